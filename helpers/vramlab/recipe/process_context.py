"""What a recipe's process holds outside torch's allocator, and what it may have of a card.

`hardware.contexts` is told which libraries the recipe loads, and how many ranks it has.
"""

from ..base.errors import RecipeError
from ..hardware.contexts import CONVOLUTIONS, TRAINING, Room, context_on
from ..hardware.gpu import Gpu, usable_memory
from ..report.report import Interval
from .options import HALF
from .recipe import Recipe

FLASH_SINCE = (
    8,
    0,
)  # compute capability from which sdpa's fused kernel on 16-bit queries is FlashAttention's


def context_of(recipe: Recipe | None, card: Gpu | None) -> Interval:
    """Return the bytes outside the allocator of one rank of `recipe`.

    Without a recipe they are those of any training on `card`.
    """
    if recipe is None:
        return context_on(card)
    return context_on(card, _loaded(recipe, card), recipe.group.world_size)


def _loaded(recipe: Recipe, card: Gpu | None) -> str:
    """Return what of the readings' words the recipe loads."""
    if recipe.shape.image_tokens or recipe.shape.features:
        return CONVOLUTIONS  # patches and sounds are cut by one
    if card is None or card.compute_capability < FLASH_SINCE:
        return TRAINING
    if recipe.quantization and recipe.quantization.prepare:
        return "bitsandbytes"  # whose fp32 queries take no FlashAttention
    is_half = recipe.precision.partition("-")[0] in HALF or recipe.weights_dtype in HALF.values()
    return "flash" if is_half and recipe.attn_implementation != "eager" else "cublas"


def loads_whole(recipe: Recipe) -> bool:
    """Return whether each of FSDP's ranks holds the whole model until it is sharded.

    A loop of one's own moves it to the device first. The Trainer leaves that to `fully_shard`,
    which moves one unit at a time and shards it
    (`torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device`).
    """
    sharding = recipe.group
    if sharding.engine != "fsdp" or recipe.loop.name == "trainer":
        return False
    return not (recipe.quantization or sharding.offload)


def loads_on_host(recipe: Recipe) -> bool:
    """Return whether each rank loads its quantized base in host memory (`device_map={"": "cpu"}`).

    That is FSDP's whose parameters live there. `from_pretrained` by itself loads all of a 4-bit
    base on each card: with `cpu_ram_efficient_loading` too, for which transformers 5.23
    (`modeling_utils._move_missing_keys_from_meta_to_device`) and accelerate 1.15
    (`fsdp_utils.fsdp2_prepare_model`) except quantized weights. Of one in host memory
    `fully_shard` moves one unit at a time to the card and its shards back.
    """
    where = recipe.group.engine, recipe.group.offload
    return recipe.quantization is not None and where == ("fsdp", "parameters")


def room_on(
    recipe: Recipe | None,
    card: Gpu | None,
    other_memory: int = 0,
    expandable_segments: bool = False,
) -> Room | None:
    """Return what the process may have of `card`, of which others hold `other_memory` bytes.

    It is None without a card. Raises RecipeError where others hold all of it.
    """
    if card is None:
        return None
    whole = usable_memory(card)
    if not 0 <= other_memory < whole:
        raise RecipeError(
            "other_memory",
            other_memory,
            f"it must be less than the {whole} bytes of {card.name}",
        )
    return Room(card, whole - other_memory, context_of(recipe, card), expandable_segments)
