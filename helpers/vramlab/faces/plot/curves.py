"""Figures over an axis: the events of one step, and the peak over a swept value."""

import itertools
from collections.abc import Mapping, Sequence
from numbers import Real

from ...report.compare import check_unit, failure
from ...report.report import Moment, Report, TensorGroup, in_unit
from . import splits, style
from .splits import amount, label_of, size_of, split_of

LETTER = 0.0145  # width of a letter of a phase's name as a share of the axes


@style.styled()
def timeline(report: Report, largest: int = 3, unit: str = "GiB", title: str = "One training step, byte by byte"):
    """Return a figure of what is alive after each allocation event of one step, by category, with its phases.

    `largest`: how many tensors are named. Raises ValueError for an unknown unit or a report without a timeline (predicted).
    """
    if not report.timeline:
        why = f"a {report.source} one" if report.status == "ok" else failure(report)
        raise ValueError(f"this report has no timeline to draw ({why}): simulate, measure and watch make one.")
    moments, best = report.timeline, {}
    for moment in moments:
        best[moment.phase] = max(best.get(moment.phase, moment), moment, key=lambda m: m.bytes.total)
    high = max(best.values(), key=lambda m: m.bytes.total)
    first, last, top = moments[0].index, moments[-1].index, high.bytes.total / check_unit(unit)

    figure, ax = style.start(title, report.title)
    splits.areas(ax, [m.index for m in moments], [split_of(m.bytes) for m in moments], unit, step="post")
    ax.set(xlim=(first, max(last, first + 1)), ylim=(min(0, ax.dataLim.y0), (top or 1) * 1.25))
    _shade_phases(ax, moments)
    said = f"{amount(high.bytes.total, unit)} {unit} in {label_of(high.phase)}"
    side, shift = ("right", -9) if high.index - first > 0.6 * (last - first) else ("left", 9)
    ax.plot([high.index], [top], "v", color=style.ALARM, markersize=9, clip_on=False, zorder=5, gid="peak")
    look = {"ha": side, "color": style.ALARM, "fontweight": "bold", "bbox": style.PATCH}
    ax.annotate(said, (high.index, top), xytext=(shift, 3), textcoords="offset points", gid="peak", **look)

    names = [_tensor(tensor, unit) for tensor in report.largest[:largest]]
    heading = f"\n\nlargest at the peak of the run, in {label_of(report.peak_phase)}:\n" if names else ""
    ax.set_xlabel("allocation events" + heading + "\n".join(names), loc="left", fontsize=9.5, linespacing=1.3)
    at_best = [split_of(m.bytes) for m in best.values()]
    rows = splits.split_rows([*map(label_of, best)], at_best, unit, f"highest of, {unit}")
    tensors = f" Largest tensors at the peak: {'; '.join(names)}." if names else ""
    alt = f"Stacked area over the allocation events of one training step, {report.title}. Highest: {said}.{tensors}"
    return style.finish(figure, rows, alt, say_rows=True)


def _shade_phases(ax, moments: Sequence[Moment]) -> None:
    """Shade and name each run of one phase; leave out a name that would touch the one before."""
    left, right = ax.get_xlim()
    starts = [(phase, next(run).index) for phase, run in itertools.groupby(moments, key=lambda moment: moment.phase)]
    taken = -LETTER  # where the last name ends, as a share of the axes
    for i, ((phase, start), (_, end)) in enumerate(itertools.pairwise([*starts, ("", right)])):
        if i % 2:
            ax.axvspan(start, end, color=style.FAINT, zorder=0, linewidth=0)
        if start > left:
            ax.axvline(start, color="#888888", linewidth=0.7, linestyle=":", gid=f"start {phase}")
        half = LETTER * len(phase) / 2
        middle = min(max((start + end - 2 * left) / 2 / (right - left), half), 1 - half)
        if middle - half > taken + LETTER / 2:
            taken = middle + half
            look = {"ha": "center", "va": "top", "fontsize": 9.5, "gid": "phase"}
            ax.annotate(label_of(phase), (middle, 0.985), xycoords="axes fraction", **look)


def _tensor(tensor: TensorGroup, unit: str) -> str:
    """Describe tensors of one kind: bytes of all, count, purpose, shape, place."""
    count, first = (f"{tensor.count} × ", "first in ") if tensor.count > 1 else ("", "in ")
    where = f"{first}{tensor.where}" if tensor.where else f"by {tensor.op}"
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    whole = amount(tensor.size * tensor.count, unit)
    text = f"{whole} {unit}: {count}{label_of(tensor.category)} [{shape}] {where}"
    return text if len(text) <= 84 else text[:83] + "…"


@style.styled()
def sweep(
    x_values: Sequence[float],
    reports: Sequence[Report] | Mapping[str, Sequence[Report]],
    xlabel: str,
    limit=None,
    dots: Sequence[Report | None] | None = None,
    unit: str = "GiB",
    title: str | None = None,
):
    """Return a figure of the peak over batch sizes, sequence lengths or other ascending numbers.

    A list of reports is drawn as areas by category, a mapping from names to lists as a line of totals each, and `dots`
    (reports of another witness or None) as points. With a `limit`, the first value that does not fit is marked
    (`has_to_fit`). Raises ValueError for lists of different lengths, values that do not ascend, or an unknown unit.
    """
    size, x = check_unit(unit), list(x_values)
    lines = dict(reports) if isinstance(reports, Mapping) else {"": list(reports)}
    dots = list(dots or [None] * len(x))
    if len(x) < 2 or not all(isinstance(a, Real) for a in x) or not all(a < b for a, b in itertools.pairwise(x)):
        raise ValueError(f"sweep needs two or more ascending numbers to sweep over, not {x!r}.")
    for series in (*lines.values(), dots):
        if len(series) != len(x):
            raise ValueError(f"sweep needs one report for each of the {len(x)} values, not {len(series)}.")
    every = [report for series in lines.values() for report in series]
    kind, source = has_to_fit(every), next((r.source for r in dots if r), "")
    figure, ax = style.start(title or f"Memory at the peak over {xlabel}", splits.subtitle(every))
    _draw_series(ax, x, lines, kind, unit)
    if source:
        look = {"color": "black", "markerfacecolor": "white", "markersize": 7, "markeredgewidth": 1.6, "zorder": 6}
        ax.plot(*_points(x, dots, size), "o", label=source, clip_on=False, **look)
    splits.draw_limit(ax.axhline, limit, unit)
    alt = f"{figure.heading}."
    if limit is not None:
        most, card = splits.limit_of(limit)
        crossings = {name: first_over(x, line, most, kind) for name, line in lines.items()}
        said = _mark_crossings(ax, crossings, most / size, xlabel)
        alt += f" Limit: {card}, {amount(most, unit)} {unit}; {said}."
    ax.update_datalim([(x[0], 0)])
    ax.set(xlim=(x[0], x[-1]), ylim=(0, ax.dataLim.y1 * 1.16 or 1), xlabel=xlabel, ylabel=unit)
    _label_ticks(ax, x)
    return style.finish(figure, _sweep_rows(x, lines, dots, source, unit, xlabel), alt, say_rows=True)


def _draw_series(ax, x: Sequence[float], lines: Mapping[str, Sequence[Report]], kind: str, unit: str) -> None:
    """Draw lines of totals; the series "" as areas with a line of what has to fit."""
    size = check_unit(unit)
    for (label, series), (colour, marker, dash) in zip(lines.items(), itertools.cycle(style.LINES), strict=False):
        if label:
            look = {"color": colour, "marker": marker, "linestyle": dash, "clip_on": False, "zorder": 4}
            ax.plot(*_points(x, series, size), label=label, **look)
            continue
        good = [(a, split_of(r)) for a, r in zip(x, series, strict=True) if r.status == "ok"]
        splits.areas(ax, [a for a, _ in good], [split for _, split in good], unit)
        if kind != "peak":
            heights = _points(x, series, size, kind)
            ax.plot(*heights, "--", color="black", linewidth=1.4, label=f"{kind}, which has to fit")


def _points(x: Sequence[float], series: Sequence[Report | None], size: int, kind: str = "peak") -> tuple[list, list]:
    """Return x and height of the reports that have figures."""
    good = [(a, r) for a, r in zip(x, series, strict=True) if r and r.status == "ok"]
    return [a for a, _ in good], [size_of(getattr(r, kind)) / size for _, r in good]


def has_to_fit(reports: Sequence[Report]) -> str:
    """Return which figure is compared with a card: the process's where all reports have it, else reserved, else peak."""
    good = [r for r in reports if r.status == "ok"]
    known = (name for name in ("process", "reserved") if good and all(getattr(r, name) is not None for r in good))
    return next(known, "peak")


def first_over(x: Sequence[float], reports: Sequence[Report], limit: float, kind: str) -> float | None:
    """Return the first value whose report needs more than `limit` bytes or ran out of memory, None when all fit."""
    over = (a for a, r in zip(x, reports, strict=True) if r.status == "oom" or size_of(getattr(r, kind)) > limit)
    return next(over, None)


def _mark_crossings(ax, crossings: Mapping[str, float | None], height: float, xlabel: str) -> str:
    """Mark the first value of each line that does not fit; return the verdicts in words."""
    said = []
    for label, first in crossings.items():
        verdict = "all fit" if first is None else f"{xlabel} {first:g} is the first that does not fit"
        said.append(f"{label}: {verdict}" if label else verdict)
        if first is not None:
            ax.axvline(first, color=style.ALARM, linewidth=1, linestyle=":")
            look = {"color": style.ALARM, "markersize": 10, "markeredgecolor": "white", "clip_on": False, "zorder": 7}
            ax.plot([first], [height], "X", gid="first over", **look)
    look = {"va": "top", "color": style.ALARM, "fontsize": 9.5, "fontweight": "bold", "bbox": style.PATCH, "zorder": 8}
    look |= {"xycoords": "axes fraction", "xytext": (4, -3), "textcoords": "offset points"}
    ax.annotate("\n".join(said), (0, 1), gid="verdict", **look)
    return " · ".join(said)


def _label_ticks(ax, x: Sequence[float]) -> None:
    """Set a tick per value; leave out labels that would touch the next one."""
    names, letter = [f"{value:g}" for value in x], 0.0085 * (x[-1] - x[0])
    clear = [b - a > letter * (len(f"{a:g}{b:g}") + 1.2) for a, b in itertools.pairwise(x)]
    ax.set_xticks(x, [name if free else "" for name, free in zip(names, [*clear, True], strict=True)])


def _sweep_rows(x, lines, dots, source: str, unit: str, xlabel: str) -> list[tuple[str, ...]]:
    def total(report: Report | None) -> str:
        split = "–" if report is None else split_of(report)
        return split if isinstance(split, str) else in_unit(size_of(split), unit)

    names, corner = [f"{a:g}" for a in x], f"{xlabel}, {unit}"
    if "" in lines:
        rows = splits.split_rows(names, [split_of(r) for r in lines[""]], unit, corner)
    else:
        columns = ([label, *map(total, series)] for label, series in lines.items())
        rows = list(zip([corner, *names], *columns, strict=True))
    return [(*row, cell) for row, cell in zip(rows, [source, *map(total, dots)], strict=True)] if source else rows
