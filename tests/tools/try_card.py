"""`make card` as if this machine had a T4, an RTX 4090 or an H100.

It is PyTorch's CUDA build on the stand-in (`data/stand_in/`).

Every piece of the list that the card can do has to end well, a second call has to find nothing left
to do, what came out must be refused as a record, and a recipe in a forked process must hold what it
holds in a fresh one. No kernel computes anything, so the figures mean nothing; without --folder
they are thrown away.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import execute
import try_cuda
from vramlab.base.errors import RecordError, VramLabError
from vramlab.measurement.card import CardRun, run_card
from vramlab.measurement.pieces import Piece
from vramlab.measurement.records import load
from vramlab.measurement.share import share
from vramlab.recipe.knobs import rebuild
from vramlab.recipe.recipe import Recipe

CARDS = ("T4", "RTX 4090", "H100")
MINUTES = 230


def rehearse(lists: list[str], minutes: float, folder: str | None) -> list[str]:
    """Do all of the lists on the card that this process sees; return what went wrong."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vramlab-"))
        run = run_card(
            lists or None, minutes, folder, progress=lambda line: print(line, flush=True)
        )
        wrong = [f"{piece.title}: {why}" for piece, why in run.failed]
        wrong += [f"{piece.title}: not done in {minutes:g} minutes" for piece, _ in run.left]
        again = run_card(lists or None, minutes, folder, dry_run=True)
        done = run.before + len(run.done)
        # A second call takes up where the first one ended, so all that was done must be found.
        if again.before != done:
            wrong.append(f"{done} were done and {again.before} of them are found again")
        # Figures of the stand-in must never get among the records, on either way in.
        for refuses in (load, lambda path: share(path, folder)):
            try:
                refuses(run.file)
                wrong.append(f"{run.file.name} was taken for a record")
            except RecordError as error:
                print(error)
        return wrong + differences(run)


def differences(run: CardRun) -> list[str]:
    """Run one of the forked recipes again in a fresh process; say where its bytes are others."""
    for report in run.reports:
        # The first one that can fork is enough: it shows whether forking changes bytes at all.
        piece = Piece("recipe", recipe=rebuild(Recipe, "recipe", report.recipe))
        if report.status != "ok" or not piece.can_fork():
            continue
        fresh = piece.run(piece.start(), timeout=600).to_dict()
        forked = report.to_dict()
        # Seconds differ from run to run.
        names = [name for name in fresh if fresh[name] != forked[name] and name != "speed"]
        return [f"{piece.title}: forked, it has other {', '.join(names)}"] if names else []
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "lists", nargs="*", help="lists of pieces; the project's when none is named"
    )
    parser.add_argument(
        "--card", action="append", help=f"may be given more than once; else {', '.join(CARDS)}"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each card")
    parser.add_argument("--folder", help="keep what is done there; a second call goes on")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        wrong = rehearse(given.lists, given.minutes, given.folder)
        print(*wrong, sep="\n", file=sys.stderr)
        return 1 if wrong else 0
    failed = []
    for card in given.card or CARDS:
        print(card, flush=True)
        try:
            surroundings = try_cuda.surroundings(card)
        except VramLabError as error:  # no such card, or a part of the stand-in is missing
            sys.exit(str(error))
        failed.append(started(given, surroundings))
    return max(failed)


def started(given: argparse.Namespace, surroundings: dict[str, str]) -> int:
    """Run this script on the stand-in, whose libraries a process has from its start.

    Return its exit status.
    """
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        *given.lists,
        "--here",
        f"--minutes={given.minutes}",
    ]
    if given.folder:
        command.append(f"--folder={given.folder}")
    return subprocess.run(command, env={**os.environ, **surroundings}).returncode


if __name__ == "__main__":
    execute.exit_with(main)
