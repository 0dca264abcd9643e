"""TRL's fused head: no logits, but a tile of them, and gradients that are summed up in fp32.

After `trl/kernels/chunked_logprob.py` of trl 1.16. With T tokens that have a label, hidden size h,
vocabulary V and w bytes a number that is computed: kept are w·T·h; forward's peak adds a tile of
w · min(T, 4,096) · 32,768, backward's also 4·T·h and, where the head is trained, 4·V·h.
"""

import dataclasses
from functools import lru_cache
from math import ceil, prod
from typing import Any, NamedTuple

from ..base.errors import RecipeError
from ..recipe.families import family_of
from ..recipe.knobs import unchecked
from ..recipe.options import TRL
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from .calls import FUSED_TILE
from .graph import CAST, Tensor
from .numerics import BOOL, INT64
from .operators import Operators
from .tensor_sizes import FP32

TILE_TOKENS = 4096  # TOKEN_CHUNK_SIZE
TILE_COLUMNS = 32768  # _CHUNKED_LOGPROB_CHUNK_SIZE
STATISTICS = 7  # fp32 numbers a token that the forward pass folds tiles into
DROPOUTS = ("hidden_dropout", "embedding_dropout", "attention_dropout")  # fields of a shape


def with_its_adapters(recipe: Recipe) -> Recipe:
    """Return `recipe` as TRL's trainer runs it.

    Adapters of a quantized base are in bf16, and pairs are sequences.

    Raises:
        RecipeError: what the formulas do not know of the trainer.
    """
    if recipe.trainer == "transformers":
        return recipe
    _refuse_unknown(recipe)
    changed = recipe
    if recipe.trainer != "sft":
        lora = recipe.lora
        if lora:
            lora = unchecked(lora, lora_dropout=0.0)
        changed = unchecked(
            recipe,
            batch_size=recipe.sequences,
            shape=_without_dropout(recipe.shape),
            lora=lora,
        )
    if recipe.quantization is None or recipe.lora is None:
        return changed
    others = {recipe.implied_dtype, recipe.weights_dtype} - {"bfloat16"}
    if others:
        # Of two the first one by name, so that the sentence is the same each time.
        allowed = f"the formulas do not know its bf16 adapters beside {min(others)}: ask simulate"
        raise RecipeError("trainer", recipe.trainer, allowed)
    # Without a dtype of their own adapters are as wide as everything else (`compute_recipe`).
    return unchecked(changed, lora=unchecked(changed.lora, autocast_adapter_dtype=None))


def _refuse_unknown(recipe: Recipe) -> None:
    """Raise RecipeError for what the formulas do not know of TRL's trainers."""
    if recipe.rollouts:
        allowed = "the formulas do not know what it samples: ask simulate"
        raise RecipeError("trainer", recipe.trainer, allowed)
    if recipe.shape.experts_per_token:
        name = TRL[recipe.trainer]
        unknown = f"the balancing loss that {name} adds for a mixture"
        allowed = f"the formulas do not know {unknown}: ask simulate"
        raise RecipeError("trainer", recipe.trainer, allowed)
    written_out = recipe.attn_implementation == "eager"
    in_place = written_out and recipe.shape.layout and recipe.shape.layout.scores_in_place
    if in_place and recipe.passes_without_gradients:
        unknown = "what Falcon's loop keeps of scores without gradients"
        allowed = f"the formulas do not know {unknown}: ask simulate"
        raise RecipeError("attn_implementation", "eager", allowed)


@lru_cache(maxsize=64)
def _without_dropout(shape: Shape, reference: bool = False) -> Shape:
    """Return `shape` without the dropout that is a module's (`disable_dropout_in_model`).

    Families call a function or a module: of some all dropout goes, of some none. A `reference`
    model has none at all.
    """
    names = DROPOUTS if reference else family_of(shape).dropout_modules
    changes: dict[str, Any] = dict.fromkeys(names, 0.0)
    return dataclasses.replace(shape, **changes)


def reference_recipe(recipe: Recipe) -> Recipe:
    """Return the frozen model of `recipe`, as `with_its_adapters` gives it."""
    shape = _without_dropout(recipe.shape, True)
    return unchecked(recipe, lora=None, gradient_checkpointing=False, shape=shape)


def log_probabilities(
    m: Operators,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labelled: int,
) -> Tensor:
    """Return those of the `labelled` tokens, in fp32, as one function with its backward pass."""
    tensor = m.ledger.tensor
    b, tokens, _ = x.shape
    width = m.numerics.autocast or x.width
    # labels[:, 1:] != -100, a byte a position; the last position of a sample predicts nothing.
    mask = tensor("ne", (b, tokens - 1), BOOL)
    hidden = _labelled(m, x, mask, labelled)
    targets = tensor("index", (labelled,), INT64)
    # `mm_buf`: allocated once for all tiles, as wide as a full chunk of the vocabulary even where
    # that is smaller.
    tile = min(labelled, TILE_TOKENS) * TILE_COLUMNS * width
    copies = _Copies.of(m, x, weight, labelled)
    workspace = m.ledger.workspaces[:1]

    tiles = ceil(labelled / TILE_TOKENS) * ceil(weight.shape[0] / TILE_COLUMNS)
    m.ledger.calls += FUSED_TILE * tiles
    statistics = STATISTICS * [labelled * FP32]
    m.ledger.scratch((*statistics, tile, *copies.forward, *workspace), "fused_head")
    saved = [
        hidden,
        weight,
        targets,
        tensor("add", (labelled,), FP32),
        tensor("sub", (labelled,), FP32),
        mask,
    ]
    inputs = [hidden, weight]
    if bias is not None:
        inputs.append(bias)

    # Backward sums gradients up in fp32, and casts those that are to be in half precision.
    trained = [one for one in inputs if one.needs]
    sums = [FP32 * prod(one.shape) for one in trained]
    kept = [FP32 * prod(one.shape) for one in trained if one.width != FP32]
    return m.op(
        "fused_head",
        inputs,
        (labelled,),
        FP32,
        saves=saved,
        grads=(CAST, CAST, CAST),
        # `spike` is there in the loop over tiles; `extra` is what the function's names still hold
        # while it casts its results.
        spike=(*sums, tile, *copies.backward, *workspace),
        extra=[*kept, tile],
    )


def _labelled(
    m: Operators,
    x: Tensor,
    mask: Tensor,
    labelled: int,
) -> Tensor:
    """Take the hidden states of the tokens that have a label."""
    b, tokens, hidden_size = x.shape
    sliced = m.slice(x, (b, tokens - 1, hidden_size))
    # The gradient is put into zeros, in a copy of those.
    copy = labelled * hidden_size * x.width
    return m.op(
        "index",
        [sliced],
        (labelled, hidden_size),
        x.width,
        saves=[mask],
        extra=copy,
    )


class _Copies(NamedTuple):
    """Bytes of the copies of hidden states and weight in the product's dtype, tile by tile."""

    rows: list[int]
    columns: list[int]

    @classmethod
    def of(
        cls,
        m: Operators,
        x: Tensor,
        weight: Tensor,
        labelled: int,
    ) -> "_Copies":
        """Return those of the head's products."""
        if not labelled:  # the token of each sample is its first: no tile is computed
            return cls([0], [0])
        width = m.numerics.autocast or x.width
        row = x.shape[-1] * width
        rows = [0]
        if x.width != width:
            rows = _tiles(labelled, TILE_TOKENS, row)
        columns = [0]
        if weight.width != width:
            columns = _tiles(weight.shape[0], TILE_COLUMNS, row)
        return cls(rows, columns)

    @property
    def forward(self) -> list[int]:
        """Return what is there at once: a copy lives until the next tile's has been made."""
        rows = self.rows
        return max([rows[0], self.columns[0]], rows[:2], key=sum)

    @property
    def backward(self) -> list[int]:
        """Return the same where all columns are gone over for each tile of rows."""
        rows = self.rows
        columns = self.columns
        return max([rows[0], *columns[:2]], [*rows[:2], columns[-1]], key=sum)


def _tiles(length: int, tile: int, row: int) -> list[int]:
    """List the bytes of each tile of `length` rows."""
    return [min(tile, length - begin) * row for begin in range(0, length, tile)]
