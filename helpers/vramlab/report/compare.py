"""`compare`: reports of one recipe in a table; `diff`: any two.

Each report has its difference from the strongest witness.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ..base import html
from ..base.errors import ReportError
from ..base.text import printable
from .difference import cause_notes, library_notes, tensor_notes
from .report import (
    ALL_PHASES,
    CATEGORIES,
    SOURCES,
    UNITS,
    Interval,
    Phase,
    Report,
    format_bytes,
    in_unit,
    text_table,
    unit_for,
)


@dataclass(frozen=True)
class ComparisonRow:
    """One line of a comparison: a value per report, in bytes; None where unknown.

    The row of the peak's phase has text.
    """

    section: str
    name: str
    values: tuple[int | Interval | str | None, ...]


@dataclass(frozen=True)
class Comparison:
    """A table of reports."""

    title: str  # the recipe in one line
    unit: str  # of the sizes on screen
    labels: tuple[str, ...]  # a short name for each report with figures
    # Label of the report that differences are taken against; None without reports.
    against: str | None
    rows: tuple[ComparisonRow, ...]
    # A sentence for each report without figures, such as out of memory.
    failed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # sentences that qualify the differences

    def row(self, name: str) -> ComparisonRow:
        """Return the row of that name, such as "peak total". Raises KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    def differences(self, name: str) -> dict[str, tuple[int, float]]:
        """Return differences in the row of that name by label.

        They are in bytes, and as a fraction (0.03 is 3 %).
        """
        sizes = {}
        for label, value in zip(self.labels, self.row(name).values, strict=True):
            # Phases' names stand in rows too, and have no difference.
            if isinstance(value, int | Interval):
                sizes[label] = int(value)
        if self.against not in sizes:
            return {}
        reference = sizes.pop(self.against)
        divisor = reference or math.ulp(0)  # what grows from nothing grows infinitely
        differences = {}
        for label, size in sizes.items():
            change = size - reference
            differences[label] = (change, change / divisor)
        return differences

    def __str__(self) -> str:
        lines = [self.title]
        if self.rows:
            lines.append(text_table(self._table()))
        if len(self.labels) > 1:
            equality = "a plain 0 is equality to the byte"
            lines.append(f"Δ is taken against {self.against}; {equality}.")
        lines += self.failed
        lines += [f"note: {note}" for note in self.notes]
        return printable("\n".join(lines))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the comparison as a notebook shows it."""
        head, *rows = self._table() if self.rows else [(self.title,)]
        notes = [*self.failed, *self.notes]
        if len(self.labels) > 1:
            notes.insert(
                0,
                f"Δ is taken against {self.against}; a plain 0 is equality to the byte.",
            )
        return html.table(head, rows, self.title, notes)

    def _table(self) -> list[tuple[str, ...]]:
        """Return header and rows as text.

        Intervals take a second line, so that columns stay narrow.
        """
        others = [label for label in self.labels if label != self.against]
        header = [self.unit, *self.labels]
        for label in others:
            # Two columns for each, in bytes and in per cent.
            header += [f"Δ {label}", "Δ %"]
        lines = [tuple(header)]
        for section, rows in groupby(self.rows, key=lambda row: row.section):
            # A section's name takes a line of its own, over its rows.
            lines.append((section, *_blanks(len(header) - 1)))
            for row in rows:
                lines.append((f"  {row.name}", *self._cells(row, others)))
                if any(isinstance(value, Interval) for value in row.values):
                    blanks = _blanks(2 * len(others))
                    lines.append((f"  {row.name}, low–high", *self._ranges(row), *blanks))
        return lines

    def _cells(
        self,
        row: ComparisonRow,
        others: list[str],
    ) -> Iterator[str]:
        """Yield the cells of a row: its values, and two for the difference of each other label."""
        for value in row.values:
            if isinstance(value, str | None):
                yield value or "–"
            else:
                yield in_unit(int(value), self.unit)
        # A report that lacks the figure has no difference either.
        differences = self.differences(row.name)
        for label in others:
            if label in differences:
                yield from _change(*differences[label], self.unit)
            else:
                yield from _blanks(2)

    def _ranges(self, row: ComparisonRow) -> Iterator[str]:
        """Yield the ends of each interval of a row."""
        for value in row.values:
            if isinstance(value, Interval):
                yield f"{in_unit(value.low, self.unit)}–{in_unit(value.high, self.unit)}"
            else:
                yield ""


def _blanks(count: int) -> list[str]:
    return [""] * count


def compare(*reports: Report) -> Comparison:
    """Return a table of one recipe's reports, and of their differences from the last.

    The weakest witness comes first. Raises ValueError: no reports, something that is no report, or
    different recipes, which `diff` compares.
    """

    def strength(pair: tuple[str, Report]) -> int:
        _, report = pair
        # SOURCES stand from the weakest witness to the strongest.
        return SOURCES.index(report.source)

    # The last is the one that the others are held against.
    pairs = sorted(zip(column_labels(reports), reports, strict=True), key=strength)
    _, strongest = pairs[-1]
    comparison = _compared(pairs, strongest.title, -1)
    return replace(comparison, notes=(*comparison.notes, *_interval_notes(comparison)))


def diff(a: Report, b: Report) -> Comparison:
    """Return a table of any two reports, differences being B − A.

    Its notes say why the peaks are where they are, which tensors came, went or changed (of those in
    `Report.largest`, by category, operator, module and dtype), and which libraries have other
    versions. Raises ReportError for a report without figures.
    """
    title = b.title
    if _recipe_difference((a, b)):
        title = "different recipes, named in the notes"
    comparison = _compared(
        [("A", a), ("B", b)],
        title,
        0,
    )
    if comparison.failed:
        why = comparison.failed[0]
        raise ReportError(f"a report without figures cannot be compared ({why}).")
    notes = (
        *comparison.notes,
        *cause_notes(a, b),
        *tensor_notes(a, b),
        *library_notes(a, b),
    )
    return replace(comparison, notes=notes)


def _compared(
    pairs: Sequence[tuple[str, Report]],
    title: str,
    against: int,
) -> Comparison:
    """Return the table of (label, report).

    Differences are taken against that index of those with figures.
    """
    with_figures = []
    failed = []
    notes = []
    # Titles are the recipes in one line: where they agree the table has it already.
    is_one_recipe = len({report.title for _, report in pairs}) == 1
    for label, report in pairs:
        if report.status == "ok":
            with_figures.append((label, report))
        else:
            failed.append(f"{label}: {failure(report)}")
        if not is_one_recipe:
            notes.append(f"{label} is {report.title}.")
    notes += _moment_notes(with_figures)
    # Two runs that ran out of memory still say so.
    if not with_figures:
        return Comparison(
            title,
            "GiB",
            (),
            None,
            (),
            tuple(failed),
            tuple(notes),
        )
    labels, reports = zip(*with_figures, strict=True)
    return Comparison(
        title=title,
        unit=unit_for(max(report.peak.total for report in reports)),
        labels=labels,
        against=labels[against],
        rows=tuple(_rows(reports)),
        failed=tuple(failed),
        notes=tuple(notes),
    )


def _moment_notes(pairs: Sequence[tuple[str, Report]]) -> Iterator[str]:
    """Yield sentences where the reports are of different targets or peak in different phases."""
    if len({report.target for _, report in pairs}) > 1:
        targets = ", ".join(f"{label} is for {report.target}" for label, report in pairs)
        yield f"the targets differ ({targets}), so kernels and rounding do too."
    if len({report.peak_phase for _, report in pairs}) > 1:
        phases = ", ".join(f"{label} in {report.peak_phase}" for label, report in pairs)
        rest = "so their categories are not of the same moment"
        yield f"the peaks stand in different phases ({phases}), {rest}."


def check_unit(unit: str) -> int:
    """Return the bytes of a unit. Raises ValueError for an unknown one."""
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}, but allowed are {', '.join(UNITS)}.")
    return UNITS[unit]


def failure(report: Report) -> str:
    """Return one line for a report without figures: "out of memory: …"."""
    kind = "out of memory" if report.status == "oom" else report.status
    message = " ".join(report.message.split())
    return f"{kind}: {message}" if report.message else kind


def column_labels(reports: Sequence[Report]) -> list[str]:
    """Return a short and unique name for each report, in the order given.

    Raises ValueError as `compare`.
    """
    if not reports or not all(isinstance(report, Report) for report in reports):
        example = "compare(predict(recipe), simulate(recipe))"
        raise ValueError(f"compare takes reports, one argument each: {example}.")
    different = _recipe_difference(reports)
    if different:
        rest = "diff compares two of different recipes"
        raise ValueError(f"these reports differ in {different}: {rest}.")
    names = [report.source for report in reports]
    targets = {report.target for report in reports}
    # The target tells two of one source apart, or else their number.
    if len(set(names)) < len(names) and len(targets) > 1:
        names = [f"{report.source} ({report.target})" for report in reports]
    labels = []
    for index, name in enumerate(names):
        if names.count(name) > 1:
            number = names[: index + 1].count(name)
            labels.append(f"{name} {number}")
        else:
            labels.append(name)
    return labels


def _recipe_difference(reports: Sequence[Report]) -> str:
    """Return in words the fields in which the recipes differ.

    Those that an older record lacks are skipped.
    """
    recipes = [report.recipe for report in reports if report.recipe is not None]
    for recipe in recipes[1:]:
        fields = []
        for name, value in recipes[0].items():
            if name in recipe and recipe[name] != value:
                fields.append(f"{name} ({value!r} against {recipe[name]!r})")
        if fields:
            return " and ".join(fields)
    return ""


def _rows(reports: Sequence[Report]) -> Iterator[ComparisonRow]:
    """Yield the rows of a table; those that are empty in all reports are left out."""
    section = "at the peak"
    yield ComparisonRow(
        section,
        "phase",
        tuple(report.peak_phase for report in reports),
    )
    # The last category is "unexplained", which has a row of its own below.
    for name in CATEGORIES[:-1]:
        values = tuple(getattr(report.peak, name) for report in reports)
        if any(values):
            yield ComparisonRow(section, name.replace("_", " "), values)
    yield ComparisonRow(
        section,
        "unexplained",
        tuple(map(_unexplained, reports)),
    )
    yield ComparisonRow(
        section,
        "peak total",
        tuple(report.peak.total for report in reports),
    )
    for name in ALL_PHASES:
        phases = [report.phases.get(name) for report in reports]
        # A phase such as "generate" is in few reports, and its row would be empty.
        if any(phases):
            for moment in ("peak", "end"):
                sizes = tuple(_total(phase, moment) for phase in phases)
                yield ComparisonRow(
                    "each phase",
                    f"{name.replace('_', ' ')} {moment}",
                    sizes,
                )
    for name in ("allocated", "requested", "reserved", "process", "rss"):
        values = tuple(getattr(report, name) for report in reports)
        if any(value is not None for value in values):
            yield ComparisonRow("allocator and device", name, values)


def _total(phase: Phase | None, moment: str) -> int | None:
    """Return the bytes at a phase's "peak" or "end"; None where the report lacks the phase."""
    return getattr(phase, moment).total if phase else None


def _unexplained(report: Report) -> int | None:
    """Return the allocator's figure minus what was accounted for.

    Only a run has an allocator whose truth can exceed what was accounted for.
    """
    if report.source in ("predicted", "simulated") and not report.peak.unexplained:
        return None
    return report.peak.unexplained


def _interval_notes(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence for each interval that does not contain the measured figure."""
    for row in comparison.rows:
        # The strongest witness is the last.
        measured = row.values[-1]
        # Only a figure of a run can be outside of an interval.
        if not isinstance(measured, int):
            continue
        for label, value in zip(comparison.labels, row.values, strict=True):
            if not isinstance(value, Interval) or value.low <= measured <= value.high:
                continue
            side = "above" if measured > value.high else "below"
            figure = f"{comparison.against} {format_bytes(measured, comparison.unit)}"
            low = format_bytes(value.low, comparison.unit)
            high = format_bytes(value.high, comparison.unit)
            yield f"{row.name}: {figure} is {side} the interval of {label}, {low} to {high}."


def _change(
    change: int,
    relative: float,
    unit: str,
) -> list[str]:
    """Return the two cells of a difference."""
    if not change:
        return ["0", "0"]
    sign = "+" if change > 0 else "−"
    size = sign + in_unit(abs(change), unit)
    if math.isinf(relative):
        return [size, "–"]
    if abs(relative) >= 10:  # so far from the reference, per cent no longer say anything
        return [size, f"×{relative + 1:,.0f}"]
    return [size, f"{sign}{abs(relative):.2%}"]
