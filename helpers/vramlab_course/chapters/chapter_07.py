"""Chapter 07: what its blanks stand on, and batches of many lengths.

These go through the allocator of a card of 24 GB.
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

from vramlab.formulas.predict import predict
from vramlab.hardware.allocator import Allocator
from vramlab.hardware.contexts import context_on
from vramlab.hardware.gpu import find_gpu
from vramlab.planning.step_time import timed_records
from vramlab.recipe.recipe import LoRA, Quantization, Recipe
from vramlab.report.report import MiB

from vramlab_course import published
from vramlab_course.expandable import ExpandableAllocator
from vramlab_course.fragmentation import Followed, Requests, follow, requests_of
from vramlab_course.live import live

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

WHOLE = Recipe(
    "llama-3.1-8b",
    batch_size=4,
    seq_len=1024,
    precision="bf16-mixed",
    optim="paged_adamw_8bit",
    gradient_checkpointing=True,
    lora=LoRA(r=16, target_modules="all-linear"),
    quantization=Quantization("nf4", double=True, prepare=False),
)
RECIPE = WHOLE.replace(num_layers=2)  # what is simulated: the head and its logits are whole
# Of a Trainer: it neither logs nor saves, and does not warn where there is no GPU.
QUIET = {
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
BUCKETS = (256, 512, 1024)
CARD = "RTX 4090"

# Lengths like those of texts, from a fixed seed: log-normal around e^5.9 = 365 tokens, in
# multiples of 128 up to 1,024.
_RNG = random.Random(0)
_DRAWN = [128 * round(_RNG.lognormvariate(5.9, 0.6) / 128) for _ in range(24)]
LENGTHS = [min(1024, max(128, length)) for length in _DRAWN]


def milliseconds(work: Callable[[], Any]) -> float:
    """The shortest of five times that `work` takes."""
    import torch

    took = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # Python does not wait for a GPU by itself
        took.append(1e3 * (time.perf_counter() - start))
    return min(took)


def tried(name: str, batches: "DataLoader[Any]", train: Callable[[list[Any]], None]) -> None:
    """Print how long a loop over `batches` waits for one: the median.

    The first batch is left out: while it comes, the workers start. What training takes is left out
    too: it differs from run to run by more than it is about.
    """
    import torch

    if batches.num_workers:  # a forked process sees the classes that a notebook defines
        batches.multiprocessing_context = "fork"
    coming = iter(batches)
    next(coming)
    waited = []
    before = time.perf_counter()
    while (batch := next(coming, None)) is not None:
        ready = time.perf_counter()
        train([batch])
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # Python does not wait for a GPU by itself
        waited.append(1e3 * (ready - before))
        before = time.perf_counter()
    live(f"{name:<26}waits {median(waited):4.0f} ms a batch (median of {len(waited)})")


def collate(rows: "list[torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The batch that a Trainer wants, of samples that are tokens."""
    import torch

    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}


def room() -> int:
    """Bytes that the segments of RECIPE may take.

    That is the card without CUDA's context and without WHOLE's other layers.
    """
    card = find_gpu(CARD)
    whole, part = (predict(each, gpu=CARD) for each in (WHOLE, RECIPE))
    # the head and its logits are whole in both, so the difference is the other layers
    others = whole.peak.total - part.peak.total
    return card.total - context_on(card).value - others


@cache
def requests() -> Requests:
    """Requests of RECIPE at every length of the chapter.

    Its first step, which makes the states, has the shortest.
    """
    return requests_of(RECIPE, sorted({*LENGTHS, *BUCKETS}))


def cured_lengths(cure: str) -> list[int]:
    """LENGTHS after a cure; "none" and "expandable segments" leave them as they are."""
    return {
        # Cut or padded to one length near the middle of what was drawn.
        "fixed": [512] * len(LENGTHS),
        "padding": [max(LENGTHS)] * len(LENGTHS),
        "bucketing": [min(bucket for bucket in BUCKETS if bucket >= n) for n in LENGTHS],
        # One step at the longest length first, so that large segments are there before small ones.
        "warm-up": [max(LENGTHS), *LENGTHS],
    }.get(cure, LENGTHS)


def run(cure: str, limit: int | None, expandable: bool = False) -> Followed:
    """Run LENGTHS with a cure through the allocator's model.

    Raises AllocatorError when `limit` is too low.
    """
    kind = ExpandableAllocator if expandable else Allocator
    return follow(requests(), cured_lengths(cure), kind(limit=limit))


def recorded_8b(name: str) -> list[tuple[Recipe, float]]:
    """(recipe, seconds of a step) of each record of WHOLE's model on the card `name`.

    Those count that have a frozen base, all layers and fused AdamW.
    """
    kept = []
    for recipe, seconds in timed_records(name):
        is_whole = recipe.name == WHOLE.name and recipe.num_layers is None
        if is_whole and recipe.lora and recipe.optim == "adamw_torch_fused":
            kept.append((recipe, seconds))
    return sorted(kept, key=lambda record: (record[0].batch_size, record[1]))


def recorded_lora() -> list[tuple[str, str, Recipe, float]]:
    """Recorded runs of LoRA and QLoRA: name, card, recipe and seconds of a step.

    On an H200 they are pairs: one and four samples with and without 4-bit weights, and fused
    kernels with and without checkpointing. The last is another project's, on a T4.
    """
    runs = []
    for recipe, seconds in recorded_8b("H200"):
        fused = recipe.use_liger_kernel and recipe.batch_size == 4
        if recipe.seq_len == 1024 or fused:
            kind = "QLoRA" if recipe.quantization else "LoRA"
            name = f"H200, 8B, {kind}, {recipe.batch_size} × {recipe.seq_len:,}"
            name += ", Liger" * recipe.use_liger_kernel
            name += ", checkpointing" * recipe.gradient_checkpointing
            runs.append((name, "H200", recipe, seconds))
    run = recorded_on_t4()
    runs.append(("T4, 1.7B, LoRA, 4 × 1,024, checkpointing", "T4", run.recipe, run.seconds))
    return runs


def recorded_on_t4() -> published.Run:
    """Another project's run on a T4: LoRA in 16 bits, four samples of 1,024 tokens as in WHOLE."""
    for run in published.timed_on("T4"):
        asked = run.recipe
        if (asked.batch_size, asked.quantization, asked.attn_implementation) == (4, None, "sdpa"):
            return run
    raise LookupError("no such run is stored")


def storages(values: Any) -> "set[torch.UntypedStorage]":
    """The storages of all tensors in nested lists, tuples and dictionaries, or of an iterator.

    A storage is the memory behind a tensor.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    # An iterator, such as `model.parameters()`, would be one leaf.
    if isinstance(values, Iterator):
        values = list(values)
    return {
        value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)
    }


def round_up(size: int, unit: int) -> int:
    """The next multiple of `unit`."""
    # Division that rounds up, in integers: floats are wrong beyond 2**53.
    return -(-size // unit) * unit


class Block:
    """A piece of a segment: its bytes, the list of blocks it stands in, its pool, if it is free."""

    def __init__(self, size: int, segment: list["Block"], small: bool):
        self.size = size
        self.segment = segment
        self.small = small
        self.free = True


# Sizes of segments are those of `get_allocation_size` in CUDACachingAllocator.cpp: kSmallBuffer,
# then kLargeBuffer up to kMinLargeAlloc, then whole multiples of kRoundLarge.
class Segments:
    """All memory that cudaMalloc gave, as lists of blocks in the order of their addresses."""

    def __init__(self):
        self.segments = []
        self.allocated = 0  # bytes of the blocks in use
        self.reserved = 0  # bytes of all segments
        self.mallocs = 0  # calls to cudaMalloc
        self.given_back = 0  # calls to cudaFree

    def cuda_malloc(self, size: int, small: bool) -> Block:
        """Make a segment for a request of `size` bytes and return it as one free block."""
        if small:
            length = 2 * MiB
        elif size < 10 * MiB:
            length = 20 * MiB
        else:
            length = round_up(size, 2 * MiB)
        # The block needs the list that it stands in, so the list is made first.
        segment = []
        segment.append(Block(length, segment, small))
        self.segments.append(segment)
        self.reserved += length
        self.mallocs += 1
        return segment[0]
