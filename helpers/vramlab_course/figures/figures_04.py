"""Drawings of chapter 04: which rank holds what, what two collectives do, who waits for what."""

from collections.abc import Mapping, Sequence

from vramlab.interfaces.plot import style

Numbers = Sequence[Sequence[float]]  # of each rank

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


@style.styled()
def who_holds_what(
    world_size: int = 4,
    title: str = "Who holds what",
    ways: Sequence[str] = tuple(WAYS),
    sizes: Sequence[float] = (1, 1, 1),
):
    """Return a figure of each rank's share of parameters, gradients and optimizer states.

    Each way of dividing them is a row.

    A frame is the whole of one part, as wide as its share of `sizes`, and what other ranks hold of
    it is white. Tensor parallelism divides each layer upright, pipelining across, ZeRO flat lists.
    """
    about = "derived: P parameters, G gradients, S states; white: held by other ranks"
    # Three together, whatever the sizes are, so that ranks stand at fixed places.
    widths = [len(PARTS) * size / sum(sizes) for size in sizes]
    figure, ax = style.start(title, about)
    ranks = range(world_size)
    share = 1 / world_size
    rows = [("way", *(f"{part} on one rank" for part in PARTS))]
    for row, way in enumerate(ways):
        divided = WAYS[way]
        low = -1.3 * row
        cut = [part in divided or isinstance(divided, str) for part in PARTS]
        for i, look in enumerate(style.look(PARTS).values()):
            width = widths[i]
            # 3.9 from rank to rank: the three parts, gaps of 0.08 and a wider gap between ranks.
            offset = sum(widths[:i]) + 0.08 * i
            left = [3.9 * rank + offset for rank in ranks]
            empty = {"facecolor": "white", "edgecolor": "#888888", "linewidth": 0.6}
            ax.bar(left, 1, width, low, align="edge", **empty)
            # A rank has its layers of everything: a band across.
            if divided == "layers":
                ax.bar(
                    left,
                    share,
                    width,
                    [low + 1 - (rank + 1) * share for rank in ranks],
                    align="edge",
                    **look,
                )
            # Its part of the flat list, or of each matrix: a band upright.
            elif cut[i]:
                ax.bar(
                    [x + rank * share * width for rank, x in enumerate(left)],
                    1,
                    share * width,
                    low,
                    align="edge",
                    **look,
                )
            else:
                ax.bar(left, 1, width, low, align="edge", **look)
            # The letters stand above the first row alone.
            waiting = left if row == 0 else ()
            for x in waiting:
                ax.text(
                    x + width / 2,
                    1.08,
                    "PGS"[i],
                    ha="center",
                    va="bottom",
                    fontsize=9.5,
                )
        rows.append((way, *(f"1/{world_size}" if one else "all" for one in cut)))
    ax.set(
        xlim=(-0.2, 3.9 * world_size - 0.6),
        ylim=(-1.3 * row - 0.2, 1.55),
    )
    ax.set_yticks([0.5 - 1.3 * row for row in range(len(ways))], ways)
    ax.set_xticks(
        [3.9 * rank + 1.58 for rank in ranks],
        [f"rank {rank}" for rank in ranks],
    )
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return style.finish(figure, rows, f"Frames. {title} on {world_size} ranks.", say_rows=True)


@style.styled()
def two_collectives(given: Numbers, reduced: Numbers, gathered: Numbers, title: str):
    """Return a figure of each rank's numbers before and after a reduce-scatter and an all-gather.

    A rank is a row. What another rank holds is white, and a part has the colour of its rank.
    """
    about = "computed on real ranks · white: held by another rank"
    figure, ax = style.start(title, about)
    world = len(given)
    length = len(given[0])
    part = length // world
    rows = [("rank", "hands in", "has after reduce-scatter", "has after all-gather")]
    for rank in range(world):
        # Filled up with blocks that this rank does not hold.
        own = [None] * length
        own[rank * part : (rank + 1) * part] = reduced[rank]
        for column, numbers in enumerate((given[rank], own, gathered[rank])):
            for place, number in enumerate(numbers):
                colour, *_ = style.LINES[place // part % len(style.LINES)]
                # The ranks' own addends are paler than their sum.
                strength = 0.18 if column == 0 else 0.5
                left = column * (length + 1.2) + place
                ax.bar(
                    left,
                    0.62,
                    0.94,
                    -rank,
                    align="edge",
                    facecolor="white" if number is None else (colour, strength),
                    edgecolor="#888888",
                    linewidth=0.6,
                )
                words = "" if number is None else f"{number:g}"
                ax.text(left + 0.47, 0.3 - rank, words, ha="center", va="center", fontsize=8)
        said = (given[rank], reduced[rank], gathered[rank])
        rows.append((f"{rank}", *(" ".join(f"{n:g}" for n in numbers) for numbers in said)))
    heads = ("each hands in a row", "reduce-scatter: its part", "all-gather: the whole row")
    for column, head in enumerate(heads):
        ax.text(column * (length + 1.2), 0.8, head, fontsize=9.5)
    ax.set(xlim=(-0.2, 3 * length + 2.6), ylim=(-world + 0.8, 1.2))
    ax.set_yticks([0.3 - rank for rank in range(world)], [f"rank {rank}" for rank in range(world)])
    ax.set_xticks([])
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    figure.set_figheight(2.6)
    return style.finish(figure, rows, f"Rows of blocks. {title}.", say_rows=True)


@style.styled()
def two_lanes(
    steps: Mapping[str, Mapping[str, tuple[float, float]]],
    title: str,
    about: str,
    pieces: int = 8,
):
    """Return a figure of a step's passes in time: above what computes, below what is sent.

    `steps` has by name each step's passes, with the seconds of computing and of sending. A pass
    takes the longer of both. The shorter is drawn in `pieces`, with the waiting between them.
    """
    figure, ax = style.start(title, about)
    (computes, *_), (sends, *_) = style.LINES[:2]
    rows = [("step and pass", "computing, s", "sending, s", "takes, s", "cores wait, s")]
    ticks = {}
    for row, (name, passes) in enumerate(steps.items()):
        start = 0.0
        lanes = {f"{name}: compute": -2.6 * row, "send": -2.6 * row - 0.9}
        for label, low in lanes.items():
            ticks[low + 0.4] = label
        for one, both in passes.items():
            takes = max(both)
            for low, seconds, colour in zip(lanes.values(), both, (computes, sends), strict=True):
                bars = [
                    (start + takes * piece / pieces, seconds / pieces) for piece in range(pieces)
                ]
                ax.broken_barh([(start, takes)], (low, 0.8), facecolor="white", edgecolor="#888888")
                ax.broken_barh(bars, (low, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4)
            ax.text(start + takes / 2, -2.6 * row + 0.88, one, ha="center", fontsize=9.5)
            waits = takes - both[0]
            rows.append((f"{name}, {one}", *(f"{n:.2f}" for n in (*both, takes, waits))))
            start += takes
        ax.text(start, -2.6 * row - 0.05, f" {start:.2f} s", va="center", fontweight="bold")
    ax.set_yticks([*ticks], [*ticks.values()])
    ax.set(xlabel="seconds; white: waits", xlim=(0, None), ylim=(-2.6 * row - 1.1, 1.4))
    ax.margins(x=0.12)
    ax.grid(visible=False)
    figure.set_figheight(3.4)
    return style.finish(figure, rows, f"Two lanes for each step. {title}.", say_rows=True)
