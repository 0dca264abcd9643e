"""Drawings of chapter 10: a picture's patches, GRPO's tenants, how a run grows with its text."""

from collections.abc import Mapping

from vramlab import Recipe, find_gpu, predict
from vramlab.hardware.gpu import usable_memory
from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import draw_limit
from vramlab.report.compare import check_unit
from vramlab.report.report import GiB

# What GRPO's tenants hold, and the category whose look each has.
TENANTS = {
    "policy": "parameters",
    "policy: optimizer states": "optimizer_states",
    "reference": "buffers",
    "engine": "kv_cache",
    "scoring: logits": "temporaries",
    "policy: gradients": "gradients",
    "policy: activations": "activations",
}
LENGTHS = tuple(2**power for power in range(11, 18))  # tokens of a text


@style.styled()
def patches(columns: int, rows: int, title: str):
    """Return a figure of a picture of patches of 16 × 16 pixels, 2 × 2 of them a token."""
    about = f"{16 * columns} × {16 * rows} pixels · thin lines: patches · thick lines: tokens"
    figure, ax = style.start(title, about)
    ax.bar(columns / 2, rows, columns, facecolor="#E3EEF5")
    for line, count, length in ((ax.vlines, columns, rows), (ax.hlines, rows, columns)):
        for place in range(count + 1):
            line(place, 0, length, color=style.INK, linewidth=0.5 if place % 2 else 2.5)
    ax.set(ylim=(-0.1, rows + 0.1), aspect="equal")
    ax.axis("off")
    figure.set_figheight(3)
    return style.finish(figure, [], f"A grid of squares. {title}. {about}.")


@style.styled()
def tenants(
    phases: Mapping[str, Mapping[str, float]],
    title: str,
    about: str,
    unit: str = "GiB",
    limit: str | None = None,
):
    """Return a figure of the bytes that each of TENANTS has in each phase, a bar for a phase."""
    figure, ax = style.start(title, about)
    size = check_unit(unit)
    tops = [0.0] * len(phases)
    rows = [(unit, *phases)]
    for name, category in TENANTS.items():
        sizes = [split.get(name, 0) / size for split in phases.values()]
        if any(sizes):
            look = style.look([category])[category]
            drawn = ax.bar([*phases], sizes, 0.8, tops, label=name, **look)
            tops = [*map(sum, zip(tops, sizes, strict=True))]
            rows.append((name, *(f"{size:.1f}" for size in sizes)))
    totals = [f"{top:.1f}" for top in tops]
    ax.bar_label(drawn, totals, padding=3, fontweight="bold", bbox=style.PATCH)
    rows.append(("total", *totals))
    ax.set_xticks(range(len(phases)), [name.replace(", ", "\n") for name in phases])
    draw_limit(ax.axhline, limit, unit)
    ax.set(ylabel=unit, ylim=(0, 1.12 * ax.dataLim.y1))
    return style.finish(figure, rows, f"Stacked bars. {title}. {about}.", say_rows=True)


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
