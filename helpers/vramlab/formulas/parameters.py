"""The weights that a ledger's model computes with, of the layers that it runs and outside them."""

from functools import lru_cache

from ..recipe import lora_modules
from ..recipe.options import LoRA, Quantization
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from . import model_states
from .graph import Parameter


def parameters_of(recipe: Recipe) -> dict[str, Parameter]:
    """Return them by name; a tied head is another name for the embedding."""
    shape = recipe.shape
    sharded = recipe.group.engine == "fsdp"
    # FSDP prefetches the next layer, so two more stand beside the one that others are like.
    layers = 3 if sharded else 2
    rows = _settings(
        shape,
        recipe.weights_dtype,
        recipe.quantization,
        recipe.lora,
        layers,
    )
    parameters = {row[0]: Parameter(*row) for row in rows}
    head = f"{shape.head}.weight"
    # Modules come in order, so the first weight with a row a token is the word embedding.
    words = _first_of(parameters, shape.vocab_size)
    if head in parameters or words is None:
        return parameters
    weight = parameters[words]
    saved = model_states.trained_whole(shape, recipe.lora)
    trained = model_states.is_tied_head_copied(shape, saved)
    if trained or model_states.is_trained_whole(words, saved):  # a copy of one of them unties them
        weight = Parameter(head, weight.shape, weight.width, trained)
    parameters[head] = weight
    if "cls.predictions.bias" in parameters:  # BERT's, which its head has by another name
        parameters[f"{shape.head}.bias"] = parameters["cls.predictions.bias"]
    return parameters


def _first_of(parameters: dict[str, Parameter], rows: int) -> str | None:
    """Return the name of the first weight with so many rows."""
    for name, weight in parameters.items():
        if weight.shape[0] == rows:
            return name
    return None


@lru_cache(maxsize=512)
def _settings(
    shape: Shape,
    dtype: str,
    quantization: Quantization | None,
    lora: LoRA | None,
    layers: int,
) -> list[tuple]:
    """List (name, shape, width, trained, quantized) of each, adapters last."""
    # Any optimizer does: only widths and what is trained are read.
    table = model_states.cached_table(shape, (dtype, quantization, lora, "sgd", None, False))
    rows = {(row.name, row.shape): row for row in table}
    whole = model_states.trained_whole(shape, lora)
    settings = []
    names = set()
    for name, role, size in model_states.first_layers(shape, layers):
        row = rows[role, size]
        copied = bool(whole) and model_states.is_trained_whole(name, whole)
        quantized = None if copied else row.quantized
        settings.append((name, size, row.width, row.trained or copied, quantized))
        names.add(name)
    # All adapters have one width.
    width = next((row.width for row in table if row.kind == "lora"), 0)
    for name, inside, out in lora_modules.adapted(shape, lora):
        # Adapters of layers that do not run are left out.
        if lora and (f"{name}.weight" in names or name == shape.head):
            settings.append((f"{name}.lora_A", (lora.r, inside), width, True, None))
            settings.append((f"{name}.lora_B", (out, lora.r), width, True, None))
    return settings
