"""Drawings of chapter 05. Each function draws a figure and returns it."""

from types import SimpleNamespace

from vramlab.faces.plot import canvas, style

BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#DDDDDD"
TARGETS = {
    "all-linear": ("all linear layers", BLUE, "o"),
    "gate_proj, up_proj, down_proj": ("feed-forward", GREEN, "^"),
    "q_proj, v_proj": ("queries and values", RED, "s"),
}


def layer(inputs: int, outputs: int, r: int):
    """Draw a frozen matrix and the two strips whose product is added to it, to scale."""
    numbers, frozen = r * (inputs + outputs), inputs * outputs
    title = f"Two strips are trained in place of the square: {100 * numbers / frozen:.1f} % of its numbers"
    said = f"A grey square, W; along its left and upper edge two blue lines, {r / inputs:.1%} as wide as it: B and A."
    with canvas(title, said, f"derived: {outputs:,} × {inputs:,}, rank {r}, drawn to scale") as ax:
        ax.bar(0, outputs, inputs, align="edge", color=GREY)
        ax.bar(0, r, inputs, align="edge", bottom=1.06 * outputs, color=BLUE)
        ax.bar(-0.06 * inputs - r, outputs, r, align="edge", color=BLUE)
        middle = {"ha": "center", "va": "center", "linespacing": 1.6}
        ax.text(inputs / 2, outputs / 2, f"W, frozen\n{frozen:,} numbers", fontsize=12, **middle)
        ax.text(inputs / 2, 1.12 * outputs, f"A: {r} × {inputs:,}, {r * inputs:,} numbers", color=BLUE, **middle)
        ax.text(-0.13 * inputs, outputs / 2, f"B: {outputs:,} × {r}", color=BLUE, rotation=90, **middle)
        ax.set_aspect("equal")
        ax.set_ylim(-0.02 * outputs, 1.18 * outputs)
        ax.axis("off")
    return ax.figure


def ranks(sweep: SimpleNamespace):
    """Draw what `finetuning.recorded_sweep` holds: bits per byte of unseen prose by rank and by target layers."""
    rows = [("bits per byte", "trained", "prose", "programs")]
    rows.append(("untuned", "0", *(f"{sweep.base[text]:.3f}" for text in ("documentation", "programs"))))
    for run in sorted(sweep.runs, key=lambda run: run.trained):
        name = f"{TARGETS[run.targets][0]}, r={run.r}" if run.r else "all weights"
        rows.append((name, f"{run.trained:,}", f"{run.documentation:.3f}", f"{run.programs:.3f}"))
    title = "Rank helps up to 16; which layers have adapters matters more"
    said = "Bits per byte of prose over the rank: " + "; ".join(f"{row[0]} {row[2]}" for row in rows[1:]) + "."
    about = f"recorded on a CPU, {sweep.where['date']}: base model · 100 steps of 4 × 256 tokens"
    with canvas(title, said, about, rows) as ax:
        for targets, (name, colour, mark) in TARGETS.items():
            points = sorted((run.r, run.documentation) for run in sweep.runs if run.targets == targets)
            look = {} if len(points) > 1 else {"markerfacecolor": "none", "markeredgewidth": 2, "markersize": 11}
            ax.plot(*zip(*points, strict=True), f"{mark}-", color=colour, label=name, **look)
        for y, dash, name in (
            (sweep.base["documentation"], ":", "untuned"),
            (sweep.run(None).documentation, "--", "all weights"),
        ):
            ax.axhline(y, color=style.INK, linestyle=dash)
            ax.text(64, y - 0.003, name, ha="right", va="top")
        ax.set_xscale("log", base=2)
        ticks = sorted({run.r for run in sweep.runs if run.r})
        ax.set_xticks(ticks, ticks)
        ax.set(xlabel="rank", ylabel="bits per byte of unseen prose", ylim=(1.36, 1.66))
    return ax.figure
