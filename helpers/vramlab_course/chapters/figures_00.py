"""Drawing of chapter 00: why a run that passed its first step dies in the second."""

from vramlab.faces.plot import style
from vramlab.report.report import GiB, Report

NEAR = {"textcoords": "offset points"}


@style.styled()
def two_steps(first: Report, second: Report, room: int, title: str, about: str):
    """Return a figure of what is alive in two steps, one after the other, and where the second
    exceeds `room` bytes.
    """
    figure, ax = style.start(title, about)
    look = style.look(["optimizer_states"])["optimizer_states"]
    rows = [("step", "states at its start, GiB", "peak, GiB")]
    for n, run in enumerate((first, second)):
        x = [n + i / len(run.timeline) for i in range(len(run.timeline))]
        total = [moment.bytes.total / GiB for moment in run.timeline]
        held = [moment.bytes.optimizer_states / GiB for moment in run.timeline]
        ax.fill_between(x, held, total, color="#C8C8C8", linewidth=0)
        ax.fill_between(x, 0, held, where=[size > 0 for size in held], **look)
        top = max(total)
        ax.annotate(
            f"{top:.1f} GiB", (x[total.index(top)], top), (7, -9), **NEAR, fontweight="bold"
        )
        rows.append((str(n + 1), f"{held[0]:.2f}", f"{top:.2f}"))
    limit = room / GiB
    ax.axhline(limit, color=style.ALARM, linestyle="--")
    ax.annotate(f"a T4's {limit:.2f} GiB", (0.01, limit), (0, 5), **NEAR, color=style.ALARM)
    died = next(place for place, size in zip(x, total, strict=True) if size > limit)
    ax.plot(died, limit, "X", color=style.ALARM, markersize=10, zorder=5)
    ax.annotate(
        "dies here",
        (died, limit),
        (-9, 6),
        **NEAR,
        ha="right",
        color=style.ALARM,
        fontweight="bold",
    )
    ax.annotate(
        f"AdamW's states: {held[0]:.1f} GiB",
        (1.5, held[0] / 2),
        (0, 0),
        **NEAR,
        ha="center",
        bbox=style.PATCH,
    )
    ax.annotate("weights, activations, gradients", (0.47, 3), (0, 0), **NEAR, ha="center")
    ax.set(
        xlim=(0, 2.02),
        ylim=(0, 20),
        ylabel="GiB",
        xlabel="allocations and releases, in their order",
    )
    ax.set_xticks([0.5, 1.5], ["step 1", "step 2"])
    alt = (
        f"{title}. Two hills, one for each step; the second stands on the states and crosses "
        f"the card's line."
    )
    return style.finish(figure, rows, alt, say_rows=True)
