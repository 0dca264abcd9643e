"""Drawings of chapter 05. Each function draws a figure and returns it."""

from collections.abc import Sequence
from types import SimpleNamespace

from vramlab import GiB
from vramlab.interfaces.plot import canvas, style

BLUE = "#0072B2"
RED = "#D55E00"
GREY = "#DDDDDD"
SCALE, HEIGHT = 2.8, 1.24  # of the frozen matrix in the axes' units
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
        f"derived: one linear layer, {outputs:,} × {inputs:,}, rank {r} · to scale",
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
        ax.bar(5.1, HEIGHT, SCALE, 1.28, color=GREY, zorder=0)
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
        aspect = SCALE / HEIGHT * outputs / inputs  # a square matrix is drawn square
        ax.set(xlim=(-0.4, 11.7), ylim=(-0.8, 2.8), aspect=aspect)
        ax.axis("off")
    return ax.figure


def solved(runs: Sequence[SimpleNamespace], sure: float, title: str, about: str):
    """Draw the per cent that each run solved, and a band of `sure` around the first one's."""
    rows = [("run", "GiB", "solved, %")]
    for run in runs:
        rows.append((run.name, f"{run.memory_max_bytes / GiB:.1f}", f"{run.solved:.1f}"))
    said = "; ".join(", ".join(row) for row in rows)
    middle = runs[0].solved
    with canvas(
        title, f"Points, to the right what was solved. {title}. {said}.", about, rows
    ) as ax:
        ax.axvspan(middle - sure, middle + sure, color=GREY, zorder=0)
        for y, run in enumerate(runs):
            ax.plot(run.solved, y, "o", color=BLUE if run.lora else RED, markersize=9)
            ax.annotate(rows[y + 1][2], (run.solved, y), (8, -3), textcoords="offset points")
        ax.set_yticks(range(len(runs)), [f"{name}, {size} GiB" for name, size, _ in rows[1:]])
        ax.invert_yaxis()
        ax.set(xlabel="problems solved, %", xlim=(38, 54))
    return ax.figure


def label(run: SimpleNamespace) -> str:
    """What was trained, in a few words."""
    return f"{TARGETS[run.targets]}, r={run.r}" if run.r else "all weights"


def tradeoff(sweep: SimpleNamespace, title: str, lower: Sequence[SimpleNamespace] = ()):
    """Draw what `finetuning.recorded_sweep` holds: what was learned over what was forgotten.

    That is bits per byte gained on unseen prose over those lost on programs: a large dot for each
    setting, a small one for each of its seeds, and an arrow to the same setting in `lower`, at a
    lower rate. The feed-forward layers alone are left out.
    """
    shown = [run for run in sweep.runs if run.targets != FEED_FORWARD]
    slower = [run for run in lower if run.targets != FEED_FORWARD]
    rows = [("bits per byte", "rate", "learned", "forgot")]
    for run in [*shown, *slower]:
        forgot, learned = gains(sweep, run)
        rows.append((label(run), f"{run.learning_rate:g}", f"{learned:.3f}", f"{forgot:.3f}"))
    points = "; ".join(f"{row[0]} at {row[1]}: {row[3]}, {row[2]}" for row in rows[1:])
    said = f"Points, to the right what was forgotten, up what was learned. {points}. {title}."
    recipe = sweep.where["recipe"].split(", fp32")[0]
    about = f"recorded: base model, {recipe}, small dots are seeds"
    with canvas(title, said, about, rows) as ax:
        for run in [*shown, *slower]:
            colour = BLUE if run.r else RED
            seeds = _seeds(sweep, run)
            ax.plot(*seeds, "o", color=colour, markersize=4, alpha=0.5)
            forgot, learned = gains(sweep, run)
            ax.plot(forgot, learned, "o", color=colour, markersize=9)
            # Names stand behind the last dot, of slower runs before the first.
            words = f"{label(run)}, at {run.learning_rate:g}"
            start, offset, side = max(seeds[0]), 8, "left"
            if run in slower:
                start, offset, side = min(seeds[0]), -8, "right"
            ax.annotate(
                words,
                (start, learned),
                (offset, -3),
                textcoords="offset points",
                fontsize=9,
                ha=side,
            )
        for run in slower:
            start = gains(sweep, sweep.run(run.r))
            look = {"arrowstyle": "-|>", "color": style.INK, "shrinkA": 6, "shrinkB": 6}
            ax.annotate("", gains(sweep, run), start, arrowprops=look)
        ax.plot(0, 0, "*", color=style.INK, markersize=12)
        ax.annotate("untuned", (0, 0), (8, 4), textcoords="offset points", fontsize=9)
        ax.text(0.03, 0.93, "↖ better", transform=ax.transAxes)
        ax.set(xlabel="forgot: bits per byte lost on programs", xlim=(-0.09, 0.3))
        ax.set(ylabel="learned: bits per byte gained on prose")
    return ax.figure


def gains(sweep: SimpleNamespace, run: SimpleNamespace) -> tuple[float, float]:
    """What a setting forgot and learned, means over its seeds in bits per byte."""
    base = sweep.base
    return run.programs - base["programs"], base["documentation"] - run.documentation


def _seeds(sweep: SimpleNamespace, run: SimpleNamespace) -> tuple[list[float], list[float]]:
    """What each seed forgot and learned."""
    forgot = [bits - sweep.base["programs"] for bits in run.seeds["programs"]]
    learned = [sweep.base["documentation"] - bits for bits in run.seeds["documentation"]]
    return forgot, learned
