"""Which recipes a run of few layers and micro-batches may stand for."""

from math import ceil

from ..recipe import lora_modules
from ..recipe.configuration import READERS
from ..recipe.deepspeed_config import HIDDEN, MOST_GATHERED
from ..recipe.options import FUSED, TRL
from ..recipe.recipe import Recipe
from .repetition import GROUPS, Repetition, cut

# What a model returns besides, where its configuration asks for it.
MORE_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def is_abridged(recipe: Recipe) -> bool:
    """Tell whether two micro-batches are run for all of a step's.

    An engine of many ranks does something else in the last.
    """
    differs = recipe.sharding or recipe.activation_offloading or recipe.rollouts
    return recipe.gradient_accumulation_steps > 1 and not differs


def may_be_deepened(recipe: Recipe, target: str) -> bool:
    """Tell whether a shallow run could say what `recipe` takes, and take less time."""
    if target == "cpu" and recipe.shape.config.get("sliding_window"):
        # a sliding cache makes a scalar a layer before the layers run; on CUDA it is the host's
        return False
    if recipe.activation_offloading:
        return False  # copies come one node late, and a storage is copied once
    # DDP's buckets and DeepSpeed's flat buffers run across layers, one unit has all of them, a
    # pipeline deals them out
    sharding = recipe.sharding
    if sharding and sharding.engine != "tensor":
        by_layers = (sharding.engine, sharding.wrap) == ("fsdp", "layers")
        if not (by_layers or streams_weights(recipe)):
            return False
    if sharding and sharding.reshard_root:
        return False
    if lora_modules.differ_by_layer(recipe.shape, recipe.lora):
        return False
    if recipe.peft and recipe.peft.differs_by_layer:
        return False
    if names_a_layer(recipe):
        return False
    return recipe.shape.num_layers > GROUPS + bool(sharding)


def streams_weights(recipe: Recipe) -> bool:
    """Tell whether DeepSpeed keeps weights and states on the host, and fetches them by weight.

    On one card, for more ranks have copies of the small weights in one list without names. All
    weights are trained: gradients of adapters fit into one bucket, which is reduced behind the last
    layer.
    """
    sharding = recipe.group
    if recipe.adapters or recipe.quantization or recipe.freeze:
        return False
    streams = (sharding.engine, sharding.offload) == ("deepspeed", "parameters")
    return streams and sharding.world_size == 1


def streamed(recipe: Recipe) -> tuple[int, int]:
    """Return how many layers ahead DeepSpeed fetches weights, and how many of the last differ.

    It fetches until `MOST_GATHERED` elements are there, the last weight in part (and so the last
    layer). Those of the head are among them all the time where TRL multiplies with its weight
    itself. How far ahead that is is a guess: where weights are there for longer, the log says so
    (`deepen.py`), and all layers are run. A weight is freed after forward if its next use is
    `MOST_GATHERED` elements away or more, on which each layer that follows counts twice, once in
    backward: so those before the last ones are, however deep the model is.
    """
    persistent = HIDDEN["stage3_param_persistence_threshold"](recipe.shape.hidden_size)
    layer = 0
    for weight in recipe.shape.weights():
        if weight.layer == 0 and weight.size > persistent:
            layer += weight.size
    head = 0
    if recipe.trainer in FUSED:
        head = recipe.shape.vocab_size * recipe.shape.hidden_size
    ahead = max(1, ceil((MOST_GATHERED - head) / layer))
    return ahead, max(ahead + 1, ceil(MOST_GATHERED / (2 * layer)))


def names_a_layer(recipe: Recipe) -> bool:
    """Tell whether something is frozen, or left out of the 4 bits, by a layer's number."""
    skipped = recipe.quantization.skip_modules if recipe.quantization else None
    for name in (*(recipe.freeze or ()), *(skipped or ())):
        if any(map(str.isdigit, name.split("."))):
            return True
    return False


def is_written_down(recipe: Recipe) -> bool:
    """Tell whether the tests hold the architecture's deepened log against the whole run.

    It may return no more than they ask for.
    """
    shape = recipe.shape
    if recipe.peft:
        return False
    # TRL asks for the router's logits
    if recipe.trainer in TRL and shape.experts_per_token:
        return False
    if shape.layout is None and shape.family not in READERS:
        return False
    return not any(shape.settings.get(name) for name in MORE_OUTPUTS)


def shallow_recipe(recipe: Recipe, layers: Repetition, extra: int = 0) -> Recipe:
    """Return `recipe` with the layers alone that stand for all, and `extra` more groups of them."""
    config = cut(recipe.shape, layers.kept(extra)).config
    return recipe.replace(model=config, num_layers=None, task=recipe.shape.task)
