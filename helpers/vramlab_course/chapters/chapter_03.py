"""Chapter 03: what is alive at a peak, figures, and recorded runs.

For its claims there are also the bytes that autograd keeps, and steps that empty the cache.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from vramlab.hardware.allocator import Allocator
from vramlab.hardware.gpu import Gpu
from vramlab.interfaces import plot
from vramlab.measurement.records import find_record
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, Report, text_table

from vramlab_course import published
from vramlab_course.fragmentation import Followed, Requests, follow, requests_of

STYLES = ("-", "--", ":")
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


def fits(reports: Mapping[str, Report], card: Gpu) -> str:
    """Table of a peak each, and whether it fits on `card` with expandable segments."""
    heads = ("the 8B", "simulated, GiB", f"fits an {card.name}?")
    rows: list = [heads]
    for name, report in reports.items():
        grade = report.process_with(True).verdict(card.total)
        rows.append((name, report.peak.total / GiB, grade))
    return text_table(rows, form=".1f")


def recorded(runs: Mapping[str, Recipe]) -> str:
    """Table of the peaks and speeds that an H200 had."""
    heads = ("the 8B, measured on an H200", "peak, GiB", "tokens/s")
    rows: list = [heads]
    for name, recipe in runs.items():
        seen = find_record(recipe)
        speed = round(seen.speed.tokens_per_second)
        rows.append((name, seen.peak.total / GiB, speed))
    return text_table(rows, form=".1f")


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


def steps(
    runs: Mapping[str, Report],
    unit: int,
    title: str,
    about: str,
    card: Gpu | None = None,
) -> Any:
    """Return a figure of what is alive over one step of each run, in GiB or MiB as `unit` says.

    Forward and backward are equally wide in all of them. The last run is filled.
    """
    name_of = "GiB" if unit == GiB else "MiB"
    rows = [(name, f"{report.peak.total / unit:.1f}") for name, report in runs.items()]
    peaks = ", ".join(map(" ".join, rows))
    alt = f"What is alive over one step. {title}. {name_of} at the peak: {peaks}."
    with plot.canvas(title, alt, about, [("run", f"peak, {name_of}"), *rows]) as ax:
        for row, report, style in zip(rows, runs.values(), STYLES, strict=False):
            # while the model is built there are fewer parameters: that is no part of the step
            total = report.peak.parameters
            step = [m for m in report.timeline if m.bytes.parameters == total]
            half = [m.phase for m in step].index("backward")
            forward = np.linspace(0, 0.35, half)
            backward = np.linspace(0.35, 1, len(step) - half)
            x = [*forward, *backward]
            sizes = [m.bytes.total / unit for m in step]
            label = " ".join((*row, name_of))
            (line,) = ax.plot(x, sizes, style, label=label)
        ax.fill_between(x, sizes, color=line.get_color(), alpha=0.2)
        if card:
            room = card.total / unit
            label = f"{card.name}: {room:.1f}"
            ax.axhline(room, color="#B00020", label=label)
        names = {
            0.15: "forward",
            0.35: "loss",
            0.65: "backward, layer by layer",
        }
        for across, name in names.items():
            ax.annotate(
                name,
                (across, 0),
                (0, 4),
                textcoords="offset points",
                ha="center",
            )
        ax.set(
            ylabel=f"{name_of} alive",
            xlabel="one step",
            xlim=(0, 1),
            ylim=0,
            xticks=[],
        )
    return ax.figure


def pairings(samples: list[int]) -> Iterator[list[list[int]]]:
    """Every way to deal `samples` into pairs; the first pairs neighbours."""
    if not samples:
        yield []
        return
    first, *others = samples
    for second in others:
        rest = [one for one in others if one != second]
        for pairs in pairings(rest):
            yield [[first, second], *pairs]


def pairings_off(off: list[float], title: str, about: str) -> Any:
    """Return a histogram of how many % each of `pairings` is off.

    The first is named, and the one that is 0.
    """
    edges = range(0, 65, 5)
    counts = np.histogram(off, edges)[0]
    rows = [(f"{edge}–{edge + 5}", f"{count}") for edge, count in zip(edges, counts, strict=False)]
    said = ", ".join(map(" %: ".join, rows))
    alt = f"A histogram. {title}. {said}."
    with plot.canvas(title, alt, about, [("gradients off by, %", "pairings"), *rows]) as ax:
        middles = [edge + 2.5 for edge in edges[:-1]]
        ax.bar(middles, counts, width=4.6)
        notes = {
            "as many labels\nin each pair": (0, (9, 13)),
            "in order\nof length": (int(off[0] // 5), (65, 15)),
        }
        for name, (bar, where) in notes.items():
            ax.annotate(
                name,
                (middles[bar], counts[bar]),
                where,
                arrowprops={"arrowstyle": "->"},
                ha="center",
            )
        ax.set(
            xlabel="gradients off by, %",
            ylabel="ways to deal the samples",
            xlim=(0, 71),
            yticks=range(0, 21, 5),
        )
    return ax.figure
