"""Chapter 02's pictures: a step's peak from close by, and what a Llama layer keeps."""

from collections.abc import Sequence

from vramlab import MiB, Report
from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import layers, split_of

NEAR = 15  # allocation events on either side of the peak

# What a layer keeps, in the order in which it makes it: the part's colour, and its tensors.
NORM = ("its input, fp32", "one number, fp32", "the input, normalized", "the result")
KEPT = {
    "norm 1": ("#56B4E9", NORM),
    "attention": (
        "#0072B2",
        ("queries, rotated", "keys, rotated", "values", "a number a head, fp32", "the result"),
    ),
    "norm 2": ("#56B4E9", NORM),
    "feed-forward": ("#D55E00", ("gate", "SiLU of the gate", "up", "SiLU × up")),
}


def close_up(figure, report: Report):
    """Add the events around the peak to a figure of `report`'s timeline in MiB, as an inset."""
    high = max(report.timeline, key=lambda moment: moment.bytes.total)
    near = [moment for moment in report.timeline if abs(moment.index - high.index) < NEAR]
    x = [moment.index for moment in near]
    ax = figure.axes[0].inset_axes((0.66, 0.42, 0.33, 0.36))
    base = [0.0] * len(x)
    for heights, look in layers([split_of(moment.bytes) for moment in near], "MiB"):
        above = [low + height for low, height in zip(base, heights, strict=True)]
        ax.fill_between(x, base, above, step="post", **look)
        base = above
    ax.set(xlim=(x[0], x[-1]), ylim=(160, high.bytes.total / MiB + 10), xticks=[])
    ax.set_title("the peak from close by", fontsize=9)
    ax.tick_params(labelsize=8)


@style.styled()
def layer(sizes: Sequence[int], title: str, about: str):
    """Return a figure of a layer from top to bottom, with the bytes a token of each tensor kept.

    `sizes` are in the order in which the layer saves them, that of KEPT.
    """
    figure, ax = style.start(title, about)
    rows = [("part", "tensor", "bytes a token")]
    for part, (colour, names) in KEPT.items():
        start = len(rows) - 1
        own = sizes[start : start + len(names)]
        rows += [(part, name, f"{size:,}") for name, size in zip(names, own, strict=True)]
        drawn = ax.barh(range(start, start + len(own)), own, color=colour)
        ax.bar_label(drawn, fmt="{:,.0f}", padding=4, fontsize=8)
        ax.text(
            0.95,  # to the right of all bars
            start + (len(own) - 1) / 2,
            f"{part}\n{sum(own):,}",
            rotation=270,
            va="center",
            ha="center",
            transform=ax.get_yaxis_transform(),
            fontsize=8,
        )
        ax.axhline(start - 0.5, color=style.INK, linewidth=0.8)
    ax.set_yticks(range(len(sizes)), [row[1] for row in rows[1:]], fontsize=8)
    ax.set(
        xlabel="bytes for each token",
        xticks=[],
        ylim=(len(sizes) - 0.4, -0.45),
        xlim=(0, 1.28 * max(sizes)),
    )
    ax.grid(visible=False)
    said = "; ".join(f"{part}, {name}: {size}" for part, name, size in rows[1:])
    return style.finish(figure, rows, f"A layer from top to bottom. {said}.")
