"""The peak over batch sizes, sequence lengths, ranks, …, and the first value that does not fit a card."""

import itertools
from collections.abc import Mapping, Sequence
from numbers import Real

from ...report.report import Report
from . import style
from .splits import amount, areas, check_unit, draw_limit, exact, limit_of, size_of, split_of, split_rows, subtitle

Lines = Mapping[str, Sequence[Report]]


@style.drawn
def sweep(
    x_values: Sequence[float],
    reports: Sequence[Report] | Lines,
    xlabel: str,
    limit=None,
    dots: Sequence[Report | None] | None = None,
    unit: str = "GiB",
    title: str | None = None,
):
    """The peak over a list of batch sizes, sequence lengths, …; returns the figure.

    A list of reports is a stacked area by category; a mapping from names to lists is a line of totals each. With a
    `limit`, the first value that does not fit is marked. What has to fit is the process's memory where all reports tell
    it, else what the allocator reserves, else the peak; an area has it as a line of its own.

    Args:
        x_values: what was swept, two or more ascending numbers.
        dots: reports of the same values from another witness, drawn as points; None where there is none.
    Raises:
        ValueError: lists of different lengths, values that do not ascend, or an unknown unit.
    """
    size, x = check_unit(unit), list(x_values)
    lines = dict(reports) if isinstance(reports, Mapping) else {"": list(reports)}
    dots = list(dots) if dots else [None] * len(x)
    _check(x, [*lines.values(), dots])
    everything = [r for series in lines.values() for r in series]
    kind = has_to_fit(everything)
    figure, ax = style.start(title or f"Memory at the peak over {xlabel}", subtitle(everything))
    top = [0.0]  # of all that is drawn

    def line(series: Sequence[Report | None], label: str, of: str = "peak", **look) -> None:
        good = [(a, size_of(getattr(r, of)) / size) for a, r in zip(x, series, strict=True) if r and r.status == "ok"]
        top.extend(height for _, height in good)
        ax.plot([a for a, _ in good], [height for _, height in good], label=label, **look)

    for (label, series), (colour, marker, dash) in zip(lines.items(), itertools.cycle(style.LINES), strict=False):
        good = [(a, r.peak) for a, r in zip(x, series, strict=True) if r.status == "ok"]
        if label:
            line(series, label, color=colour, marker=marker, linestyle=dash, clip_on=False, zorder=4)
            continue
        areas(ax, [a for a, _ in good], [peak for _, peak in good], unit)
        top.extend(size_of(peak) / size for _, peak in good)
        if kind != "peak":
            line(series, f"{kind}, which has to fit", kind, color="black", linestyle="--", linewidth=1.4)
    if source := next((r.source for r in dots if r and r.status == "ok"), ""):
        look = {"color": "black", "markerfacecolor": "white", "markersize": 7, "markeredgewidth": 1.6, "zorder": 6}
        line(dots, source, marker="o", linestyle="", clip_on=False, **look)
    height = draw_limit(ax, limit, unit)
    crossings = {label: first_over(x, series, limit_of(limit)[0], kind) for label, series in lines.items()}
    if limit is not None:
        _mark(ax, crossings, height, xlabel)
    ax.set(xlim=(x[0], x[-1]), ylim=(0, (max([*top, height]) or 1) * 1.16), xlabel=xlabel, ylabel=unit)
    _ticks(ax, x)
    alt = f"{figure.heading}."
    if limit is not None:
        bytes_, card = limit_of(limit)
        alt += f" Limit: {card}, {amount(bytes_, unit)} {unit}; {_verdict(crossings, xlabel)}."
    return style.finish(figure, _rows(x, lines, dots, unit, xlabel), alt, say_rows=True)


def has_to_fit(reports: Sequence[Report]) -> str:
    """Which figure is held against a card: the strongest that all reports with figures have."""
    good = [r for r in reports if r.status == "ok"]
    known = (name for name in ("process", "reserved") if good and all(getattr(r, name) is not None for r in good))
    return next(known, "peak")


def first_over(x: Sequence[float], reports: Sequence[Report], limit: float, kind: str) -> float | None:
    """The first value whose report needs more than `limit` bytes (of an interval the likeliest), or ran out of memory;
    None when all fit."""
    over = (a for a, r in zip(x, reports, strict=True) if r.status == "oom" or size_of(getattr(r, kind)) > limit)
    return next(over, None)


def _check(x: list[float], lists: Sequence[Sequence]) -> None:
    ascending = all(isinstance(a, Real) for a in x) and all(a < b for a, b in itertools.pairwise(x))
    if len(x) < 2 or not ascending:
        raise ValueError(f"sweep needs two or more ascending numbers to sweep over, not {x!r}.")
    for reports in lists:
        if len(reports) != len(x):
            raise ValueError(f"sweep needs one report for each of the {len(x)} values, not {len(reports)}.")


def _mark(ax, crossings: Mapping[str, float | None], height: float, xlabel: str) -> None:
    for first in crossings.values():
        if first is not None:
            ax.axvline(first, color=style.ALARM, linewidth=1, linestyle=":")
            look = {"color": style.ALARM, "markersize": 10, "markeredgecolor": "white", "clip_on": False, "zorder": 7}
            ax.plot([first], [height], "X", gid="first over", **look)
    look = {"va": "top", "color": style.ALARM, "fontsize": 9.5, "fontweight": "bold", "bbox": style.PATCH, "zorder": 8}
    where = {"xycoords": "axes fraction", "xytext": (4, -3), "textcoords": "offset points"}
    ax.annotate(_verdict(crossings, xlabel).replace(" · ", "\n"), (0, 1), gid="verdict", **where, **look)


def _verdict(crossings: Mapping[str, float | None], xlabel: str) -> str:
    said = []
    for label, first in crossings.items():
        verdict = "all fit" if first is None else f"{xlabel} {first:g} is the first that does not fit"
        said.append(f"{label}: {verdict}" if label else verdict)
    return " · ".join(said)


def _ticks(ax, x: Sequence[float]) -> None:
    """A tick per value; labels that would touch their right neighbour are left out."""
    span = x[-1] - x[0]
    names, edge = [], float("inf")
    for value in reversed(x):
        half = 0.0085 * len(f"{value:g}") * span
        clear = value + half < edge
        names.append(f"{value:g}" if clear else "")
        edge = value - half - 0.01 * span if clear else edge
    ax.set_xticks(list(x), names[::-1])


def _total(report: Report | None, unit: str) -> str:
    if report is None:
        return "–"
    return exact(report.peak.total, unit) if report.status == "ok" else split_of(report)


def _rows(x, lines: Lines, dots: Sequence[Report | None], unit: str, xlabel: str) -> list[tuple[str, ...]]:
    names, corner = [f"{a:g}" for a in x], f"{xlabel}, {unit}"
    if any(lines):
        rows = [(corner, *map(str, lines))]
        rows += [(a, *(_total(r, unit) for r in line)) for a, *line in zip(names, *lines.values(), strict=True)]
    else:
        rows = split_rows(names, [split_of(r) for r in lines[""]], unit, corner)
    if source := next((r.source for r in dots if r is not None), None):
        column = [source, *(_total(r, unit) for r in dots)]
        rows = [(*row, cell) for row, cell in zip(rows, column, strict=True)]
    return rows
