"""Drawing of chapter 04: which rank holds what."""

from collections.abc import Sequence

from vramlab.interfaces.plot import style

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
