"""One training step over its allocation events, as an area per category."""

import itertools
from collections.abc import Sequence

from . import plot_style as style
from .labels import failure
from .plot_parts import areas, split_rows
from .report import Moment, Report, Tensor

POINTS = 2000  # more moments than this are thinned: a figure has fewer pixels
LETTER = 0.0145  # width of a letter of a phase's name as a share of the axes


@style.drawn
def timeline(report: Report, largest: int = 3, unit: str = "GiB", title: str = "One training step, byte by byte"):
    """A stacked area of what is alive after each allocation event of one step, phases behind it; returns the figure.

    Args:
        largest: how many of the tensors alive at the peak are named.
        unit: "GiB", "MiB", "KiB" or "B".
    Raises:
        ValueError: the report has no timeline (predicted reports never have), or an unknown unit.
    """
    if not report.timeline:
        why = f"a {report.source} one" if report.status == "ok" else failure(report)
        raise ValueError(f"this report has no timeline to draw ({why}): simulate, measure and watch make one.")
    size = style.check_unit(unit)
    moments = thin(report.timeline)
    high = max(moments, key=lambda moment: moment.bytes.total)
    first, last, top = moments[0].index, moments[-1].index, high.bytes.total / size
    figure, ax = style.start(title, report.title)
    areas(ax, [moment.index for moment in moments], [moment.bytes for moment in moments], unit, step="post")
    ax.set_xlim(first, max(last, first + 1))
    rows_of_names = _phases_behind(ax, moments)
    ax.set_ylim(min(0, ax.dataLim.y0), (top or 1) * (1.16 + 0.09 * rows_of_names))

    said = f"{style.amount(high.bytes.total, unit)} {unit} in {style.name(high.phase)}"
    late = high.index - first > 0.6 * (last - first)
    ax.plot([high.index], [top], "v", color=style.ALARM, markersize=9, clip_on=False, zorder=5, gid="peak")
    look = {"ha": "right" if late else "left", "color": style.ALARM, "fontweight": "bold", "bbox": style.PATCH}
    ax.annotate(said, (high.index, top), xytext=(-9 if late else 9, 3), textcoords="offset points", gid="peak", **look)

    names = [_tensor(tensor, unit) for tensor in report.largest[:largest]]
    heading = f"\n\nlargest at the peak of the run, in {style.name(report.peak_phase)}:\n"
    below = "allocation events" + (heading + "\n".join(names) if names else "")
    ax.set_xlabel(below, loc="left", fontsize=9.5, linespacing=1.3)
    style.legend(figure)

    best = highest(moments)
    rows = split_rows([style.name(phase) for phase in best], [m.bytes for m in best.values()], unit, "highest of")
    each = "; ".join(f"{style.name(phase)} {style.amount(m.bytes.total, unit)}" for phase, m in best.items())
    tensors = f" Largest tensors at the peak: {'; '.join(names)}." if names else ""
    alt = f"Stacked area over the allocation events of one training step, {report.title}, in {unit}."
    return style.finish(figure, rows, f"{alt} Highest: {said}. Highest of each phase: {each}.{tensors}")


def thin(moments: Sequence[Moment], points: int = POINTS) -> list[Moment]:
    """At most about `points` of the moments: the highest and the lowest of each run of neighbours within a phase."""
    if len(moments) <= points:
        return list(moments)
    width = -(-2 * len(moments) // points)
    kept = []
    for _, group in itertools.groupby(moments, key=lambda moment: moment.phase):
        group = list(group)
        for start in range(0, len(group), width):
            part = sorted(group[start : start + width], key=lambda moment: moment.bytes.total)
            kept += sorted({part[0].index: part[0], part[-1].index: part[-1]}.values(), key=lambda moment: moment.index)
    return kept


def highest(moments: Sequence[Moment]) -> dict[str, Moment]:
    """The highest moment of each phase, phases as they first come."""
    best: dict[str, Moment] = {}
    for moment in moments:
        if moment.phase not in best or moment.bytes.total > best[moment.phase].bytes.total:
            best[moment.phase] = moment
    return best


def _phases_behind(ax, moments: Sequence[Moment]) -> int:
    """A shade and a name per run of one phase; returns how many rows the names take.

    A name that would touch its left neighbour goes to a second row; one that has no room there either is left out.
    """
    runs = itertools.groupby(moments, key=lambda moment: moment.phase)
    starts = [(phase, next(group).index) for phase, group in runs]
    left, right = ax.get_xlim()
    ends = [start for _, start in starts[1:]] + [right]
    taken = [-1.0, -1.0]
    for i, ((phase, start), end) in enumerate(zip(starts, ends, strict=True)):
        if i % 2:
            ax.axvspan(start, end, color=style.FAINT, zorder=0, linewidth=0, gid=f"phase {phase}")
        if start > left:
            ax.axvline(start, color="#888888", linewidth=0.7, linestyle=":", gid=f"start {phase}")
        text = style.name(phase)
        width = LETTER * len(text)
        middle = min(max((start + end - 2 * left) / 2 / (right - left), width / 2), 1 - width / 2)
        row = next((row for row in (0, 1) if middle - width / 2 > taken[row] + LETTER / 2), None)
        if row is not None:
            taken[row] = middle + width / 2
            look = {"ha": "center", "va": "top", "fontsize": 9.5, "gid": "phase"}
            ax.annotate(text, (middle, 0.985 - 0.07 * row), xycoords="axes fraction", **look)
    return 2 if taken[1] > 0 else 1


def _tensor(tensor: Tensor, unit: str) -> str:
    """Tensors of one kind in a few words: bytes of all, how many, what for, which shape, where."""
    count = f"{tensor.count} × " if tensor.count > 1 else ""
    first = "first in " if tensor.count > 1 else "in "
    where = f"{first}{tensor.where}" if tensor.where else f"by {tensor.op}"
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    whole = style.amount(tensor.size * tensor.count, unit)
    text = f"{whole} {unit}: {count}{style.name(tensor.category)} [{shape}] {where}"
    return text if len(text) <= 84 else text[:83] + "…"
