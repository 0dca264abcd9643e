"""`compare`: reports of one recipe in a table, with each one's difference from the strongest witness; `diff` of any two."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from . import html
from .errors import ReportError
from .report import CATEGORIES, PHASES, SOURCES, UNITS, Interval, Report, format_bytes, in_unit, text_table, unit_for
from .text import printable


@dataclass(frozen=True)
class ComparisonRow:
    """One line of a comparison: a value per report, in bytes (text for the peak's phase); None where unknown."""

    section: str
    name: str
    values: tuple[int | Interval | str | None, ...]


@dataclass(frozen=True)
class Comparison:
    """A table of reports."""

    title: str  # the recipe in one line
    unit: str  # of the sizes on screen
    labels: tuple[str, ...]  # a short name for each report with figures
    against: str | None  # label of the report that differences are taken against; None without reports
    rows: tuple[ComparisonRow, ...]
    failed: tuple[str, ...] = ()  # a sentence for each report without figures, such as out of memory
    notes: tuple[str, ...] = ()  # sentences that qualify the differences

    def row(self, name: str) -> ComparisonRow:
        """Return the row of that name, for example "peak total". Raises KeyError when there is none."""
        return {row.name: row for row in self.rows}[name]

    def differences(self, name: str) -> dict[str, tuple[int, float]]:
        """Return differences in the row of that name by label: in bytes, and as a fraction (0.03 is 3 %)."""
        values = zip(self.labels, self.row(name).values, strict=True)
        sizes = {label: int(value) for label, value in values if isinstance(value, int | Interval)}
        if self.against not in sizes:
            return {}
        reference = sizes.pop(self.against)
        divisor = reference or math.ulp(0)  # what grows from nothing grows infinitely
        return {label: (size - reference, (size - reference) / divisor) for label, size in sizes.items()}

    def __str__(self) -> str:
        lines = [self.title, text_table(self._table())] if self.rows else [self.title]
        if len(self.labels) > 1:
            lines.append(f"Δ is taken against {self.against}; a plain 0 is equality to the byte.")
        return printable("\n".join([*lines, *self.failed, *(f"note: {note}" for note in self.notes)]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the comparison as a notebook shows it."""
        head, *rows = self._table() if self.rows else [(self.title,)]
        notes = [*self.failed, *self.notes]
        if len(self.labels) > 1:
            notes.insert(0, f"Δ is taken against {self.against}; a plain 0 is equality to the byte.")
        return html.table(head, rows, self.title, notes)

    def _table(self) -> list[tuple[str, ...]]:
        """Header and rows as text; intervals take a second line, so that columns stay narrow."""
        others = [label for label in self.labels if label != self.against]
        changes = [text for label in others for text in (f"Δ {label}", "Δ %")]
        lines = [(self.unit, *self.labels, *changes)]
        for section, rows in groupby(self.rows, key=lambda row: row.section):
            lines.append((section, *[""] * (len(lines[0]) - 1)))
            for row in rows:
                cells = [v or "–" if isinstance(v, str | None) else in_unit(int(v), self.unit) for v in row.values]
                found = self.differences(row.name)
                for label in others:
                    cells += _change(*found[label], self.unit) if label in found else ["", ""]
                lines.append((f"  {row.name}", *cells))
                if any(isinstance(value, Interval) for value in row.values):
                    ends = [(v.low, v.high) if isinstance(v, Interval) else () for v in row.values]
                    ranges = ["–".join(in_unit(n, self.unit) for n in pair) for pair in ends]
                    lines.append((f"  {row.name}, low–high", *ranges, *[""] * len(changes)))
        return lines


def compare(*reports: Report) -> Comparison:
    """Return a table of one recipe's reports, weakest witness first, and of their differences from the last.

    Raises ValueError: no reports, something that is no report, or different recipes, which `diff` compares.
    """
    pairs = sorted(zip(column_labels(reports), reports, strict=True), key=lambda pair: SOURCES.index(pair[1].source))
    found = _compared(pairs, pairs[-1][1].title, -1)
    return replace(found, notes=(*found.notes, *_interval_notes(found)))


def diff(a: Report, b: Report) -> Comparison:
    """Return a table of any two reports, differences being B − A, with notes of the tensors that came, went or changed
    (of those in `Report.largest`, by category, operator, module and dtype) and of libraries of other versions.

    Raises ReportError for a report without figures.
    """
    title = "different recipes, named in the notes" if _recipe_difference((a, b)) else b.title
    found = _compared([("A", a), ("B", b)], title, 0)
    if found.failed:
        raise ReportError(f"a report without figures cannot be compared ({found.failed[0]}).")
    old, new = a.environment, b.environment
    unlike = sorted(name for name in old.keys() & new.keys() - {"date", "fits"} if old[name] != new[name])
    libraries = (f"{name}: {old[name]} → {new[name]}" for name in unlike)
    return replace(found, notes=(*found.notes, *_tensor_notes(a, b), *libraries))


def _compared(pairs: Sequence[tuple[str, Report]], title: str, against: int) -> Comparison:
    """Return the table of (label, report), with differences taken against that index of those with figures."""
    good = [(label, report) for label, report in pairs if report.status == "ok"]
    failed = tuple(f"{label}: {failure(report)}" for label, report in pairs if report.status != "ok")
    unlike = len({report.title for _, report in pairs}) > 1
    notes = (*(f"{label} is {report.title}." for label, report in pairs if unlike), *_moment_notes(good))
    if not good:
        return Comparison(title, "GiB", (), None, (), failed, notes)
    names, reports = zip(*good, strict=True)
    unit = unit_for(max(report.peak.total for report in reports))
    return Comparison(title, unit, names, names[against], tuple(_rows(reports)), failed, notes)


def _tensor_notes(a: Report, b: Report) -> Iterator[str]:
    """Say which tensors differ, the largest difference first."""
    sizes, groups = (Counter(), Counter()), {}
    for report, known in zip((a, b), sizes, strict=True):
        for group in report.largest:
            key = group.category, group.op, group.where, group.dtype
            known[key], groups[key] = known[key] + group.size * group.count, group
    for key in sorted(groups, key=lambda key: -abs(sizes[1][key] - sizes[0][key])):
        old, new = (known[key] for known in sizes)
        other = sizes[old > 0].values()  # what one report does not list may be smaller than all that it lists
        if old != new and ((old and new) or max(old, new) > min(other, default=0)):
            kind, change = "changed" if old and new else "new" if new else "gone", abs(new - old)
            yield f"{'+' if new > old else '−'}{format_bytes(change, unit_for(change))} {kind}: {groups[key]}"


def _moment_notes(good: Sequence[tuple[str, Report]]) -> Iterator[str]:
    """Return sentences where the reports describe different targets or peak in different phases."""
    if len({r.target for _, r in good}) > 1:
        targets = ", ".join(f"{label} is for {r.target}" for label, r in good)
        yield f"the targets differ ({targets}), so kernels and rounding do too."
    if len({r.peak_phase for _, r in good}) > 1:
        where = ", ".join(f"{label} in {r.peak_phase}" for label, r in good)
        yield f"the peaks stand in different phases ({where}), so their categories are not of the same moment."


def check_unit(unit: str) -> int:
    """Return the bytes of a unit. Raises ValueError for an unknown one."""
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}, but allowed are {', '.join(UNITS)}.")
    return UNITS[unit]


def failure(report: Report) -> str:
    """Return one line for a report without figures: "out of memory: …"."""
    kind = "out of memory" if report.status == "oom" else report.status
    return f"{kind}: {' '.join(report.message.split())}" if report.message else kind


def column_labels(reports: Sequence[Report]) -> list[str]:
    """Return a short and unique name for each report, in the order given. Raises ValueError as `compare`."""
    if not reports or not all(isinstance(report, Report) for report in reports):
        raise ValueError("compare takes reports, one argument each: compare(predict(recipe), simulate(recipe)).")
    if different := _recipe_difference(reports):
        raise ValueError(f"these reports differ in {different}: diff compares two of different recipes.")
    names = [r.source for r in reports]
    if len(set(names)) < len(names) and len({r.target for r in reports}) > 1:
        names = [f"{name} ({r.target})" for name, r in zip(names, reports, strict=True)]
    return [f"{name} {names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _recipe_difference(reports: Sequence[Report]) -> str:
    """Return in words the fields in which the recipes differ, skipping those that an older record lacks."""
    recipes = [r.recipe for r in reports if r.recipe is not None]
    for recipe in recipes[1:]:
        fields = [name for name in recipes[0] if name in recipe and recipe[name] != recipes[0][name]]
        if fields:
            return " and ".join(f"{name} ({recipes[0][name]!r} against {recipe[name]!r})" for name in fields)
    return ""


def _rows(reports: Sequence[Report]) -> Iterator[ComparisonRow]:
    section = "at the peak"
    yield ComparisonRow(section, "phase", tuple(r.peak_phase for r in reports))
    for name in CATEGORIES[:-1]:
        values = tuple(getattr(r.peak, name) for r in reports)
        if any(values):
            yield ComparisonRow(section, name.replace("_", " "), values)
    # Only a run has an allocator whose truth can exceed what was accounted for.
    known = tuple(r.peak.unexplained if r.source not in SOURCES[:2] or r.peak.unexplained else None for r in reports)
    yield ComparisonRow(section, "unexplained", known)
    yield ComparisonRow(section, "peak total", tuple(r.peak.total for r in reports))
    for phase in PHASES:
        found = [r.phases.get(phase) for r in reports]
        for moment in ("peak", "end") if any(found) else ():
            values = tuple(p and getattr(p, moment).total for p in found)
            yield ComparisonRow("each phase", f"{phase.replace('_', ' ')} {moment}", values)
    for name in ("allocated", "requested", "reserved", "process", "rss"):
        values = tuple(getattr(r, name) for r in reports)
        if any(value is not None for value in values):
            yield ComparisonRow("allocator and device", name, values)


def _interval_notes(found: Comparison) -> Iterator[str]:
    """Return a sentence for each interval that does not contain the measured figure."""
    for row in found.rows:
        truth = row.values[-1]
        for label, value in zip(found.labels, row.values, strict=True):
            if isinstance(value, Interval) and isinstance(truth, int) and not value.low <= truth <= value.high:
                side = "above" if truth > value.high else "below"
                low, true, high = (format_bytes(n, found.unit) for n in (value.low, truth, value.high))
                yield f"{row.name}: {found.against} {true} is {side} the interval of {label}, {low} to {high}."


def _change(change: int, relative: float, unit: str) -> list[str]:
    """Return the two cells of a difference; far from the reference, per cent no longer say anything."""
    sign, size = "+" if change > 0 else "−", in_unit(abs(change), unit)
    if not change:
        return ["0", "0"]
    if math.isinf(relative):
        return [sign + size, "–"]
    return [sign + size, f"×{relative + 1:,.0f}" if abs(relative) >= 10 else f"{sign}{abs(relative):.2%}"]
