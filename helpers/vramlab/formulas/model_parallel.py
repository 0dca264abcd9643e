"""Tensor and pipeline parallel ranks: a slice of every matrix, or some of the layers, predicted as a model of its own.

Tensor parallel (Shoeybi et al. 2019) on N ranks: P/N of what is sliced and all of the norms; activations are sliced
between the two matrices of a pair (heads, MLP channels) and whole elsewhere, as are logits and loss. Each pair's result
is all-reduced into a new tensor.

Pipeline (Huang et al. 2019; Narayanan et al. 2021) with N stages and m micro-batches: a stage's own layers, with the
activations of the micro-batches in flight: all m under GPipe, min(m, N - rank) under 1F1B; and for each micro-batch two
buffers, one at the ends of the pipeline, for hidden states to come and for their gradients.
"""

import dataclasses
from functools import lru_cache

from ..hardware.gpu import Chip
from ..hardware.overhead import rounded
from ..recipe.knobs import unchecked
from ..recipe.parallel_limits import WHOLE_EMBEDDING, stage_layers
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..recipe.weights import Weight
from ..report.report import Bytes, Phase
from .ledger import Leaf, Parameter, Tensor
from .model import Model
from .model_states import input_bytes, is_sharded_by, weight_width
from .operators import BOOL, INT64

# Sliced by outputs (the first of a pair) and by inputs (the second one): transformers' `tp_plan`.
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "query_key_value", "gate_proj", "up_proj", "fc1", "dense_h_to_4h")
BY_INPUTS = ("o_proj", "down_proj", "dense", "fc2", "dense_4h_to_h")


def rank_recipe(recipe: Recipe) -> Recipe:
    """Return `recipe` as its rank runs it: its shape has this rank's weights, its batch is a pipeline's micro-batch."""
    sharding = recipe.sharding
    if not is_model_parallel(recipe):
        return recipe
    if sharding.engine == "tensor":
        return unchecked(recipe, shape=_sliced(recipe.shape, sharding.world_size, sharding.rank))
    loop, shape = recipe.loop, _stage(recipe.shape, sharding.world_size, sharding.rank)
    if not loop.keep_outputs:  # a stage holds a micro-batch's result until its backward pass is done
        loop = dataclasses.replace(loop, keep_outputs="backward")
    return unchecked(recipe, shape=shape, batch_size=recipe.batch_size // sharding.micro_batches, loop=loop)


def is_model_parallel(recipe: Recipe) -> bool:
    """Tell whether each rank holds a slice of the model or some of its layers."""
    sharding = recipe.sharding
    return sharding is not None and sharding.world_size > 1 and sharding.engine in ("tensor", "pipeline")


@lru_cache(maxsize=256)
def _sliced(shape: Shape, ranks: int, rank: int) -> Shape:
    rows = -(-shape.vocab_size // ranks)  # DTensor's slices: as `torch.chunk` makes them
    rows = max(0, min(rows, shape.vocab_size - rank * rows))
    sizes = {name: getattr(shape, name) // ranks for name in ("num_heads", "num_kv_heads", "intermediate_size")}
    found = dataclasses.replace(shape, name=f"{shape.name}, slice {rank} of {ranks}", vocab_size=rows, **sizes)
    found.__dict__["_weights"] = tuple(_slice(shape, weight, ranks, rows) for weight in shape.weights())
    return found


def _slice(shape: Shape, weight: Weight, ranks: int, rows: int) -> Weight:
    module, _, part = weight.name.rpartition(".")
    name, (first, *others) = module.rpartition(".")[2], weight.shape
    if weight.layer is None:
        sliced = first == shape.vocab_size and not (weight.kind == "embedding" and shape.family in WHOLE_EMBEDDING)
        return dataclasses.replace(weight, shape=(rows, *others)) if sliced else weight
    if name in BY_OUTPUTS:
        return dataclasses.replace(weight, shape=(first // ranks, *others))
    if name in BY_INPUTS and part == "weight":
        return dataclasses.replace(weight, shape=(first, others[0] // ranks))
    return weight


@lru_cache(maxsize=256)
def _stage(shape: Shape, stages: int, rank: int) -> Shape:
    layers = stage_layers(shape.num_layers, stages)[rank]
    found = dataclasses.replace(shape, name=f"{shape.name}, stage {rank} of {stages}", num_layers=len(layers))
    last, weights = rank == stages - 1, []
    for weight in shape.weights():
        if weight.layer is not None:
            if weight.layer in layers:  # the ledger writes out the first of the layers, by number
                name = weight.name.replace(f".{weight.layer}.", f".{weight.layer - layers[0]}.", 1)
                weights.append(dataclasses.replace(weight, name=name, layer=weight.layer - layers[0]))
        elif weight.kind == "embedding":
            if rank == 0:
                weights.append(weight)
            elif last and shape.tied:
                weights.append(dataclasses.replace(weight, name=f"{shape.head}.weight"))
        elif last:
            weights.append(weight)
    found.__dict__["_weights"] = tuple(weights)
    return found


def pipelined(recipe: Recipe, first: dict[str, Phase], later: dict[str, Phase], kept: int) -> dict[str, Phase]:
    """Return the phases of a stage's whole step, from those of one micro-batch.

    Args:
        first, later: of a micro-batch before which no gradient exists, and of one before which they do.
        kept: bytes of activations that one micro-batch keeps from its forward to its backward pass.
    """
    sharding, count = recipe.sharding, recipe.sharding.micro_batches
    most = count if sharding.schedule == "gpipe" else min(count, sharding.world_size - sharding.rank)  # in flight
    size = recipe.batch_size // count * recipe.seq_len * recipe.shape.hidden_size * weight_width(recipe.weights_dtype)
    neighbours = (sharding.rank > 0) + (sharding.rank < sharding.world_size - 1)
    inputs = input_bytes(recipe) - first["load"].end.inputs

    def plus(split: Bytes, others: int = 0) -> Bytes:
        """Add what all micro-batches have, and the activations of `others` in flight."""
        found = dataclasses.asdict(split)
        found["inputs"] += inputs
        found["workspace"] += count * neighbours * rounded(size)
        found["activations"] += others * kept
        return Bytes(**found)

    phases = {name: Phase(plus(p.peak), plus(p.end)) for name, p in first.items()}
    forwards, backwards = ([plus(first[name].peak, most - 1)] for name in ("forward", "backward"))
    if count > most:  # then a forward pass begins when a backward pass is done
        forwards.append(plus(later["forward"].peak, most - 1))
    if count > 1:
        backwards.append(plus(later["backward"].peak, most - 1 if count > most else max(most - 2, 0)))
    for name, peaks in (("forward", forwards), ("backward", backwards)):
        phases[name] = Phase(max(peaks, key=lambda split: split.total), phases[name].end)
    return phases


def beyond_the_slice(recipe: Recipe) -> int:
    """Return the bytes that an embedding's gradient has beyond a tensor parallel rank's slice (of a `rank_recipe`).

    DTensor computes that of the whole table and keeps a view of it; a tied head's sum is a new tensor, of the slice.
    """
    shape = recipe.shape
    is_slice = is_model_parallel(recipe) and is_sharded_by(recipe, "tensor")
    if not is_slice or shape.tied or shape.family in WHOLE_EMBEDDING:
        return 0
    width = weight_width(recipe.weights_dtype)
    whole, part = shape.settings["vocab_size"] * shape.hidden_size, shape.vocab_size * shape.hidden_size
    return rounded(width * whole) - rounded(width * part)


class TensorParallelModel(Model):
    """The ledger of a tensor parallel rank: pairs of sliced matrices, between whole hidden states."""

    def replicated(self, x: Tensor) -> Tensor:
        """Enter a pair of matrices with a whole tensor; its gradient is all-reduced into a new one."""
        return self.op("all_reduce", [x], x.shape, x.width, view=x)

    def all_reduced(self, x: Tensor) -> Tensor:
        """Sum over the ranks into a new tensor; the gradient passes."""
        return self.scale(x, "add")

    def attention(self, at: dict[str, str], x: Tensor, *others) -> Tensor:
        return self.all_reduced(super().attention(at, self.replicated(x), *others))

    def feed_forward(self, at: dict[str, str], x: Tensor) -> Tensor:
        return self.all_reduced(super().feed_forward(at, self.replicated(x)))

    def embedding(self, ids: Tensor, name: str) -> Tensor:
        if self.shape.family in WHOLE_EMBEDDING:
            return super().embedding(ids, name)
        if ids.block is None:  # numbers of rows that are not here are replaced, and remembered
            ids = self.tensor("masked", ids.shape, INT64)
        mask, weight = self.tensor("mask", ids.shape, BOOL), self.parameters[f"{name}.weight"]
        # see `beyond_the_slice`; a tied table's slice of it is also cloned before it is added to the head's
        count = self.setting("vocab_size", 0) + (weight.shape[0] if self.shape.tied else 0)
        part, weight.shape = weight.shape, (count, weight.shape[1])
        rows = super().embedding(ids, name)
        weight.shape = part
        rows = self.op("index_put", [rows], rows.shape, rows.width, saves=[mask], view=rows)
        return self.all_reduced(rows)

    def linear(self, x: Tensor, name: str) -> Tensor:
        if name != self.shape.head:
            return super().linear(x, name)
        b, n, _ = x.shape
        ranks, whole = self.recipe.sharding.world_size, self.setting("vocab_size", 0)
        part = super().linear(self.replicated(x), name)
        gathered = self.block("all_gather", (ranks * b, n, -(-whole // ranks)), part.width)
        logits = self.op("cat", [part], (b, n, whole), part.width)
        del gathered
        return logits


class PipelineStage(Model):
    """The ledger of one micro-batch in a stage: hidden states come in from the stage before and go on to the next."""

    def __init__(self, recipe: Recipe, shape: Shape, parameters: dict[str, Parameter], chip: Chip):
        super().__init__(recipe, shape, parameters, chip)
        self.begins = recipe.sharding.rank == 0
        self.ends = recipe.sharding.rank == recipe.sharding.world_size - 1

    def embed(self) -> Tensor:
        return super().embed() if self.begins else self.received((self.batch, self.tokens, self.shape.hidden_size))

    def received(self, shape: tuple[int, ...]) -> Tensor:
        """Receive hidden states in a buffer that `pipelined` counts."""
        block = self.block("received", (0,), 1)
        hidden = Tensor(block, shape, self.hidden_width)
        hidden.needs, hidden.node = True, Leaf(None)  # its gradient is sent back
        return hidden

    def norm(self, x: Tensor, name: str) -> Tensor:
        return super().norm(x, name) if f"{name}.weight" in self.parameters else x

    def logits_and_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().logits_and_loss(x) if self.ends else (x, x)
