"""Chapter 02's picture: a Llama layer, and what it keeps for the backward pass."""

from collections.abc import Sequence

from vramlab.interfaces.plot import canvas, style

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
    (PARTS[3], "gate × up"),
)
COLOURS = dict(zip(PARTS, ("#56B4E9", "#0072B2", "#56B4E9", "#D55E00"), strict=True))


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
            ax.text(widest, middle, part, rotation=270, va="center", ha="center", fontsize=9)
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
