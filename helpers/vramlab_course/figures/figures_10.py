"""Drawings of chapter 10: what is there at some moments, how a run grows with its text."""

from collections.abc import Mapping

from vramlab import Recipe, find_gpu, predict
from vramlab.hardware.gpu import usable_memory
from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import draw_limit
from vramlab.report.report import GiB

# What is on the card at a moment, and the category whose look each has.
HELD = {"kept": "parameters", "for a moment": "activations"}
LENGTHS = tuple(2**power for power in range(11, 18))  # tokens of a text


@style.styled()
def held(moments: Mapping[str, Mapping[str, float]], title: str, about: str, limit: str):
    """Return a figure of who holds what at some moments, a bar each, and a card's line."""
    figure, ax = style.start(title, about)
    tops = [0.0] * len(moments)
    rows = [("GiB", *(name.replace("\n", " ") for name in moments))]
    for name, category in HELD.items():
        sizes = [split.get(name, 0) / GiB for split in moments.values()]
        if not any(sizes):
            continue
        look = style.look([category])[category]
        drawn = ax.bar([*moments], sizes, 0.7, tops, label=name, **look)
        tops = [*map(sum, zip(tops, sizes, strict=True))]
        rows.append((name, *(f"{size:.1f}" for size in sizes)))
    totals = [f"{top:.1f}" for top in tops]
    ax.bar_label(drawn, totals, padding=3, fontweight="bold", bbox=style.PATCH)
    rows.append(("total", *totals))
    draw_limit(ax.axhline, limit, "GiB")
    ax.set(ylabel="GiB", ylim=(0, 1.12 * ax.dataLim.y1))
    alt = f"Stacked bars. {title}. {about}. {_room(limit)}"
    return style.finish(figure, rows, alt, say_rows=True)


@style.styled()
def growth(ladder: Mapping[str, Recipe], limit: str, title: str):
    """Return a figure of each recipe's predicted peak over the text's length, and a card's line."""
    first = next(iter(ladder.values()))
    about = f"predicted: {first.name}, LoRA, {first.precision}, one text"
    figure, ax = style.start(title, about)
    rows = [("peak, GiB, at tokens", *(f"{length:,}" for length in LENGTHS))]
    looks = zip(ladder.items(), style.LINES, strict=False)
    for (name, recipe), (colour, mark, dash) in looks:
        peaks = []
        for length in LENGTHS:
            report = predict(recipe.replace(seq_len=length), gpu=limit)
            peaks.append(report.peak.total / GiB)
        ax.plot(
            LENGTHS,
            peaks,
            color=colour,
            marker=mark,
            linestyle=dash,
            label=name,
        )
        rows.append((name, *(f"{peak:,.1f}" for peak in peaks)))
        ax.text(LENGTHS[-1], peaks[-1], f"  {peaks[-1]:,.0f}")
    draw_limit(ax.axhline, limit, "GiB")
    # Both axes are logarithmic.
    ax.set(
        xlabel="tokens of a text, each mark twice the last",
        ylabel="peak, GiB, each mark twice the last",
        xscale="log",
        yscale="log",
    )
    ax.minorticks_off()
    ax.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    sizes = [2**power for power in range(4, 11)]
    ax.set_yticks(sizes, [f"{size:,}" for size in sizes])
    alt = f"Lines over the length of a text. {title}. {about}. {_room(limit)}"
    return style.finish(figure, rows, alt, say_rows=True)


def _room(limit: str) -> str:
    return f"The card has {usable_memory(find_gpu(limit)) / GiB:.1f} GiB. "
