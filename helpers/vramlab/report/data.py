"""Where the package's data lie: model shapes, recorded measurements, claims."""

from functools import cache
from pathlib import Path


@cache
def data_folder() -> Path:
    """The data folder: beside the modules in an installed wheel, at the top of the repository in a checkout.

    Raises:
        FileNotFoundError: neither is there.
    """
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "data_files", here.parents[3] / "data"):
        if (folder / "models").is_dir():
            return folder
    raise FileNotFoundError("vramlab's data folder is missing: install the package again, or run from its repository")


def data_path(*parts: str) -> Path:
    """The path of a data file, for example `data_path("models", "gpt2.json")`; it need not exist."""
    return data_folder().joinpath(*parts)
