"""Chapter 03: a figure of several steps, and recorded pairs.

For its claims there are also the bytes that autograd keeps, and steps that empty the cache.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from vramlab.hardware.allocator import Allocator
from vramlab.interfaces import plot
from vramlab.measurement.records import measurements_folder
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import MiB, Report

from vramlab_course.fragmentation import Followed, Requests, follow, requests_of

LENGTHS = (320, 384, 576, 320, 832, 128, 448, 192)


def saved_bytes(function: Callable[[], Any], own: Iterable[Any] = ()) -> tuple[int, Any]:
    """Bytes that autograd keeps for the backward pass of `function()`; and its result.

    Each storage counts once, and those of `own` are left out.

    `watch` cannot be used for compiled models: under it torch.compile runs eagerly.
    """
    import torch

    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # several tensors that are saved may be views of one storage
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    # a weight is saved too, and is there anyway
    return sum(size for pointer, size in kept.items() if pointer not in known), result


@cache
def requests() -> Requests:
    """Requests of a gpt2 of four layers at each of LENGTHS."""
    return requests_of(
        Recipe("gpt2", batch_size=8, seq_len=1024, precision="fp16-mixed", num_layers=4),
        LENGTHS,
    )


@cache
def replayed(
    empty_cache: str = "",
    limit: int | None = None,
    lengths: tuple[int, ...] = (),
) -> Followed:
    """The steps of `lengths` (LENGTHS) through the allocator's model; see `follow`.

    Raises AllocatorError when `limit` is too low.
    """
    return follow(requests(), lengths or LENGTHS, Allocator(limit=limit), empty_cache)


def recorded_pairs(*fields: str, name: str = "nvidia-h100") -> list[tuple[str, ...]]:
    """How many times as long a step took after a change of a recipe's `fields`.

    Of all pairs that were recorded on a card, differ in nothing else and see as many samples. The
    last field's least value is the one before: no checkpointing, or no accumulation. A row for each
    number of passes, or else for each method: its models, the number of its pairs, and the least
    and the largest ratio.
    """
    alike: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(measurements_folder().glob(f"{name}-*.json")):
        # Read as JSON: a report's class checks all fields, and only two are needed.
        for report in json.loads(path.read_text(encoding="utf-8"))["reports"].values():
            if report["speed"]:
                recipe = dict(report["recipe"])
                samples = recipe["batch_size"] * recipe["gradient_accumulation_steps"]
                values = [recipe.pop(field) for field in fields]
                # The recipe without these fields, so that both of a pair have one key.
                key = json.dumps([samples, recipe], sort_keys=True)
                alike.setdefault(key, []).append((values[-1], report["speed"]["median"]))
    found: dict[str, list[tuple[str, float]]] = {}
    for key, group in alike.items():
        _, recipe = json.loads(key)
        method = "LoRA" if recipe["lora"] else "all weights"
        if recipe["quantization"]:
            method += ", 4-bit base"
        (least, before), *others = sorted(group)
        for value, after in others:
            if value != least:
                how = f"{value} passes" if value is not True else method
                found.setdefault(how, []).append((recipe["model"], after / before))
    rows = []
    for how in sorted(found, key=lambda how: (len(how), how)):
        ratios = [ratio for _, ratio in found[how]]
        models = ", ".join(sorted({model for model, _ in found[how]}))
        rows.append((how, models, str(len(ratios)), f"{min(ratios):.2f} – {max(ratios):.2f}"))
    return rows


def steps(runs: Mapping[str, Report], title: str, about: str):
    """Return a figure of what is alive over one step of each run.

    All are equally wide, whatever their number of events, with a dot where the first backward pass
    begins.
    """
    rows = [
        ("run", "peak, MiB"),
        *((name, f"{report.peak.total / MiB:.0f}") for name, report in runs.items()),
    ]
    alt = (
        f"What is alive over one step, a line each, a dot where the first backward pass begins. "
        f"{title}. "
        f"{'; '.join(': '.join(row) for row in rows)}."
    )
    with plot.canvas(title, alt, about, rows) as ax:
        for (name, peak), report, line in zip(
            rows[1:],
            runs.values(),
            ("-", "--", "-."),
            strict=True,
        ):
            # while the model is built there are fewer parameters: that is no part of the step
            moments = [m for m in report.timeline if m.bytes.parameters == report.peak.parameters]
            # Checkpointing has more events than a plain step; as shares of a step all lines end at
            # 1.
            x = [i / len(moments) for i in range(len(moments))]
            sizes = [m.bytes.total / MiB for m in moments]
            (drawn,) = ax.plot(x, sizes, line, label=f"{name}: {peak} MiB")
            begins = next(i for i, moment in enumerate(moments) if moment.phase == "backward")
            ax.plot(
                x[begins],
                sizes[begins],
                "o",
                color=drawn.get_color(),
                markersize=7,
            )
        # An empty line, for the legend alone.
        ax.plot([], [], "o", color="#888888", label="the first backward pass begins")
        ax.set(
            ylabel="MiB",
            xlabel="allocations and releases of one step",
            xlim=(0, 1),
            ylim=0,
            xticks=[],
        )
    return ax.figure
