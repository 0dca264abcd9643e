"""Drawings of chapter 09: where a model and its batch can be cut, and how long each cut waits."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

from vramlab.interfaces.plot import style

from ..chapters.chapter_09 import Ways, fsdp_step

SECONDS = {"forward": 1, "backward": 2}  # of a micro-batch on one stage, in forward passes
Order = Callable[[int, int, int], list[tuple[str, int]]]  # of stage, stages and micro-batches
THIN = {"edgecolor": "#888888", "linewidth": 0.6}
SHOWN = (2048, 8192, 32_768)  # tokens, in the table of the ways to cut
SHARED = "#DDDDDD"  # what all ranks have
HATCHES = ("", "///", "...", "xxx")  # of ranks 0 to 3, for grey print
# The map's cuts between two cards: what each card holds of model and batch, and what travels.
CUTS = {
    "DDP (chapter 04)": ("the whole model, its own samples", "gradients"),
    "1 · FSDP": ("half of each weight, its own samples", "weights and gradients"),
    "2 · pipeline": ("some of the layers, all samples", "activations, at the cut"),
    "3 · tensor": ("half of each matrix, all samples", "sums, in every layer"),
    "4 · context": ("the whole model, half of each sample", "keys and values"),
    "5 · experts": ("half of the experts, its own samples", "tokens, there and back"),
}


def _rank_look(rank: int | None) -> dict[str, Any]:
    """Return the face of what a rank holds; None: of what all hold."""
    if rank is None:
        return {"facecolor": SHARED}
    colour = style.LINES[rank][0]
    return {"facecolor": (colour, 0.55), "hatch": HATCHES[rank], "edgecolor": "white"}


def _box(ax: Any, at: tuple[float, float], size: tuple[float, float], **look: Any) -> None:
    """Draw a rectangle by its lower left corner."""
    x, y = at
    width, height = size
    ax.bar(x, height, width, y, align="edge", **{"linewidth": 0.0} | look)


def _bare(ax: Any) -> None:
    """Take away what is no part of a drawing: grid, ticks and frame."""
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def _holder(cut: str, layer: int, column: int, upper: bool) -> int | None:
    """Return which of two cards holds a piece of a layer on the map; None: both."""
    return {
        "1 · FSDP": int(not upper),
        "2 · pipeline": layer // 2,
        "3 · tensor": column // 2,
        "5 · experts": None if upper else column // 2,
    }.get(cut)


def _reader(cut: str, sample: int, token: int) -> int | None:
    """Return which of two cards computes with a token of a sample on the map; None: both."""
    if cut in ("2 · pipeline", "3 · tensor"):
        return None
    return token // 2 if cut == "4 · context" else sample


@style.styled()
def map_of_cuts(title: str):
    """Return a figure of one model and one batch, cut between two cards in each way of `CUTS`."""
    about = "left: a batch of 2 samples × 4 tokens · right: a model of 4 layers"
    figure, ax = style.start(title, about)
    for number, (cut, (_, travels)) in enumerate(CUTS.items()):
        left = 7.4 * (number % 3)
        low = -6.6 * (number // 3)
        ax.text(left, low + 4.55, cut, fontweight="bold", fontsize=9.5)
        ax.text(left, low - 0.3, f"travels: {travels}", va="top", fontsize=8)
        ax.text(left, low + 2.85, "batch", fontsize=8, color="#444444")
        for sample in range(2):
            for token in range(4):
                at = (left + 0.5 * token, low + 2.2 - 0.6 * sample)
                look = _rank_look(_reader(cut, sample, token))
                _box(ax, at, (0.46, 0.46), **look)
        for layer in range(4):
            for column in range(4):
                for upper in (False, True):
                    at = (left + 2.7 + column, low + 3.4 - 1.1 * layer + 0.45 * upper)
                    look = _rank_look(_holder(cut, layer, column, upper))
                    # Experts are blocks of their own; everything else is one piece.
                    gap = 0.12 if "experts" in cut and not upper else 0.0
                    _box(ax, at, (1 - gap, 0.45), **look)
    for rank in (0, 1, None):
        name = "on both cards" if rank is None else f"card {rank} only"
        ax.bar(0, 0, label=name, **_rank_look(rank))
    ax.set(xlim=(-0.2, 22), ylim=(-7.6, 5.2))
    _bare(ax)
    rows = [("cut", "a card holds", "travels")]
    rows += [(cut, *both) for cut, both in CUTS.items()]
    return style.finish(figure, rows, f"Six small drawings. {title}.", say_rows=True)


@style.styled()
def tensor_cut(title: str):
    """Return a figure of a feed-forward block that is cut for two ranks."""
    figure, ax = style.start(title, "grey: on both ranks · blue: rank 0 · hatched: rank 1")
    # The rank that holds it, left, low, width and height.
    for rank, *at, width, height in (
        (None, 0, 2.5, 4, 3),  # x
        (0, 6, 2, 4, 4),  # up, by columns
        (1, 10, 2, 4, 4),
        (0, 16, 2.5, 4, 3),  # the wide numbers
        (1, 20, 2.5, 4, 3),
        (0, 26, 4, 4, 4),  # down, by rows
        (1, 26, 0, 4, 4),
        (0, 32, 2.5, 4, 3),  # the parts
        (1, 38, 2.5, 4, 3),
        (None, 44, 2.5, 4, 3),  # y
    ):
        _box(ax, (at[0], at[1]), (width, height), **_rank_look(rank))
    heads = {2: "x", 10: "up", 20: "relu of each", 28: "down", 34: "part 0", 40: "part 1", 46: "y"}
    for middle, name in heads.items():
        ax.text(middle, 8.5, name, ha="center", fontsize=9)
    for middle, sign in zip((5, 15, 25, 31, 37, 43), "@→@→+=", strict=True):
        ax.text(middle, 4, sign, ha="center", va="center", fontsize=12)
    ax.text(37, 0.6, "the all-reduce", ha="center", fontsize=9)
    ax.set(xlim=(-0.3, 48.3), ylim=(-0.3, 9.5))
    _bare(ax)
    figure.set_figheight(2.4)
    alt = f"Matrices in a row. {title}. x is on both ranks. Each rank has half of the columns of "
    alt += "up, so half of the wide numbers, and the half of the rows of down that belong to them. "
    alt += "Its part is as large as y, and an all-reduce adds both parts."
    return style.finish(figure, [], alt)


@style.styled()
def handed_on(
    title: str,
    about: str,
    heads: list[str],
    pieces: Sequence[str],
    steps: Mapping[str, str],
    later: bool = True,
):
    """Return a figure of a ring: in each step every rank hands its piece to the rank on its right.

    `heads` name the ranks; `steps` has what is added to the words of pieces in a step. Without
    `later` the pieces of later ranks are white.
    """
    figure, ax = style.start(title, about)
    rows = [("in", *heads)]
    for step, (name, more) in enumerate(steps.items()):
        line = [name]
        for rank in range(len(heads)):
            source = (rank - step) % len(heads)
            looked_at = later or source <= rank
            look = _rank_look(source) if looked_at else {"facecolor": "white", **THIN}
            _box(ax, (rank, -step), (0.8, 0.72), **look)
            words = pieces[source] + more
            ax.text(rank + 0.4, 0.36 - step, words, ha="center", va="center", bbox=style.PATCH)
            line.append(words if looked_at else f"{words}, not looked at")
            if step + 1 < len(steps) and rank + 1 < len(heads):
                tip = {"arrowstyle": "->", "color": style.INK}
                ax.annotate("", (rank + 1.1, -step - 0.25), (rank + 0.75, -step), arrowprops=tip)
        rows.append(tuple(line))
    _bare(ax)
    ax.set_xticks([rank + 0.4 for rank in range(len(heads))], heads)
    ax.set_yticks([0.36 - step for step in range(len(steps))], steps)
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    ax.set(xlim=(-0.1, len(heads)), ylim=(0.8 - len(steps), 0.9))
    figure.set_figheight(1.2 + 0.55 * len(steps))
    return style.finish(figure, rows, f"A grid of steps and ranks. {title}.", say_rows=True)


def ring(title: str):
    """Return a figure of whose keys each of four ranks has in each step; white: of later tokens."""
    about = "queries stay; keys and values go one rank to the right in every step, and from the "
    about += "last to the first · white: later tokens, which are not looked at"
    ranks = range(4)
    heads = [f"rank {rank}:\nqueries {rank}" for rank in ranks]
    keys = [f"keys {rank}" for rank in ranks]
    steps = {f"step {step}": "" for step in ranks}
    return handed_on(title, about, heads, keys, steps, later=False)


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


def waiting(order: Order, stages: int, micro_batches: int) -> float:
    """Return the share of the stages' time in which they wait, if each follows `order`."""
    orders = [order(stage, stages, micro_batches) for stage in range(stages)]
    return bubble(pipeline_ends(orders))


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
def ways_to_cut(ways: Ways, title: str, about: str):
    """Return a figure of how many times its computing a step takes, over the tokens of a rank.

    Above is FSDP, where dots are Answer.AI's runs on two RTX 3090; below are the cuts, with LoRA.
    """
    figure, (upper, lower) = style.start(title, about, rows=2, sharex=True, sharey=True)
    tokens = [2 ** (eighth / 8) for eighth in range(80, 129)]
    rows = [("a step takes", *(f"{each:,} tokens a rank" for each in SHOWN))]
    for ax, panel in (
        (
            upper,
            {
                "FSDP, LoRA, nothing hidden": (ways.unhidden, "#0072B2", "-", (2800, 2.75)),
                "FSDP, QLoRA, nothing hidden": (
                    partial(ways.unhidden, method="qlora"),
                    "#009E73",
                    "-.",
                    (1024, 0.6),
                ),
            },
        ),
        (
            lower,
            {
                "FSDP, LoRA, best case": (ways.hidden, "#D55E00", "--", (1650, 2.9)),
                "tensor": (ways.tensor, "#CC79A7", "-.", (16_384, 2.05)),
                "pipeline": (ways.pipeline, "#777777", ":", (1024, 1.3)),
            },
        ),
    ):
        for name, (line, colour, look, place) in panel.items():
            ax.plot(tokens, [line(each) for each in tokens], look, color=colour)
            ax.text(*place, name, color=colour)
            rows.append((name, *(f"{line(each):.2f} ×" for each in SHOWN)))
    said = []
    for method, marker, batches in (("LoRA", "ok", (1, 4, 6)), ("QLoRA", "sk", (1, 4, 10))):
        dots = [
            (each.tokens, each.seconds / each.computing)
            for each in (fsdp_step("RTX 3090", method.lower(), batch) for batch in batches)
        ]
        upper.plot(*zip(*dots, strict=True), marker)
        said += [f"{method}: published {more:.2f} × with {at:,}" for at, more in dots]
    # Forward is a third of the computing, and hides its gathering last.
    enough = 1.5 * ways.unhidden(1) - 1.5
    lower.text(enough, 0.5, f"↑ {enough:,.0f}: all is hidden")
    # There a pipeline's wait, 1024 / tokens, is what FSDP does not hide of its forward pass.
    even = enough - 3072
    lower.text(even, 0.5, f"pipeline = FSDP: {even:,.0f} ↑", ha="right")
    figure.supylabel("step / computing")
    upper.set(xscale="log", ylim=(0.3, 4))
    lower.set_xlabel("tokens of a rank in one pass")
    marks = tokens[::8]
    lower.set_xticks(marks, [f"{mark:,.0f}" for mark in marks])
    lower.minorticks_off()
    return style.finish(
        figure, rows, f"Lines and dots. {title}. {about}. {', '.join(said)}.", say_rows=True
    )
