"""Measure every recipe of a list, cheapest first, and keep the reports for others."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import RecordError
from ..hardware.gpu import current_device
from ..recipe.recipe import Recipe
from ..report.report import Report
from .card import Beside, Progress, run_on
from .measure import too_much
from .pieces import COURSE_LIST, Piece, read_list
from .records import RecordFile, measurements_folder, read_records


@dataclass
class Outcome:
    """What `record` did.

    Reports (some with status "oom"), and recipes with the seconds they would take or a reason.
    """

    wanted: int = 0
    recorded: int = 0
    measured: list[Report] = field(default_factory=list)
    missing: list[tuple[Recipe, float]] = field(default_factory=list)
    skipped: list[tuple[Recipe, str]] = field(default_factory=list)
    file: Path | None = None

    def __str__(self) -> str:
        now = f"{self.recorded} recorded before, {len(self.measured)} measured now"
        lines = [f"{self.wanted} recipes wanted, {now}"]
        if self.file and self.measured:
            lines.append(f"in {self.file}")
        if self.missing:
            total = sum(seconds for _, seconds in self.missing)
            lines.append(f"still missing, about {total / 60:,.0f} minutes:")
            lines += [f"{seconds:6,.0f} s  {recipe}" for recipe, seconds in self.missing]
        lines += [f"skipped: {recipe}: {reason}" for recipe, reason in self.skipped]
        return "\n".join(lines)


def record(
    paths: Iterable[str | os.PathLike] | None = None,
    minutes: float = 8,
    folder: str | os.PathLike | None = None,
    dry_run: bool = False,
    progress: Progress = print,
    estimate: Callable[[Recipe], int] | None = None,
    beside: Beside | None = None,
) -> Outcome:
    """Measure what is wanted and not recorded yet, cheapest first, and save each report at once.

    It goes as `run_card`, with pieces that are all recipes and worth the same.

    Args:
        paths: lists of recipes (`read_list`); None takes COURSE_LIST.
        minutes: from the start of the first run; what is not expected to end in this time is not
            started.
        folder: where the record files are; None is the course's own, which needs a GPU.
        dry_run: measure nothing, only list what is missing.
        progress: takes a line for each recipe.
        estimate: gives the bytes that one process needs; on a CPU, what needs more than is free is
            skipped.
        beside: gives what to print after each report that has figures.
    Returns:
        What was measured and what is still missing. Running out of memory is a result. What is
        saved stays after Ctrl-C.
    Raises:
        RecordError: a list or file cannot be read, or there is no GPU and no `folder`.
    """
    here = current_device()
    if here.kind != "cuda" and not (dry_run or folder):
        rest = "the course keeps no CPU figures: name a folder for them"
        raise RecordError(f"there is no CUDA device here, and {rest}.")
    run = run_on(here, Path(folder or measurements_folder()))
    # On a stand-in bytes are right and times are not, and a record has both.
    if run.source != "measured" and not dry_run:
        rest = "so nothing can be recorded on it"
        raise RecordError(f"this is a stand-in for a GPU, which measures nothing, {rest}.")
    recipes: dict[Recipe, None] = {}  # each once, in the order of the lists
    for path in paths or [COURSE_LIST]:
        recipes |= dict.fromkeys(read_list(Path(path)))
    known = read_records(run.file, missing_ok=True, source=run.source)
    if dry_run and here.kind != "cuda":
        # Without a GPU the list is what one would have to do.
        run.device = "cuda"
        known = _all_of(run.file.parent)  # missing is then what no GPU has measured

    def why_not(piece: Piece) -> str:
        reason = piece.cannot(here.gpu, run.device)
        if not reason and run.device == "cpu" and piece.recipe:
            reason = too_much(piece.recipe, estimate)
        return reason

    run.plan([Piece("recipe", recipe=recipe) for recipe in recipes], here, known, why_not)
    if not dry_run:
        run.do_all(minutes, progress, beside)
    return Outcome(
        wanted=len(recipes),
        recorded=run.before,
        measured=run.reports,
        missing=_recipes(run.left),
        skipped=_recipes([*run.not_here, *run.failed]),
        # Nothing was written where nothing was measured.
        file=run.file if run.reports else None,
    )


def _all_of(folder: Path) -> RecordFile:
    """Return the reports of all record files in `folder`."""
    found = RecordFile()
    for path in folder.glob("*.json"):
        found.reports |= read_records(path).reports
    return found


def _recipes(pieces: Iterable[tuple[Piece, float | str]]) -> list:
    """Return (recipe, what is said of it) of pieces that are recipes."""
    return [(piece.recipe, said) for piece, said in pieces]
