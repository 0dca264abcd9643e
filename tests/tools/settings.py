"""Where things are, and the surroundings in which outputs are the same on every machine.

They are those of notebooks and of tests.
"""

import argparse
import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "tools"
NOTEBOOKS = ROOT / "notebooks"

# Kernels and worker processes inherit these. No MPLBACKEND: a kernel that inherits one draws
# nothing inline.
DETERMINISTIC = {
    # stored outputs are those of a CPU run, so that any machine can compare them
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "120",  # text tables wrap at the terminal's width
    "OMP_NUM_THREADS": "1",  # CPU attention allocates one buffer per thread
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "PYTHONSTARTUP": str(TOOLS / "kernel_start.py"),  # kernels run it, scripts do not
}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",  # models come from shapes, so a request to the hub is a mistake
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",  # or tokenizers warn on stderr after a fork
    # or Python 3.11 kernels warn on stderr about frozen modules
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


def apply(deterministic: bool) -> None:
    """Set the surroundings for this process and those it starts.

    What the user has set stays unless `deterministic`.
    """
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    if deterministic:
        os.environ.update(DETERMINISTIC)


def chapters() -> list[Path]:
    """The chapters' notebooks in the order of the course."""
    return sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


def all_notebooks(root: Path = ROOT) -> list[Path]:
    """Every notebook that is checked.

    Chapters come first, then what is no chapter (the calculator), then solutions.
    """
    return [
        path
        for folder in ("notebooks", "notebooks/solutions")
        for path in sorted((root / folder).glob("*.ipynb"))
    ]


def notebook_path(text: str) -> Path:
    """`text` as the path of a notebook that exists, for argparse."""
    path = Path(text)
    if path.suffix != ".ipynb" or not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no notebook {text}")
    return path


def repository_url(root: Path = ROOT) -> str:
    """The repository's address.

    It stands in one place, `[project.urls]` in pyproject.toml.
    """
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
