"""Pictures of a world of ranks: who holds what, and when each stage of a pipeline works."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...report.errors import RecipeError
from . import style

PARTS = (("parameters", "P"), ("gradients", "G"), ("optimizer_states", "S"))
WAYS = {
    "data parallel": (),
    "ZeRO-1": ("optimizer_states",),
    "ZeRO-2": ("optimizer_states", "gradients"),
    "ZeRO-3": ("optimizer_states", "gradients", "parameters"),
    "tensor": "columns",
    "pipeline": "rows",
}


@style.drawn
def who_holds_what(world_size: int = 4, ways: Sequence[str] = tuple(WAYS), title: str = "Who holds what"):
    """Every rank's share of parameters, gradients and optimizer states, a row for each way of dividing; the figure.

    A square is the whole of one part; what a rank holds of it is filled. Tensor parallelism cuts each layer upright
    (a slice of every matrix), pipelining across (some of the layers), and ZeRO cuts flat lists of numbers.

    Raises RecipeError for a way that is none of WAYS or a world outside 2 to 8.
    """
    for way in ways:
        if way not in WAYS:
            raise RecipeError("ways", way, "allowed are " + ", ".join(map(repr, WAYS)))
    if world_size not in range(2, 9):
        raise RecipeError("world_size", world_size, "2 to 8 ranks can be drawn")
    figure, ax = style.start(title, f"{world_size} ranks; one square is all of it: P parameters, G gradients, S states")
    width, looks = len(PARTS) + 0.9, style.look([name for name, _ in PARTS])
    rows = [("way", *(f"{name} on one rank" for name, _ in PARTS))]
    for row, way in enumerate(ways):
        cut, low = WAYS[way], (len(ways) - 1 - row) * 1.3
        for rank in range(world_size):
            for i, (name, letter) in enumerate(PARTS):
                left, share = rank * width + i * 1.08, rank / world_size
                ax.add_patch(_box(left, low, 1, 1, facecolor="white", edgecolor="#888888", linewidth=0.6))
                whole = cut not in ("columns", "rows") and name not in cut
                x, w = (left, 1) if whole or cut == "rows" else (left + share, 1 / world_size)
                y, h = (low + 1 - share - 1 / world_size, 1 / world_size) if cut == "rows" else (low, 1)
                ax.add_patch(_box(x, y, w, h, **looks[name]))
                if row == 0:
                    ax.text(left + 0.5, low + 1.08, letter, ha="center", va="bottom", fontsize=9.5)
        held = (f"1/{world_size}" if isinstance(cut, str) or name in cut else "all" for name, _ in PARTS)
        rows.append((way, *held))
    ax.set_xlim(-0.2, world_size * width - 0.6)
    ax.set_ylim(-0.2, len(ways) * 1.3 + 0.25)
    ax.set_yticks([(len(ways) - 1 - row) * 1.3 + 0.5 for row in range(len(ways))], ways)
    ax.set_xticks([rank * width + 1.58 for rank in range(world_size)], [f"rank {rank}" for rank in range(world_size)])
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    return style.finish(figure, rows, f"Squares. {title} on {world_size} ranks.", say_rows=True)


def _box(x: float, y: float, width: float, height: float, **look):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **look)


@dataclass(frozen=True)
class Slot:
    """One micro-batch's forward or backward pass on one stage; times in units of a forward pass."""

    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


def pipeline_slots(schedule: str, stages: int, micro_batches: int, backward: float = 2.0) -> list[Slot]:
    """When each stage works, if a forward pass takes 1, a backward pass `backward`, and sending takes nothing.

    "gpipe" runs all forward passes, then all backward passes (Huang et al. 2019); "1f1b" begins a backward pass as
    soon as one can be had, so that stage s never holds more than `stages - s` micro-batches (Narayanan et al. 2021,
    figure 4). Raises RecipeError for another schedule.
    """
    if schedule not in ("gpipe", "1f1b"):
        raise RecipeError("schedule", schedule, "allowed are 'gpipe' and '1f1b'")
    orders = []
    for stage in range(stages):
        ahead = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
        order = [("forward", m) for m in range(ahead)]
        for m in range(micro_batches):
            order.append(("backward", m))
            if ahead + m < micro_batches:
                order.append(("forward", ahead + m))
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    clock, at, found = [0.0] * stages, [0] * stages, []
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            if at[stage] == len(orders[stage]):
                continue
            kind, m = orders[stage][at[stage]]
            before = stage - 1 if kind == "forward" else stage + 1
            needs = [("forward", stage, m)] if kind == "backward" else []
            needs += [(kind, before, m)] if 0 <= before < stages else []
            if any(need not in ends for need in needs):
                continue
            start = max([clock[stage], *(ends[need] for need in needs)])
            end = start + (1.0 if kind == "forward" else backward)
            ends[kind, stage, m] = clock[stage] = end
            found.append(Slot(stage, m, kind, start, end))
            at[stage] += 1
    return sorted(found, key=lambda slot: (slot.stage, slot.start))


def bubble(slots: Sequence[Slot]) -> float:
    """The share of the stages' time in which they wait: (N − 1)/(m + N − 1) for both schedules."""
    busy = sum(slot.end - slot.start for slot in slots)
    return 1 - busy / (max(slot.end for slot in slots) * (1 + max(slot.stage for slot in slots)))


@style.drawn
def pipeline(stages: int = 4, micro_batches: int = 8, title: str = "Who works when in a pipeline"):
    """Both schedules as timelines, a row for each stage, with the waiting left white; returns the figure."""
    schedules = ("gpipe", "1f1b")
    about = f"{stages} stages, {micro_batches} micro-batches; a backward pass takes two forward passes, sending nothing"
    figure, axes = style.start(title, about, rows=len(schedules), sharex=True)
    looks = style.look(["activations", "gradients"])
    rows = [("schedule", "time units", "waiting", "most micro-batches held")]
    for ax, schedule in zip(axes, schedules, strict=True):
        slots = pipeline_slots(schedule, stages, micro_batches)
        for slot in slots:
            look = looks["activations" if slot.kind == "forward" else "gradients"]
            low = stages - 1 - slot.stage
            ax.add_patch(_box(slot.start, low + 0.08, slot.end - slot.start, 0.84, **{**look, "hatch": ""}))
            ax.text((slot.start + slot.end) / 2, low + 0.5, slot.micro_batch + 1, ha="center", va="center", fontsize=8)
        end = max(slot.end for slot in slots)
        ax.set_xlim(0, end * 1.01)
        ax.set_ylim(0, stages)
        ax.set_yticks([stages - 0.5 - s for s in range(stages)], [f"stage {s}" for s in range(stages)])
        ax.set_ylabel(schedule)
        ax.grid(visible=False)
        rows.append((schedule, f"{end:g}", f"{bubble(slots):.1%}", str(most_held(slots))))
    axes[-1].set_xlabel("time, in forward passes of one stage")
    for name, kind in (("activations", "forward pass of a micro-batch"), ("gradients", "its backward pass")):
        axes[0].bar([0], [0], 0, label=kind, **{**looks[name], "hatch": ""})
    return style.finish(figure, rows, f"Two timelines. {title}, {about}.", say_rows=True)


def most_held(slots: Sequence[Slot], stage: int = 0) -> int:
    """The most micro-batches whose activations `stage` holds at a time: between their forward and backward passes."""
    mine = [slot for slot in slots if slot.stage == stage]
    events = sorted((slot.end, -1) if slot.kind == "backward" else (slot.start, 1) for slot in mine)
    held = most = 0
    for _, change in events:
        held += change
        most = max(most, held)
    return most
