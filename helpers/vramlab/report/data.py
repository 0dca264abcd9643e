"""Paths of the package's data: model shapes, GPUs, recorded measurements."""

from functools import cache
from pathlib import Path


@cache
def data_folder() -> Path:
    """Return the data folder of an installed wheel or of a checkout."""
    here = Path(__file__).resolve()
    installed = here.parents[1] / "data_files"
    return installed if installed.is_dir() else here.parents[3] / "data"


def data_path(*parts: str) -> Path:
    """Return the path of a data file such as `data_path("models", "gpt2.json")`; it need not exist."""
    return data_folder().joinpath(*parts)
