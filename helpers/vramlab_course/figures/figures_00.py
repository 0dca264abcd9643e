"""Chapter 00's pictures: why a run that passed its first step dies in the second.

Another shows what of a peak stays and what comes and goes.
"""

from collections.abc import Mapping

from vramlab.hardware.gpu import Gpu
from vramlab.interfaces.plot import style
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import Bytes, GiB, Report, TensorGroup
from vramlab.simulation.simulate import trace

COMES_AND_GOES = {"facecolor": "#C8C8C8", "linewidth": 0}


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
    looks = style.look(["parameters", "optimizer_states"])
    rows = [("step", "states at its start, GiB", "peak, GiB")]
    for n, run in enumerate((first, second)):
        alive = [moment.bytes for moment in run.timeline]
        # Each step is one wide, however many events it has.
        x = [n + i / len(alive) for i in range(len(alive))]
        total = [held.total / GiB for held in alive]
        parameters = [held.parameters / GiB for held in alive]
        base = [(held.parameters + held.optimizer_states) / GiB for held in alive]
        # Each is drawn from 0 over the one before.
        ax.fill_between(x, total, **COMES_AND_GOES)
        ax.fill_between(x, base, **looks["optimizer_states"])
        ax.fill_between(x, parameters, **looks["parameters"])
        top = max(total)
        place = (x[total.index(top)] + 0.03, top - 0.5)
        ax.annotate(f"{top:.2f} GiB: the loss", place, fontweight="bold")
        states = f"{base[0] - parameters[0]:.2f}"
        rows.append((str(n + 1), states, f"{top:.2f}"))
    limit = room / GiB
    ax.axhline(limit, color=style.ALARM, linestyle="--")
    # `x` and `total` are still the second step's.
    died = next(place for place, size in zip(x, total, strict=True) if size > limit)
    ax.plot(died, limit, "X", color=style.ALARM, markersize=10)
    for said, place in {f"a T4's {limit:.2f} GiB": 0.01, "dies here": died - 0.28}.items():
        ax.annotate(said, (place, limit + 0.3), color=style.ALARM)
    # The update is the bump between the hills: gradients are still there when the states come.
    words = {
        f"parameters: {parameters[0]:.1f} GiB": (1.5, parameters[0] / 2),
        f"AdamW's states: {states} GiB": (1.5, (parameters[0] + base[0]) / 2),
        "activations, gradients": (0.47, 4),
        "update": (0.98, 9.2),
    }
    for said, place in words.items():
        ax.annotate(said, place, ha="center", bbox=style.PATCH)
    ax.set(xlim=(0, 2.02), ylim=(0, 20), ylabel="GiB")
    ax.set_xticks([0.5, 1.5], ["step 1", "step 2"])
    alt = f"{title}. Two hills; the second stands on the states and crosses the card's line."
    return style.finish(figure, rows, alt, say_rows=True)


OTHERS = "norms, sums and others"
STAYS = {"parameters": "parameters", "optimizer states": "optimizer_states"}


def parts_at_peak(recipe: Recipe, card: Gpu) -> dict[str, int]:
    """Bytes of everything that is alive at the peak of the second step, by where it comes from.

    Simulated, for a model whose layers have `self_attn` and `mlp`. What stays comes first.
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
    return dict(sorted(parts.items(), key=lambda item: (item[0] not in STAYS, -item[1])))


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


@style.styled()
def stacked(peaks: Mapping[str, Bytes], room: int, title: str, about: str):
    """Return a figure of each peak as a bar of its parts, with a line at `room` bytes."""
    figure, ax = style.start(title, about)
    looks = style.look(["parameters", "optimizer_states", "gradients"])
    rows = [("peak", "GiB")]
    for name, peak in peaks.items():
        end = 0.0
        for kind, look in looks.items():
            size = getattr(peak, kind) / GiB
            label = kind.replace("_", " ") if size else ""
            ax.barh(name, size, left=end, label=label, **look)
            end += size
        total = peak.total / GiB
        rest = ax.barh(name, total - end, left=end, label="rest of the hill", **COMES_AND_GOES)
        rows.append((name, f"{total:.1f}"))
        ax.bar_label(rest, [rows[-1][1]], padding=4)
    ax.axvline(room / GiB, color=style.ALARM, linestyle="--", label="room for tensors")
    ax.set(xlabel="GiB", xlim=(0, 20))
    ax.invert_yaxis()
    ax.grid(False)
    return style.finish(figure, rows, f"Bars. {title}.", say_rows=True)
