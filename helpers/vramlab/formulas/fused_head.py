"""TRL's fused head in the ledger: no logits, but a tile of them, and gradients that are summed up in fp32.

After `trl.trainer.utils.add_fused_lm_head` and `trl/kernels/chunked_logprob.py` of trl 1.16. With T tokens that have a
label (not padding, nor a sample's last), hidden size h, vocabulary V and w bytes a number that is computed: kept are w·T·h;
forward's peak adds a tile of w · min(T, 4,096) · 32,768, backward's also 4·T·h and, where the head is trained, 4·V·h.
"""

import dataclasses
from collections.abc import Iterator
from functools import lru_cache

from ..recipe.knobs import unchecked
from ..recipe.options import TRL
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.errors import RecipeError
from .ledger import Block, Parameter, Tensor
from .model_states import FP32
from .operators import BOOL, INT64, Operators

TOKENS, COLUMNS = 4096, 32768  # of a tile: TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE
STATISTICS = 7  # fp32 numbers a token that the forward pass folds tiles into


def with_its_adapters(recipe: Recipe) -> Recipe:
    """`recipe` as TRL's trainer runs it: adapters of a quantized base in bf16, pairs as sequences. Raises RecipeError."""
    if recipe.trainer == "transformers":
        return recipe
    if recipe.shape.experts_per_token:
        allowed = (
            f"the formulas do not know the balancing loss that {TRL[recipe.trainer]} adds for a mixture: ask simulate"
        )
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


def sizes(total: int, most: int) -> Iterator[int]:
    """The pieces of at most `most` that `total` is cut into; of more than three the first two and the last."""
    count = -(-total // most)
    for i in range(count):
        if i < 2 or i == count - 1:
            yield min(most, total - i * most)


class FusedHead:
    """The head of one micro-batch: as the node that backward calls, it makes its gradients."""

    def __init__(self, m: Operators, x: Tensor, weight: Parameter, bias: Parameter | None):
        self.m, self.weight, self.bias, self.width = m, weight, bias, m.autocast or x.width
        self.where, self.gradient, self.saved = m.where, None, ()
        (b, n, h), samples = x.shape, m.recipe.samples
        rows = (sum(samples) - len(samples),)
        mask, sliced = m.tensor("ne", (b, n - 1), BOOL), m.slice(x, b, n - 1, h)
        # its gradient is put into zeros, in a copy of those
        copied = rows[0] * h * x.width
        hidden = m.op("index", [sliced], (*rows, h), x.width, saves=[mask], extra=copied)
        self.node, self.needs, self.hidden = hidden.node, hidden.needs, hidden.view(*hidden.shape)
        targets = m.tensor("index", rows, INT64)
        statistics = [m.tensor("full", rows, FP32) for _ in range(STATISTICS)]
        tile, casts = self.tile(), self.casts(False)
        del statistics, tile, casts
        self.saved = [hidden, targets, m.tensor("add", rows, FP32), m.tensor("sub", rows, FP32), mask]
        self.result = m.tensor("sub", rows, FP32)
        if m.no_grad:
            self.saved = ()
            return
        for parameter in self.trained():
            parameter.uses += 1
        m.nodes.append(self)
        self.result.node, self.result.needs = self, True

    def trained(self) -> list[Parameter]:
        """Its parameters that get a gradient."""
        return [p for p in (self.weight, self.bias) if p is not None and p.needs]

    def tile(self) -> Block:
        """What the products of a tile are written into."""
        return self.m.block("empty", (min(self.hidden.shape[0], TOKENS), COLUMNS), self.width)

    def casts(self, backward: bool) -> list[Tensor | None]:
        """Copies of rows and of columns of the weight in the dtype of the products; those of the last tile.

        The backward pass keeps a tile's copies until the next one's are made.
        """
        m, (rows, h), part, columns = self.m, self.hidden.shape, None, None
        for n in sizes(rows, TOKENS):
            part = m.tensor("to", (n, h), self.width) if self.hidden.width != self.width else None
            for v in sizes(self.weight.shape[0], COLUMNS):
                columns_ = m.tensor("to", (v, h), self.width) if self.weight.width != self.width else None
                columns = columns_ if backward else None
                del columns_
                if self.bias is not None and self.bias.width != self.width:
                    m.scratch(v * self.width, "to")
                if backward and self.bias is not None and self.bias.needs:
                    m.scratch(v * FP32, "sum")
        return [part, columns]

    def receive(self, ledger: Operators, gradient: Block) -> None:
        self.gradient = gradient

    def __call__(self) -> None:
        """Sum up the gradients of rows and parameters tile by tile in fp32, cast them, and hand them on."""
        m, results = self.m, []
        m.where = self.where
        receivers = [(self.node, self.hidden)] if self.needs else []
        receivers += [(parameter, parameter) for parameter in self.trained()]
        sums = [m.block("zeros", like.shape, FP32) for _, like in receivers]
        tile = self.tile()
        casts = self.casts(True)
        for (receiver, like), total in zip(receivers, sums, strict=True):
            results.append((receiver, total if like.width == FP32 else m.block("to", like.shape, like.width)))
        self.saved, self.hidden, self.gradient = (), None, None
        del total, sums, tile, casts
        results.reverse()
        m.deliver(results)
