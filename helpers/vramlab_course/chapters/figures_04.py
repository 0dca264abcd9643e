"""Drawing of chapter 04: which rank holds what."""

from collections.abc import Sequence

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
