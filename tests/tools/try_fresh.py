"""Try the built wheel as a stranger gets it.

It goes into an empty environment, without constraints, with the newest of all that is served.

The wheel is built from a copy of this working tree, installed with the extras `simulate`,
`quantization` and `trl` outside of it, and run there: the command line, then `fresh_checks.py`.
With --write the versions that passed become the newest tested ones, which the wheel carries
(`data/tested_versions.json`, read by `vramlab doctor`). With --floor every library that
pyproject.toml names has the lowest version that it allows, as where a library was there before and
pip left it.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pins
import settings
from fresh_environment import IGNORED, install, interpreter, surroundings
from packaging.version import Version

EXTRAS = "simulate,quantization,trl"
COMMANDS = (
    "doctor",
    "predict gpt2",
    "simulate gpt2",
    "simulate gpt2 --gpu T4 --lora-r 8 --precision fp16-mixed",
    "simulate gpt2 --gpu T4 --lora-r 8 --quantization nf4",
    "simulate gpt2 --gpu T4 --trainer sft",
    "plan gpt2 --gpu T4 --method lora",
    "measure gpt2 --num-layers 1 --seq-len 16",
)
VERSIONS = """import json
from importlib import metadata
print(json.dumps({each.name.lower().replace("_", "-"): each.version for each in \
metadata.distributions()}))"""


def built_wheel(root: Path, folder: Path, pip_flags: list[str]) -> Path:
    """Build the wheel of a copy of `root` in `folder`."""
    shutil.copytree(root, folder / "source", ignore=IGNORED)
    shutil.rmtree(folder / "source" / "data" / "base_model")  # a distribution of its own
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        *pip_flags,
        "-w",
        folder,
        folder / "source",
    ]
    subprocess.run(build, check=True)
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("vramlab-*.whl")
    return wheel


def floor_flags(folder: Path) -> list[str]:
    """The flags with which pip takes the lowest versions that pyproject.toml allows."""
    constraints = folder / "floors.txt"
    # A constraint binds only what is installed anyway, so nothing is added by it.
    constraints.write_text("\n".join(pins.floors()) + "\n")
    return ["-c", str(constraints)]


def not_at_the_floor(versions: dict[str, str]) -> list[str]:
    """A line for each library that is installed in another version than its lowest.

    They are those that pyproject.toml names.
    """
    floors = dict(line.split("==") for line in pins.floors())
    return [
        f"{name} {versions[name]} is not the floor, {floor}"
        for name, floor in floors.items()
        # The public part: a build of torch for the CPU calls itself 2.13.0+cpu.
        if name in versions and Version(Version(versions[name]).public) != Version(floor)
    ]


def installed(wheel: Path, folder: Path, pip_flags: list[str]) -> Path:
    """Make an environment at `folder` and install the wheel with its extras; its interpreter."""
    python = interpreter(folder)
    install(python, *pip_flags, f"{wheel}[{EXTRAS}]")
    return python


def failures(python: Path, elsewhere: Path) -> list[str]:
    """Run everything in the empty folder `elsewhere`; a line for each thing that failed."""
    wrong = []
    where = {"env": surroundings(python.parent), "cwd": elsewhere}
    for command in COMMANDS:
        print(f"$ vramlab {command}", flush=True)
        run = subprocess.run(
            [python.parent / "vramlab", *command.split()], **where, capture_output=True, text=True
        )
        print(run.stdout + run.stderr, flush=True)
        # doctor fails where what the course needs is missing, as matplotlib here
        if (run.returncode and command != "doctor") or "Traceback" in run.stderr or not run.stdout:
            wrong.append(f"vramlab {command} ended with {run.returncode}")
        # Said with exit status 0: a look of doctor's that failed, and a plan by formulas alone.
        if any(word in run.stdout for word in ("could not be checked", "NOT SIMULATED")):
            wrong.append(f"vramlab {command}: {run.stdout.splitlines()[0]}")
    print("$ python fresh_checks.py", flush=True)
    # A copy away from the checkout, whose folder Python would otherwise put on its path.
    shutil.copy(settings.TOOLS / "fresh_checks.py", elsewhere)
    if subprocess.run([python, "fresh_checks.py"], **where).returncode:
        wrong.append("fresh_checks.py failed")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pip-flags", default="", help="more flags for pip, in one word")
    parser.add_argument(
        "--environment", type=Path, help="where to make the environment, which then stays"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--write", action="store_true", help="if all passes, write data/tested_versions.json"
    )
    which.add_argument(
        "--floor", action="store_true", help="the lowest versions that pyproject.toml allows"
    )
    given = parser.parse_args()
    flags = shlex.split(given.pip_flags)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built_wheel(settings.ROOT, folder, flags)
        chosen = floor_flags(folder) if given.floor else []
        python = installed(wheel, given.environment or folder / "environment", [*flags, *chosen])
        (folder / "elsewhere").mkdir()
        wrong = failures(python, folder / "elsewhere")
        found = subprocess.run(
            [python, "-c", VERSIONS], check=True, capture_output=True, text=True, cwd=folder
        ).stdout
    versions = json.loads(found)
    if given.floor:
        wrong += not_at_the_floor(versions)
    print(
        "versions:",
        *(f"{name} {versions[name]}" for name in pins.tested({}) if name in versions),
        sep="\n  ",
    )
    if given.write and not wrong:
        pins.write_tested(versions)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
