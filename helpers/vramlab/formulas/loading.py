"""What loading takes, of the device and of the host.

On the device the highest moment while a quantized base is loaded: a sum over its tensors in the order in which they come.

`transformers.core_model_loading` quantizes one tensor at a time, in the natural order of their names, and has a layer's
experts twice while it merges them. Preparing makes fp32 copies of what stays in 16 bits. A tied head that the file has too
comes first, and goes when a mask of its size says that it equals the embedding (`tie_weights`).
"""

from functools import lru_cache
from math import ceil, prod

from ..hardware.overhead import rounded
from ..recipe.knobs import unchecked
from ..recipe.options import Quantization
from ..recipe.process_context import loads_whole
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.report import Bytes
from .model_states import (
    BLOCK,
    FP32,
    HALF,
    ParameterRow,
    buffer_bytes,
    cached_table,
    parameter_bytes,
    starred_name,
    weight_width,
)

# Parts of names that sort otherwise in the published checkpoints (`transformers.conversion_mapping`): w1 and w3 before w2.
STORED_AS = {"mixtral": {"mlp": "block_sparse_moe", "gate_up_proj": "a", "down_proj": "b"}}


def loading_peak(recipe: Recipe) -> Bytes | None:
    """Return the split at that moment; None where the device never holds more than the result."""
    if loads_whole(recipe):
        whole = parameter_bytes(unchecked(recipe, sharding=None))
        return Bytes(parameters=whole, buffers=buffer_bytes(recipe.shape))
    if recipe.quantization is None:
        return None
    parameters, buffers, temporaries = _highest(recipe.shape, recipe.weights_dtype, recipe.quantization)
    return Bytes(parameters=parameters, buffers=buffers, temporaries=temporaries)


def loaded_on_host(recipe: Recipe) -> int:
    """Return the bytes of weights that all ranks together hold in host memory while they load.

    `from_pretrained` makes a model there and moves it. A quantized one goes to the device tensor by tensor. Of FSDP's
    ranks one reads (`cpu_ram_efficient_loading`, which the programs of `plan` set), of others each.
    """
    if recipe.quantization:
        return 0
    weights = sum(prod(weight.shape) for weight in recipe.shape.weights()) * weight_width(recipe.weights_dtype)
    sharding = recipe.sharding
    return weights * (sharding.world_size if sharding and sharding.engine != "fsdp" else 1)


@lru_cache(maxsize=256)
def _highest(shape: Shape, dtype: str, quantization: Quantization) -> tuple[int, int, int]:
    """Return the bytes of loaded tensors, of buffers, and those that the next tensor takes."""
    loaded = Quantization(quantization.quant_type, quantization.double, prepare=False)
    rows = {(row.name, row.shape): row for row in cached_table(shape, (dtype, loaded, None, "sgd", None, False))}
    tensors = [(weight.name, rows[starred_name(weight.name), weight.shape]) for weight in shape.weights()]
    table = (shape.vocab_size, shape.hidden_size)
    head = next(sum(row.blocks) for row in rows.values() if row.shape == table) if shape.stores_tied_head else 0
    kept, moments, other = head, [], STORED_AS.get(shape.family, {})

    def place(named: tuple) -> list[tuple[int, str]]:  # `dot_natural_key`: layer 10 follows layer 9
        return [(int(part), "") if part.isdigit() else (-1, other.get(part, part)) for part in named[0].split(".")]

    for _, row in sorted(tensors, key=place):
        moments.append((kept, 0, _working(row)))
        kept += sum(row.blocks)
    if head:
        moments.append((kept, buffer_bytes(shape), rounded(prod(table)) + rounded(1)))
        kept -= head
    for _, row in tensors if quantization.prepare else ():
        if row.quantized is None and row.width == HALF:
            copy = rounded(prod(row.shape) * FP32)
            moments.append((kept, buffer_bytes(shape), copy))
            kept += copy - row.size
    return max(moments, key=sum)


def _working(row: ParameterRow) -> int:
    """Return the most bytes that loading one tensor takes: itself, and what becomes of it."""
    n, result = prod(row.shape), sum(row.blocks)
    if row.quantized is None:
        return 2 * result if row.kind == "expert" else result
    scales = rounded(FP32 * ceil(n / BLOCK))
    double = len(row.blocks) > 3  # fp32 scales and their distances from the mean; else 16 magnitudes and their maximum
    transposed = row.size if row.kind == "conv1d" else 0
    return row.size + transposed + result + (2 * scales if double else 2 * rounded(1))
