"""Witnesses beside each other: every category, how far each is from the strongest witness, what is unexplained."""

from collections.abc import Iterator, Sequence

from .comparison import Comparison, Row, difference
from .labels import check, failure, labels_of
from .report import CATEGORIES, PHASES, Interval, Report, format_bytes

__all__ = ["compare", "difference"]

# What a difference is taken against: a run outweighs a simulation, and a simulation a formula.
STRENGTH = {"predicted": 0, "simulated": 1, "recorded": 2, "measured": 2}
DEVICE_ROWS = ("allocated", "requested", "reserved", "process", "rss")


def compare(
    *reports: Report, labels: Sequence[str] | None = None, same_recipe: bool = True, unit: str = "GiB"
) -> Comparison:
    """A table of what each report says of the same recipe, and how far each is from the strongest witness.

    Args:
        reports: in any order; they are shown predicted, simulated, then recorded and measured, and differences are
            taken against the last. Different recipes keep their order, and differences are taken against the first.
        labels: names for the columns, in the order of `reports`; None makes short ones that tell them apart.
        same_recipe: False allows different recipes (what does a trick change?) and says so in a note.
        unit: "GiB", "MiB", "KiB" or "B", for the eye only.
    Raises:
        ValueError: nothing to compare, something that is no report, or different recipes.
    """
    apart = check(reports, same_recipe, unit)
    names = labels_of(reports, labels)
    pairs = list(zip(names, reports, strict=True))
    if not apart:
        pairs.sort(key=lambda pair: STRENGTH[pair[1].source])
    good = [(label, r) for label, r in pairs if r.status == "ok"]
    failed = [f"{label}: {failure(r)}" for label, r in pairs if r.status != "ok"]
    titles = {r.title for r in reports}
    notes = [f"{label} is {r.title}." for label, r in pairs if len(titles) > 1]
    if len({r.target for _, r in good}) > 1:
        targets = ", ".join(f"{label} is for {r.target}" for label, r in good)
        notes.append(f"the targets differ ({targets}), so kernels and rounding do too.")
    if len({r.peak_phase for _, r in good}) > 1:
        where = ", ".join(f"{label} in {r.peak_phase}" for label, r in good)
        notes.append(f"the peaks stand in different phases ({where}), so their categories are not of the same moment.")
    columns = [r for _, r in good]
    rows = tuple(_rows(columns)) if columns else ()
    if not apart:
        notes += list(_outside(rows, [label for label, _ in good], unit))
    against = good[0 if apart else -1][0] if good else None
    title = "different recipes, named in the notes" if apart else pairs[-1][1].title
    labels = tuple(label for label, _ in good)
    return Comparison(title, unit, labels, against, tuple(columns), rows, tuple(failed), tuple(notes))


def _rows(reports: list[Report]) -> Iterator[Row]:
    section = "at the peak"
    yield Row(section, "phase", tuple(r.peak_phase for r in reports))
    for name in CATEGORIES[:-1]:
        values = tuple(getattr(r.peak, name) for r in reports)
        if any(values):
            yield Row(section, name.replace("_", " "), values)
    # Only a run has an allocator whose truth can exceed what was accounted for.
    known = tuple(r.peak.unexplained if STRENGTH[r.source] == 2 or r.peak.unexplained else None for r in reports)
    yield Row(section, "unexplained", known)
    yield Row(section, "peak total", tuple(r.peak.total for r in reports))
    for phase in PHASES:
        found = [r.phases.get(phase) for r in reports]
        if any(found):
            yield Row("each phase", f"{phase.replace('_', ' ')} peak", tuple(p and p.peak.total for p in found))
            yield Row("each phase", f"{phase.replace('_', ' ')} end", tuple(p and p.end.total for p in found))
    for name in DEVICE_ROWS:
        values = tuple(getattr(r, name) for r in reports)
        if any(value is not None for value in values):
            yield Row("allocator and device", name, values)


def _outside(rows: Sequence[Row], labels: list[str], unit: str) -> Iterator[str]:
    """A sentence for each interval that a measured figure falls out of: an under-estimate costs somebody a run."""
    for row in rows:
        truth = row.values[-1]
        for label, value in zip(labels, row.values, strict=True):
            if isinstance(value, Interval) and isinstance(truth, int) and not value.low <= truth <= value.high:
                side = "above" if truth > value.high else "below"
                low, true, high = (format_bytes(n, unit) for n in (value.low, truth, value.high))
                yield f"{row.name}: {labels[-1]} {true} is {side} the interval of {label}, {low} to {high}."
