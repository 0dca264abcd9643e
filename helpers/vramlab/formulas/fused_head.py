"""TRL's fused head in the ledger: no logits, but a tile of them, and gradients that are summed up in fp32.

After `trl/kernels/chunked_logprob.py` of trl 1.16. With T tokens that have a label, hidden size h, vocabulary V and w bytes
a number that is computed: kept are w·T·h; forward's peak adds a tile of w · min(T, 4,096) · 32,768, backward's also 4·T·h
and, where the head is trained, 4·V·h.
"""

import dataclasses
from functools import lru_cache
from math import prod

from ..recipe.knobs import unchecked
from ..recipe.options import TRL
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.errors import RecipeError
from .ledger import CAST, Parameter, Tensor
from .model_states import FP32
from .operators import BOOL, INT64, Operators

TOKENS, COLUMNS = 4096, 32768  # of a tile: TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE
STATISTICS = 7  # fp32 numbers a token that the forward pass folds tiles into


def with_its_adapters(recipe: Recipe) -> Recipe:
    """`recipe` as TRL's trainer runs it: adapters of a quantized base in bf16, pairs as sequences. Raises RecipeError."""
    if recipe.trainer == "transformers":
        return recipe
    if recipe.shape.experts_per_token:
        name = TRL[recipe.trainer]
        allowed = f"the formulas do not know the balancing loss that {name} adds for a mixture: ask simulate"
        raise RecipeError("trainer", recipe.trainer, allowed)
    if recipe.shape.family == "falcon" and recipe.attn_implementation == "eager" and recipe.passes_without_gradients:
        allowed = "the formulas do not know what Falcon's loop keeps of scores without gradients: ask simulate"
        raise RecipeError("attn_implementation", "eager", allowed)
    found = recipe
    if recipe.trainer != "sft":
        lora = recipe.lora and dataclasses.replace(recipe.lora, lora_dropout=0.0)
        found = unchecked(recipe, batch_size=recipe.sequences, shape=_without_dropout(recipe.shape), lora=lora)
    if recipe.quantization is None:
        return found
    if others := {recipe.implied_dtype, recipe.weights_dtype} - {"bfloat16"}:
        allowed = f"the formulas do not know its bf16 adapters beside {others.pop()}: ask simulate"
        raise RecipeError("trainer", recipe.trainer, allowed)
    # adapters as wide as everything else (`compute_recipe`)
    return unchecked(found, lora=unchecked(found.lora, autocast_adapter_dtype=None))


@lru_cache(maxsize=64)
def _without_dropout(shape: Shape, reference: bool = False) -> Shape:
    """`shape` without the dropout that is a module's (`disable_dropout_in_model`); a `reference` model has none at all."""
    none = {"hidden_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    if not (reference or shape.family in ("gpt2", "bert")):
        none = {name: 0.0 for name in (*none,)[:2] if shape.family in ("gpt_neox", "phi")}
    return dataclasses.replace(shape, **none)


def reference_recipe(recipe: Recipe) -> Recipe:
    """The frozen model of `recipe`, as `with_its_adapters` gives it, that runs without gradients."""
    shape = _without_dropout(recipe.shape, True)
    return unchecked(recipe, lora=None, gradient_checkpointing=False, shape=shape)


def log_probabilities(m: Operators, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    """Return those of the tokens that have a label, in fp32, as one function with its backward pass."""
    (b, n, h), rows, width = x.shape, (m.recipe.labelled,), m.autocast or x.width
    mask, sliced = m.tensor("ne", (b, n - 1), BOOL), m.slice(x, b, n - 1, h)
    # its gradient is put into zeros, in a copy of those
    hidden = m.op("index", [sliced], (*rows, h), x.width, saves=[mask], extra=rows[0] * h * x.width)
    targets = m.tensor("index", rows, INT64)
    # tiles of the product, and copies of the last two tiles' rows and columns in its dtype
    tile = min(rows[0], TOKENS) * COLUMNS * width
    parts, columns = (
        [min(most, length - begin) * h * width for begin in range(0, length, most)] if own != width else [0]
        for length, most, own in ((rows[0], TOKENS, x.width), (weight.shape[0], COLUMNS, weight.width))
    )
    if not rows[0]:  # the token of each sample is its first: no tile is computed
        parts, columns = [0], [0]
    statistics, most = STATISTICS * [rows[0] * FP32], max([parts[0], columns[0]], parts[:2], key=sum)
    product = m.workspaces[:1]
    m.scratch((*statistics, tile, *most, *product), "fused_head")
    saved = [hidden, targets, m.tensor("add", rows, FP32), m.tensor("sub", rows, FP32), mask]
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    trained = [t for t in inputs if t.needs]
    sums = [FP32 * prod(t.shape) for t in trained]  # of gradients
    most = max([parts[0], *columns[:2]], [*parts[:2], columns[-1]], key=sum)
    kept = [size for size, t in zip(sums, trained, strict=True) if t.width != FP32]
    spike, kept = (*sums, tile, *most, *product), [*kept, tile]
    return m.op("fused_head", inputs, rows, FP32, saves=saved, grads=(CAST,) * 3, spike=spike, extra=kept)
