"""Chapter 03: what is alive at a peak, a figure of several steps, recorded runs, and epochs.

For its claims there are also the bytes that autograd keeps, and steps that empty the cache.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from vramlab.formulas.whole_run import predict_run
from vramlab.hardware.allocator import Allocator
from vramlab.hardware.gpu import Gpu
from vramlab.interfaces import plot
from vramlab.measurement.records import find_record
from vramlab.planning.step_time import step_time
from vramlab.recipe.options import LoRA
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
    rows: list = [("the 8B", "simulated, GiB", "on an RTX 4090", "on an H200, GiB", "tokens/s")]
    for name, recipe, report in ladder:
        seen = find_record(recipe)
        speed = round(seen.speed.tokens_per_second) if seen.speed else "–"
        grade = report.process_with(True).verdict(card.total)  # with expandable segments
        rows.append((name, report.peak.total / GiB, grade, seen.peak.total / GiB, speed))
    return rows


def passes_of_one() -> list[tuple[str, float | str]]:
    """Rows of a table: how many times as long recorded updates take in passes of one sample."""
    large = Recipe(
        "llama-3.1-8b",
        4,
        1024,
        "bf16-mixed",
        "adamw_torch_fused",
        dtype="bfloat16",
        lora=LoRA(r=16),
        gradient_checkpointing=True,
    )
    tiny = {}
    for run in published.timed_on("T4"):
        recipe = run.recipe
        is_sdpa = recipe.attn_implementation == "sdpa"
        if recipe.name == "tinyllama-1.1b" and recipe.quantization and is_sdpa:
            tiny[recipe.seq_len, recipe.batch_size] = run.seconds
    # Of both only a sample alone was recorded.
    alone = find_record(large.replace(batch_size=1)).speed
    larges = 4 * alone.median / find_record(large).speed.median
    return [
        ("recorded, all samples one by one", "times as long"),
        ("8B, LoRA, 4 × 1,024, bf16, H200", larges),
        ("TinyLlama, LoRA, 8 × 1,024, T4", 8 * tiny[1024, 1] / tiny[1024, 8]),
    ]


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


def steps(plain: Report, teeth: Report, title: str, about: str) -> Any:
    """Return a figure of what is alive over one step, without checkpointing and with it.

    Both lines are equally wide, whatever their number of events.
    """
    runs = {"plain": plain, "checkpointed": teeth}
    rows = [("run", "peak, MiB")]
    alt = f"What is alive over one step, a line each. {title}."
    for name, report in runs.items():
        rows.append((name, f"{report.peak.total / MiB:.0f}"))
        alt += " {}: {} MiB.".format(*rows[-1])
    alt += " The teeth are named loss and layer 4 to layer 1."
    with plot.canvas(title, alt, about, rows) as ax:
        for (name, peak), report, line in zip(rows[1:], runs.values(), ("-", "--"), strict=True):
            # while the model is built there are fewer parameters: that is no part of the step
            moments = [m for m in report.timeline if m.bytes.parameters == report.peak.parameters]
            # Checkpointing has more events than a plain step; as shares of a step both lines end
            # at 1.
            x = [i / len(moments) for i in range(len(moments))]
            sizes = [m.bytes.total / MiB for m in moments]
            (drawn,) = ax.plot(x, sizes, line, label=f"{name}: {peak} MiB")
        tops = _tops(sizes)
        labels = ["loss", *(f"layer {layer}" for layer in range(len(tops) - 1, 0, -1))]
        for top, label in zip(tops, labels, strict=True):
            # At the bottom, where there is no other line.
            ax.annotate(
                label,
                (x[top], sizes[top]),
                (x[top], 3),
                ha="center",
                va="bottom",
                color=drawn.get_color(),
                arrowprops={"arrowstyle": "-", "color": drawn.get_color(), "linewidth": 0.6},
            )
        ax.set(
            ylabel="MiB alive",
            xlabel="one step, from its first allocation to its last release",
            xlim=(0, 1),
            ylim=0,
            xticks=[],
        )
    return ax.figure


def _tops(sizes: Sequence[float]) -> list[int]:
    """Where each tooth is highest, those that reach 85 % of the highest."""
    high = 0.85 * max(sizes)
    tops: list[int] = []
    is_up = False
    for index, size in enumerate(sizes):
        if size >= high and not is_up:
            tops.append(index)
        elif size >= high and size > sizes[tops[-1]]:
            tops[-1] = index
        # A tooth has notches, so it ends only well below.
        is_up = size >= high or (is_up and size > 0.7 * high)
    return tops
