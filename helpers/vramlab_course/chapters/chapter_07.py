"""Chapter 07: batches of many lengths through the allocator of a T4.

`python -m vramlab_course.chapters.chapter_07` measures the same lengths on this machine's GPU and stores the result.
"""

import random
from functools import cache

from vramlab.hardware.allocator import Allocator
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import Recipe

from vramlab_course.expandable import ExpandableAllocator
from vramlab_course.fragmentation import Followed, Requests, follow, requests_of
from vramlab_course.lengths import SETTINGS, measure_lengths, save_lengths

RECIPE = Recipe("gpt2", batch_size=8, seq_len=1024, precision="fp16-mixed", num_layers=6)
BUCKETS = (256, 512, 1024)
CARD = "T4"


def draw_lengths(count: int = 24) -> list[int]:
    """Lengths like those of texts: log-normal around 365 tokens, multiples of 64 up to 1,024, from a fixed seed."""
    rng = random.Random(0)
    return [min(1024, max(64, 64 * round(rng.lognormvariate(5.9, 0.6) / 64))) for _ in range(count)]


LENGTHS = draw_lengths()


def room() -> int:
    """Bytes that segments may take on a T4: its memory without CUDA's context."""
    card = find_gpu(CARD)
    return card.total - card.context_interval.value


@cache
def requests() -> Requests:
    """Requests of RECIPE at every length of the chapter."""
    return requests_of(RECIPE, [*LENGTHS, *BUCKETS])


def cured_lengths(cure: str) -> list[int]:
    """LENGTHS after a cure; "none" and "expandable segments" leave them as they are."""
    return {
        "fixed": [512] * len(LENGTHS),
        "padding": [max(LENGTHS)] * len(LENGTHS),
        "bucketing": [min(bucket for bucket in BUCKETS if bucket >= n) for n in LENGTHS],
        "warm-up": [max(LENGTHS), *LENGTHS],
    }.get(cure, LENGTHS)


def run(cure: str, limit: int | None, expandable: bool = False) -> Followed:
    """Run LENGTHS with a cure through the allocator's model. Raises AllocatorError when `limit` is too low."""
    kind = ExpandableAllocator if expandable else Allocator
    return follow(requests(), cured_lengths(cure), kind(limit=limit))


def main() -> None:
    """Measure LENGTHS on this machine's GPU in each allocator setting, and store the results."""
    for settings in SETTINGS:
        found = measure_lengths(RECIPE, LENGTHS, settings)
        print(settings or "default", save_lengths(RECIPE, LENGTHS, settings, found).name)


if __name__ == "__main__":
    main()
