"""The table that `compare` returns: values, differences, and how they are shown as text, Markdown and HTML."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from .labels import failure
from .report import Bytes, Interval, Report, format_bytes, text_table

INFINITE = (float("inf"), float("-inf"))  # relative to nothing
Value = int | Interval | str | None


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a value per report in bytes; text for the peak's phase, None where it is not known."""

    section: str
    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Comparison:
    """Reports beside each other, and how far each is from one of them.

    Attributes:
        title: the recipe in one line.
        unit: what sizes are shown in; inside they are bytes.
        labels: one per report, the source where that tells them apart.
        against: the label of the report that differences are taken against, None without reports.
        reports: the reports with figures, in the order of `labels`.
        rows: the lines of the table.
        failed: a line of text per report without figures (out of memory).
        notes: what the reader has to know before trusting a difference.
    """

    title: str
    unit: str
    labels: tuple[str, ...]
    against: str | None
    reports: tuple[Report, ...]
    rows: tuple[Row, ...]
    failed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The line called `name`, for example "peak total". Raises ValueError when there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.rows)
        raise ValueError(f"this comparison has no row {name!r}: it has {known}.")

    def to_dict(self) -> dict:
        """A JSON-ready dictionary: sizes in bytes, `relative` differences as fractions (0.03 is 3 %)."""
        rows = []
        for row in self.rows:
            values = {k: _jsonable(v) for k, v in zip(self.labels, row.values, strict=True)}
            changes = {
                label: {"bytes": change, "relative": None if relative in INFINITE else relative}
                for label, (change, relative) in self._differences(row)
            }
            rows.append({"section": row.section, "name": row.name, "values": values, "differences": changes})
        reports = [
            {"label": label, "source": r.source, "target": r.target, "title": r.title}
            for label, r in zip(self.labels, self.reports, strict=True)
        ]
        return {
            "title": self.title,
            "against": self.against,
            "reports": reports,
            "rows": rows,
            "failed": list(self.failed),
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        parts = [self.title]
        if self.rows:
            lines = [self._head()]
            for section, rows in self._sections():
                lines.append((section, *[""] * (len(lines[0]) - 1)))
                lines += [("  " + name, *cells) for name, *cells in self._lines(rows)]
            parts.append(text_table(lines))
        return "\n".join([*parts, *self._foot()])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        table = []
        if self.rows:
            head = self._head()
            table = ["| " + " | ".join(map(_bar, head)) + " |", "|:--" + "|--:" * (len(head) - 1) + "|"]
            for section, rows in self._sections():
                table.append(f"| **{section}** |" + " |" * (len(head) - 1))
                table += ["| " + " | ".join(map(_bar, cells)) + " |" for cells in self._lines(rows)]
        return "\n".join([f"**{self.title}**", "", *table, *(f"\n{line}" for line in self._foot())])

    def _repr_html_(self) -> str:
        lines = ["<table>", f'<caption style="text-align:left">{escape(self.title)}</caption>']
        right = ' style="text-align:right"'
        head = self._head()
        if self.rows:
            cells = "".join(f'<th scope="col"{right if i else ""}>{escape(c)}</th>' for i, c in enumerate(head))
            lines.append(f"<thead><tr>{cells}</tr></thead>")
        for section, rows in self._sections():
            lines.append(f'<tbody><tr><th colspan="{len(head)}" style="text-align:left">{escape(section)}</th></tr>')
            for name, *cells in self._lines(rows):
                tds = "".join(f"<td{right}>{escape(c)}</td>" for c in cells)
                th = f'<th scope="row" style="text-align:left;font-weight:normal">{escape(name)}</th>'
                lines.append(f"<tr>{th}{tds}</tr>")
            lines.append("</tbody>")
        return "\n".join([*lines, "</table>", *(f"<p>{escape(line)}</p>" for line in self._foot())])

    def _head(self) -> tuple[str, ...]:
        changes = [text for label in self.labels if label != self.against for text in (f"Δ {label}", "Δ %")]
        return (self.unit, *self.labels, *changes)

    def _foot(self) -> list[str]:
        lines = []
        if len(self.labels) > 1:
            lines.append(f"Δ is taken against {self.against}; a plain 0 is equality to the byte.")
        return [*lines, *self.failed, *(f"note: {note}" for note in self.notes)]

    def _sections(self) -> Iterator[tuple[str, list[Row]]]:
        for section in dict.fromkeys(row.section for row in self.rows):
            yield section, [row for row in self.rows if row.section == section]

    def _differences(self, row: Row) -> Iterator[tuple[str, tuple[int | None, float | None]]]:
        sizes = {label: number(value) for label, value in zip(self.labels, row.values, strict=True)}
        reference = sizes.pop(self.against)
        for label, size in sizes.items():
            known = size is not None and reference is not None
            yield label, (size - reference, relative_to(size, reference)) if known else (None, None)

    def _lines(self, rows: list[Row]) -> Iterator[tuple[str, ...]]:
        """The rows as text; one with intervals takes a second line, so that columns stay narrow."""
        for row in rows:
            cells = [row.name, *(_cell(value, self.unit) for value in row.values)]
            for _, (change, relative) in self._differences(row):
                cells += ["", ""] if change is None else [_signed(change, self.unit), _per_cent(relative)]
            yield tuple(cells)
            if any(isinstance(value, Interval) for value in row.values):
                ranges = (_range(value, self.unit) for value in row.values)
                yield (f"{row.name}, low–high", *ranges, *[""] * (len(cells) - 1 - len(row.values)))


def number(value: Value) -> int | None:
    """The bytes of a value, the likeliest of an interval, None for text."""
    return None if isinstance(value, str) else value.value if isinstance(value, Interval) else value


def relative_to(value: int, reference: int) -> float:
    """How far `value` is from `reference`, as a fraction of it; infinite where only the reference is 0."""
    if value == reference:
        return 0.0
    return (value - reference) / reference if reference else float("inf") if value > 0 else float("-inf")


def difference(a: Report | Bytes | Interval | int, b: Report | Bytes | Interval | int) -> float:
    """How far `a` is from `b`, relative to `b`: 0.03 when `a` is 3 % above. Reports are compared by their peak's total.

    Raises:
        ValueError: a report without figures, because the run did not end well.
    """
    return relative_to(*map(_size, (a, b)))


def _size(value: Report | Bytes | Interval | int) -> int:
    if isinstance(value, Report):
        if value.status != "ok":
            raise ValueError(f"a report without figures cannot be compared ({failure(value)}).")
        return value.peak.total
    return value.total if isinstance(value, Bytes) else number(value)


def _bare(n: int, unit: str) -> str:
    return format_bytes(n, unit).rsplit(" ", 1)[0]


def _cell(value: Value, unit: str) -> str:
    return "–" if value is None else value if isinstance(value, str) else _bare(number(value), unit)


def _range(value: Value, unit: str) -> str:
    return f"{_bare(value.low, unit)}–{_bare(value.high, unit)}" if isinstance(value, Interval) else ""


def _signed(change: int, unit: str) -> str:
    return "0" if change == 0 else ("+" if change > 0 else "−") + _bare(abs(change), unit)


def _per_cent(relative: float) -> str:
    if relative == 0:
        return "0"
    if abs(relative) >= 10:  # per cent no longer say anything
        return "–" if relative in INFINITE else f"×{relative + 1:,.0f}"
    return f"{'+' if relative > 0 else '−'}{abs(relative):.2%}"


def _bar(text: str) -> str:
    return text.replace("|", "\\|")


def _jsonable(value: Value) -> int | str | dict | None:
    return {"low": value.low, "value": value.value, "high": value.high} if isinstance(value, Interval) else value
