"""Paths of the package's data: model shapes, GPUs, recorded measurements."""

from functools import cache
from pathlib import Path


@cache
def data_folder() -> Path:
    """Return the data folder of an installed wheel or of a checkout. Raises FileNotFoundError if there is neither."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "data_files", here.parents[3] / "data"):
        if (folder / "models").is_dir():
            return folder
    raise FileNotFoundError("vramlab's data folder is missing: install the package again, or run from its repository")


def data_path(*parts: str) -> Path:
    """Return the path of a data file such as `data_path("models", "gpt2.json")`; it need not exist."""
    return data_folder().joinpath(*parts)
