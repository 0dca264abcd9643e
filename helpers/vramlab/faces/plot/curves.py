"""Figures over an axis: the events of one step, and the peak over a swept value."""

import itertools
import math
from collections.abc import Mapping, Sequence

from ...report.compare import check_unit, failure
from ...report.report import Moment, Report, TensorGroup, in_unit
from . import style
from .splits import amount, label_of, layers, shared_title, split_of, split_rows

LETTER = 0.0145  # width of a letter of a phase's name as a share of the axes


@style.styled()
def timeline(report: Report, unit: str = "GiB", title: str = "One training step, byte by byte"):
    """Return a figure of what is alive after each allocation event of one step, by category, with its phases and the
    largest tensors.

    Raises ValueError for an unknown unit or a report without a timeline (predicted).
    """
    if not report.timeline:
        why = f"a {report.source} one" if report.status == "ok" else failure(report)
        raise ValueError(f"this report has no timeline to draw ({why}): simulate, measure and watch make one.")
    moments, best = report.timeline, {}
    for moment in moments:
        best[moment.phase] = max(best.get(moment.phase, moment), moment, key=lambda m: m.bytes.total)
    high = max(best.values(), key=lambda m: m.bytes.total)
    x, top = [moment.index for moment in moments], high.bytes.total / check_unit(unit)

    figure, ax = style.start(title, report.title)
    base = [0.0] * len(x)
    for heights, look in layers([split_of(moment.bytes) for moment in moments], unit):
        above = [low + height for low, height in zip(base, heights, strict=True)]
        ax.fill_between(x, base, above, step="post", **look)
        base = above
    ax.set(xlim=(x[0], max(x[-1], x[0] + 1)), ylim=(min(0, ax.dataLim.y0), (top or 1) * 1.25), ylabel=unit)
    _shade_phases(ax, moments)
    said = f"{amount(high.bytes.total, unit)} {unit} in {label_of(high.phase)}"
    side, shift = ("right", -9) if high.index - x[0] > 0.6 * (x[-1] - x[0]) else ("left", 9)
    ax.plot([high.index], [top], "v", color=style.ALARM, markersize=9, clip_on=False, zorder=5, gid="peak")
    look = {"ha": side, "color": style.ALARM, "fontweight": "bold", "bbox": style.PATCH}
    ax.annotate(said, (high.index, top), xytext=(shift, 3), textcoords="offset points", gid="peak", **look)

    names = [_tensor(tensor, unit) for tensor in report.largest[:3]]
    heading = f"\n\nlargest at the peak of the run, in {label_of(report.peak_phase)}:\n" if names else ""
    ax.set_xlabel("allocation events" + heading + "\n".join(names), loc="left", fontsize=9.5, linespacing=1.3)
    at_best = [split_of(moment.bytes) for moment in best.values()]
    rows = split_rows([*map(label_of, best)], at_best, unit, f"highest of, {unit}")
    tensors = f" Largest tensors at the peak: {'; '.join(names)}." if names else ""
    alt = f"Stacked area over the allocation events of one training step, {report.title}. Highest: {said}.{tensors}"
    return style.finish(figure, rows, alt, say_rows=True)


def _shade_phases(ax, moments: Sequence[Moment]) -> None:
    """Shade every other run of one phase, and name those that have room for it."""
    left, right = ax.get_xlim()
    starts = [(phase, next(run).index) for phase, run in itertools.groupby(moments, key=lambda moment: moment.phase)]
    for i, ((phase, start), (_, end)) in enumerate(itertools.pairwise([*starts, ("", right)])):
        if i % 2:
            ax.axvspan(start, end, color=style.FAINT, zorder=0, linewidth=0)
        if i:
            ax.axvline(start, color="#888888", linewidth=0.7, linestyle=":", gid=f"start {phase}")
        if end - start > LETTER * len(phase) * (right - left):
            look = {"ha": "center", "va": "top", "fontsize": 9.5, "gid": "phase"}
            ax.annotate(label_of(phase), ((start + end) / 2, 0.985), xycoords=("data", "axes fraction"), **look)


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
    reports: Mapping[str, Sequence[Report]],
    xlabel: str,
    unit: str = "GiB",
    title: str | None = None,
):
    """Return a figure of the peak over batch sizes, sequence lengths or other numbers: a line of reports for each name.

    Raises ValueError for lists of different lengths or an unknown unit.
    """
    size, x = check_unit(unit), list(x_values)
    every = list(itertools.chain(*reports.values()))
    figure, ax = style.start(title or f"Memory at the peak over {xlabel}", shared_title(every))
    columns = [[f"{xlabel}, {unit}", *(f"{value:g}" for value in x)]]
    for (name, series), (colour, marker, dash) in zip(reports.items(), itertools.cycle(style.LINES), strict=False):
        peaks = [report.peak.total if report.status == "ok" else math.nan for report in series]
        look = {"color": colour, "marker": marker, "linestyle": dash, "clip_on": False, "zorder": 4}
        ax.plot(x, [peak / size for peak in peaks], label=name, **look)
        columns.append([name, *("–" if math.isnan(peak) else in_unit(peak, unit) for peak in peaks)])
    ax.update_datalim([(x[0], 0)])
    ax.set(xlim=(x[0], x[-1]), ylim=(0, ax.dataLim.y1 * 1.16 or 1), xlabel=xlabel, ylabel=unit)
    ax.set_xticks(x, columns[0][1:])
    return style.finish(figure, list(zip(*columns, strict=True)), f"{figure.heading}.", say_rows=True)
