"""Drawings of chapter 09: when each stage of a pipeline works, and what each split costs."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import accumulate
from math import isfinite

from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import layers, split_of
from vramlab.report.report import GiB

from ..chapters.chapter_09 import Way

SECONDS = {"forward": 1, "backward": 2}  # of a micro-batch on one stage, in forward passes
NO_BAR = 1.02  # below that a bar from 1 × on is thinner than its edge
Order = Callable[[int, int, int], list[tuple[str, int]]]  # of stage, stages and micro-batches


def stage_order(
    schedule: str,
    stage: int,
    stages: int,
    micro_batches: int,
) -> list[tuple[str, int]]:
    """Return the passes of a stage in order, as ("forward" or "backward", micro-batch).

    "gpipe" runs all forward passes first (Huang et al. 2019); "1f1b" begins a backward pass as soon
    as it can, so that stage s holds at most `stages - s` micro-batches (Narayanan et al. 2021,
    figure 4).
    """
    # 1F1B's last stage begins backward after one forward pass, the one before it after two, and so
    # on.
    ahead = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
    order = [("forward", m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(("backward", m))
        if ahead + m < micro_batches:
            order.append(("forward", ahead + m))
    return order


def pipeline_ends(orders: list[list[tuple[str, int]]]) -> dict[tuple[int, str, int], float]:
    """Return when each (stage, pass, micro-batch) ends, in forward passes; sending takes no time.

    `orders`: each stage's.
    """
    stages = len(orders)

    @cache
    def end(stage: int, kind: str, m: int) -> float:
        i = orders[stage].index((kind, m))
        # Forward passes come from the stage before, backward passes from the one behind.
        sender = stage - 1 if kind == "forward" else stage + 1
        # A pass waits for the one before it on its own stage, and for the sender's of the same
        # micro-batch.
        waits = []
        if i > 0:
            waits.append(end(stage, *orders[stage][i - 1]))
        if 0 <= sender < stages:
            waits.append(end(sender, kind, m))
        return max(waits, default=0) + SECONDS[kind]

    ends = {}
    for stage, order in enumerate(orders):
        for kind, m in order:
            ends[stage, kind, m] = end(stage, kind, m)
    return ends


def bubble(ends: dict[tuple[int, str, int], float]) -> float:
    """Return the share of the stages' time in which they wait.

    It is (N − 1)/(m + N − 1) for both schedules.
    """
    busy = sum(SECONDS[kind] for _, kind, _ in ends)
    stages = 1 + max(stage for stage, *_ in ends)
    whole = stages * max(ends.values())
    return 1 - busy / whole


def most_held(order: list[tuple[str, int]]) -> int:
    """Return the most micro-batches between their forward and backward pass."""
    # A forward pass keeps one micro-batch more, a backward pass one fewer.
    return max(accumulate(1 if kind == "forward" else -1 for kind, _ in order))


@style.styled()
def pipeline(
    stages: int = 4,
    micro_batches: int = 8,
    title: str = "Who works when in a pipeline",
    own: Order | None = None,
):
    """Return a figure of both schedules as timelines, a row per stage; waiting is white.

    `own` gives the passes of a stage in place of 1F1B's, from stage, stages and micro-batches.
    """
    about = f"derived: {stages} stages, {micro_batches} micro-batches; a backward pass takes two "
    about += "forward passes"
    figure, axes = style.start(title, about, rows=2, sharex=True)
    colours = {
        "forward": style.LOOK["activations"][0],
        "backward": style.LOOK["gradients"][0],
    }
    labels = {"forward": "forward pass of a micro-batch", "backward": "its backward pass"}
    rows = [("schedule", "time units", "waiting", "most micro-batches held")]
    for ax, name in zip(axes, ("GPipe", "1F1B"), strict=True):
        made = own if own and name == "1F1B" else partial(stage_order, name.lower())
        orders = [made(stage, stages, micro_batches) for stage in range(stages)]
        ends = pipeline_ends(orders)
        for kind, time in SECONDS.items():
            at = []
            starts = []
            numbers = []
            for (stage, one, m), end in ends.items():
                if one == kind:
                    # The first stage on top; a half, since bars are drawn about their middle.
                    at.append(stages - 0.5 - stage)
                    starts.append(end - time)
                    numbers.append(m)
            look = {
                "color": colours[kind],
                "edgecolor": style.INK,
                "linewidth": 0.5,
                "label": labels[kind],
            }
            done = ax.barh(at, time, 0.84, starts, **look)
            ax.bar_label(done, numbers, label_type="center", fontsize=8)
        ax.set(
            xlim=(0, max(ends.values()) * 1.01),
            ylim=(0, stages),
            ylabel=name,
        )
        ax.set_yticks(
            [stages - 0.5 - s for s in range(stages)],
            [f"stage {s}" for s in range(stages)],
        )
        ax.grid(visible=False)
        # The first stage holds the most: its backward passes come last.
        held = most_held(orders[0])
        rows.append((name, f"{max(ends.values()):g}", f"{bubble(ends):.1%}", str(held)))
    axes[-1].set_xlabel("time, in forward passes of one stage")
    return style.finish(figure, rows, f"Two timelines. {title}, {about}.", say_rows=True)


@style.styled()
def ways_to_cut(
    ways: Mapping[str, Way],
    links: Mapping[str, float],
    title: str,
    about: str,
):
    """Return a figure of the ways: GiB a rank above, and below how much longer a pass takes.

    `links` are bytes per second by name. A pass that only computes has "1 ×" in place of a bar.
    """
    figure, axes = style.start(title, about, rows=2, sharex=True)
    above, below = axes
    places = range(len(ways))
    bottoms = [0.0] * len(ways)
    for heights, look in layers([split_of(way.peak) for way in ways.values()], "GiB"):
        bars = above.bar(places, heights, 0.62, bottoms, **look)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    above.bar_label(bars, [f"{top:.0f}" for top in bottoms], padding=2, fontsize=9)
    above.set(ylabel="GiB a rank", ylim=(0, 1.2 * max(bottoms)))
    width = 0.8 / len(links)
    # Greys, the slower the darker: the colours are those of the bytes above.
    greys = ("#E2E2E2", "#B5B5B5", "#777777", style.INK)
    for number, ((name, bandwidth), grey) in enumerate(zip(links.items(), greys, strict=False)):
        offset = (number - (len(links) - 1) / 2) * width
        times = [way.times(bandwidth) for way in ways.values()]
        # On this axis a bar begins at 1 ×, where nothing is waited for.
        drawn = below.bar(
            [place + offset for place in places],
            [more - 1 for more in times],
            width,
            1,
            color=grey,
            edgecolor=style.INK,
            linewidth=0.5,
            label=f"over {name}",
        )
        marked = ["1 ×" if more < NO_BAR else "" for more in times]
        below.bar_label(drawn, marked, padding=1, fontsize=6.5)
    marks = [2**power for power in range(7)]
    below.set(yscale="log", ylabel="a step takes", ylim=(1, 80))
    below.set_yticks(marks, [f"{mark} ×" for mark in marks])
    below.minorticks_off()
    below.set_xticks(places, [name.replace(", ", ",\n") for name in ways])
    rows = [("a rank", "GiB", "GB sent", *links, "hidden from, GB/s")]
    for name, way in ways.items():
        least = way.hidden_from()
        enough = f"{least / 1e9:,.0f}" if isfinite(least) else "not hidden"
        longer = (f"{way.times(bandwidth):.1f} ×" for bandwidth in links.values())
        sizes = (f"{way.peak.total / GiB:.1f}", f"{sum(way.sent) / 1e9:.1f}")
        rows.append((name, *sizes, *longer, enough))
    return style.finish(figure, rows, f"Two rows of bars. {title}. {about}.", say_rows=True)
