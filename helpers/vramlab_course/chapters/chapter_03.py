"""Chapter 03: what is alive at a peak, a figure of several steps, and recorded runs.

For its claims there are also the bytes that autograd keeps, and steps that empty the cache.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from vramlab.hardware.allocator import Allocator
from vramlab.interfaces import plot
from vramlab.measurement.measure import measure
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, MiB, Report

from vramlab_course import published
from vramlab_course.chapters.chapter_06 import recorded_8b
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
    loss = [one for one in large if ".layers." not in one.where and one.count == 1][:3]
    norms = [one for one in large if one.where.endswith("_layernorm")][:1]
    silu = [one for one in large if one.where.endswith("mlp.act_fn")]
    parts = {
        "the loss, in fp32": loss,
        "layers: inputs of norms, in fp32": norms,
        "layers: results of silu": silu,
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


def passes_of_one() -> list[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Recorded runs in one pass, and in passes of one sample: GiB and seconds of an update.

    GPT-2's passes are a record of accumulation. The others are an update of one sample, times their
    number.
    """
    tiny = {}
    for run in published.runs():
        recipe = run.recipe
        if (
            recipe.name == "tinyllama-1.1b"
            and recipe.quantization
            and recipe.attn_implementation == "sdpa"
            and recipe.seq_len == 1024
            and run.seconds
        ):
            tiny[recipe.batch_size] = (run.allocated / GiB, run.seconds)
    whole = {}
    for recipe, seen in recorded_8b("nvidia-h200"):
        if not recipe.quantization:
            whole[recipe.batch_size] = (seen.peak.total / GiB, seen.speed.median)
    cases = []
    for name, samples, found in (("TinyLlama, T4", 8, tiny), ("Llama 3.1 8B, H200", 4, whole)):
        size, seconds = found[1]
        cases.append((f"{name}, {samples} × 1,024", found[samples], (size, samples * seconds)))
    pair = []
    for batch, passes in ((8, 1), (1, 8)):
        recipe = Recipe("gpt2", batch, 512, "fp32", gradient_accumulation_steps=passes)
        seen = measure(recipe, recorded=True)
        pair.append((seen.peak.total / GiB, seen.speed.median))
    cases.append(("GPT-2, H100, 8 × 512", *pair))
    return cases


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
