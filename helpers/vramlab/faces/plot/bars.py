"""Bars: stacked ones of reports or of any table of bytes, and intervals against the line of a card."""

import itertools
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence

from ...report.compare import check_unit, column_labels
from ...report.report import Bytes, Interval, Report
from . import style
from .splits import Split, amount, draw_limit, layers, limit_of, size_of, split_of, split_rows, subtitle

SHORT = {"predicted": "pred.", "simulated": "sim.", "emulated": "emul.", "measured": "meas.", "recorded": "rec."}
AT_THE_PEAK = "Memory at the peak, by category"
Groups = Sequence[tuple[str, Sequence[str]]]  # a group's name and the labels of its bars


def compare(
    *reports: Report,
    labels: Sequence[str] | None = None,
    same_recipe: bool = True,
    limit=None,
    unit: str = "GiB",
    title: str = AT_THE_PEAK,
):
    """Return a figure of each report's peak by category; `labels`, `same_recipe` and errors as in `vramlab.compare`."""
    groups = [("", column_labels(reports, labels, same_recipe))]
    return _draw(groups, reports, unit, limit, (title, subtitle(reports)), (f"peak, {unit}", unit))


def compare_many(
    groups: Sequence[tuple[str, Sequence[Report]]], limit=None, unit: str = "GiB", title: str = AT_THE_PEAK
):
    """Return a figure with the bars of `compare` in groups, (name, reports) of each batch size. Raises ValueError."""
    if not groups or not all(len(group) == 2 for group in groups):
        raise ValueError("compare_many takes (name, reports) pairs, for example [('batch 4', [predicted, simulated])].")
    names = [(str(group), column_labels(reports)) for group, reports in groups]
    reports = [r for _, group in groups for r in group]
    return _draw(names, reports, unit, limit, (title, subtitle(reports)), (f"peak, {unit}", unit))


def bars(
    labels: Sequence[str],
    values: Sequence[Bytes | Mapping[str, float]],
    ylabel: str | None = None,
    unit: str = "GiB",
    title: str = "Memory by category",
    subtitle: str = "",
    limit=None,
):
    """Return a figure of any bytes by category, for example bytes per parameter, a bar per label.

    `ylabel` is the unit if None; the unit "B" draws numbers as they are. Raises ValueError for no bars, labels and values of
    different number, or an unknown unit.
    """
    if not len(labels) or len(labels) != len(values):
        raise ValueError(f"bars needs one label per value, not {len(labels)} labels for {len(values)} values.")
    return _draw([("", [*map(str, labels)])], values, unit, limit, (title, subtitle), (ylabel or unit,) * 2)


@style.styled()
def _draw(groups: Groups, values: Sequence, unit: str, limit, headings: tuple[str, str], sizes: tuple[str, str]):
    """Draw a bar per value, its total above it, or words where a run failed; `sizes` names them in table and axes."""
    figure, ax = style.start(*headings)
    splits = [split_of(value) for value in values]
    positions = [bar + 0.6 * group for bar, group in enumerate(i for i, (_, names) in enumerate(groups) for _ in names)]
    above, below = ([0.0] * len(splits) for _ in range(2))  # what is over-explained hangs below 0
    for heights, look in layers(splits, unit):
        base = [up if h >= 0 else down for up, down, h in zip(above, below, heights, strict=True)]
        ax.bar(positions, heights, 0.8, bottom=base, **look)
        above = [up + max(h, 0) for up, h in zip(above, heights, strict=True)]
        below = [down + min(h, 0) for down, h in zip(below, heights, strict=True)]
    if min(below) < 0:
        ax.axhline(0, color=style.INK, linewidth=0.8)
    draw_limit(ax.axhline, limit, unit)
    _name_bars(ax, groups, positions)
    _write_totals(ax, splits, list(zip(positions, above, strict=True)), unit)
    ax.set_ylabel(sizes[1])
    full = [f"{group}, {name}" if group else name for group, names in groups for name in names]
    alt = f"Stacked bars. {', '.join(filter(None, headings))}."
    return style.finish(figure, split_rows(full, splits, unit, sizes[0]), alt, say_rows=True)


def _write_totals(ax, splits: Sequence[Split], tops: Sequence[tuple[float, float]], unit: str) -> None:
    """Write each total above its bar, upright where they would touch, and leave room for it."""
    texts = [split if isinstance(split, str) else amount(size_of(split), unit) for split in splits]
    longest = max((len(text) for text, split in zip(texts, splits, strict=True) if text != split), default=0)
    upright = longest * len(texts) > 62
    ax.update_datalim([(0, 0)])
    low, high = ax.dataLim.intervaly
    ax.set_ylim(low * 1.1, (high or 1) * (1.12 + (0.022 * longest if upright else 0)))
    for text, split, top in zip(texts, splits, tops, strict=True):
        look = {"fontweight": "bold", "bbox": style.PATCH, "rotation": 90 if upright else 0}
        if isinstance(split, str):
            look = {"color": style.ALARM, "rotation": 90}
        look |= {"ha": "center", "va": "bottom", "fontsize": 9.5, "xytext": (0, 3), "textcoords": "offset points"}
        ax.annotate(text, top, gid="total", **look)


def _name_bars(ax, groups: Groups, positions: Sequence[float]) -> None:
    """Write names under the bars, upright where they would touch, and the groups' names below them."""
    names = [name for _, labels in groups for name in labels]
    if len(groups) > 1:
        names = [" ".join(SHORT.get(word, word) for word in name.split(" ")) for name in names]
    room = 64 // len(names)
    lines = [textwrap.fill(name, max(room, 6), break_long_words=False) for name in names]
    upright = max(len(line) for name in lines for line in name.split("\n")) > room
    if upright:
        lines = [textwrap.fill(name, 20) for name in names]
    ax.set_xticks(positions, lines, rotation=90 if upright else 0)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.7, max(positions[-1], 1) + 0.7)
    if len(groups) > 1:
        edge, below = iter(positions), ax.secondary_xaxis("bottom")
        centres = [statistics.mean(itertools.islice(edge, len(labels))) for _, labels in groups]
        below.set_xticks(centres, [group for group, _ in groups], fontweight="bold", fontsize=10)
        depth = 6.5 * max(map(len, names)) if upright else 14 * max(name.count("\n") + 1 for name in lines)
        below.tick_params(length=0, pad=8 + depth, labelfontfamily=style.FONT)
        below.spines["bottom"].set_visible(False)


@style.styled()
def fits(needs: Mapping[str, Interval], limit, title: str, subtitle: str = "", unit: str = "GiB"):
    """Return a figure of a bar from the low to the high end of each need, a dot where it is likely, and its tier.

        needs = {f"{n} texts": predict(recipe.replace(batch_size=n), gpu="T4").process for n in (1, 2, 4)}
        figure = plot.fits(needs, "T4", "Two texts are safe on a T4", f"predicted · {recipe}")
        print(plot.table(figure))
        plt.show()

    `limit` is one for all or a list with one for each need, which its label then names. Raises ValueError for no needs
    or another number of limits.
    """
    size, each = check_unit(unit), limit if isinstance(limit, list | tuple) else [limit] * len(needs)
    if not needs or len(each) != len(needs):
        raise ValueError(f"fits needs a limit for all or each of its needs, not {len(each)} for {len(needs)}.")
    figure, ax = style.start(title, subtitle)
    rows = [(unit, "at least", "likely", "at most", "card", "fits")]
    dashes = dict(zip(dict.fromkeys(each), itertools.cycle(["--", ":", "-."]), strict=False))
    pairs = list(zip(needs.values(), map(limit_of, each), strict=True))
    said = [(need.tier(most) or "too much") + f"\non {card}" * (len(dashes) > 1) for need, (most, card) in pairs]
    widths = [0.02 * (1 + max(map(len, words.split("\n")))) for words in said]  # a letter is 1/50 of the axes, about
    right = max(n for need, (most, _) in pairs for n in (need.high, most) if n < math.inf) / (1 - max(widths))
    for y, (name, one, (need, (most, card))) in enumerate(zip(needs, each, pairs, strict=True)):
        ax.barh(y, (need.high - need.low) / size, 0.45, need.low / size, color=style.PROCESS)
        ax.plot(need.value / size, y, "o", color=style.INK, markersize=5)
        draw_limit(lambda x, y=y, **look: ax.plot([x, x], [y - 0.5, y + 0.5], **look), one, unit, dashes[one])
        clear = most if need.high <= most <= need.high + widths[y] * right else need.high
        look = {"color": style.INK if need.tier(most) else style.ALARM, "va": "center", "bbox": style.PATCH}
        ax.annotate(said[y], (clear / size, y), (5, 0), textcoords="offset points", gid="tier", **look)
        bounds = [f"{n / size:,.2f}" for n in (need.low, need.value, need.high, most)]
        rows.append((" ".join(name.split()), *bounds[:3], f"{card}: {bounds[3]}", said[y].split("\n")[0]))
    ax.set_yticks(range(len(needs)), needs)
    words = f"{unit} that the process takes; the dot is the likely figure"
    ax.set(xlim=(0, right / size), ylim=(len(needs) - 0.5, -0.5), xlabel=words)
    return style.finish(figure, rows, f"Intervals. {title}. {subtitle}.", say_rows=True)
