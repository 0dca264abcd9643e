"""Chapter 00's pictures: why a run that passed its first step dies in the second.

A second one shows what is alive at its peak.
"""

from collections.abc import Mapping

from vramlab.hardware.gpu import Gpu
from vramlab.interfaces.plot import canvas, style
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, Report, TensorGroup
from vramlab.simulation.simulate import trace

NEAR = {"textcoords": "offset points"}


@style.styled()
def two_steps(
    first: Report,
    second: Report,
    room: int,
    title: str,
    about: str,
):
    """Return a figure of what is alive in two steps, one after the other.

    It shows where the second exceeds `room` bytes.
    """
    figure, ax = style.start(title, about)
    base = style.look(["parameters", "optimizer_states"])
    rows = [("step", "states at its start, GiB", "peak, GiB")]
    for n, run in enumerate((first, second)):
        # Each step is one wide, however many events it has.
        count = len(run.timeline)
        x = [n + i / count for i in range(count)]
        total = [moment.bytes.total / GiB for moment in run.timeline]
        below = [0.0] * count
        for part, look in base.items():
            held = [getattr(moment.bytes, part) / GiB for moment in run.timeline]
            above = [low + size for low, size in zip(below, held, strict=True)]
            ax.fill_between(x, below, above, **look)
            below = above
        ax.fill_between(x, below, total, color="#C8C8C8", linewidth=0)
        top = max(total)
        ax.annotate(
            f"{top:.2f} GiB: the loss",
            (x[total.index(top)], top),
            (7, -9),
            **NEAR,
            fontweight="bold",
        )
        rows.append((str(n + 1), f"{held[0]:.2f}", f"{top:.2f}"))
    limit = room / GiB
    ax.axhline(limit, color=style.ALARM, linestyle="--")
    ax.annotate(
        f"a T4's {limit:.2f} GiB",
        (0.01, limit),
        (0, 5),
        **NEAR,
        color=style.ALARM,
    )
    # `x`, `total` and `held`, the states, are still the second step's.
    died = next(place for place, size in zip(x, total, strict=True) if size > limit)
    ax.plot(died, limit, "X", color=style.ALARM, markersize=10, zorder=5)
    ax.annotate(
        "dies here",
        (died, limit),
        (-9, 6),
        **NEAR,
        ha="right",
        color=style.ALARM,
        fontweight="bold",
    )
    # The update is the bump between the hills: gradients are still there when the states come.
    words = {
        f"parameters: {below[0] - held[0]:.1f} GiB": (1.5, (below[0] - held[0]) / 2),
        f"AdamW's states: {held[0]:.1f} GiB": (1.5, below[0] - held[0] / 2),
        "activations, gradients": (0.47, 4),
        "update": (0.98, 9.2),
    }
    for said, place in words.items():
        ax.annotate(said, place, ha="center", bbox=style.PATCH)
    ax.set(
        xlim=(0, 2.02),
        ylim=(0, 20),
        ylabel="GiB",
        xlabel="allocations and releases, in their order",
    )
    ax.set_xticks([0.5, 1.5], ["step 1", "step 2"])
    alt = (
        f"{title}. Two hills, one for each step; the second stands on the states and crosses "
        f"the card's line."
    )
    return style.finish(figure, rows, alt, say_rows=True)


OTHERS = "norms, sums and others"
STAYS = {"parameters": "parameters", "optimizer states": "optimizer_states"}


def parts_at_peak(recipe: Recipe, card: Gpu) -> dict[str, int]:
    """Bytes of everything that is alive at the peak of the second step, by where it comes from.

    Simulated, for a model whose layers have `self_attn` and `mlp`. The largest part comes first.
    """
    history = trace(recipe, card=card)
    # The highest moment from the last step's beginning on.
    top = history.highest(history.last_step[0].start)
    parts: dict[str, int] = {}
    # So many groups that all are among them.
    for group in history.largest(top, count=10_000):
        part = _part(group, recipe.shape.vocab_size)
        parts[part] = parts.get(part, 0) + group.count * group.size
    # what is no tensor: cuBLAS' second workspace, and the rounding of each storage to 512 bytes
    parts[OTHERS] += history.split(top).total - sum(parts.values())
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _part(group: TensorGroup, vocabulary: int) -> str:
    """Where a group of tensors comes from."""
    if group.category in ("parameters", "optimizer_states"):
        return group.category.replace("_", " ")
    is_16_bits = str(group.dtype).endswith("16")
    # Autocast copies matrices to 16 bits for each use.
    if is_16_bits and group.op == "_to_copy" and len(group.shape) == 2:
        return "16-bit copies of the weights"
    # The head's weight has the vocabulary too, and was taken above.
    if vocabulary in group.shape:
        return "the loss"
    # Scores of a softmax are attention's, whichever module they are put down to.
    if "softmax" in group.op or "self_attn" in group.where:
        return "attention"
    if ".mlp" in group.where:
        return "feed-forward layers"
    return OTHERS


def whole(parts: Mapping[str, int], title: str, about: str):
    """Return a figure of all parts as bars, the largest on top, with their sum in the table."""
    total = sum(parts.values())
    rows = [("part", "GiB", "share")]
    sized = {}
    words = []
    for name, size in parts.items():
        sized[name] = f"{size / GiB:.2f}"
        rows.append((name, sized[name], f"{size / total:.0%}"))
        words.append(f"{name}: {sized[name]} GiB")
    rows.append(("together", f"{total / GiB:.2f}", "100%"))
    alt = f"Bars. {title}. {'; '.join(words)}."
    looks = style.look([*STAYS.values(), "activations"])
    named = set()
    with canvas(title, alt, about, rows) as ax:
        for y, (name, size) in enumerate(parts.items()):
            category = STAYS.get(name, "activations")
            # The first bar of a category names it in the legend.
            label = "" if category in named else "activations and temporaries"
            if name in STAYS:
                label = name
            named.add(category)
            ax.barh(
                y,
                size / GiB,
                label=label,
                **looks[category],
            )
            ax.annotate(
                sized[name],
                (size / GiB, y),
                (4, 0),
                **NEAR,
                va="center",
            )
        widest = max(parts.values()) / GiB
        ax.set(
            xlabel="GiB",
            ylim=(len(parts) - 0.5, -0.5),
            xlim=(0, 1.12 * widest),
        )
        ax.set_yticks(range(len(parts)), list(parts))
        ax.grid(axis="y", visible=False)
    return ax.figure
