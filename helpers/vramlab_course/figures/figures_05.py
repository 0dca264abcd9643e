"""Drawings of chapter 05. Each function draws a figure and returns it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vramlab import GiB
from vramlab.interfaces.plot import canvas, style

BLUE = "#0072B2"
RED = "#D55E00"
GREY = "#DDDDDD"
SCALE, HEIGHT = 2.8, 1.5  # of the frozen matrix in the axes' units
FEED_FORWARD = "gate_proj, up_proj, down_proj"
TARGETS = {
    "all-linear": "all linear",
    FEED_FORWARD: "feed-forward",
    "q_proj, v_proj": "queries and values",
}


def flow(inputs: int, outputs: int, r: int):
    """Draw how x goes through the frozen matrix and, beside it, through A and B."""
    frozen = inputs * outputs
    title = "Two thin matrices are trained, and the large one stays frozen"
    said = (
        f"Arrows. x, {inputs:,} numbers a token, goes up into the frozen W and down into A, "
        f"which makes {r} numbers of it. "
        f"B makes {outputs:,} of these, times α / r. Both ways are added to y."
    )
    with canvas(
        title,
        said,
        f"derived: one linear layer, {outputs:,} × {inputs:,}, rank {r}",
    ) as ax:
        words = (
            (0.5, 1, f"x\n{inputs:,}\na token"),
            (5.1, 1.9, f"W, frozen\n{outputs:,} × {inputs:,}\n{frozen:,} numbers"),
            (3.3, -0.3, f"A, trained\n{r} × {inputs:,}\n{r * inputs:,}"),
            (7.9, 0.05, f"B, trained\n{outputs:,} × {r}\n{r * outputs:,}"),
            (10.9, 1, f"y\n{outputs:,}\na token"),
        )
        for x, y, text in words:
            ax.text(x, y, text, ha="center", va="center", fontsize=9.5, linespacing=1.5)
        # Inputs run to the right and outputs down, all three matrices to scale.
        ax.bar(5.1, HEIGHT, SCALE, 1.15, color=GREY, zorder=0)
        ax.bar(3.3, HEIGHT * r / outputs, SCALE, 0.25, color=BLUE, edgecolor=BLUE)
        ax.bar(6.9, HEIGHT, SCALE * r / inputs, -0.7, color=BLUE, edgecolor=BLUE)
        # From one box's edge to the next one's.
        arrows = (
            ((1.2, 1.25), (3.6, 1.9)),
            ((1.2, 0.85), (1.8, 0.3)),
            ((4.8, 0.25), (6.75, 0.25)),
            ((7.05, 0.4), (9.0, 0.9)),
            ((6.6, 1.9), (9.0, 1.15)),
            ((9.5, 1), (10.15, 1)),
        )
        look = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.4}
        for start, end in arrows:
            ax.annotate("", end, start, arrowprops=look)
        ax.text(5.75, 0.34, f"{r}", ha="center", color=BLUE, fontsize=11)
        ax.text(7.7, 0.85, "× α / r", ha="center", color=BLUE)
        ax.text(9.25, 1, "+", ha="center", va="center", fontsize=15)
        ax.set(xlim=(-0.4, 11.7), ylim=(-0.8, 2.8))
        ax.axis("off")
    return ax.figure


def over_length(
    predicted: Mapping[str, Mapping[int, int]],
    simulated: Mapping[str, Mapping[int, int]],
    title: str,
    about: str,
):
    """Draw peaks over the length: `predicted` as lines, `simulated` as marks."""
    first = next(iter(simulated.values()))
    rows = [("peak, GiB", *(f"{tokens:,} tokens" for tokens in first))]
    for name, peaks in simulated.items():
        rows.append((name, *(f"{size / GiB:.1f}" for size in peaks.values())))
    said = (
        f"Lines that rise with the length. {title}. "
        + "; ".join(", ".join(row) for row in rows)
        + "."
    )
    with canvas(title, said, about, rows) as ax:
        for (name, peaks), (colour, mark, dash) in zip(
            predicted.items(),
            style.LINES,
            strict=False,
        ):
            ax.plot(
                [*peaks],
                [size / GiB for size in peaks.values()],
                dash,
                color=colour,
            )
            marks = simulated[name]
            ax.plot(
                [*marks],
                [size / GiB for size in marks.values()],
                mark,
                color=colour,
            )
        ax.set_xticks([*first], [f"{tokens:,}" for tokens in first])
        ax.set(xlabel="tokens", ylabel="peak, GiB", ylim=(0, None))
        _name_the_ends(ax, predicted)
    return ax.figure


def _name_the_ends(ax: Any, lines: Mapping[str, Mapping[int, int]]) -> None:
    """Write each line's name at its right end, names of neighbours apart from each other."""
    start, end = ax.get_xlim()
    ax.set_xlim(start, end + 0.42 * (end - start))
    below, least = float("-inf"), 0.045 * ax.get_ylim()[1]
    for (name, peaks), (colour, *_) in sorted(
        zip(lines.items(), style.LINES, strict=False), key=lambda each: max(each[0][1].values())
    ):
        last = max(peaks)
        below = max(peaks[last] / GiB, below + least)
        ax.annotate(name, (last, below), (8, -3), textcoords="offset points", color=colour)


def label(run: SimpleNamespace) -> str:
    """What was trained, in a few words."""
    return f"{TARGETS[run.targets]}, r={run.r}" if run.r else "all weights"


def frontier(sweep: SimpleNamespace, title: str):
    """Draw what `finetuning.recorded_sweep` holds: what was learned over what was forgotten.

    That is bits per byte of unseen prose over those of programs: a large dot for each setting, and
    a line from it to the dot of each of its seeds.
    """
    rows = [("bits per byte", "trained", "rate", "prose", "± seeds", "programs")]
    base = sweep.base
    rows.append(("untuned", "0", "", f"{base['documentation']:.3f}", "", f"{base['programs']:.3f}"))
    runs = sorted([*sweep.runs, *sweep.lower], key=lambda run: run.documentation)
    names = []
    for run in runs:
        numbers = (f"{run.trained:,}", f"{run.learning_rate:g}", f"{run.documentation:.3f}")
        names.append(label(run) + (f", rate {run.learning_rate:g}" if run in sweep.lower else ""))
        rows.append((names[-1], *numbers, f"{run.deviation:.3f}", f"{run.programs:.3f}"))
    points = "; ".join(f"{row[0]} {row[5]}, {row[3]}" for row in rows[1:])
    said = (
        "Points, to the right what was forgotten, down what was learned: programs, prose. "
        f"{points}. Down and left is better."
    )
    about = (
        f"recorded: base model, {sweep.where['recipe'].split(', fp32')[0]}, "
        f"{len(runs[0].seeds['documentation'])} seeds"
    )
    with canvas(title, said, about, rows) as ax:
        for run in runs:
            colour = BLUE if run.r else RED
            place = run.programs, run.documentation
            # Dots of several settings lie among one another; the lines say whose each is.
            for programs, documentation in zip(*_both(run.seeds), strict=True):
                ax.plot(
                    [run.programs, programs],
                    [run.documentation, documentation],
                    color=colour,
                    linewidth=0.8,
                )
            ax.plot(*_both(run.seeds), "o", color=colour, markersize=4, markerfacecolor="white")
            ax.plot(*place, "o", color=colour, markersize=9)
            # Words stand where no other dots lie, or the edge does.
            is_left = run in sweep.lower or run.targets == "all"
            seeds = run.seeds["programs"]
            start, offset, side = (max(seeds), run.documentation), (8, -9), "left"
            if is_left:
                start, offset, side = (min(seeds), run.documentation), (-8, -9), "right"
            elif run.targets == FEED_FORWARD:
                start, offset, side = (
                    (run.programs, max(run.seeds["documentation"])),
                    (-8, 4),
                    "center",
                )
            ax.annotate(
                f"{label(run)}\nrate {run.learning_rate:g}",
                start,
                offset,
                textcoords="offset points",
                fontsize=9,
                ha=side,
            )
        place = base["programs"], base["documentation"]
        ax.plot(*place, "*", color=style.INK, markersize=12)
        ax.annotate("untuned", place, (8, 2), textcoords="offset points", fontsize=9)
        ax.text(0.03, 0.05, "↙ better", transform=ax.transAxes)
        ax.set(xlabel="forgotten: bits per byte of programs", xlim=(1.32, None))
        ax.set(ylabel="learned: bits per byte of unseen prose")
    return ax.figure


def _both(seeds: Mapping[str, list[float]]) -> tuple[list[float], list[float]]:
    return seeds["programs"], seeds["documentation"]
