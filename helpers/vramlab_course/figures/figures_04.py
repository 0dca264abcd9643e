"""Drawings of chapter 04: who holds what and when, two collectives, and gathers in time."""

from collections.abc import Sequence
from typing import Any

from vramlab.interfaces.plot import style

Numbers = Sequence[Sequence[int]]  # of each rank
SENT = "sent"  # the row without boxes
THIN = {"edgecolor": "#888888", "linewidth": 0.6}

PARTS = ("parameters", "gradients", "optimizer_states")
WIDTHS = (0.75, 0.75, 1.5)  # as AdamW's 4, 4 and 8 bytes a parameter in fp32
# What each way divides among the ranks.
WAYS = {
    "data parallel": (),
    "ZeRO-1": PARTS[2:],
    "ZeRO-2": PARTS[1:],
    "ZeRO-3": PARTS,
}


@style.styled()
def who_holds_what(world_size: int, title: str):
    """Return a figure of each rank's share of parameters, gradients and optimizer states.

    Each way of dividing them is a row.

    A frame is the whole of one part, as wide as its bytes, and what other ranks hold of it is
    white.
    """
    about = "derived, in fp32 · W weights, G gradients, S states · white: on other ranks"
    figure, ax = style.start(title, about)
    looks = style.look(PARTS).values()
    rows = [("way", *(f"{part} on one rank" for part in PARTS))]
    for row, way in enumerate(WAYS):
        box = {"height": 1, "bottom": -1.3 * row, "align": "edge"}
        shares = [1 / world_size if part in WAYS[way] else 1 for part in PARTS]
        for rank in range(world_size):
            left = 3.9 * rank
            for letter, width, share, look in zip("WGS", WIDTHS, shares, looks, strict=True):
                begin = left + rank * share * width if share < 1 else left
                ax.bar(left, width=width, facecolor="white", **THIN, **box)
                ax.bar(begin, width=share * width, **look, **box)
                # The letters stand above the first row alone.
                if row == 0:
                    ax.text(left + width / 2, 1.08, letter, ha="center", va="bottom", fontsize=9.5)
                left += width + 0.08
        said = ("all" if share == 1 else f"1/{world_size}" for share in shares)
        rows.append((way, *said))
    ax.set(xlim=(-0.2, 3.9 * world_size - 0.6), ylim=(-1.3 * row - 0.2, 1.55))
    ax.set_yticks([0.5 - 1.3 * row for row in range(len(WAYS))], WAYS)
    ranks = range(world_size)
    ax.set_xticks([3.9 * rank + 1.58 for rank in ranks], [f"rank {rank}" for rank in ranks])
    _bare(ax)
    return style.finish(figure, rows, f"Frames. {title} on {world_size} ranks.", say_rows=True)


def _bare(ax: Any) -> None:
    """Take away what is no part of a drawing: grid, ticks and frame."""
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


@style.styled()
def two_collectives(given: Numbers, reduced: Numbers, gathered: Numbers, title: str):
    """Return a figure of each rank's numbers before and after a reduce-scatter and an all-gather.

    A rank is a row. What another rank holds is white, and a part has the colour of its rank.
    """
    figure, ax = style.start(title, "computed on real ranks · white: held by another rank")
    length = len(given[0])
    part = length // len(given)
    columns = {
        "each hands in a vector": given,
        "reduce-scatter: its part": reduced,
        "all-gather: the whole vector": gathered,
    }
    for column, (head, ranks) in enumerate(columns.items()):
        left = column * (length + 1.2)
        ax.text(left, 0.8, head, fontsize=9.5)
        for rank, numbers in enumerate(ranks):
            blocks = [left + place for place in range(length)]
            ax.bar(blocks, 0.62, 0.94, -rank, align="edge", facecolor="white", **THIN)
            first = 0 if len(numbers) == length else rank * part
            for place, number in enumerate(numbers, first):
                # The ranks' own addends are paler than their sum.
                face = (style.LINES[place // part][0], 0.5 if column else 0.18)
                ax.bar(blocks[place], 0.62, 0.94, -rank, align="edge", facecolor=face)
                x = blocks[place] + 0.47
                ax.text(x, 0.3 - rank, f"{number}", ha="center", va="center", fontsize=8)
    rows = [("rank", *columns)]
    for rank, held in enumerate(zip(*columns.values(), strict=True)):
        rows.append((f"{rank}", *map(str, held)))
    ranks = range(len(given))
    ax.set_yticks([0.3 - rank for rank in ranks], [f"rank {rank}" for rank in ranks])
    ax.set_xticks([])
    ax.set(xlim=(-0.2, 3 * length + 2.6), ylim=(0.9 - len(given), 1.2))
    _bare(ax)
    figure.set_figheight(2.6)
    return style.finish(figure, rows, f"Rows of blocks. {title}.", say_rows=True)


@style.styled()
def gather_use_free(layers: int, title: str):
    """Return a figure of what one of two ranks has of each layer's weight while a step runs.

    A column is a pass through one layer. The rank's own half is dark at all times; the half that
    was gathered is pale.
    """
    figure, ax = style.start(title, "rank 0 of two · dark: its shard · pale: gathered for a moment")
    own = style.LINES[0][0]
    box = {"align": "edge", "height": 0.7}
    middle = {"ha": "center", "va": "center", "fontsize": 8.5}
    names = [f"layer {number}" for number in range(1, layers + 1)]
    moments = [(f"forward\n{name}", name, "gather") for name in names]
    for name in names[::-1]:
        moments.append((f"backward\n{name}", name, "gather, then\nreduce-scatter"))
    rows = [("moment", *names, SENT)]
    for column, (head, computes, sent) in enumerate(moments):
        ax.text(column + 0.4, 0.35, head, **middle)
        for row, name in enumerate(names, 1):
            ax.bar(column, width=0.8, bottom=-row, facecolor="white", **THIN, **box)
            ax.bar(column, width=0.4, bottom=-row, facecolor=own, **box)
            if name == computes:
                ax.bar(column + 0.4, width=0.4, bottom=-row, facecolor=(own, 0.35), **box)
        ax.text(column + 0.4, -layers - 0.55, sent, **middle)
        rows.append((head, *("whole" if name == computes else "shard" for name in names), sent))
    labels = [*names, SENT]
    ax.set_yticks([-0.65 - row for row in range(len(labels))], labels)
    ax.set_xticks([])
    ax.set(xlim=(-0.1, len(moments)), ylim=(-len(labels) - 0.1, 0.8))
    _bare(ax)
    figure.set_figheight(0.9 + len(labels) / 2)
    return style.finish(figure, rows, f"Boxes in time. {title}.", say_rows=True)


@style.styled()
def gathers_in_time(gather: int, samples: Sequence[int], title: str):
    """Return a figure of four layers' forward passes, one for each number of samples on a card.

    A layer computes 1 ms for each sample. Meanwhile the next is gathered, which takes `gather` ms.
    """
    figure, ax = style.start(title, "derived: the forward pass of layers 1 to 4")
    rows = [("samples on a card", "layers compute from, ms")]
    for count in samples:
        pace = max(gather, count)  # from one layer's begin to the next one's
        begins = [gather + pace * layer for layer in range(4)]
        gathers = [0, *begins[:3]]  # each when the layer before begins
        rows.append((f"{count}", f"{begins}"))
        for lane, width, lefts in (("computes", count, begins), ("gathers", gather, gathers)):
            name = [f"{count} on a card: {lane}"] * 4
            look = {"facecolor": (style.LINES[lane == "computes"][0], 0.35), **THIN}
            boxes = ax.barh(name, width, 0.7, lefts, **look)
            ax.bar_label(boxes, "1234", label_type="center", fontsize=8.5)
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.set(xlabel="ms", xticks=range(0, 20, 5))
    figure.set_figheight(2.9)
    return style.finish(figure, rows, f"Boxes in time. {title}.", say_rows=True)
