"""Drawings of chapter 08. Each function draws a figure and returns it."""

import itertools
from collections.abc import Mapping, Sequence

from vramlab import Recipe, step_time
from vramlab.interfaces.plot import canvas, style
from vramlab.report.report import GiB

from ..chapters.chapter_07 import recorded_8b
from ..step_times import held_out

# tokens/s; bytes at least, likely, at most; recipe
Row = tuple[float, Sequence[float], Recipe]
SECONDS = (0.2, 0.5, 1, 2, 5, 10)
Point = tuple[float, float]  # GiB, tokens/s


def cloud(
    rows: Sequence[Row],
    front: Sequence[Point],
    marked: Mapping[str, Row],
    usable: int,
    title: str,
    subtitle: str,
):
    """Draw recipes by likely memory and speed, those that no other beats as a line, some `marked`
    by name, and a card's usable bytes.
    """
    sizes = [row[1][1] / GiB for row in rows]
    alt = (
        f"A cloud of {len(rows)} recipes, speed over likely memory, {min(sizes):.0f} to "
        f"{max(sizes):.0f} GiB. A stair leads along its upper left edge. Marked: "
        + "; ".join(f"{name}, {row[1][1] / GiB:.1f} GiB" for name, row in marked.items())
        + f". The card's line stands at {usable / GiB:.1f} GiB."
    )
    with canvas(title, alt, subtitle) as ax:
        for checkpointing, mark in ((True, "o"), (False, "^")):
            kind = [row for row in rows if row[2].gradient_checkpointing is checkpointing]
            words = "checkpointing" if checkpointing else "no checkpointing"
            ax.plot(
                [row[1][1] / GiB for row in kind],
                [row[0] for row in kind],
                mark,
                linestyle="",
                markersize=5,
                alpha=0.75,
                label=words,
            )
        stairs = sorted(front)
        ax.step(*zip(*stairs, strict=True), where="post", color=style.INK, label="beaten by none")
        corners = itertools.cycle(((0.02, 0.04), (0.4, 0.04), (0.02, 0.93)))  # where no recipe is
        for (name, (speed, needs, _)), corner in zip(marked.items(), corners, strict=False):
            place = needs[1] / GiB, speed
            ax.plot(*place, "o", markersize=14, fillstyle="none", color=style.INK)
            line = {"arrowstyle": "-", "shrinkB": 8}
            ax.annotate(name, place, corner, textcoords="axes fraction", arrowprops=line)
        label = f"the card: {usable / GiB:.1f} GiB"
        ax.axvline(usable / GiB, color=style.ALARM, linestyle="--", label=label)
        speeds = [row[0] for row in rows]
        ax.set(xscale="log", xlabel="likely memory of the process, GiB")
        ax.set(xlim=(0.8 * min(sizes), 1.2 * max(sizes)), ylabel="tokens/s, estimated")
        room = 0.28 * (max(speeds) - min(speeds))
        ax.set_ylim(min(speeds) - room, max(speeds) + room)
        ticks = [size for size in (7.5, 15, 30, 60, 120, 240, 480) if size <= 1.2 * max(sizes)]
        ax.set_xticks(ticks, [f"{size:g}" for size in ticks])
        ax.minorticks_off()
    return ax.figure


def timed() -> dict[str, list[tuple[Recipe, float, float]]]:
    """By card: recipe, estimated and measured seconds of a step. The T4's are published ones by
    others, estimated by a fit without any run of their model; the others are the course's records
    of the 8B, which are in no fit.
    """
    held = [(run.recipe, run.seconds / ratio, run.seconds) for run, ratio in held_out("T4")]
    by_card = {"T4, held out": held}
    for recipe, seconds in recorded_8b("H200"):
        estimated = step_time(recipe, "H200").seconds
        by_card.setdefault("H200, recorded", []).append((recipe, estimated, seconds))
    return by_card


def speeds(by_card: Mapping[str, list[tuple[Recipe, float, float]]], title: str, subtitle: str):
    """Draw measured over estimated seconds of each step, by card."""
    rows = [("card", "steps", "measured / estimated, least", "median", "most")]
    alt = "Points about the line of an exact estimate."
    with canvas(title, alt, subtitle, rows) as ax:
        for (name, steps), mark in zip(by_card.items(), ("o", "^", "s"), strict=False):
            ratios = [measured / estimated for _, estimated, measured in steps]
            ax.plot([each[1] for each in steps], ratios, mark, linestyle="", label=name)
            middle = sorted(ratios)[len(ratios) // 2]
            figures = (f"{ratio:.2f}" for ratio in (min(ratios), middle, max(ratios)))
            rows.append((name, str(len(steps)), *figures))
        ax.axhline(1, color=style.INK, linewidth=1)
        ax.set(xscale="log", xlabel="estimated seconds of a step", ylabel="measured / estimated")
        ax.set_ylim(0.5, 1.55)
        ax.set_xticks(SECONDS, [f"{seconds:g}" for seconds in SECONDS])
        ax.minorticks_off()
    ax.figure.rows = rows
    return ax.figure
