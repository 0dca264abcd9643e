"""`make course`: run every chapter on whatever hardware is here, and leave the results as pages.

The committed notebooks are read and never written. A chapter that fails is reported at the end; the
others still run.
"""

import argparse
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import execute
import page
import settings
from rich.console import Console
from vramlab.interfaces.doctor import MARKER, environment_stamp

OUT = settings.ROOT / "build" / "course"


def machine() -> str:
    """This machine and the library versions, a line each."""
    return environment_stamp().replace(MARKER, "")


def run_course(paths: list[Path], out: Path, table: Callable[[], str]) -> int:
    """Run `paths`, write notebooks, pages and the index into `out`, and print the table.

    Return the exit status.
    """
    runs: list[execute.Run] = []
    here = machine()
    out.mkdir(parents=True, exist_ok=True)

    # The index is written anew after each chapter, so that it is whole after Ctrl-C.
    def keep(run: execute.Run) -> None:
        runs.append(run)
        page.save(run, out, paths)
        (out / "index.html").write_text(page.index(runs, here), encoding="utf-8")

    print(here, flush=True)
    execute.run_all(paths, Console(), keep)
    wrong = execute.failures(runs)
    ended = len(runs) - len(wrong)
    try:
        text = table()
        (out / "index.html").write_text(page.index(runs, here, text), encoding="utf-8")
        print(f"\n{text}")
    # The chapters' pages are worth having whatever fails in the table.
    except Exception:
        wrong.append(f"the table of the three witnesses: {traceback.format_exc()}")
    print(f"\n{ended} of {len(runs)} chapters ran to the end: {out / 'index.html'}", flush=True)
    if wrong:
        print("\nFailed:", *wrong, sep="\n", file=sys.stderr)
    return 1 if wrong or not runs else 0


def three_witnesses() -> str:
    """The table of `witnesses.py`, which loads torch only now."""
    import witnesses

    return witnesses.table()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "notebooks", nargs="*", type=settings.notebook_path, help="every chapter when none is named"
    )
    paths = parser.parse_args().notebooks or settings.chapters()
    settings.apply(deterministic=False)
    # Or pages of a chapter that is gone would stay and be taken for this run's.
    shutil.rmtree(OUT, ignore_errors=True)
    return run_course(paths, OUT, three_witnesses)


if __name__ == "__main__":
    execute.exit_with(main)
