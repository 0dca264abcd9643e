"""`assert_fits`: a test that a training step fits a card."""

from collections.abc import Mapping
from typing import Any

from ..hardware.gpu import Gpu, find_gpu
from ..report.errors import RecipeError, needing
from ..report.report import Interval, Report, format_bytes
from .explain import parts

TIERS = {"safe": "high", "likely": "value", "tight": "low"}  # which end of the process's interval has to fit


def assert_fits(what: Any, gpu: str | Gpu = "T4", tier: str = "likely", **given: Any) -> Report:
    """Raise AssertionError, which names the largest parts, unless the training step fits the card; return its report.

    Args:
        what: a recipe, a module, a mapping of what `simulate` takes, or a report; `given`: what else `simulate` takes.
        tier: "safe", "likely" or "tight": the upper end, the middle or the lower end of the interval of what the process
            holds is within the card's memory.
    Raises:
        RecipeError, GpuError: an unknown tier or card, or something that cannot be simulated.
    """
    card = find_gpu(gpu)
    if tier not in TIERS:
        raise RecipeError("tier", tier, f"allowed are {', '.join(map(repr, TIERS))}")
    report = report_of(what, gpu=card.name, **given)
    needs = report.process if report.process is not None else report.peak.total
    size = getattr(needs, TIERS[tier]) if isinstance(needs, Interval) else needs
    if report.status != "ok" or size > card.total:
        has, over = format_bytes(card.total), format_bytes(size - card.total)
        said = f"the process needs {needs}" if isinstance(needs, Interval) else f"it needs {format_bytes(needs)}"
        why = report.message or f"{said}, {card.name} has {has}: {over} too much"
        raise AssertionError("\n".join([f"{report.title} does not fit {card.name} ({tier}): {why}", *parts(report)]))
    return report


@needing("assert_fits")
def report_of(what: Any, **given: Any) -> Report:
    """Return the report of `what`, as in `assert_fits`: simulated, unless it is one."""
    if isinstance(what, Report):
        return what
    from ..simulation.simulate import simulate

    if not isinstance(what, Mapping):
        what = {"model" if hasattr(what, "named_parameters") else "recipe": what}
    return simulate(**{**given, **what})
