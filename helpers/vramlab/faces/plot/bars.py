"""Bars: stacked ones of reports or of any table of bytes, and intervals against the line of a card."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence

from ...hardware.gpu import find_gpu
from ...report.compare import check_unit, column_labels
from ...report.report import TIERS, Bytes, Interval, Report
from . import style
from .splits import Split, amount, draw_limit, layers, shared_title, split_of, split_rows


def compare(
    *reports: Report,
    limit=None,
    unit: str = "GiB",
    title: str = "Memory at the peak, by category",
):
    """Return a figure of each report's peak by category; errors as in `vramlab.compare`. `bars` draws
    reports of different recipes."""
    names = column_labels(reports)
    return bars(names, reports, f"peak, {unit}", unit, title, shared_title(reports), limit)


@style.styled()
def bars(
    labels: Sequence[str],
    values: Sequence[Bytes | Mapping[str, float] | Report],
    ylabel: str | None = None,
    unit: str = "GiB",
    title: str = "Memory by category",
    subtitle: str = "",
    limit=None,
):
    """Return a figure of any bytes by category, for example bytes per parameter: a bar per label, its total above it, or
    words where a run failed.

    `ylabel` is the unit if None; the unit "B" draws numbers as they are. Raises ValueError for no bars, labels and values of
    different number, or an unknown unit.
    """
    if not len(labels) or len(labels) != len(values):
        raise ValueError(f"bars needs one label per value, not {len(labels)} labels for {len(values)} values.")
    figure, ax = style.start(title, subtitle)
    names, splits = [*map(str, labels)], [split_of(value) for value in values]
    tops = [0.0] * len(splits)
    for heights, look in layers(splits, unit):  # what is over-explained hangs below 0
        bottom = [top if height >= 0 else 0 for top, height in zip(tops, heights, strict=True)]
        ax.bar(range(len(names)), heights, 0.8, bottom=bottom, **look)
        tops = [top + max(height, 0) for top, height in zip(tops, heights, strict=True)]
    draw_limit(ax.axhline, limit, unit)
    _name_bars(ax, names)
    _write_totals(ax, splits, tops, unit)
    ax.set_ylabel(ylabel or unit)
    alt = f"Stacked bars. {', '.join(filter(None, (title, subtitle)))}."
    return style.finish(figure, split_rows(names, splits, unit, ylabel or unit), alt, say_rows=True)


def _write_totals(ax, splits: Sequence[Split], tops: Sequence[float], unit: str) -> None:
    """Write each total above its bar, and leave room for it."""
    ax.update_datalim([(0, 0)])
    low, high = ax.dataLim.intervaly
    ax.set_ylim(low * 1.1, (high or 1) * 1.12)
    if low < 0:
        ax.axhline(0, color=style.INK, linewidth=0.8)
    for x, (split, top) in enumerate(zip(splits, tops, strict=True)):
        if isinstance(split, str):
            text, look = split, {"color": style.ALARM, "rotation": 90}
        else:
            text, look = amount(sum(split.values()), unit), {"fontweight": "bold", "bbox": style.PATCH}
        look |= {"ha": "center", "va": "bottom", "fontsize": 9.5, "textcoords": "offset points"}
        ax.annotate(text, (x, top), (0, 3), gid="total", **look)


def _name_bars(ax, names: Sequence[str]) -> None:
    """Write names under the bars, upright where they would touch."""
    room = 64 // len(names)
    lines = [textwrap.fill(name, max(room, 6), break_long_words=False) for name in names]
    upright = max(len(line) for name in lines for line in name.split("\n")) > room
    if upright:
        lines = [textwrap.fill(name, 20) for name in names]
    ax.set_xticks(range(len(names)), lines, rotation=90 if upright else 0)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.7, max(len(names) - 1, 1) + 0.7)


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
    cards = [find_gpu(card) for card in each]
    figure, ax = style.start(title, subtitle)
    rows = [(unit, "at least", "likely", "at most", "card", "fits")]
    dashes = dict(zip(dict.fromkeys(card.name for card in cards), itertools.cycle(["--", ":", "-."]), strict=False))
    tiers = [need.tier(card.total) or "too much" for need, card in zip(needs.values(), cards, strict=True)]
    said = [tier + f"\non {card.name}" * (len(dashes) > 1) for tier, card in zip(tiers, cards, strict=True)]
    widths = [0.02 * (1 + max(map(len, words.split("\n")))) for words in said]  # a letter is 1/50 of the axes, about
    right = max(*(need.high for need in needs.values()), *(card.total for card in cards)) / (1 - max(widths))
    for y, ((name, need), card, tier) in enumerate(zip(needs.items(), cards, tiers, strict=True)):
        ax.barh(y, (need.high - need.low) / size, 0.45, need.low / size, color=style.PROCESS)
        ax.plot(need.value / size, y, "o", color=style.INK, markersize=5)
        draw_limit(lambda x, y=y, **look: ax.plot([x, x], [y - 0.5, y + 0.5], **look), card, unit, dashes[card.name])
        clear = card.total if need.high <= card.total <= need.high + widths[y] * right else need.high
        look = {"color": style.INK if tier in TIERS else style.ALARM, "va": "center", "bbox": style.PATCH}
        ax.annotate(said[y], (clear / size, y), (5, 0), textcoords="offset points", gid="tier", **look)
        bounds = [f"{n / size:,.2f}" for n in (need.low, need.value, need.high, card.total)]
        rows.append((" ".join(name.split()), *bounds[:3], f"{card.name}: {bounds[3]}", tier))
    ax.set_yticks(range(len(needs)), needs)
    words = f"{unit} that the process takes; the dot is the likely figure"
    ax.set(xlim=(0, right / size), ylim=(len(needs) - 0.5, -0.5), xlabel=words)
    return style.finish(figure, rows, f"Intervals. {title}. {subtitle}.", say_rows=True)
