"""Run chapters on this machine's card and keep the executed notebooks: `make course` without its pages.

    PYTHONPATH=helpers python tests/tools/on_card.py --out FOLDER [--minutes 5] [--jobs 2] [NOTEBOOK …]

Needs the course's packages, nbclient, ipykernel and rich; nothing is installed and no page is made. A notebook that was
kept before is not run again, one that does not end in time is left out. What ran is packed into one file, FOLDER.tar.gz;
`card_outputs.py FOLDER` stores of it what the card changes.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tarfile
import time
from pathlib import Path

import execute
import nbformat
import settings
from vramlab.hardware.nvml import nvml_snapshot
from vramlab.report.report import environment

# Those first that show most of a card: its allocator and profiler, measured against simulated, the roofline, its sensors.
FIRST = ("07", "08", "00", "09", "05", "01", "02", "03", "06", "04")


def in_order(paths: list[Path]) -> list[Path]:
    """The notebooks, those first that show most of a card."""
    return sorted(paths, key=lambda path: FIRST.index(path.stem[:2]) if path.stem[:2] in FIRST else len(FIRST))


def keep(path: Path, out: Path, deadline: float) -> str:
    """Run one notebook and write what came of it, if that is before the deadline. Return a line about it."""
    left = int(deadline - time.monotonic())
    if left < 20:
        return f"{path.stem}  not started: the time is over"
    run = execute.run(path, timeout=left)
    nbformat.write(run.notebook, out / path.name if not run.error else out / f"{path.stem}.failed.ipynb")
    return f"{path.stem}  {run.seconds:.0f} s  {execute.failures([run])[0] if run.error else 'ok'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=settings.notebook_path, help="the chapters when none is named")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--jobs", type=int, default=1, help="notebooks at a time; more than one blurs times")
    given = parser.parse_args()
    settings.apply(deterministic=False)
    deadline = time.monotonic() + 60 * given.minutes
    seen = nvml_snapshot()  # and not torch, whose context would take memory from the chapters
    print(f"{seen.name or seen.reason}, driver {seen.driver}, {os.cpu_count()} cores", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    seen_versions = environment(gpu=seen.name, driver=seen.driver)
    told = {name: seen_versions[name] for name in ("gpu", "driver", "python", "torch", "transformers", "date")}
    told["jobs"] = given.jobs
    (given.out / "about.json").write_text(json.dumps(told, indent=1) + "\n")
    paths = [path for path in in_order(given.notebooks or settings.chapters()) if not (given.out / path.name).exists()]
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.jobs, fresh) as pool:
        for run in concurrent.futures.as_completed(pool.submit(keep, path, given.out, deadline) for path in paths):
            print(run.exception() or run.result(), flush=True)
    with tarfile.open(given.out.with_suffix(".tar.gz"), "w:gz") as packed:
        packed.add(given.out, given.out.name)
    return 0 if seen.available else 1


if __name__ == "__main__":
    sys.exit(main())
