"""One training step over its allocation events, as an area per category."""

import itertools
from collections.abc import Sequence

from ...report.compare import failure
from ...report.report import Moment, Report, Tensor
from . import style
from .splits import amount, areas, check_unit, name, split_rows

POINTS = 2000  # more moments than this are thinned: a figure has fewer pixels
LETTER = 0.0145  # width of a letter of a phase's name as a share of the axes


@style.drawn
def timeline(report: Report, largest: int = 3, unit: str = "GiB", title: str = "One training step, byte by byte"):
    """A stacked area of what is alive after each allocation event of one step, phases behind it; returns the figure.

    `largest` is how many of the tensors alive at the peak are named.

    Raises:
        ValueError: the report has no timeline (predicted reports never have), or an unknown unit.
    """
    if not report.timeline:
        why = f"a {report.source} one" if report.status == "ok" else failure(report)
        raise ValueError(f"this report has no timeline to draw ({why}): simulate, measure and watch make one.")
    size, moments = check_unit(unit), thin(report.timeline)
    best: dict[str, Moment] = {}
    for moment in moments:
        if moment.phase not in best or moment.bytes.total > best[moment.phase].bytes.total:
            best[moment.phase] = moment
    high = max(best.values(), key=lambda moment: moment.bytes.total)
    first, last, top = moments[0].index, moments[-1].index, high.bytes.total / size
    figure, ax = style.start(title, report.title)
    areas(ax, [moment.index for moment in moments], [moment.bytes for moment in moments], unit, step="post")
    ax.set_xlim(first, max(last, first + 1))
    _phases_behind(ax, moments)
    ax.set_ylim(min(0, ax.dataLim.y0), (top or 1) * 1.25)

    said = f"{amount(high.bytes.total, unit)} {unit} in {name(high.phase)}"
    late = high.index - first > 0.6 * (last - first)
    ax.plot([high.index], [top], "v", color=style.ALARM, markersize=9, clip_on=False, zorder=5, gid="peak")
    look = {"ha": "right" if late else "left", "color": style.ALARM, "fontweight": "bold", "bbox": style.PATCH}
    ax.annotate(said, (high.index, top), xytext=(-9 if late else 9, 3), textcoords="offset points", gid="peak", **look)

    names = [_tensor(tensor, unit) for tensor in report.largest[:largest]]
    heading = f"\n\nlargest at the peak of the run, in {name(report.peak_phase)}:\n" if names else ""
    ax.set_xlabel("allocation events" + heading + "\n".join(names), loc="left", fontsize=9.5, linespacing=1.3)
    rows = split_rows([name(phase) for phase in best], [m.bytes for m in best.values()], unit, f"highest of, {unit}")
    tensors = f" Largest tensors at the peak: {'; '.join(names)}." if names else ""
    alt = f"Stacked area over the allocation events of one training step, {report.title}. Highest: {said}.{tensors}"
    return style.finish(figure, rows, alt, say_rows=True)


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


def _phases_behind(ax, moments: Sequence[Moment]) -> None:
    """A shade and a name per run of one phase; a name that would touch its left neighbour is left out."""
    starts = [(phase, next(run).index) for phase, run in itertools.groupby(moments, key=lambda moment: moment.phase)]
    left, right = ax.get_xlim()
    taken = -1.0
    for i, ((phase, start), (_, end)) in enumerate(itertools.pairwise([*starts, ("", right)])):
        if i % 2:
            ax.axvspan(start, end, color=style.FAINT, zorder=0, linewidth=0)
        if start > left:
            ax.axvline(start, color="#888888", linewidth=0.7, linestyle=":", gid=f"start {phase}")
        width = LETTER * len(phase)
        middle = min(max((start + end - 2 * left) / 2 / (right - left), width / 2), 1 - width / 2)
        if middle - width / 2 > taken + LETTER / 2:
            taken = middle + width / 2
            look = {"ha": "center", "va": "top", "fontsize": 9.5, "gid": "phase"}
            ax.annotate(name(phase), (middle, 0.985), xycoords="axes fraction", **look)


def _tensor(tensor: Tensor, unit: str) -> str:
    """Tensors of one kind in a few words: bytes of all, how many, what for, which shape, where."""
    count, first = (f"{tensor.count} × ", "first in ") if tensor.count > 1 else ("", "in ")
    where = f"{first}{tensor.where}" if tensor.where else f"by {tensor.op}"
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    whole = amount(tensor.size * tensor.count, unit)
    text = f"{whole} {unit}: {count}{name(tensor.category)} [{shape}] {where}"
    return text if len(text) <= 84 else text[:83] + "…"
