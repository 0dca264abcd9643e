"""The figures: stacked bars of bytes, intervals against a card, a step's timeline."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ...hardware.gpu import find_gpu, usable_memory
from ...report.compare import check_unit, column_labels, failure
from ...report.report import TIERS, Bytes, Interval, Moment, Report, TensorGroup
from . import style
from .splits import amount, draw_limit, label_of, layers, shared_title, split_of, split_rows

LETTER = 0.0145  # width of a letter of a phase's name as a share of the axes


def compare(*reports: Report, unit: str = "GiB", **options: Any) -> Any:
    """Return a figure of each report's peak by category.

    Errors as in `vramlab.compare`, `options` as of `bars`.
    """
    names = column_labels(reports)
    said = {"ylabel": f"peak, {unit}", "subtitle": shared_title(reports)}
    return bars(
        names,
        reports,
        unit=unit,
        **{"title": "Memory at the peak, by category", **said, **options},
    )


@style.styled()
def bars(
    labels: Sequence[str],
    values: Sequence[Bytes | Mapping[str, float] | Report],
    ylabel: str | None = None,
    unit: str = "GiB",
    title: str = "Memory by category",
    subtitle: str = "",
    limit: Any = None,
) -> Any:
    """Return a figure of bytes by category, for example bytes per parameter.

    A bar per label, its total above it.

    `ylabel` is the unit if None; the unit "B" draws numbers as they are. Raises ValueError for no
    bars, labels and values of different number, an unknown unit, or a report of a run that failed.
    """
    if not len(labels) or len(labels) != len(values):
        raise ValueError(
            f"bars needs one label per value, not {len(labels)} labels for {len(values)} values."
        )
    names = [*map(str, labels)]
    splits = [split_of(value) for value in values]
    figure, ax = style.start(title, subtitle)
    tops = [0.0] * len(splits)
    for heights, look in layers(splits, unit):  # what is over-explained hangs below 0
        bottom = [top if height >= 0 else 0 for top, height in zip(tops, heights, strict=True)]
        ax.bar(range(len(names)), heights, 0.8, bottom=bottom, **look)
        # A negative height is what the categories count too much; it must not lower the stack.
        tops = [top + max(height, 0) for top, height in zip(tops, heights, strict=True)]
    draw_limit(ax.axhline, limit, unit)
    _name_bars(ax, names)
    # Or bars that hang below 0 alone would have an axis that does not show it.
    ax.update_datalim([(0, 0)])
    low, high = ax.dataLim.intervaly
    # A tenth of room above for the totals, and an axis of length 1 where all is 0.
    ax.set(ylabel=ylabel or unit, ylim=(low * 1.1, (high or 1) * 1.12))
    if low < 0:
        ax.axhline(0, color=style.INK, linewidth=0.8)
    look = {
        "ha": "center",
        "va": "bottom",
        "fontsize": 9.5,
        "fontweight": "bold",
        "bbox": style.PATCH,
        "gid": "total",
    }
    for x, (split, top) in enumerate(zip(splits, tops, strict=True)):
        ax.annotate(
            amount(sum(split.values()), unit),
            (x, top),
            (0, 3),
            textcoords="offset points",
            **look,
        )
    alt = f"Stacked bars. {', '.join(filter(None, (title, subtitle)))}."
    return style.finish(figure, split_rows(names, splits, unit, ylabel or unit), alt, say_rows=True)


def _name_bars(ax: Any, names: Sequence[str]) -> None:
    """Write names under the bars, upright where they would touch."""
    # About 64 letters stand side by side under the axes.
    room = 64 // len(names)
    lines = [textwrap.fill(name, max(room, 6), break_long_words=False) for name in names]
    upright = max(map(len, "\n".join(lines).split("\n"))) > room
    if upright:
        lines = [textwrap.fill(name, 20) for name in names]
    ax.set_xticks(range(len(names)), lines, rotation=90 if upright else 0)
    ax.tick_params(axis="x", length=0)
    # One bar alone would fill the figure, so it gets the width that two have.
    ax.set_xlim(-0.7, max(len(names) - 1, 1) + 0.7)


@style.styled()
def fits(
    needs: Mapping[str, Interval | Report],
    limit: Any,
    title: str,
    subtitle: str = "",
    unit: str = "GiB",
) -> Any:
    """Return a figure of a bar from the low to the high end of each need.

    One is `predict(recipe, gpu="T4").process`, say: a dot where it is likely, and its tier, which
    colours the bar as on the site.

    Of a report, such as `predict(recipe, gpu="T4", other_memory=GiB)`, the process counts, and the
    card less what others hold of it. `limit` is one for all or a list with one for each need, which
    its label then names. Raises ValueError for no needs.
    """
    intervals = _intervals(needs)
    # One card for all needs, or one for each.
    asked = limit if isinstance(limit, list | tuple) else [limit] * len(intervals)
    cards = [find_gpu(card) for card in asked]
    size = check_unit(unit)
    figure, ax = style.start(title, subtitle)
    rows: list[tuple[str, ...]] = [(unit, "at least", "likely", "at most", "card", "fits")]
    # A dash for each card and not for each need, so that equal lines mean one card.
    dashes = dict(
        zip(
            dict.fromkeys(card.name for card in cards),
            itertools.cycle(["--", ":", "-."]),
            strict=False,
        )
    )
    rooms = []
    for need, card in zip(needs.values(), cards, strict=True):
        room = need.usable if isinstance(need, Report) else None
        rooms.append(usable_memory(card) if room is None else room)
    tiers = [need.verdict(room) for need, room in zip(intervals.values(), rooms, strict=True)]
    said = [
        tier + f"\non {card.name}" * (len(dashes) > 1)
        for tier, card in zip(tiers, cards, strict=True)
    ]
    # a letter is 1/50 of the axes, about
    widths = [0.02 * (1 + max(map(len, words.split("\n")))) for words in said]
    # The axis is so much longer than the largest bar as the longest words take.
    right = max(*(need.high for need in intervals.values()), *rooms) / (1 - max(widths))
    for y, ((name, need), card, room, tier) in enumerate(
        zip(intervals.items(), cards, rooms, tiers, strict=True)
    ):
        fill, hatch = style.TIER_LOOK.get(tier, style.NO_TIER_LOOK)
        ax.barh(
            y,
            (need.high - need.low) / size,
            0.45,
            need.low / size,
            color=fill,
            hatch=hatch,
            edgecolor=style.INK,
            linewidth=0,
        )
        ax.plot(need.value / size, y, "o", color=style.INK, markersize=5)
        draw_limit(
            lambda x, y=y, **look: ax.plot([x, x], [y - 0.5, y + 0.5], **look),
            card,
            unit,
            dashes[card.name],
        )
        # Words that would stand across the card's line stand before the bar, on the same side.
        crosses = need.high <= room <= need.high + widths[y] * right
        end, side, shift = (need.low, "right", -5) if crosses else (need.high, "left", 5)
        ax.annotate(
            said[y],
            (end / size, y),
            (shift, 0),
            textcoords="offset points",
            gid="tier",
            color=style.INK if tier in TIERS else style.ALARM,
            ha=side,
            va="center",
            bbox=style.PATCH,
        )
        bounds = [f"{n / size:,.2f}" for n in (need.low, need.value, need.high, room)]
        rows.append((" ".join(name.split()), *bounds[:3], f"{card.name}: {bounds[3]}", tier))
    ax.set_yticks(range(len(intervals)), intervals)
    words = f"{unit} that the process takes; the dot is the likely figure"
    ax.set(xlim=(0, right / size), ylim=(len(intervals) - 0.5, -0.5), xlabel=words)
    return style.finish(figure, rows, f"Intervals. {title}. {subtitle}.", say_rows=True)


def _intervals(needs: Mapping[str, Interval | Report]) -> dict[str, Interval]:
    """Return what the process takes, of each need. Raises ValueError where a report lacks it."""
    intervals = {}
    for name, need in needs.items():
        whole = need.process if isinstance(need, Report) else need
        if whole is None:
            raise ValueError(f"{name}: this report does not say what the process takes.")
        intervals[name] = Interval.of(whole)
    return intervals


@style.styled()
def timeline(
    report: Report,
    unit: str = "GiB",
    title: str = "One training step, byte by byte",
) -> Any:
    """Return a figure of what is alive after each allocation event of a step, by category.

    With its phases and the largest tensors.

    Raises ValueError for an unknown unit or a report without a timeline (predicted).
    """
    if not report.timeline:
        why = f"a {report.source} one" if report.status == "ok" else failure(report)
        raise ValueError(
            f"this report has no timeline to draw ({why}): simulate, measure and watch make one."
        )
    moments = report.timeline
    best: dict[str, Moment] = {}
    for moment in moments:
        # The highest moment of each phase, for the table and for what is read aloud.
        best[moment.phase] = max(
            best.get(moment.phase, moment),
            moment,
            key=lambda m: m.bytes.total,
        )
    high = max(best.values(), key=lambda m: m.bytes.total)
    x = [moment.index for moment in moments]
    top = high.bytes.total / check_unit(unit)

    figure, ax = style.start(title, report.title)
    base = [0.0] * len(x)
    for heights, look in layers([split_of(moment.bytes) for moment in moments], unit):
        above = [low + height for low, height in zip(base, heights, strict=True)]
        ax.fill_between(x, base, above, step="post", **look)
        base = above
    ax.set(
        # A timeline of one event has an axis, too.
        xlim=(x[0], max(x[-1], x[0] + 1)),
        ylim=(min(0, ax.dataLim.y0), (top or 1) * 1.25),
        ylabel=unit,
    )
    _shade_phases(ax, moments)
    said = f"{amount(high.bytes.total, unit)} {unit} in {label_of(high.phase)}"
    # Right of that the words would not fit into the axes.
    is_late = high.index - x[0] > 0.6 * (x[-1] - x[0])
    _mark_peak(ax, high.index, top, said, is_late)

    names = [_tensor(tensor, unit) for tensor in report.largest[:3]]
    heading = ""
    if report.cause:
        heading = f"\n\nwhy there: {_shortened(str(report.cause))}"
    if names:
        heading += f"\n\nlargest at the peak of the run, in {label_of(report.peak_phase)}:\n"
    ax.set_xlabel(
        "allocation events" + heading + "\n".join(names),
        loc="left",
        fontsize=9.5,
        linespacing=1.3,
    )
    at_best = [split_of(moment.bytes) for moment in best.values()]
    rows = split_rows([*map(label_of, best)], at_best, unit, f"highest of, {unit}")
    tensors = f" Largest tensors at the peak: {'; '.join(names)}." if names else ""
    area = f"Stacked area over the allocation events of one training step, {report.title}"
    why = f" Why there: {report.why}." if report.cause else ""
    alt = f"{area}. Highest: {said}.{why}{tensors}"
    return style.finish(figure, rows, alt, say_rows=True)


def _mark_peak(ax: Any, x: int, y: float, said: str, is_late: bool) -> None:
    """Mark the peak, and say its size beside it: on its left where it is late in the step."""
    point = {"color": style.ALARM, "markersize": 9, "clip_on": False, "zorder": 5}
    ax.plot([x], [y], marker=7, gid="peak", **point)
    look = {"color": style.ALARM, "fontweight": "bold", "bbox": style.PATCH}
    ax.annotate(
        said,
        (x, y),
        xytext=(-9 if is_late else 9, 3),
        textcoords="offset points",
        ha="right" if is_late else "left",
        gid="peak",
        **look,
    )


def _shade_phases(ax: Any, moments: Sequence[Moment]) -> None:
    """Shade every other run of one phase, and name those that have room for it."""
    left, right = ax.get_xlim()
    starts = [
        (phase, next(run).index)
        for phase, run in itertools.groupby(moments, key=lambda moment: moment.phase)
    ]
    # Each run ends where the next one starts, and the last one at the axis's end.
    for i, ((phase, start), (_, end)) in enumerate(itertools.pairwise([*starts, ("", right)])):
        if i % 2:
            ax.axvspan(start, end, color=style.FAINT, zorder=0, linewidth=0)
        if i:
            ax.axvline(start, color="#888888", linewidth=0.7, linestyle=":", gid=f"start {phase}")
        if end - start > LETTER * len(phase) * (right - left):
            look = {"ha": "center", "va": "top", "fontsize": 9.5, "gid": "phase"}
            ax.annotate(
                label_of(phase),
                ((start + end) / 2, 0.985),
                xycoords=("data", "axes fraction"),
                **look,
            )


def _tensor(tensor: TensorGroup, unit: str) -> str:
    """Describe tensors of one kind: bytes of all, count, purpose, shape, place."""
    # Of several only the first one's place was kept.
    count, first = (f"{tensor.count} × ", "first in ") if tensor.count > 1 else ("", "in ")
    where = f"{first}{tensor.where}" if tensor.where else f"by {tensor.op}"
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    whole = amount(tensor.size * tensor.count, unit)
    text = f"{whole} {unit}: {count}{label_of(tensor.category)} [{shape}] {where}"
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= 84 else text[:83] + "…"
