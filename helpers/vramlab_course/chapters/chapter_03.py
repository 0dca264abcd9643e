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
from vramlab.report.byte_counts import Moment
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

    kept = {tensor.untyped_storage().data_ptr(): 0 for tensor in own}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Several tensors that are saved may be views of one storage. A weight is saved too, and is
        # there anyway.
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sum(kept.values()), result


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
    # Only the loss has its large tensors outside of the layers.
    places = {
        "base_model.model": "the loss, in fp32",
        "_layernorm": "layers: inputs of norms, in fp32",
        "mlp.act_fn": "layers: results of the activation function",
    }
    weights = report.peak.parameters
    left = report.peak.total - weights
    rows: list[tuple] = [
        ("alive at the peak", "tensors", "GiB in all"),
        ("1 weights", "", weights / GiB),
    ]
    for place, what in places.items():
        found = [one for one in report.largest if one.where.endswith(place)]
        size = sum(one.count * one.size for one in found)
        left -= size
        rows.append((f"{len(rows)} {what}", sum(one.count for one in found), size / GiB))
    rows.append((f"{len(rows)} the rest, nearly all kept by layers", "", left / GiB))
    return rows


def fits(reports: Mapping[str, Report], card: Gpu) -> str:
    """Table of a peak each, and whether it fits on `card` with expandable segments."""
    rows: list = [("the 8B", "simulated, GiB", f"fits an {card.name}?")]
    for name, report in reports.items():
        grade = report.process_with(True).verdict(card.total)
        rows.append((name, report.peak.total / GiB, grade))
    return text_table(rows, form=".1f")


def recorded(runs: Mapping[str, Recipe]) -> str:
    """Table of the peaks and speeds that an H200 had."""
    rows: list = [("the 8B, measured on an H200", "peak, GiB", "tokens/s")]
    for name, recipe in runs.items():
        seen = find_record(recipe)
        rows.append((name, seen.peak.total / GiB, round(seen.speed.tokens_per_second)))
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


def _passes(report: Report) -> tuple[list[Moment], int, int]:
    """Return the moments of forward and backward, and how many events each of the two has."""
    # while the model is built there are fewer parameters: that is no part of the step
    total = report.peak.parameters
    step = [m for m in report.timeline if m.bytes.parameters == total and m.phase != "step"]
    half = [m.phase for m in step].index("backward")
    middle = step[half].index
    return step, middle - step[0].index, step[-1].index - middle


def steps(
    runs: Mapping[str, Report],
    unit: int,
    title: str,
    about: str,
    card: Gpu | None = None,
) -> Any:
    """Return a figure of what is alive over one step of each run, in GiB or MiB as `unit` says.

    A layer stands at the same place in all of them. The last run is filled.
    """
    name_of = "GiB" if unit == GiB else "MiB"
    rows = [(name, f"{report.peak.total / unit:.1f}") for name, report in runs.items()]
    peaks = ", ".join(map(" ".join, rows))
    alt = f"What is alive over one step. {title}. {name_of} at the peak: {peaks}."
    passes = list(map(_passes, runs.values()))
    # What a forward pass has beyond this share of its backward pass are events of the loss.
    share = min(forward / backward for _, forward, backward in passes)
    with plot.canvas(title, alt, about, [("run", f"peak, {name_of}"), *rows]) as ax:
        for row, (step, _, backward), style in zip(rows, passes, STYLES, strict=False):
            # Runs whose losses alone differ have nearly as many: the fewest are the layers'.
            layers = min(other for _, _, other in passes if other > 0.95 * backward)
            events = [m.index for m in step]
            edges = [
                events[0],
                events[0] + share * layers,
                events[-1] - layers,
                events[-1],
            ]
            x = np.interp(events, edges, [0, 0.35, 0.37, 1])
            sizes = [m.bytes.total / unit for m in step]
            (line,) = ax.plot(x, sizes, style, label=" ".join((*row, name_of)))
        weights = step[0].bytes.parameters / unit
        ax.fill_between(
            x,
            weights,
            sizes,
            color=line.get_color(),
            alpha=0.2,
        )
        ax.axhline(
            weights,
            color="#767676",
            label=f"weights {weights:.1f}",
        )
        height, at = max(zip(sizes[-90:], x[-90:], strict=True))
        ax.text(at, height, "a layer\nruns again\n", ha="center")
        if card:
            room = card.total / unit
            ax.axhline(
                room,
                color="#B00020",
                label=f"{card.name} {room:.1f}",
            )
        ax.set(
            ylabel=f"{name_of} alive",
            xlim=(0, 1),
            ylim=0,
            xticks=(0.17, 0.36, 0.69),
            xticklabels=("forward", "loss", "backward, layer by layer"),
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

    The first is marked, and the one that is 0.
    """
    edges = range(0, 65, 5)
    counts = np.histogram(off, edges)[0]
    rows = [(f"{edge}–{edge + 5}", f"{count}") for edge, count in zip(edges, counts, strict=False)]
    said = ", ".join(map(" %: ".join, rows))
    alt = f"A histogram. {title}. {said}."
    with plot.canvas(title, alt, about, [("gradients off by, %", "pairings"), *rows]) as ax:
        ax.hist(off, edges, rwidth=0.92)
        ax.text(
            2.5,
            1.3,
            "as many labels in each pair",
            rotation=90,
            ha="center",
        )
        ax.axvline(
            off[0],
            color="black",
            ls="--",
            label="in order of length",
        )
        ax.set(
            xlabel="gradients off by, %",
            ylabel="ways to deal the samples",
            yticks=range(0, 21, 5),
        )
    return ax.figure
