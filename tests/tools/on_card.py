"""Run chapters on this machine's card and keep the executed notebooks.

That is `make course` without its pages.

    export PYTHONPATH=helpers
    python tests/tools/on_card.py --out FOLDER [--minutes 5] [--jobs 2] [NOTEBOOK …]

Needs the course's packages, nbclient, ipykernel and rich; nothing is installed and no page is made.
A notebook that was kept before is not run again, one that does not end in time is ended. What ran
by then is always in one file, FOLDER.tar.gz; `card_outputs.py FOLDER` stores of it what the card
changes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import execute
import nbformat
import settings
from vramlab.hardware.nvml import nvml_snapshot
from vramlab.report.report import environment

# Those first that show most of a card: its allocator and profiler, measured against simulated, the
# roofline, its sensors.
FIRST = ("07", "08", "00", "11", "05", "01", "02", "03", "06", "04")


def in_order(paths: list[Path]) -> list[Path]:
    """The notebooks, those first that show most of a card."""
    return sorted(
        paths, key=lambda path: FIRST.index(path.stem[:2]) if path.stem[:2] in FIRST else len(FIRST)
    )


def keep(path: Path, out: Path) -> None:
    """Run one notebook and write what came of it."""
    run = execute.run(path)
    nbformat.write(
        # Under another name, so that a later call runs it again.
        run.notebook,
        out / path.name if not run.error else out / f"{path.stem}.failed.ipynb",
    )
    print(
        f"{path.stem}  {run.seconds:.0f} s  {execute.failures([run])[0] if run.error else 'ok'}",
        flush=True,
    )


def keep_all(paths: list[Path], out: Path, jobs: int, deadline: float) -> None:
    """Run the notebooks, so many at a time.

    Those that still run at the deadline are ended, with their kernels.
    """
    waiting = list(paths)
    running = {}
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < deadline:
            path = waiting.pop(0)
            running[path] = start(path, out)
        for path, process in list(running.items()):
            late = time.monotonic() >= deadline
            if process.poll() is None and late:
                # The whole group: the kernel is a child that would keep the card's memory.
                os.killpg(process.pid, signal.SIGKILL)
                print(f"{path.stem}  ended: the time is over", flush=True)
            if process.poll() is not None or late:
                process.wait()
                del running[path]
                # After each, as a machine on loan may end at any moment.
                pack(out)
        if waiting and time.monotonic() >= deadline:
            print("not started:", *(path.stem for path in waiting), flush=True)
            return
        time.sleep(0.2)


def start(path: Path, out: Path) -> subprocess.Popen:
    """Start a process that runs one notebook, with a group of its own for it and its kernel."""
    command = [sys.executable, str(Path(__file__).resolve()), str(path), f"--out={out}", "--here"]
    return subprocess.Popen(command, start_new_session=True)


def pack(out: Path) -> None:
    """Put all that there is into one file, whole at any moment."""
    part = out.with_suffix(".part")
    with tarfile.open(part, "w:gz") as packed:
        packed.add(out, out.name)
    # A rename within one folder is atomic, so no half-written archive is ever fetched.
    part.replace(out.with_suffix(".tar.gz"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "notebooks", nargs="*", type=settings.notebook_path, help="the chapters when none is named"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--jobs", type=int, default=1, help="notebooks at a time; more than one blurs times"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    settings.apply(deterministic=False)
    if given.here:
        keep(given.notebooks[0], given.out)
        return 0
    deadline = time.monotonic() + 60 * given.minutes
    seen = nvml_snapshot()  # and not torch, whose context would take memory from the chapters
    print(f"{seen.name or seen.reason}, driver {seen.driver}, {os.cpu_count()} cores", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    seen_versions = environment(gpu=seen.name, driver=seen.driver)
    told = {
        name: seen_versions[name]
        for name in ("gpu", "driver", "python", "torch", "transformers", "date")
    }
    told["jobs"] = given.jobs
    (given.out / "about.json").write_text(json.dumps(told, indent=1) + "\n")
    paths = [
        path
        for path in in_order(given.notebooks or settings.chapters())
        if not (given.out / path.name).exists()
    ]
    keep_all(paths, given.out, given.jobs, deadline)
    return 0 if seen.available else 1


if __name__ == "__main__":
    sys.exit(main())
