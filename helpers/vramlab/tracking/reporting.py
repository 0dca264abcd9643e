"""From a run's history to the report that every witness gives."""

from typing import Any

from ..hardware.gpu import Gpu
from ..hardware.overhead import CONTEXT
from ..recipe.recipe import Recipe
from ..report.report import Interval, MiB, Report, environment
from .history import History, largest


def to_report(
    history: History, source: str, recipe: Recipe | None, target: str, card: Gpu | None = None, **more: Any
) -> Report:
    """The report of a replayed run. On CUDA the log also goes through the allocator's model, for what it reserves."""
    at = history.highest()
    if source == "simulated" and history.replayed:
        replayed = history.replayed
        more |= {"allocated": replayed.allocated, "requested": replayed.requested}
        bounds = card if card and replayed.fits else None
        more["reserved"] = _about(replayed.reserved, replayed.allocated, bounds)
        more["process"] = _with_context(more["reserved"], card, bounds)
        if card and not replayed.fits:
            more["notes"] = [
                *more.get("notes", ()),
                f"does not fit {card.name}: reserved is that of a card without end",
            ]
    counted = {key: (len(found), found[0].where) for key, found in history.groups(at).items()}
    return Report(
        source=source,
        recipe=recipe.to_dict() if recipe else None,
        title=more.pop("title", str(recipe) if recipe else ""),
        target=target,
        phases=history.phases(),
        peak=history.split(at),
        peak_phase=history.phase_at(at),
        largest=largest(counted),
        timeline=history.timeline(),
        environment=environment(gpu=card.name if card else None),
        **more,
    )


def _about(reserved: int, allocated: int, bounds: Gpu | None) -> Interval:
    """Segments as the allocator's model reserves them; another order of loading and freeing can change a few.

    Of the published runs in `data/published_runs.json` that say what was reserved, 97 % lie below the upper end.
    On a card that the step fits (`bounds`) there are no more than it holds: unused ones are given back before that.
    """
    high = reserved + max(reserved // 10, 64 * MiB)
    return Interval(allocated, reserved, min(high, bounds.total - bounds.context_interval.low) if bounds else high)


def _with_context(reserved: Interval, card: Gpu | None, bounds: Gpu | None) -> Interval:
    """What the device shows for the process: the segments and CUDA's context beside them."""
    context = card.context_interval if card else CONTEXT
    low, value, high = (getattr(reserved, end) + getattr(context, end) for end in ("low", "value", "high"))
    return Interval(low, value, min(high, bounds.total) if bounds else high)
