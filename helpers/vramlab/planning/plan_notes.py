"""What to know of a recipe before choosing it, beyond memory and time."""

from collections.abc import Iterator

from ..recipe.recipe import Recipe
from ..recipe.weights import unquantized
from ..report.report import format_bytes
from .search_space import host_bytes

ROUNDING = {"bf16-true": "1/256", "fp16-true": "1/2048"}  # half the least relative step of the format: 2^-8, 2^-11


def notes_on(recipe: Recipe) -> Iterator[str]:
    """What ranking by speed does not weigh, one sentence each."""
    precision, full = recipe.precision, recipe.lora is None
    if precision in ROUNDING and full:
        yield f"{precision}: an update below about {ROUNDING[precision]} of a weight is rounded away (chapter 01)"
    if precision == "fp16-true":
        yield "fp16-true: nothing scales the loss, so gradients under 6e-8 become zero (chapter 01)"
    if recipe.optim == "adafactor":
        yield "adafactor is another optimizer: compare the loss before trusting it"
    if recipe.optim.startswith("paged"):
        yield f"paged states: {format_bytes(host_bytes(recipe), digits=2)} of host memory when the card is full"
    if recipe.attn_implementation == "flash_attention_2":
        yield "flash_attention_2 needs the package flash-attn"
    yield from unquantized(recipe)
    sharding = recipe.sharding
    if sharding and sharding.offload:
        yield f"{sharding.offload} offloaded: {format_bytes(host_bytes(recipe), digits=0)} of host memory for all ranks"
    if sharding and sharding.world_size > 8:
        yield "more than 8 GPUs are several machines: say link=, the bytes a second of one GPU's network"
