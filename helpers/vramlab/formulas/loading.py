"""What loading takes, of the device and of the host.

On the device it is the highest moment while a quantized base is loaded, one tensor after the other.

`transformers.core_model_loading` quantizes one tensor at a time, in the natural order of their
names, and has a layer's experts twice while it merges them. Preparing makes fp32 copies of what
stays in 16 bits. A tied head that the file has too comes first, and goes when a mask of its size
says that it equals the embedding (`tie_weights`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from ..hardware.overhead import rounded
from ..recipe.families import family_of
from ..recipe.knobs import unchecked
from ..recipe.options import Quantization
from ..recipe.process_context import loads_on_host, loads_whole
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.report import Bytes
from .model_states import ParameterRow, buffer_bytes, cached_table, parameter_bytes, starred_name
from .tensor_sizes import BLOCK, FP32, HALF, weight_width


class Moment(NamedTuple):
    """Bytes of loaded tensors, of buffers, and of those that the next tensor takes."""

    parameters: int
    buffers: int
    temporaries: int


def loading_peak(recipe: Recipe) -> Bytes | None:
    """Return the split at the highest moment of loading.

    It is None where the device never holds more than the result.
    """
    if loads_whole(recipe):
        whole = parameter_bytes(unchecked(recipe, sharding=None))
        return Bytes(parameters=whole, buffers=buffer_bytes(recipe.shape))
    if recipe.quantization is None or loads_on_host(recipe):
        return None
    highest = _highest(recipe.shape, recipe.weights_dtype, recipe.quantization)
    return Bytes(**highest._asdict())


def loaded_on_host(recipe: Recipe) -> int:
    """Return the bytes of weights that all ranks together hold in host memory while they load.

    `from_pretrained` makes a model there and moves it. A quantized one goes to the device tensor by
    tensor, or is packed there by each rank (`loads_on_host`). In the dtype of their file weights
    are its pages, which all ranks share, and in another dtype each rank has a copy. At DeepSpeed's
    stage 3 rank 0 alone reads values, as they are in the file (transformers 5.23,
    `modeling_utils.py`). Each rank of FSDP reads all weights, with `cpu_ram_efficient_loading` too:
    transformers asks for it only where it makes what a file lacks (its issue 43749).
    """
    sharding = recipe.group
    if recipe.quantization and loads_on_host(recipe):
        highest = _highest(recipe.shape, recipe.weights_dtype, recipe.quantization)
        return sharding.world_size * sum(highest)
    if recipe.quantization:
        return 0
    numbers = sum(prod(weight.shape) for weight in recipe.shape.weights())
    weights = numbers * weight_width(recipe.weights_dtype)
    # Most files are in 16 bits where a configuration does not say it.
    stored = recipe.shape.published_dtype or "bfloat16"
    if sharding.engine == "deepspeed" and sharding.stage == 3:
        return numbers * weight_width(stored)
    if recipe.weights_dtype == stored:
        return weights
    copies = sharding.world_size
    if sharding.engine == "fsdp" and sharding.offload == "parameters":
        # Each rank has the whole weights until all shards are there (accelerate 1.15,
        # `fsdp2_prepare_model`: `original_sd`).
        copies += 1
    return weights * copies


@lru_cache(maxsize=256)
def _highest(shape: Shape, dtype: str, quantization: Quantization) -> Moment:
    """Return the moment with the most bytes."""
    packs_later = quantization.experts == "loaded"
    in_turn = None if packs_later else quantization.experts
    loaded = replace(quantization, prepare=False, experts=in_turn)
    tensors = _tensors(shape, dtype, loaded)
    embedding = (shape.vocab_size, shape.hidden_size)
    head = 0
    if shape.stores_tied_head:
        head = next(sum(row.blocks) for _, row in tensors if row.shape == embedding)
    family = family_of(shape)
    others = family.stored_as
    merges = not family.stored_fused
    # The copy of a tied head comes before everything else and stays until it has been compared
    # with the embedding.
    kept = head
    moments = []
    for _, row in sorted(tensors, key=lambda tensor: _natural(tensor[0], others)):
        moments.append(Moment(kept, 0, _working(row, merges)))
        kept += sum(row.blocks)
    buffers = buffer_bytes(shape)
    if head:
        mask = rounded(prod(embedding)) + rounded(1)
        moments.append(Moment(kept, buffers, mask))
        kept -= head
    if packs_later:
        # Experts that were loaded whole are packed when the model is complete: for each of them
        # the moment has the whole tensor, still kept, and its packed form.
        packed = _tensors(shape, dtype, replace(loaded, experts=quantization.experts))
        for (_, row), (_, after) in zip(tensors, packed, strict=True):
            if row.kind == "expert":
                moments.append(Moment(kept, buffers, _packing(after)))
                kept += sum(after.blocks) - sum(row.blocks)
        tensors = packed
    if quantization.prepare:
        for _, row in tensors:
            if row.quantized is None and row.width == HALF:
                # `prepare_model_for_kbit_training` assigns `param.data.to(float32)` one by one, so
                # only one weight at a time is there in both formats.
                copy = rounded(prod(row.shape) * FP32)
                moments.append(Moment(kept, buffers, copy))
                kept += copy - row.size
    return max(moments, key=sum)


def _tensors(shape: Shape, dtype: str, loaded: Quantization) -> list[tuple[str, ParameterRow]]:
    """Return the name and the row of each tensor."""
    table = cached_table(shape, (dtype, loaded, None, "sgd", None, False))
    rows = {(row.name, row.shape): row for row in table}
    tensors = []
    for weight in shape.weights():
        tensors.append((weight.name, rows[starred_name(weight.name), weight.shape]))
    return tensors


def _natural(name: str, others: Mapping[str, str]) -> list[tuple[int, str]]:
    """Return the key that sorts names as `dot_natural_key` does: layer 10 follows layer 9."""
    key = []
    for part in name.split("."):
        if part.isdigit():
            key.append((int(part), ""))
        else:
            key.append((-1, others.get(part, part)))
    return key


def _working(row: ParameterRow, merges: bool) -> int:
    """Return the most bytes that loading one tensor takes: itself, and what becomes of it."""
    merging = 2 * row.size if row.kind == "expert" and merges else 0
    if row.quantized is None:
        return max(merging, sum(row.blocks))
    return max(merging, row.size + _packing(row))


def _packing(row: ParameterRow) -> int:
    """Return the most bytes that putting a tensor in 4 bits takes besides the tensor."""
    scales = rounded(FP32 * ceil(prod(row.shape) / BLOCK))
    extra = 2 * rounded(1)  # 16 magnitudes and their maximum
    if len(row.blocks) > 3:  # double quantization: fp32 scales and their distances from the mean
        extra = 2 * scales
    if row.kind == "conv1d":  # it is transposed first
        extra += row.size
    return sum(row.blocks) + extra
