"""Drawings of chapter 04: which rank holds what, and when each stage of a pipeline works."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from vramlab.faces.plot import style

PARTS = ("parameters", "gradients", "optimizer_states")
# What each way divides among the ranks; "slices" of every matrix, or some of the "layers".
WAYS = {
    "data parallel": (),
    "ZeRO-1": PARTS[2:],
    "ZeRO-2": PARTS[1:],
    "ZeRO-3": PARTS,
    "tensor": "slices",
    "pipeline": "layers",
}
SECONDS = {"forward": 1, "backward": 2}  # of a micro-batch on one stage, in forward passes


@style.styled()
def who_holds_what(
    world_size: int = 4, title: str = "Who holds what", ways: Sequence[str] = tuple(WAYS)
):
    """Return a figure of each rank's share of parameters, gradients and optimizer states, a row per
    way of dividing.

    A square is the whole of one part. Tensor parallelism divides each layer upright, pipelining
    across, ZeRO flat lists.
    """
    about = f"derived: {world_size} ranks; a square is all: P parameters, G gradients, S states"
    figure, ax = style.start(title, about)
    ranks, share = range(world_size), 1 / world_size
    rows = [("way", *(f"{part} on one rank" for part in PARTS))]
    for row, way in enumerate(ways):
        divided = WAYS[way]
        low, cut = -1.3 * row, [part in divided or isinstance(divided, str) for part in PARTS]
        for i, look in enumerate(style.look(PARTS).values()):
            left = [3.9 * rank + 1.08 * i for rank in ranks]
            ax.bar(
                left, 1, 1, low, align="edge", facecolor="white", edgecolor="#888888", linewidth=0.6
            )
            if divided == "layers":
                ax.bar(
                    left,
                    share,
                    1,
                    [low + 1 - (rank + 1) * share for rank in ranks],
                    align="edge",
                    **look,
                )
            elif cut[i]:
                ax.bar(
                    [x + rank * share for rank, x in enumerate(left)],
                    1,
                    share,
                    low,
                    align="edge",
                    **look,
                )
            else:
                ax.bar(left, 1, 1, low, align="edge", **look)
            waiting = left if row == 0 else ()
            for x in waiting:
                ax.text(x + 0.5, 1.08, "PGS"[i], ha="center", va="bottom", fontsize=9.5)
        rows.append((way, *(f"1/{world_size}" if one else "all" for one in cut)))
    ax.set(xlim=(-0.2, 3.9 * world_size - 0.6), ylim=(-1.3 * row - 0.2, 1.55))
    ax.set_yticks([0.5 - 1.3 * row for row in range(len(ways))], ways)
    ax.set_xticks([3.9 * rank + 1.58 for rank in ranks], [f"rank {rank}" for rank in ranks])
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return style.finish(figure, rows, f"Squares. {title} on {world_size} ranks.", say_rows=True)


def stage_order(
    schedule: str, stage: int, stages: int, micro_batches: int
) -> list[tuple[str, int]]:
    """Return the passes of a stage in order, as ("forward" or "backward", micro-batch).

    "gpipe" runs all forward passes first (Huang et al. 2019); "1f1b" begins a backward pass as soon
    as it can, so that stage s holds at most `stages - s` micro-batches (Narayanan et al. 2021,
    figure 4).
    """
    ahead = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
    order = [("forward", m) for m in range(ahead)]
    for m in range(micro_batches):
        order += [("backward", m), *([("forward", ahead + m)] if ahead + m < micro_batches else [])]
    return order


def pipeline_ends(orders: list[list[tuple[str, int]]]) -> dict[tuple[int, str, int], float]:
    """Return when each (stage, pass, micro-batch) ends, in forward passes; sending takes no time.

    `orders`: each stage's.
    """
    stages = len(orders)

    @cache
    def end(stage: int, kind: str, m: int) -> float:
        i, sender = orders[stage].index((kind, m)), stage - 1 if kind == "forward" else stage + 1
        waits = [end(stage, *orders[stage][i - 1])] if i else []
        if 0 <= sender < stages:
            waits += [end(sender, kind, m)]
        return max(waits, default=0) + SECONDS[kind]

    return {(stage, *one): end(stage, *one) for stage, order in enumerate(orders) for one in order}


def bubble(ends: dict[tuple[int, str, int], float]) -> float:
    """Return the share of the stages' time in which they wait: (N − 1)/(m + N − 1) for both
    schedules.
    """
    busy = sum(SECONDS[kind] for _, kind, _ in ends)
    return 1 - busy / (max(ends.values()) * (1 + max(stage for stage, *_ in ends)))


def most_held(order: list[tuple[str, int]]) -> int:
    """Return the most micro-batches between their forward and backward pass."""
    return max(accumulate(1 if kind == "forward" else -1 for kind, _ in order))


@style.styled()
def pipeline(stages: int = 4, micro_batches: int = 8, title: str = "Who works when in a pipeline"):
    """Return a figure of both schedules as timelines, a row per stage; waiting is white."""
    about = (
        f"derived: {stages} stages, {micro_batches} micro-batches; a backward pass takes two "
        f"forward passes"
    )
    figure, axes = style.start(title, about, rows=2, sharex=True)
    colours = {"forward": style.LOOK["activations"][0], "backward": style.LOOK["gradients"][0]}
    labels = {"forward": "forward pass of a micro-batch", "backward": "its backward pass"}
    rows = [("schedule", "time units", "waiting", "most micro-batches held")]
    for ax, name in zip(axes, ("GPipe", "1F1B"), strict=True):
        orders = [
            stage_order(name.lower(), stage, stages, micro_batches) for stage in range(stages)
        ]
        ends = pipeline_ends(orders)
        for kind, time in SECONDS.items():
            found = [(stage, m, end - time) for (stage, one, m), end in ends.items() if one == kind]
            at, starts = (
                [stages - 0.5 - stage for stage, *_ in found],
                [start for *_, start in found],
            )
            look = {
                "color": colours[kind],
                "edgecolor": style.INK,
                "linewidth": 0.5,
                "label": labels[kind],
            }
            done = ax.barh(at, time, 0.84, starts, **look)
            ax.bar_label(done, [m + 1 for _, m, _ in found], label_type="center", fontsize=8)
        ax.set(xlim=(0, max(ends.values()) * 1.01), ylim=(0, stages), ylabel=name)
        ax.set_yticks(
            [stages - 0.5 - s for s in range(stages)], [f"stage {s}" for s in range(stages)]
        )
        ax.grid(visible=False)
        held = most_held(orders[0])
        rows.append((name, f"{max(ends.values()):g}", f"{bubble(ends):.1%}", str(held)))
    axes[-1].set_xlabel("time, in forward passes of one stage")
    return style.finish(figure, rows, f"Two timelines. {title}, {about}.", say_rows=True)
