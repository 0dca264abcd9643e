"""Drawing of chapter 10: how a run grows with its text."""

from collections.abc import Mapping

from vramlab import Recipe, find_gpu, predict
from vramlab.hardware.gpu import usable_memory
from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import draw_limit
from vramlab.report.report import GiB

LENGTHS = tuple(2**power for power in range(11, 18))  # tokens of a text


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
    draw_limit(ax.axhline, limit, "GiB")
    ax.set(xlabel="tokens of a text", ylabel="peak, GiB", xscale="log", yscale="log")
    ax.minorticks_off()
    ax.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    sizes = [2**power for power in range(4, 11)]
    ax.set_yticks(sizes, [f"{size:,}" for size in sizes])
    room = usable_memory(find_gpu(limit)) / GiB
    alt = f"Lines over the length of a text. {title}. {about}. The card has {room:.1f} GiB. "
    return style.finish(figure, rows, alt, say_rows=True)
