"""Makes the report of a replayed run."""

import dataclasses
from typing import Any

from ..hardware.gpu import Gpu
from ..hardware.overhead import CONTEXT
from ..hardware.reserved import process
from ..recipe.recipe import Recipe
from ..report.report import Interval, MiB, Report, environment, format_bytes, unit_for
from .history import History


def to_report(
    history: History,
    source: str,
    recipe: Recipe | None,
    target: str,
    card: Gpu | None = None,
    since: int = 0,
    **more: Any,
) -> Report:
    """The report of a replayed run, with its peak from position `since` on; of a simulated one also what is reserved."""
    at = history.highest(since)
    if source == "simulated" and history.replayed:
        replayed = history.replayed
        more |= {"allocated": replayed.allocated, "requested": replayed.requested} if not since else {}
        room = card.total if card and not replayed.failed else None
        more["reserved"], more["process"] = _reserved_and_process(replayed.reserved, replayed.allocated, card, room)
        if card and replayed.failed:
            more["notes"] = [*more.get("notes", ()), f"does not fit {card.name}: {_failure(history)}"]
    return Report(
        source=source,
        recipe=recipe.to_dict() if recipe else None,
        title=more.pop("title", str(recipe) if recipe else ""),
        target=target,
        phases=history.phases(),
        peak=history.split(at),
        peak_phase=history.phase_at(at),
        largest=history.largest(at),
        timeline=history.timeline(),
        environment=environment(gpu=card.name if card else None),
        **more,
    )


def _failure(history: History) -> str:
    """Which request of a run found no room, and what filled the card then, in the words of PyTorch's own message."""
    error = history.replayed.failed
    begun = [name for name, start, _ in history.stretches if start <= error.event]
    step = 1 + begun[:-1].count("between_steps")
    asked, free = history.log[error.event][1].asked, error.limit - error.reserved
    sizes = (asked, free, error.limit, error.allocated, error.reserved - error.allocated)
    asked, free, limit, allocated, cached = (format_bytes(n, unit_for(n), 2) for n in sizes)
    return (
        f"in {'load' if begun == ['load'] else f'step {step}, {begun[-1]},'} it tries to allocate {asked}, and {free} are "
        f"free. Of {limit}, {allocated} are allocated, {cached} reserved but unallocated. The figure for reserved "
        "memory is that of a larger card"
    )


def _reserved_and_process(
    reserved: int, allocated: int, card: Gpu | None, room: int | None
) -> tuple[Interval, Interval]:
    """Reserved memory, and that of the process with CUDA's context, as intervals around the allocator's model: 97 % of the
    published runs that say it lie below the upper end. `room`: bytes of a card that the step fits; it gives unused
    segments back before it is full."""
    context = card.context_interval if card else CONTEXT
    high = reserved + max(reserved // 10, 64 * MiB)
    inside = Interval(allocated, reserved, min(high, room - context.low) if room else high)
    around = process(inside, card)
    return inside, dataclasses.replace(around, high=min(around.high, room)) if room else around
