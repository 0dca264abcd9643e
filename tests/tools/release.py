"""`make dist`: build what a release publishes, check it, and run it in an empty environment.

    python tests/tools/release.py [--tag v0.1.0] [--out dist] [--pip-flags …]

A source distribution and a wheel of `vramlab` and of `vramlab-base-model`: each wheel is built from
its source distribution, so what the latter lacks shows. `twine check` reads how PyPI will show
them. Nothing is uploaded: `.github/workflows/release.yml` does that when a person tags.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import settings
from fresh_environment import IGNORED, install, interpreter, surroundings
from vramlab import __version__

SOURCES = (".", "data/base_model")
COMMANDS = (
    "--version",
    "predict gpt2",
    "plan gpt2 --gpu T4 --method lora --write train.py",
    "skill",
)
BASE_MODEL = (
    "from importlib.resources import files; "
    "assert (files('vramlab_base_model') / 'model.safetensors').is_file()"
)


def disagreements(tag: str | None, root: Path = settings.ROOT) -> list[str]:
    """Return a line for each place whose version is not the package's."""
    base = tomllib.loads((root / "data/base_model/pyproject.toml").read_text())["project"]
    change = re.search(r"^## (\S+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    said = {
        "data/base_model/pyproject.toml": base["version"],
        "the first heading of CHANGELOG.md": change[1] if change else "none",
    }
    if tag is not None:
        said["the tag"] = tag.removeprefix("v")
    return [
        f"{place} says {version}, the package {__version__}"
        for place, version in said.items()
        if version != __version__
    ]


def build(out: Path, pip_flags: list[str]) -> list[Path]:
    """Build all distributions into `out` and check how an index shows them; their files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # An environment of its own, so that `build` and `twine` need not be installed here.
        python = interpreter(folder / "tools")
        install(python, *pip_flags, "build", "twine")
        # A copy, since setuptools leaves build folders beside the sources.
        shutil.copytree(settings.ROOT, folder / "source", ignore=IGNORED)
        for source in SOURCES:
            command = [python, "-m", "build", "--outdir", out, folder / "source" / source]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made = sorted(out.iterdir())
        subprocess.run([python, "-m", "twine", "check", "--strict", *made], check=True)
    return made


def failures(wheels: list[Path], pip_flags: list[str]) -> list[str]:
    """Install the wheels in an empty environment; return a line for each command that failed."""
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = interpreter(folder / "environment")
        install(python, *pip_flags, *wheels)
        # Without the checkout on any path, or the package would be found there.
        shown = surroundings(python.parent)
        commands = [[python.parent / "vramlab", *shlex.split(command)] for command in COMMANDS]
        commands.append([python, "-c", BASE_MODEL])
        for command in commands:
            run = subprocess.run(command, env=shown, cwd=folder, capture_output=True, text=True)
            # A traceback that is printed and survived is a failure, too.
            if run.returncode or "Traceback" in run.stderr:
                told = " ".join(map(str, command[1:]))
                wrong.append(f"{told} ended with {run.returncode}: {run.stderr.strip()}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="the release's tag, which must name the package's version")
    parser.add_argument("--out", type=Path, default=settings.ROOT / "dist")
    parser.add_argument("--pip-flags", default="", help="more flags for pip, in one word")
    given = parser.parse_args()
    wrong = disagreements(given.tag)
    if not wrong:
        shutil.rmtree(given.out, ignore_errors=True)
        flags = shlex.split(given.pip_flags)
        made = build(given.out.resolve(), flags)
        wrong = failures([path for path in made if path.suffix == ".whl"], flags)
        print(*(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB" for path in made), sep="\n")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
