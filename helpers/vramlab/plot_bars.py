"""Figures made of stacked bars: reports beside each other, groups of them, the phases of one, any table of bytes."""

import textwrap
from collections.abc import Sequence

from . import plot_style as style
from .labels import column_labels, failure
from .plot_parts import Split, draw_limit, limit_of, split_of, split_rows, stack, subtitle, total
from .report import PHASES, Report

SHORT = {"predicted": "pred.", "simulated": "sim.", "measured": "meas.", "recorded": "rec."}
AT_THE_PEAK = "Memory at the peak, by category"


@style.drawn
def compare(
    *reports: Report,
    labels: Sequence[str] | None = None,
    same_recipe: bool = True,
    limit=None,
    unit: str = "GiB",
    title: str = AT_THE_PEAK,
):
    """Stacked bars by category at each report's peak, beside each other, in the order given; returns the figure.

    Args:
        labels: names under the bars; None makes the same short ones as `vramlab.compare`.
        same_recipe: False allows reports of different recipes.
        limit: a line at what a card has: bytes, a `Gpu` or its name.
        unit: "GiB", "MiB", "KiB" or "B".
    Raises:
        ValueError: nothing to compare, different recipes, or an unknown unit.
    """
    names = column_labels(reports, labels, same_recipe)
    splits = [split_of(r) for r in reports]
    figure, ax = style.start(title, subtitle(reports))
    stack(ax, range(len(names)), splits, unit)
    _name_bars(ax, names)
    _top(ax, range(len(names)), splits, unit, limit)
    style.legend(figure)
    return style.finish(figure, split_rows(names, splits, unit, "peak"), _say(figure, reports, names, splits, unit))


@style.drawn
def compare_many(
    groups: Sequence[tuple[str, Sequence[Report]]], limit=None, unit: str = "GiB", title: str = AT_THE_PEAK
):
    """The bars of `compare` in groups, for example one group per batch size; returns the figure.

    Args:
        groups: (name of the group, its reports) pairs; reports of one group are of one recipe.
        limit, unit: as for `compare`.
    Raises:
        ValueError: no groups, an empty one, or different recipes within one.
    """
    if not groups or not all(len(group) == 2 for group in groups):
        raise ValueError("compare_many takes (name, reports) pairs, for example [('batch 4', [predicted, simulated])].")
    positions, names, centres, at = [], [], [], 0.0
    for group, reports in groups:
        labels = column_labels(reports)
        here = [at + i for i in range(len(labels))]
        positions += here
        centres.append(sum(here) / len(here))
        names += [(str(group), label) for label in labels]
        at = here[-1] + 1.6
    everything = [r for _, reports in groups for r in reports]
    splits = [split_of(r) for r in everything]
    figure, ax = style.start(title, subtitle(everything))
    stack(ax, positions, splits, unit, width=0.86)
    shorts = [" ".join(SHORT.get(word, word) for word in label.split(" ")) for _, label in names]
    letters = max(map(len, shorts))
    upright = letters * len(shorts) > 60
    ax.set_xticks(positions, shorts, rotation=90 if upright else 0, fontsize=9)
    ax.set_xlim(-0.8, max(positions[-1], 1) + 0.8)
    ax.tick_params(axis="x", length=0)
    below = ax.secondary_xaxis("bottom")
    below.set_xticks(centres, [str(name) for name, _ in groups], fontweight="bold", fontsize=10)
    below.tick_params(length=0, pad=8 + (6 * letters if upright else 14), labelfontfamily=style.FONT)
    below.spines["bottom"].set_visible(False)
    _top(ax, positions, splits, unit, limit)
    style.legend(figure)
    full = [", ".join(pair) for pair in names]
    return style.finish(figure, split_rows(full, splits, unit, "peak"), _say(figure, everything, full, splits, unit))


@style.drawn
def phases(
    report: Report, unit: str = "GiB", title: str = "Memory of each phase: its peak, and what is left at its end"
):
    """A stacked bar per phase at that phase's highest moment, and a line at what it leaves behind; returns the figure.

    Raises:
        ValueError: the report has no figures.
    """
    if report.status != "ok" or not report.phases:
        raise ValueError(f"this report has no phases to draw ({failure(report)}).")
    found = [phase for phase in PHASES if phase in report.phases]
    splits = [report.phases[phase].peak for phase in found]
    ends = [report.phases[phase].end.total for phase in found]
    names = [style.name(phase) for phase in found]
    figure, ax = style.start(title, subtitle([report]))
    stack(ax, range(len(found)), splits, unit)
    size = style.check_unit(unit)
    left, right = [i - 0.4 for i in range(len(found))], [i + 0.4 for i in range(len(found))]
    ax.hlines([end / size for end in ends], left, right, color="black", linewidth=2.4, label="end of the phase")
    _name_bars(ax, [n + ("\n(the peak)" if p == report.peak_phase else "") for n, p in zip(names, found, strict=True)])
    _top(ax, range(len(found)), splits, unit)
    style.legend(figure)
    column = ["end", *(style.exact(end, unit) for end in ends)]
    rows = [(*row, end) for row, end in zip(split_rows(names, splits, unit, "phase peak"), column, strict=True)]
    return style.finish(figure, rows, _say(figure, [report], names, splits, unit))


@style.drawn
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
        ylabel: what the axis measures; None takes the unit.
        unit: "B" draws the numbers as they are.
    Raises:
        ValueError: no bars, labels and values of different number, or an unknown unit.
    """
    if not len(labels) or len(labels) != len(values):
        raise ValueError(f"bars needs one label per value, not {len(labels)} labels for {len(values)} values.")
    names = [str(label) for label in labels]
    figure, ax = style.start(title, subtitle)
    stack(ax, range(len(names)), values, unit)
    _name_bars(ax, names)
    _top(ax, range(len(names)), values, unit, limit)
    if ylabel:
        ax.set_ylabel(ylabel)
    style.legend(figure)
    head, *rows = split_rows(names, values, unit, unit)
    return style.finish(figure, [(ylabel or unit, *head[1:]), *rows], _say(figure, [], names, values, unit, ylabel))


def _top(ax, positions, splits: Sequence[Split | str], unit: str, limit=None) -> None:
    """Totals over the bars, room for them, the limit, and words where a run has no bar."""
    size = style.check_unit(unit)
    parts = [[] if isinstance(split, str) else [n / size for _, n in split.items()] for split in splits]
    heights = [sum(max(n, 0) for n in numbers) for numbers in parts]
    ceiling = max([*heights, limit_of(limit)[0] / size if limit is not None else 0]) or 1
    floor = min(sum(min(n, 0) for n in numbers) for numbers in parts)
    totals = ["" if isinstance(split, str) else style.amount(total(split), unit) for split in splits]
    longest = max(map(len, totals))
    upright = longest * len(totals) > 62
    ax.set_ylim(floor * 1.1, ceiling * (1.12 + (0.022 * longest if upright else 0)))
    for x, height, text, split in zip(positions, heights, totals, splits, strict=True):
        look = {"fontweight": "bold", "bbox": style.PATCH} if text else {"color": style.ALARM}
        look |= {"ha": "center", "va": "bottom", "fontsize": 9.5, "rotation": 90 if upright or not text else 0}
        ax.annotate(text or split, (x, height), xytext=(0, 3), textcoords="offset points", gid="total", **look)
    if limit is not None:
        draw_limit(ax, limit, unit)


def _name_bars(ax, names: Sequence[str]) -> None:
    """Names under the bars, in lines short enough not to touch, upright where even that would not do."""
    room = max(6, 64 // len(names))
    lines = [
        "\n".join(textwrap.fill(part, room, break_long_words=False) for part in name.split("\n")) for name in names
    ]
    crowded = max(len(line) for name in lines for line in name.split("\n")) > room
    if crowded:
        lines = [textwrap.fill(name, 20) for name in names]
    ax.set_xticks(range(len(names)), lines, rotation=90 if crowded else 0)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.6, max(len(names), 2) - 0.4)


def _say(
    figure, reports: Sequence[Report], names, splits: Sequence[Split | str], unit: str, ylabel: str | None = None
) -> str:
    """The figure in words: each bar's total and, where bars are few, its three largest parts."""
    said = []
    for label, split in zip(names, splits, strict=True):
        if isinstance(split, str):
            said.append(f"{label}: {split}")
            continue
        parts = sorted(((n, key) for key, n in split.items() if n), key=lambda pair: -abs(pair[0]))[:3]
        most = ", ".join(f"{style.name(key)} {style.amount(n, unit)}" for n, key in parts)
        more = f", most of it {most}" if most and len(splits) <= 5 else ""
        said.append(f"{label}: {style.amount(total(split), unit)}{more}")
    about = f", {shared}" if reports and (shared := subtitle(reports)) else ""
    return f"Stacked bars. {figure.heading}{about}, in {ylabel or unit}. {'; '.join(said)}."
