"""What filled the memory: a message, a snapshot or a recipe, explained in a few plain lines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base import html
from ..base.errors import RecipeError, needing
from ..hardware.gpu import Gpu, find_gpu
from ..hardware.snapshot import read_snapshot
from ..planning.work import tell_compiling
from ..recipe.recipe import Recipe
from ..report.report import TIERS, Interval, Report, format_bytes
from .explain_elsewhere import of_model
from .explain_message import likely_cards, missing_of, more_of, of_message
from .explain_recipe import Run, parts, taken_from
from .messages import Message, MessageError, read_message

__all__ = ["Explanation", "MessageError", "assert_fits", "explain", "read_message"]


@dataclass
class Explanation:
    """Plain sentences and the facts that they say.

    Args:
        lines: the sentences.
        bytes: the bytes that they rest on, by name.
        notes: what they leave out.
        kind: of what is explained: "recipe", "snapshot", or a message's (see `Message`).
        missing: bytes that it lacks, None where that is unknown.
        request: what the message asked memory for, in words, "" where no tensor has that size.
        contradictions: what recipe and message say of each other that cannot both be.
        changes: the cheapest ones: `fields`, bytes that it `saves`, whether that is `enough`,
            `seconds` a step and `seconds_before`, and whether it is the `same` training.
    """

    lines: list[str]
    bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kind: str = "recipe"
    missing: int | None = None
    request: str = ""
    contradictions: list[str] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        """Return the explanation as a notebook shows it."""
        return html.table((), [(line.strip(),) for line in self.lines], notes=self.notes)


@needing("explain")
def explain(
    what: Any,
    recipe: Recipe | str | None = None,
    gpu: str | Gpu | None = None,
    assumed: bool = False,
    said_size: bool = False,
    **granted: Any,
) -> Explanation:
    """Say in plain lines what filled, or would fill, the memory, and the three cheapest changes.

    Args:
        what: an exception, a log or its message, the `Path` of a memory snapshot or of a script
            that trains, or a recipe.
        recipe: what ran when the message came; of a model's name how it was trained is taken from
            the message.
        gpu: the card that it ran or is to run on.
        assumed: take how it was trained from the message although `recipe` is a Recipe.
        said_size: leave its batch and length as they are then.
        granted: `other_memory` and `expandable_segments`, as for `simulate`.
    Raises:
        MessageError, SnapshotError: `what` is no such message or snapshot.
    """
    card = find_gpu(gpu) if gpu else None
    if isinstance(what, Path) and what.suffix == ".py":
        from .script import recipe_of_script, sets_expandable_segments

        read, notes = recipe_of_script(what)
        # A script that sets its allocator by itself runs with it, whatever the command line says.
        if sets_expandable_segments(what):
            granted["expandable_segments"] = True
        explained = _of_recipe(Run(read, card, granted))
        explained.notes += notes
        return explained
    if isinstance(what, Path):
        return Explanation(str(read_snapshot(what)).split("\n"), kind="snapshot")
    if isinstance(what, Recipe):
        return _of_recipe(Run(what, card, granted))
    message = read_message(str(what))
    # A bare name says nothing of precision or method, so the message may.
    if isinstance(recipe, str):
        recipe = Recipe(recipe)
        assumed = True
    # A message alone names its own lack; which change would help depends on what was trained.
    # What vLLM asked for is none of the tensors of a training without it.
    samples = message.kind == "share" and recipe and recipe.rollouts
    if recipe is None or (message.is_elsewhere and not samples):
        return _of_message(message, recipe)
    taken = ""
    # Before the run, whose report then is of the recipe as the message corrected it.
    if assumed:
        recipe, taken = taken_from(message, recipe, card, said_size)
    try:
        return _of_both(message, recipe, taken, card, granted)
    except RecipeError as error:
        # A share that vLLM cannot start with is no step that can be simulated, and what ran.
        if not samples:
            raise
        explained = _of_message(message, recipe)
        explained.lines.append(error.about(error.field.rpartition(".")[2]))
        return explained


def _of_message(message: Message, recipe: Recipe | None) -> Explanation:
    """Return what a message says by itself, and what of the model it is about."""
    more = of_model(message, recipe) if recipe else more_of(message)
    lines = [*of_message(message, alone=True), *more]
    return Explanation(lines, message.bytes, kind=message.kind, missing=missing_of(message))


def _of_recipe(run: Run) -> Explanation:
    """Return what fills a recipe's peak, and the cheapest changes."""
    lacks = run.lacks()
    # The greater of both lacks: a change has to mend the tensors' and the process's.
    missing = lacks.most
    changes = run.changes(lacks)
    lines = [*run.lines(), *run.change_lines(changes, missing)]
    split = {"peak": run.report.peak.total, **dict(run.report.peak.items())}
    return Explanation(lines, split, missing=missing, changes=changes)


def _of_both(
    message: Message,
    recipe: Recipe,
    taken: str,
    card: Gpu | None,
    granted: dict[str, Any],
) -> Explanation:
    """Return what message and recipe say together, with one figure for what is missing."""
    run = Run(recipe, card, granted)
    if card is None:
        fitting = (one for one in likely_cards(message) if one.supports(recipe.precision))
        run.timed = next(fitting, run.timed)
    against = run.contradictions(message)
    request = run.request(message)
    # A recipe that contradicts the message cannot say what the rest of the step would have lacked.
    lacks = run.lacks(message, trusted=not against)
    missing = lacks.most
    changes = run.changes(lacks)
    lines = of_message(message, alone=False)
    if request:
        lines += [request]
    lines += [f"contradiction: {one}" for one in against]
    if taken:
        lines += [taken]
    if message.kind == "host":
        lines += run.host_lines()
    lines += run.lines()
    lines += run.change_lines(changes, missing, trusted=not against)
    figures = message.bytes | {"peak": run.report.peak.total}
    return Explanation(lines, figures, [], message.kind, missing, request, against, changes)


def assert_fits(what: Any, gpu: str | Gpu = "T4", tier: str = "likely", **given: Any) -> Report:
    """Raise AssertionError, which names the largest parts, unless the training step fits the card.

    Return its report.

    Args:
        what: a recipe, a module, a mapping of what `simulate` takes, or a report; `given`: what
            else `simulate` takes, such as expandable_segments=True or other_memory.
        tier: "safe", "likely" or "tight": which end of the interval of what the process holds is
            within the card's memory.
    Raises:
        RecipeError, GpuError: an unknown tier or card, or something that cannot be simulated.
    """
    card = find_gpu(gpu)
    if tier not in TIERS:
        raise RecipeError("tier", tier, f"allowed are {', '.join(map(repr, TIERS))}")
    report = report_of(what, gpu=card, **given)
    # Without a process, as in a report for the CPU, the tensors' peak is all that can be compared.
    needs = Interval.of(report.peak.total if report.process is None else report.process)
    usable = card.total if report.usable is None else report.usable
    over = getattr(needs, TIERS[tier]) - usable
    if report.status != "ok" or over > 0:
        has = format_bytes(usable)
        why = (
            report.message
            or f"it needs {needs}, {card.name} has {has}: {format_bytes(over)} too much"
        )
        # A grade with a semicolon has the verdict under the allocator's other setting too.
        if report.otherwise and ";" in report.grade:
            why += f" ({report.grade})"
        raise AssertionError(
            "\n".join([f"{report.title} does not fit {card.name} ({tier}): {why}", *parts(report)])
        )
    return report


@needing("assert_fits")
def report_of(what: Any, **given: Any) -> Report:
    """Return the report of `what`, as in `assert_fits`; None: of what is `given`.

    Simulated with what is `given`, unless it is one.
    """
    if isinstance(what, Report):
        return what
    from ..simulation.simulate import simulate

    if what is None:
        what = {}
    # A module is known by its parameters, so that torch need not be imported to ask for its class.
    elif not isinstance(what, Mapping):
        if isinstance(what, Recipe):
            tell_compiling(what)
        what = {"model" if hasattr(what, "named_parameters") else "recipe": what}
    # What a mapping says counts before the arguments of the call.
    return simulate(**{**given, **what})
