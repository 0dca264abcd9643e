"""Paths of the package's data: model shapes, GPUs, recorded measurements."""

from pathlib import Path

_FOLDERS = Path(__file__).resolve().parents
_INSTALLED = _FOLDERS[1] / "data_files"
DATA = _INSTALLED if _INSTALLED.is_dir() else _FOLDERS[3] / "data"  # of a wheel or of a checkout


def data_path(*parts: str) -> Path:
    """Return the path of a data file, which need not exist.

    For example `data_path("models", "gpt2.json")`.
    """
    return DATA.joinpath(*parts)
