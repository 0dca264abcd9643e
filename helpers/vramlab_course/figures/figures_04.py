"""Drawings of chapter 04: which rank holds what and when, two collectives, who waits for what."""

from collections.abc import Mapping, Sequence
from typing import Any

from vramlab.interfaces.plot import style

Numbers = Sequence[Sequence[int]]  # of each rank
SENT = "sent"  # the row without boxes
THIN = {"edgecolor": "#888888", "linewidth": 0.6}

PARTS = ("parameters", "gradients", "optimizer_states")
WIDTHS = (0.375, 0.375, 2.25)  # as the paper's 2, 2 and 12 bytes a parameter
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
    about = "derived · W weights, G gradients, S states · white: on other ranks"
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
        "each hands in a row": given,
        "reduce-scatter: its part": reduced,
        "all-gather: the whole row": gathered,
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


def gather_use_free(layers: int, title: str):
    """Return a figure of what one of two ranks has of each layer's weight while a step runs.

    A column is a pass through one layer. The rank's own half is dark at all times; the half that
    was gathered is pale.
    """
    names = [f"layer {number}" for number in range(1, layers + 1)]
    moments = {f"forward\n{name}": {name: "", SENT: "gather"} for name in names}
    for name in names[::-1]:
        moments[f"backward\n{name}"] = {name: "", SENT: "gather, then\nreduce-scatter"}
    about = "rank 0 of two · dark: its shard · pale: gathered for a moment"
    return _moments([*names, SENT], moments, 0.4, title, about)


def backward_in_units(layers: int, title: str):
    """Return a figure of what one of two ranks holds of each unit while FSDP's backward pass runs.

    A column is a moment in which one layer computes. The shard is dark, and the whole unit that
    lies there too is pale and twice as wide.
    """
    names = [f"layer {number}" for number in range(1, layers + 1)]
    moments = {}
    for now in range(layers - 1, 0, -1):
        whole = {"embedding, head": "weights", names[now]: "weights", names[now - 1]: "arriving"}
        whole |= {name: "gradients" for name in names[now + 1 : now + 2]}
        moments[f"{names[now]}\ncomputes"] = whole
    about = "rank 0 of two · dark: its shard · pale: a whole unit that lies there too"
    return _moments(["embedding, head", *names], moments, 0.27, title, about)


@style.styled()
def _moments(
    names: Sequence[str],
    moments: Mapping[str, Mapping[str, str]],
    shard: float,
    title: str,
    about: str,
) -> Any:
    """A column for each moment, with what is said of some rows; `shard` is its part's width."""
    figure, ax = style.start(title, about)
    own = style.LINES[0][0]
    box = {"align": "edge", "height": 0.7}
    middle = {"ha": "center", "va": "center", "fontsize": 8.5}
    rows = [("moment", *names)]
    for column, (head, said) in enumerate(moments.items()):
        ax.text(column + 0.4, 0.35, head, **middle)
        for low, name in enumerate(names):
            low = -1 - low
            if name == SENT:
                ax.text(column + 0.4, low + 0.45, said[name], **middle)
                continue
            ax.bar(column, width=0.8, bottom=low, facecolor="white", **THIN, **box)
            ax.bar(column, width=shard, bottom=low, facecolor=own, **box)
            if name in said:
                width = 0.8 - shard
                ax.bar(column + shard, width=width, bottom=low, facecolor=(own, 0.35), **box)
                ax.text(column + shard + width / 2, low + 0.35, said[name], **middle)
        rows.append((head, *(said.get(name, "shard") or "whole" for name in names)))
    ax.set_yticks([-0.65 - row for row in range(len(names))], names)
    ax.set_xticks([])
    ax.set(xlim=(-0.1, len(moments)), ylim=(-len(names) - 0.1, 0.8))
    _bare(ax)
    figure.set_figheight(0.9 + len(names) / 2)
    return style.finish(figure, rows, f"Boxes in time. {title}.", say_rows=True)


@style.styled()
def two_lanes(steps: Mapping[str, Mapping[str, tuple[float, float]]], title: str, about: str):
    """Return a figure of a step's passes in time: above what computes, below what is sent.

    `steps` has by name each step's passes, with the seconds of computing and of sending. A pass
    takes the longer of both; what cards wait for the link is white.
    """
    figure, ax = style.start(title, about)
    rows = [("step and pass", "computing, s", "sending, s", "takes, s")]
    ticks = {}
    for row, (name, passes) in enumerate(steps.items()):
        low = -2.6 * row
        ticks |= {low + 0.4: f"{name}: compute", low - 0.5: "send"}
        start = 0.0
        for label, both in passes.items():
            takes = max(both)
            for lane, seconds in enumerate(both):
                at = (low - 0.9 * lane, 0.8)
                # An idle link costs nothing, so cards alone have a frame with white in it.
                if lane == 0:
                    ax.broken_barh([(start, takes)], at, facecolor="white", **THIN)
                ax.broken_barh(
                    [(start, seconds)], at, facecolor=style.LINES[lane][0], edgecolor="white"
                )
            ax.text(start + takes / 2, low + 0.88, label, ha="center", fontsize=9.5)
            rows.append((f"{name}, {label}", *(f"{n:.2f}" for n in (*both, takes))))
            start += takes
        ax.text(start, low - 0.05, f" {start:.2f} s", va="center", fontweight="bold")
    ax.set_yticks([*ticks], ticks.values())
    ax.set(xlabel="seconds; white: the cards wait", xlim=(0, None), ylim=(low - 1.1, 1.4))
    ax.grid(visible=False)
    figure.set_figheight(3.4)
    return style.finish(figure, rows, f"Two lanes for each step. {title}.", say_rows=True)
