"""Chapter 02's pictures: a peak from close by, what a Llama layer keeps, and four moments."""

from collections.abc import Mapping, Sequence
from operator import add

from vramlab import MiB, Report
from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import layers, split_of
from vramlab.report.report import text_table

NEAR = 15  # allocation events on either side of the peak

# What a layer keeps, in the order in which it makes it: the tensors of each part.
NORM = ("its input, fp32", "one number, fp32", "the input, normalized", "the result")
KEPT = {
    "norm 1": NORM,
    "attention": (
        "queries, rotated",
        "keys, rotated",
        "values",
        "a number a head, fp32",
        "the result",
    ),
    "norm 2": NORM,
    "feed-forward": ("gate", "SiLU of the gate", "up", "SiLU × up"),
}
COLOURS = ("#C8C8C8", "#D55E00", "#56B4E9")  # of a bar's parts; of fewer the last ones


def close_up(figure, report: Report):
    """Add the events around the peak to a figure of `report`'s timeline in MiB, as an inset."""
    figure.axes[0].set_xlabel("allocations and releases of the step, in their order")
    high = max(report.timeline, key=lambda moment: moment.bytes.total)
    near = [moment for moment in report.timeline if abs(moment.index - high.index) < NEAR]
    x = range(len(near))
    ax = figure.axes[0].inset_axes((0.66, 0.42, 0.33, 0.36))
    base = [0.0] * len(x)
    for heights, look in layers([split_of(moment.bytes) for moment in near], "MiB"):
        above = list(map(add, base, heights))
        ax.fill_between(x, base, above, step="post", **look)
        base = above
    ax.set(ylim=(160, None), xticks=[])
    ax.margins(0)
    ax.set_title("the peak from close by", fontsize=9)


def peak_table(report: Report) -> str:
    """Return what each category has at the peak, in MiB."""
    rows = [(f"at the peak, in {report.peak_phase}", "MiB")]
    for name in ("parameters", "gradients", "optimizer_states", "activations", "temporaries"):
        rows.append((name, getattr(report.peak, name) / MiB))
    return text_table(rows, form=".1f")


def layer(sizes: Sequence[int], title: str, about: str):
    """Return a figure of a layer from top to bottom, with the bytes a token of each tensor kept.

    `sizes` are in the order in which the layer saves them, that of KEPT.
    """
    left = iter(sizes)
    parts = {}
    for part, names in KEPT.items():
        own = {name: (next(left),) for name in names}
        parts[f"{part}: together {sum(map(sum, own.values())):,}"] = own
    return bars(parts, title, about, form="{:,.0f}")


@style.styled()
def bars(groups: Mapping[str, Mapping], title: str, about: str, labels=("",), form="{:.1f}"):
    """Return a figure of bars in named groups from top to bottom: their names, and sizes.

    A bar is a stack of sizes, a label each.
    """
    figure, ax = style.start(title, about)
    figure.set_figheight(6)
    rows = [("bars", "")]
    for name, group in groups.items():
        ax.text(0, len(rows), f" {name}", va="center", fontsize=9, fontweight="bold")
        rows.append((name, ""))
        for what, sizes in group.items():
            left = 0
            for size, label, colour in zip(sizes, labels, COLOURS[-len(labels) :], strict=True):
                drawn = ax.barh(
                    len(rows),
                    size,
                    left=left,
                    color=colour,
                    label=label,
                )
                left += size
            said = form.format(left)
            ax.bar_label(drawn, [said], padding=3, fontsize=8, bbox=style.PATCH)
            rows.append((what, said))
    # A group's name stands within the axes.
    names = [what if said else "" for what, said in rows]
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.tick_params(length=0)
    ax.set(xticks=[], ylim=(len(rows) - 0.4, 0.4))
    ax.margins(x=0.12)
    ax.grid(visible=False)
    return style.finish(figure, rows, f"{title}.", say_rows=True)
