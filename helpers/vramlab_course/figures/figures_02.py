"""Chapter 02's pictures: a step's peak from close by, and what a Llama layer keeps."""

from collections.abc import Sequence

from vramlab import MiB, Report
from vramlab.interfaces.plot import canvas, style
from vramlab.interfaces.plot.splits import layers, split_of

NEAR = 15  # allocation events on either side of the peak

# What a layer keeps, in the order in which it makes it: the part, and what the tensor is.
PARTS = ("norm 1", "attention", "norm 2", "feed-forward")
NORM = ("its input, fp32", "one number, fp32", "the input, normalized", "the result")
KEPT = (
    *((PARTS[0], what) for what in NORM),
    (PARTS[1], "queries, rotated"),
    (PARTS[1], "keys, rotated"),
    (PARTS[1], "values"),
    (PARTS[1], "a number a head, fp32"),
    (PARTS[1], "the result"),
    *((PARTS[2], what) for what in NORM),
    (PARTS[3], "gate"),
    (PARTS[3], "SiLU of the gate"),
    (PARTS[3], "up"),
    (PARTS[3], "SiLU × up"),
)
COLOURS = dict(zip(PARTS, ("#56B4E9", "#0072B2", "#56B4E9", "#D55E00"), strict=True))


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


def layer(sizes: Sequence[int], title: str, about: str):
    """Return a figure of a layer from top to bottom, with the bytes a token of each tensor kept.

    `sizes` are in the order in which the layer saves them, that of KEPT.
    """
    rows = [("part", "tensor", "bytes a token")]
    spans = []
    for (part, what), size in zip(KEPT, sizes, strict=True):
        rows.append((part, what, f"{size:,}"))
        spans.append(f"{part}, {what}: {size:,}")
    said = "; ".join(spans)
    alt = f"A layer from top to bottom. {said}."
    with canvas(title, alt, about, rows) as ax:
        for y, ((part, _), size) in enumerate(zip(KEPT, sizes, strict=True)):
            ax.barh(y, size, color=COLOURS[part])
            ax.annotate(
                f"{size:,}",
                (size, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        for part in PARTS:
            at = [y for y, (own, _) in enumerate(KEPT) if own == part]
            middle = sum(at) / len(at)
            widest = max(sizes) * 1.22
            whole = f"{part}\n{sum(sizes[y] for y in at):,}"
            ax.text(widest, middle, whole, rotation=270, va="center", ha="center", fontsize=8)
            if at[-1] + 1 < len(KEPT):
                ax.axhline(at[-1] + 0.5, color=style.INK, linewidth=0.8)
        ax.set_yticks(
            range(len(KEPT)),
            [what for _, what in KEPT],
            fontsize=8,
        )
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set(
            xlabel="bytes for each token",
            ylim=(len(KEPT) - 0.4, -0.6),
            xlim=(0, widest * 1.05),
        )
        ax.grid(visible=False)
    return ax.figure
