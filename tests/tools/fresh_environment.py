"""An empty environment that shows nothing of this checkout, for what a stranger would run."""

import os
import shutil
import subprocess
import venv
from pathlib import Path

import settings

# What of the checkout is no source.
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
)


def interpreter(folder: Path) -> Path:
    """Make an empty environment at `folder`; its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def install(python: Path, *words: str | Path) -> None:
    """Run `pip install` in the environment of `python`."""
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
    subprocess.run(pip, check=True, env=surroundings(python.parent), cwd=python.parent)


def surroundings(scripts: Path) -> dict[str, str]:
    """The variables of a shell in the environment whose programs are in `scripts`.

    None of them show the checkout.
    """
    shown = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **shown,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        **settings.OFFLINE,
    }
