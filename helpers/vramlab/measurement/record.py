"""Measure every recipe of a list, cheapest first, and keep the reports for others."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ..hardware.gpu import Device, Gpu, current_device, source_of
from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe
from ..report.data import data_path
from ..report.errors import MeasurementError, RecipeError, RecordError
from ..report.files import read_text, strict_json
from ..report.report import Report, environment, format_bytes
from .measure import CPU_FLOPS, cannot, measure, operations, too_much
from .records import file_name, load, measurements_folder, save

COURSE_LIST = data_path(
    "wanted.json"
)  # what the notebooks look up, and what is measured for comparison
STEPS = 7  # warm-up, repeats and tracked steps of one measurement
START = 15.0  # seconds for a process to load its libraries and make CUDA's context
EFFICIENCY = 0.3  # of the card's peak rate: cautious, small models stay under it
UNKNOWN_FLOPS = 6e12  # of a card that the table does not know


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
    progress: Callable[[str], None] = print,
    estimate: Callable[[Recipe], int] | None = None,
    beside: Callable[[Report], str] | None = None,
) -> Outcome:
    """Measure what is wanted and not recorded yet, cheapest first, and save each report at once.

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
        RecordError: a file cannot be read or written, or there is no GPU and no `folder`.
    """
    here = current_device()
    if here.kind != "cuda" and not (dry_run or folder):
        rest = "the course keeps no CPU figures: name a folder for them"
        raise RecordError(f"there is no CUDA device here, and {rest}.")
    # On a stand-in bytes are right and times are not, and a record has both.
    if source_of(here.kind) != "measured" and not dry_run:
        rest = "so nothing can be recorded on it"
        raise RecordError(f"this is a stand-in for a GPU, which measures nothing, {rest}.")
    folder = Path(folder or measurements_folder())
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{folder} is no folder, so no record can be kept there.")
    recipes: dict[Recipe, None] = {}  # each once, in the order of the lists
    for path in paths or [COURSE_LIST]:
        recipes |= dict.fromkeys(read_list(Path(path)))
    outcome = _plan(
        list(recipes),
        folder,
        here,
        dry_run,
        estimate,
    )
    if not dry_run:
        _measure_all(outcome, folder, minutes, progress, beside or (lambda report: ""))
    return outcome


def read_list(path: Path) -> list[Recipe]:
    """Return the recipes of a JSON list of objects with the fields of `Recipe`.

    A list as a field takes each of its values: `{"model": "gpt2", "batch_size": [4, 8]}` stands for
    two recipes. Raises RecordError, which names the entry, if it is none.
    """
    try:
        entries = strict_json(read_text(path))
        if not isinstance(entries, list):
            raise ValueError("it is not a list")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise RecordError(f"{path.name} is no list of recipes: {why}.") from error
    recipes = []
    for number, entry in enumerate(entries, 1):
        try:
            recipes += recipes_of(entry)
        except RecipeError as error:
            raise RecordError(f"{path.name}, entry {number}: {error}") from error
    return recipes


def recipes_of(entry: Any) -> list[Recipe]:
    """Return the recipes that an entry of a list stands for. Raises RecipeError."""
    if not isinstance(entry, dict) or "model" not in entry:
        allowed = "it must be an object with a model and the fields of Recipe"
        raise RecipeError("recipe", entry, allowed)
    return [rebuild(Recipe, "recipe", chosen) for chosen in each_choice(entry)]


def each_choice(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object for each combination of the values that lists in `entry` give a field."""
    # A field that is no list has one choice.
    choices = [value if isinstance(value, list) else [value] for value in entry.values()]
    for chosen in product(*choices):
        yield dict(zip(entry, chosen, strict=True))


def _plan(
    recipes: list[Recipe],
    folder: Path,
    here: Device,
    dry_run: bool,
    estimate: Callable[[Recipe], int] | None,
) -> Outcome:
    """Sort `recipes` into recorded, skipped with a reason, and missing, cheapest first."""
    is_cuda = here.kind == "cuda"
    # A card's file is named by its versions too: with others all is measured anew.
    files: Iterable[Path] = [folder / file_name(environment(gpu=here.name if is_cuda else None))]
    if dry_run and not is_cuda:
        files = folder.glob("*.json")  # missing is then what no GPU has measured
    known: set[str] = set()
    for path in files:
        known.update(load(path, missing_ok=True))
    todo = [recipe for recipe in recipes if recipe.key not in known]
    outcome = Outcome(wanted=len(recipes), recorded=len(recipes) - len(todo))
    device = "cuda" if is_cuda or dry_run else "cpu"
    for recipe in todo:
        reason = _reason_to_skip(recipe, here, device, estimate)
        if reason:
            outcome.skipped.append((recipe, reason))
        else:
            outcome.missing.append((recipe, seconds_for(recipe, here.gpu, device)))
    # Cheapest first, so that most is done when the time is over.
    outcome.missing.sort(key=lambda item: item[1])
    return outcome


def _reason_to_skip(
    recipe: Recipe,
    here: Device,
    device: str,
    estimate: Callable[[Recipe], int] | None,
) -> str:
    """Return why a recipe is not measured on `device`, or ""."""
    reason = cannot(recipe, device)
    if not reason and device == "cpu":
        reason = too_much(recipe, estimate)
    if not reason and here.gpu:
        reason = here.gpu.why_not(recipe.precision)
    return reason


def _measure_all(
    outcome: Outcome,
    folder: Path,
    minutes: float,
    progress: Callable[[str], None],
    beside: Callable[[Report], str],
) -> None:
    """Measure `outcome.missing` in its order until the time is nearly over."""
    deadline = time.monotonic() + 60 * minutes
    for recipe, seconds in list(outcome.missing):
        begun = time.monotonic()
        if seconds > deadline - begun:
            break  # and all that follow take longer
        try:
            report = measure(recipe, recorded=False, timeout=deadline - begun)
        except (MeasurementError, RecipeError) as error:
            result = str(error).strip().splitlines()[-1]
            outcome.skipped.append((recipe, str(error)))
        else:
            # At once, for the next one may end this process.
            outcome.file = save(report, folder)
            outcome.measured.append(report)
            result = report.status
            if result == "ok":
                result = format_bytes(report.allocated or 0) + beside(report)
        outcome.missing.remove((recipe, seconds))
        progress(f"{time.monotonic() - begun:6.1f} s  {result}  {recipe}")


def seconds_for(
    recipe: Recipe,
    card: Gpu | None = None,
    device: str = "cuda",
) -> float:
    """Estimate how long a measurement takes, rather too long than too short."""
    rate = UNKNOWN_FLOPS
    if device == "cpu":
        rate = CPU_FLOPS
    elif card:
        peak = card.flops(recipe.precision) or card.flops("fp32")
        if peak:
            rate = EFFICIENCY * peak
    return START + STEPS * operations(recipe) / rate
