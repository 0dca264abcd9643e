"""Figures made of stacked bars: reports beside each other, groups of them, any table of bytes."""

import textwrap
from collections.abc import Sequence

from ...report.compare import column_labels
from ...report.report import Report
from . import style
from .splits import Split, amount, draw_limit, layers, size_of, split_of, split_rows, subtitle

SHORT = {"predicted": "pred.", "simulated": "sim.", "measured": "meas.", "recorded": "rec."}
AT_THE_PEAK = "Memory at the peak, by category"


def compare(
    *reports: Report,
    labels: Sequence[str] | None = None,
    same_recipe: bool = True,
    limit=None,
    unit: str = "GiB",
    title: str = AT_THE_PEAK,
):
    """Stacked bars by category at each report's peak, beside each other, in the order given; returns the figure.

    `labels` and `same_recipe` are as for `vramlab.compare`.

    Raises:
        ValueError: nothing to compare, different recipes, or an unknown unit.
    """
    names = column_labels(reports, labels, same_recipe)
    return _draw([("", names)], [split_of(r) for r in reports], f"peak, {unit}", unit, limit, title, subtitle(reports))


def compare_many(
    groups: Sequence[tuple[str, Sequence[Report]]], limit=None, unit: str = "GiB", title: str = AT_THE_PEAK
):
    """The bars of `compare` in groups, for example (name, reports) of each batch size; returns the figure.

    Raises:
        ValueError: no groups, an empty one, or different recipes within one.
    """
    if not groups or not all(len(group) == 2 for group in groups):
        raise ValueError("compare_many takes (name, reports) pairs, for example [('batch 4', [predicted, simulated])].")
    names = [(str(group), column_labels(reports)) for group, reports in groups]
    reports = [r for _, group in groups for r in group]
    return _draw(names, [split_of(r) for r in reports], f"peak, {unit}", unit, limit, title, subtitle(reports))


def bars(
    labels: Sequence[str],
    values: Sequence[Split],
    ylabel: str | None = None,
    unit: str = "GiB",
    title: str = "Memory by category",
    subtitle: str = "",
    limit=None,
):
    """Stacked bars of any bytes, for example bytes per parameter; returns the figure.

    Args:
        labels: a name per bar.
        values: a `Bytes`, or a mapping of anything to numbers, per bar; categories keep their colours.
        ylabel: what the axis measures; None takes the unit, of which "B" draws the numbers as they are.
    Raises:
        ValueError: no bars, labels and values of different number, or an unknown unit.
    """
    if not len(labels) or len(labels) != len(values):
        raise ValueError(f"bars needs one label per value, not {len(labels)} labels for {len(values)} values.")
    return _draw([("", [*map(str, labels)])], values, ylabel or unit, unit, limit, title, subtitle, ylabel or unit)


@style.drawn
def _draw(
    groups: Sequence[tuple[str, list[str]]],
    splits: Sequence[Split | str],
    corner: str,
    unit: str,
    limit,
    title: str,
    about: str,
    ylabel: str = "",
):
    """The figure of groups of bars: one split for each name in them, totals above, words where a run has no bar."""
    figure, ax = style.start(title, about)
    group_of = [i for i, (_, labels) in enumerate(groups) for _ in labels]
    positions = [bar + 0.6 * group for bar, group in enumerate(group_of)]
    tops, bottom = [0.0] * len(positions), 0.0
    for base, heights, look in layers(splits, unit):
        ax.bar(positions, heights, 0.8, bottom=base, **look)
        tops = [max(top, b + h) for top, b, h in zip(tops, base, heights, strict=True)]
        bottom = min(bottom, *(b + h for b, h in zip(base, heights, strict=True)))
    if bottom:
        ax.axhline(0, color=style.INK, linewidth=0.8)
    _name_bars(ax, groups, positions)
    ceiling = max([*tops, draw_limit(ax, limit, unit)]) or 1
    texts = [s if isinstance(s, str) else amount(size_of(s), unit) for s in splits]
    longest = max((len(text) for text, s in zip(texts, splits, strict=True) if text != s), default=0)
    upright = longest * len(texts) > 62
    ax.set_ylim(bottom * 1.1, ceiling * (1.12 + (0.022 * longest if upright else 0)))
    for x, top, text, split in zip(positions, tops, texts, splits, strict=True):
        words = isinstance(split, str)
        look = {"color": style.ALARM} if words else {"fontweight": "bold", "bbox": style.PATCH}
        look |= {"ha": "center", "va": "bottom", "fontsize": 9.5, "rotation": 90 if upright or words else 0}
        ax.annotate(text, (x, top), xytext=(0, 3), textcoords="offset points", gid="total", **look)
    ax.set_ylabel(ylabel or unit)
    full = [f"{group}, {label}" if group else label for group, labels in groups for label in labels]
    alt = f"Stacked bars. {title}{about and f', {about}'}."
    return style.finish(figure, split_rows(full, splits, unit, corner), alt, say_rows=True)


def _name_bars(ax, groups: Sequence[tuple[str, list[str]]], positions: Sequence[float]) -> None:
    """Names under the bars, upright where they would touch, and the groups' names below them."""
    names = [label for _, labels in groups for label in labels]
    if len(groups) > 1:
        names = [" ".join(SHORT.get(word, word) for word in label.split(" ")) for label in names]
    room = 64 // len(names)
    lines = [textwrap.fill(label, max(room, 6), break_long_words=False) for label in names]
    crowded = max(len(line) for label in lines for line in label.split("\n")) > room
    if crowded:
        lines = [textwrap.fill(label, 20) for label in names]
    ax.set_xticks(positions, lines, rotation=90 if crowded else 0)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.7, max(positions[-1], 1) + 0.7)
    if len(groups) > 1:
        below, edge = ax.secondary_xaxis("bottom"), iter(positions)
        centres = [sum(found) / len(found) for found in ([next(edge) for _ in labels] for _, labels in groups)]
        below.set_xticks(centres, [group for group, _ in groups], fontweight="bold", fontsize=10)
        depth = 6.5 * max(map(len, names)) if crowded else 14 * max(label.count("\n") + 1 for label in lines)
        below.tick_params(length=0, pad=8 + depth, labelfontfamily=style.FONT)
        below.spines["bottom"].set_visible(False)
