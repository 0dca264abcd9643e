"""Witnesses beside each other: every category, how far each is from the strongest witness, what is unexplained."""

from collections.abc import Iterator, Sequence

from .comparison import Comparison, Row, number, relative_to
from .report import CATEGORIES, PHASES, Bytes, Interval, Report, format_bytes

# What a difference is taken against: a run outweighs a simulation, and a simulation a formula.
STRENGTH = {"predicted": 0, "simulated": 1, "recorded": 2, "measured": 2}
UNITS = ("GiB", "MiB", "KiB", "B")
DEVICE_ROWS = ("allocated", "requested", "reserved", "process", "rss")


def compare(
    *reports: Report, labels: Sequence[str] | None = None, same_recipe: bool = True, unit: str = "GiB"
) -> Comparison:
    """A table of what each report says of the same recipe, and how far each is from the strongest witness.

    Args:
        reports: in any order; they are shown predicted, simulated, then recorded and measured.
        labels: names for the columns, in the order of `reports`; None makes short ones that tell them apart.
        same_recipe: False allows different recipes (what does a trick change?) and says so in a note.
        unit: "GiB", "MiB", "KiB" or "B", for the eye only.
    Raises:
        ValueError: nothing to compare, something that is no report, or different recipes.
    """
    apart = _check(reports, same_recipe, unit)
    names = _labels(reports, labels)
    pairs = sorted(zip(names, reports, strict=True), key=lambda pair: STRENGTH[pair[1].source])
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
    notes += list(_outside(rows, [label for label, _ in good], unit))
    title = "different recipes, named in the notes" if apart else pairs[-1][1].title
    return Comparison(title, unit, tuple(label for label, _ in good), tuple(columns), rows, tuple(failed), tuple(notes))


def difference(a: Report | Bytes | Interval | int, b: Report | Bytes | Interval | int) -> float:
    """How far `a` is from `b`, relative to `b`: 0.03 when `a` is 3 % above. Reports are compared by their peak's total.

    Raises:
        ValueError: a report without figures, because the run did not end well.
    """
    return relative_to(*map(_size, (a, b)))


def column_labels(
    reports: Sequence[Report], labels: Sequence[str] | None = None, same_recipe: bool = True
) -> list[str]:
    """A short name for each report, different from the others, in the order given. Raises ValueError as `compare`."""
    _check(reports, same_recipe)
    return _labels(reports, labels)


def failure(report: Report) -> str:
    """One line for a report without figures: "out of memory: …"."""
    kind = "out of memory" if report.status == "oom" else report.status
    return f"{kind}: {' '.join(report.message.split())}" if report.message else kind


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


def _check(reports: Sequence[Report], same_recipe: bool, unit: str = "GiB") -> str:
    """What tells the reports' recipes apart, "" when nothing does; refuses what cannot be compared."""
    if not reports:
        raise ValueError("compare needs at least one report, for example compare(predict(recipe), simulate(recipe)).")
    for report in reports:
        if not isinstance(report, Report):
            raise ValueError(f"compare takes reports, one argument each, not {type(report).__name__}.")
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}, but allowed are {', '.join(UNITS)}.")
    apart = _apart(reports)
    if apart and same_recipe:
        raise ValueError(f"these reports differ in {apart}: pass same_recipe=False to compare them anyway.")
    return apart


def _labels(reports: Sequence[Report], given: Sequence[str] | None) -> list[str]:
    """A short name for each report, different from the others."""
    if given is not None:
        if len(given) != len(reports) or len(set(given)) != len(given):
            raise ValueError(f"labels must be {len(reports)} different names, one per report, not {list(given)!r}.")
        return [str(label) for label in given]
    names = [r.source for r in reports]
    if len({r.title for r in reports}) > 1:
        split = [r.title.split(" · ") for r in reports]
        shared = set(split[0]).intersection(*split[1:])
        own = [", ".join(part for part in parts if part not in shared) or "baseline" for parts in split]
        names = own if len(set(names)) == 1 else [f"{name} {mine}" for name, mine in zip(names, own, strict=True)]
    if len(set(names)) < len(names) and len({r.target for r in reports}) > 1:
        names = [f"{name} ({r.target})" for name, r in zip(names, reports, strict=True)]
    if len(set(names)) < len(names):
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{name} {names[: i + 1].count(name)}" if name in twice else name for i, name in enumerate(names)]
    return names


def _apart(reports: Sequence[Report]) -> str:
    """What tells the reports' recipes apart, in words; "" when nothing does. Fields that only one of them knows are not
    held against it: a record may be older than a field."""
    recipes = [r.recipe for r in reports if r.recipe is not None]
    for recipe in recipes[1:]:
        fields = [name for name in recipes[0] if name in recipe and recipe[name] != recipes[0][name]]
        if fields:
            pairs = [(name, f"{recipes[0][name]!r} against {recipe[name]!r}") for name in fields]
            return " and ".join(f"{name} ({shown})" if len(shown) < 80 else name for name, shown in pairs)
    titles = dict.fromkeys(r.title for r in reports)
    return "title (" + " against ".join(map(repr, titles)) + ")" if not recipes and len(titles) > 1 else ""


def _size(value: Report | Bytes | Interval | int) -> int:
    if isinstance(value, Report):
        if value.status != "ok":
            raise ValueError(f"a report without figures cannot be compared ({failure(value)}).")
        return value.peak.total
    return value.total if isinstance(value, Bytes) else number(value)
