"""Chapter 07: batches of many lengths through the allocator of a card of 24 GB."""

import random
from functools import cache

from vramlab.formulas.predict import predict
from vramlab.hardware.allocator import Allocator
from vramlab.hardware.contexts import context_on
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import LoRA, Quantization, Recipe

from vramlab_course.expandable import ExpandableAllocator
from vramlab_course.fragmentation import Followed, Requests, follow, requests_of

WHOLE = Recipe(
    "llama-3.1-8b",
    batch_size=4,
    seq_len=1024,
    precision="bf16-mixed",
    optim="paged_adamw_8bit",
    gradient_checkpointing=True,
    lora=LoRA(r=16, target_modules="all-linear"),
    quantization=Quantization("nf4", double=True),
)
RECIPE = WHOLE.replace(num_layers=2)  # what is simulated: the head and its logits are whole
BUCKETS = (256, 512, 1024)
CARD = "RTX 4090"


def draw_lengths(count: int = 24) -> list[int]:
    """Lengths like those of texts: log-normal around 365 tokens, multiples of 128 up to 1,024, from a fixed seed."""
    rng = random.Random(0)
    return [min(1024, max(128, 128 * round(rng.lognormvariate(5.9, 0.6) / 128))) for _ in range(count)]


LENGTHS = draw_lengths()


def room() -> int:
    """Bytes that RECIPE's segments may take: the card without CUDA's context and without WHOLE's other layers."""
    card = find_gpu(CARD)
    others = predict(WHOLE, gpu=CARD).peak.total - predict(RECIPE, gpu=CARD).peak.total
    return card.total - context_on(card).value - others


@cache
def requests() -> Requests:
    """Requests of RECIPE at every length of the chapter; its first step, which makes the states, has the shortest."""
    return requests_of(RECIPE, sorted({*LENGTHS, *BUCKETS}))


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
