"""Chapter 07's run of many lengths with all 32 layers: the peaks of its allocator, cure by cure.

    python benchmarks/many_lengths.py     # writes data/many_lengths.json

Simulated: two minutes on one core. The reader's own allocator follows two of the layers.
"""

import json
from itertools import pairwise
from typing import Any

from vramlab.base.data import data_path
from vramlab.hardware.allocator import Allocator, AllocatorError
from vramlab.hardware.contexts import context_on
from vramlab.hardware.gpu import find_gpu
from vramlab.report.report import GiB
from vramlab_course.chapters.chapter_07 import BUCKETS, CARD, LENGTHS, WHOLE, cured_lengths
from vramlab_course.expandable import ExpandableAllocator
from vramlab_course.fragmentation import Followed, Requests, follow, requests_of

# the trainer whose loss it is, the cure of the lengths, the allocator
CURES = {
    "none": ("transformers", "none", Allocator),
    "SFTTrainer's loss": ("sft", "none", Allocator),
    "expandable segments": ("transformers", "none", ExpandableAllocator),
    "both": ("sft", "none", ExpandableAllocator),
    "all padded to 1,024": ("transformers", "padding", Allocator),
    "buckets 256, 512, 1,024": ("transformers", "bucketing", Allocator),
    "first step at 1,024": ("transformers", "warm-up", Allocator),
}

# Here the allocator's setting decides: a batch of SAMPLES on a card of 16 GB.
SMALL_CARD = "RTX 4060 Ti 16GB"
SAMPLES = 5


def room_on(name: str) -> int:
    """Bytes that a card has for PyTorch: without CUDA's context."""
    card = find_gpu(name)
    return card.total - context_on(card).value


def step_by_step(run: Followed) -> dict[str, list[int]]:
    """In each step the most bytes allocated, and the bytes reserved at its end."""
    allocated = [max(run.allocated[begin:end]) for begin, end in pairwise(run.ends)]
    return {"allocated": allocated, "reserved": run.between[1:]}


def least_room(requests: Requests, kind: type[Allocator], allocated: int) -> int:
    """The fewest bytes, in tenths of a GiB, in which an allocator gets through LENGTHS.

    `allocated` are the bytes that it allocates at most.
    """
    tenths = 10 * allocated // GiB
    while True:
        tenths += 1
        limit = tenths * GiB // 10
        try:
            follow(requests, LENGTHS, kind(limit=limit))
        except AllocatorError:
            continue
        return limit


def whole_runs() -> dict[str, dict[str, Any]]:
    """Peaks in bytes, without CUDA's context, of each cure; and its calls to cudaFree on CARD.

    Of the run without a cure also each step, and what CARD's limit leaves reserved after it.
    """
    room = room_on(CARD)
    requests = {}
    for trainer in ("transformers", "sft"):
        recipe = WHOLE.replace(trainer=trainer)
        requests[trainer] = requests_of(recipe, sorted({*LENGTHS, *BUCKETS}))
    runs = {}
    for name, (trainer, cure, kind) in CURES.items():
        lengths = cured_lengths(cure)
        free = follow(requests[trainer], lengths, kind())
        runs[name] = {"allocated": free.peak_allocated, "reserved": free.peak_reserved, "frees": 0}
        if name == "none":
            runs[name]["steps"] = step_by_step(free)
        if free.peak_reserved > room:
            limited = follow(requests[trainer], lengths, kind(limit=room))
            runs[name]["frees"] = sum(limited.given_back)
            if name == "none":
                runs[name]["steps"]["reserved on the card"] = limited.between[1:]
        if cure == "none":
            runs[name]["least_room"] = least_room(requests[trainer], kind, free.peak_allocated)
    return runs


def on_small_card() -> dict[str, Any]:
    """The bytes with which SAMPLES die on SMALL_CARD by default, and with which they live."""
    room = room_on(SMALL_CARD)
    requests = requests_of(WHOLE.replace(batch_size=SAMPLES), sorted({*LENGTHS}))
    found: dict[str, Any] = {"gpu": SMALL_CARD, "batch_size": SAMPLES, "room": room}
    try:
        follow(requests, LENGTHS, Allocator(limit=room))
    except AllocatorError as error:
        found["asked"] = error.needed - error.reserved
        found["allocated"] = error.allocated
        found["reserved"] = error.reserved
    grown = follow(requests, LENGTHS, ExpandableAllocator(limit=room))
    found["expandable segments"] = {
        "allocated": grown.peak_allocated,
        "reserved": grown.peak_reserved,
    }
    return found


def main() -> None:
    """Store the runs, with the recipe and the lengths that they are of."""
    found = {
        "recipe": WHOLE.to_dict(),
        "lengths": LENGTHS,
        "runs": whole_runs(),
        "small_card": on_small_card(),
    }
    text = json.dumps(found, indent=1) + "\n"
    data_path("many_lengths.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
