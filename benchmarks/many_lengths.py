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


def step_by_step(run: Followed) -> dict[str, list[int]]:
    """In each step the most bytes allocated, and the bytes reserved at its end."""
    allocated = [max(run.allocated[begin:end]) for begin, end in pairwise(run.ends)]
    return {"allocated": allocated, "reserved": run.between[1:]}


def least_room(requests: Requests, allocated: int) -> int:
    """The fewest bytes, in tenths of a GiB, in which the default allocator gets through LENGTHS.

    `allocated` are the bytes that it allocates at most.
    """
    tenths = 10 * allocated // GiB
    while True:
        tenths += 1
        limit = tenths * GiB // 10
        try:
            follow(requests, LENGTHS, Allocator(limit=limit))
        except AllocatorError:
            continue
        return limit


def whole_runs() -> dict[str, dict[str, Any]]:
    """Peaks in bytes, without CUDA's context, of each cure; and its calls to cudaFree on CARD.

    Of the run without a cure also each step.
    """
    card = find_gpu(CARD)
    room = card.total - context_on(card).value
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
            runs[name]["least_room"] = least_room(requests[trainer], free.peak_allocated)
    return runs


def main() -> None:
    """Store the runs, with the recipe and the lengths that they are of."""
    found = {"recipe": WHOLE.to_dict(), "lengths": LENGTHS, "runs": whole_runs()}
    text = json.dumps(found, indent=1) + "\n"
    data_path("many_lengths.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
