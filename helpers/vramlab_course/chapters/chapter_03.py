"""Chapter 03: what is alive at a peak, a figure of several steps, recorded runs, and epochs.

For its claims there are also the bytes that autograd keeps, and steps that empty the cache.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from vramlab.formulas.whole_run import predict_run
from vramlab.hardware.allocator import Allocator
from vramlab.hardware.gpu import Gpu
from vramlab.interfaces import plot
from vramlab.measurement.records import find_record
from vramlab.planning.step_time import step_time
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, MiB, Report

from vramlab_course import published
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


def large_parts(report: Report) -> list[tuple]:
    """Rows of a table: what is alive at a Llama's peak, by what makes it, in GiB."""
    large = [one for one in report.largest if one.category != "parameters"]
    # Only logits are as wide as the vocabulary; what a layer keeps says which layer.
    parts = {
        "the loss, in fp32": [
            one for one in large if ".layers." not in one.where and one.count == 1
        ][:3],
        "layers: inputs of norms, in fp32": [
            one for one in large if one.where.endswith("_layernorm")
        ][:1],
        "layers: results of the activation function": [
            one for one in large if one.where.endswith("mlp.act_fn")
        ],
    }
    rows: list[tuple] = [("alive at the peak", "tensors", "GiB in all")]
    rows.append(("1 weights", "", report.peak.parameters / GiB))
    left = report.peak.total - report.peak.parameters
    for what, found in parts.items():
        size = sum(one.count * one.size for one in found)
        left -= size
        rows.append((f"{len(rows)} {what}", sum(one.count for one in found), size / GiB))
    rows.append((f"{len(rows)} the rest, nearly all kept by layers", "", left / GiB))
    return rows


def switched(ladder: Sequence, card: Gpu) -> list:
    """Rows of a table: a run each, as simulated for `card`, and as recorded on an H200."""
    heads = (
        "the 8B",
        "simulated, GiB",
        "fits an RTX 4090?",
        "measured on an H200",
        "tokens/s there",
    )
    rows: list = [heads]
    for name, recipe, report in ladder:
        seen = find_record(recipe)
        speed = round(seen.speed.tokens_per_second) if seen.speed else "–"
        grade = report.process_with(True).verdict(card.total)  # with expandable segments
        rows.append((name, report.peak.total / GiB, grade, seen.peak.total / GiB, speed))
    return rows


def passes_of_one() -> float:
    """How many times as long TinyLlama takes on a T4 for 8 × 1,024 tokens, one by one."""
    seconds = {}
    for run in published.timed_on("T4"):
        recipe = run.recipe
        is_sdpa = recipe.attn_implementation == "sdpa"
        if recipe.name == "tinyllama-1.1b" and recipe.quantization and is_sdpa:
            seconds[recipe.batch_size] = run.seconds
    # Only a sample alone was timed.
    return 8 * seconds[1] / seconds[8]


def epochs(recipe: Recipe, ways: dict[str, dict], lengths: Sequence[int], card: Gpu) -> list:
    """Rows of a table: peaks and predicted speed of an epoch in each of `ways`.

    A way is a change of `recipe`. A run whose largest pass does not fit on `card` has no speed.
    """
    rows: list = [("predicted", "typical pass, GiB", "largest pass, GiB", "tokens/s")]
    for name, change in ways.items():
        way = recipe.replace(**change)
        epoch = predict_run(way, lengths, gpu=card.name)
        largest = epoch.largest.peak.total
        fits = largest < card.total
        speed = round(useful_speed(way, lengths, card.name)) if fits else "dies"
        rows.append((name, epoch.typical / GiB, largest / GiB, speed))
    return rows


def useful_speed(recipe: Recipe, lengths: Sequence[int], gpu: str) -> float:
    """Predicted tokens a second: of a packed row, or of samples of `lengths`, one a pass."""
    if recipe.packing:
        return step_time(recipe, gpu).tokens_per_second
    alone = recipe.replace(batch_size=1, gradient_accumulation_steps=1)
    some = sorted(lengths)[12::25]  # one of each 25, as an estimate takes 14 ms
    seconds = sum(step_time(alone.replace(seq_len=length), gpu).seconds for length in some)
    return sum(some) / seconds


def steps(plain: Report, teeth: Report, fused: Report, title: str, about: str) -> Any:
    """Return a figure of what is alive over one step: plain, checkpointed, with a fused loss, too.

    All lines are equally wide, whatever their number of events.
    """
    runs = {"plain": plain, "checkpointed": teeth, "checkpointed, fused loss": fused}
    rows = [(name, f"{report.peak.total / MiB:.0f}") for name, report in runs.items()]
    alt = f"What is alive over one step, a line each. {title}."
    for row in rows:
        alt += " {}: {} MiB.".format(*row)
    alt += " The teeth are named loss and layer 4 to layer 1; a fused loss has none."
    with plot.canvas(title, alt, about, [("run", "peak, MiB"), *rows]) as ax:
        sizes = [_sizes(report) for report in runs.values()]
        x = [np.linspace(0, 1, len(line)) for line in sizes]
        tops = _tops(sizes[1])
        # A fused loss has more events, so the layers' teeth are put in line.
        ours = x[2][_tops(sizes[2])[-4:]]
        x[2] = np.interp(x[2], [0, *ours, 1], [0, *x[1][tops[-4:]], 1])
        for row, across, up, style in zip(rows, x, sizes, ("-", "--", ":"), strict=True):
            ax.plot(across, up, style, label="{}: {} MiB".format(*row))
        labels = ["loss", *(f"layer {layer}" for layer in range(len(tops) - 1, 0, -1))]
        for top, label in zip(tops, labels, strict=True):
            # At the bottom, where there is no other line.
            ax.annotate(
                label,
                (x[1][top], sizes[1][top]),
                (x[1][top], 3),
                ha="center",
                va="bottom",
                arrowprops={"arrowstyle": "-", "linewidth": 0.6},
            )
        ax.set(
            ylabel="MiB alive",
            xlabel="one step, from its first allocation to its last release",
            xlim=(0, 1),
            ylim=0,
            xticks=[],
        )
    return ax.figure


def _sizes(report: Report) -> list[float]:
    """MiB alive at each moment of a step."""
    total = report.peak.parameters
    # while the model is built there are fewer parameters: that is no part of the step
    return [m.bytes.total / MiB for m in report.timeline if m.bytes.parameters == total]


def _tops(sizes: Sequence[float]) -> list[int]:
    """Where each tooth is highest, those that reach 85 % of the highest."""
    high = 0.85 * max(sizes)
    tops: list[int] = []
    for index, size in enumerate(sizes):
        # A tooth has notches, so a top is the highest of 40 events.
        near = range(max(0, index - 20), min(index + 21, len(sizes)))
        if size >= high and index == max(near, key=sizes.__getitem__):
            tops.append(index)
    return tops
