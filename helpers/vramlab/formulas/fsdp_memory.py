"""FSDP2's rank: what it gathers, copies and reduces, when `fully_shard`'s hooks do it.

With N ranks a weight of d₀ rows is divided by rows: ⌈d₀/N⌉ on each rank, so N·⌈d₀/N⌉ with padding
when it is gathered.

    before a unit's forward     a flat buffer of all its weights, and the weights copied out of it;
                                then the flat buffer of the unit before is freed
                                (`FSDPParamGroup.wait_for_unshard`)
    after it                    the weights are freed at stage 3, unless the unit is kept
                                (`reshard`)
    before its backward         gathered again if it was freed; then the flat buffer of the unit
                                whose forward ran before it (`_backward_prefetch`), which is copied
                                out when its turn comes
    after its backward          weights freed, the last unit's reduce-scatter input too; whole
                                gradients copied into this unit's, freed, one shard of them left
                                (`post_backward`, `foreach_reduce`)

A "-mixed" precision gathers and reduces in half precision, from and to fp32 shards. A unit whose
inputs need no gradient is divided when the whole backward pass is over. With copies of the model
(hybrid sharding) N ranks divide one, and what a unit reduced in half precision stays until the
backward pass is over. One rank alone has no flat
buffer: each weight is copied from its shard (`wait_for_unshard`). Sources:
torch/distributed/fsdp/_fully_shard/.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod

from ..recipe.options import FUSED
from ..recipe.recipe import Recipe
from .engine_memory import APART, EMBEDDING, ROOT, TAIL, Engine
from .graph import Parameter, Tensor
from .ledger import Ledger
from .memory import Block
from .model_states import parameter_table
from .reserved import internal_fragmentation
from .tensor_sizes import FP32, weight_width


@dataclass
class Unit:
    """Weights that are gathered together (an `FSDPParamGroup`)."""

    weights: list[Parameter] = field(default_factory=list)  # those that are in the ledger
    keep: bool = False  # stays gathered from the forward to the backward pass
    flat: Block | None = None  # the buffer it is gathered into
    copied: Block | list[Block] | None = None  # the weights copied out of that
    done: bool = False  # its gradients are reduced


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Return how many numbers a shard has with padding: rows in equal chunks (`Shard(0)`)."""
    if not shape:
        return 1
    return ceil(shape[0] / ranks) * prod(shape[1:])


def own(shape: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """Return the shape of `rank`'s shard: the last ranks may have fewer rows, or none."""
    chunk = ceil(shape[0] / ranks)
    rows = min(chunk, max(0, shape[0] - rank * chunk))
    return (rows, *shape[1:])


def unit_of(name: str, recipe: Recipe) -> str:
    """Return the key of a weight's unit: a layer's prefix, TAIL, ROOT, APART or a module.

    `name` may have * for the layer's number.
    """
    # Each layer is a unit: its name ends with the first number, or the star that stands for one.
    layer = re.match(r".*?\.(\d+|\*)(?=\.)", name)
    if layer:
        return layer[0]
    if recipe.loop.name != "trainer":
        return ROOT
    # accelerate gives units to the embedding and to the last norm and head, which has a tied
    # embedding. It looks for the norm in the attribute "model" of most models
    # (`fsdp_utils._find_final_norm`), which of PEFT's wrapper is the whole model. Where nothing
    # calls the head either, its unit is never gathered.
    shape = recipe.shape
    module = name.rpartition(".")[0]
    embedding = shape.known_layout.modules[0][0]
    norms = [one for one, kind in shape.known_layout.modules if kind == "norm"]
    norm_is_hidden = recipe.lora is not None and embedding.startswith("model.")
    if module in norms[-1:]:
        return ROOT if norm_is_hidden else TAIL
    if module == shape.head:
        is_called = recipe.trainer not in FUSED
        return TAIL if is_called or shape.tied or not norm_is_hidden else APART
    if module == embedding:
        return TAIL if shape.tied else embedding
    return ROOT


class FsdpEngine(Engine):
    """The hooks of `fully_shard`.

    Attributes:
        flat: the buffer that the next all-gather frees.
        reducing: the input of the last reduce-scatter.
        shards: gradients of the units that are reduced.
        averaged: the same before the cast, which are averaged over copies of the model.
        order: units in the order of their forward passes.
        first_unit: that of the word embedding.
    """

    gathers_layers = True

    def __init__(
        self,
        ledger: Ledger,
        parameters: dict[str, Parameter],
        asked: Recipe,
        recipe: Recipe,
    ):
        super().__init__(ledger, parameters, asked, recipe)
        self.ranks = asked.group.shards
        self.mixed = asked.precision.endswith("-mixed")
        self.flat: Block | None = None
        self.reducing: Block | None = None
        self.shards: list[Block] = []
        self.averaged: list[Block] = []
        self.order: list[Unit] = []
        self.units: defaultdict[str, Unit] = defaultdict(Unit)
        for name, weight in parameters.items():
            unit = self.units[unit_of(name, asked)]
            if weight not in unit.weights:  # a tied head is the embedding
                unit.weights.append(weight)
        # accelerate keeps the tail gathered (`reshard_after_forward=False`), and `fully_shard` by
        # default the root: backward begins with these two.
        self.units[TAIL].keep = True
        self.units[ROOT].keep = True
        self.first_unit = ROOT
        if self.embeddings:
            self.first_unit = unit_of(f"{self.embeddings[0]}.weight", asked)

    def begin(self, gradients_exist: bool) -> None:
        """Enter gradients that earlier micro-batches left whole."""
        # Without micro-batches before it what is left is shards, which `shards` counts.
        if not gradients_exist or self.asked.gradient_accumulation_steps == 1:
            return
        # Those of layers that run become blocks of the ledger below; what is left over stands for
        # the other layers.
        self.other_gradients = self._whole_gradients()
        for unit in self.units.values():
            for weight in unit.weights:
                if weight.needs:
                    gradient = self.ledger.block(
                        "backward",
                        weight.shape,
                        weight.width,
                        "gradients",
                    )
                    weight.gradient = gradient
                    self.other_gradients -= gradient.entry.allocated

    def _whole_gradients(self) -> int:
        """Return the bytes of all gradients before they are reduced."""
        total = 0
        for row in parameter_table(self.recipe):
            if row.trained:
                total += (row.size + internal_fragmentation(row.size)) * row.count
        return total

    def unreduced(self, steps: int) -> dict[str, int]:
        """Return the bytes at the end of a micro-batch that is not the last of `steps`.

        It reduces nothing, so all gradients are whole when the embedding's comes, whose unit is
        still gathered. A tied head's gradient waits for the lookup's, and their sum is made beside
        both; it is the gradient itself in the first micro-batch, and is added to that in later
        ones.
        """
        sizes = {"gradients": self._whole_gradients()}
        if not self.embeddings:
            return sizes
        table = self.parameters.get(f"{self.embeddings[0]}.weight")
        if table is None or not table.needs:
            return sizes
        copies = 0
        if self.recipe.shape.tied and not self.recipe.lora:
            # A function's gradient is added to in place, a linear layer's is not (`Ledger`).
            copies += 1
            if self.recipe.trainer not in FUSED:
                copies += 1
        if steps > 2:
            copies += 1
        sizes["temporaries"] = copies * prod(table.shape) * table.width
        sizes["workspace"] = self._gathered_bytes(self.units[self.first_unit])
        return sizes

    def whole(self, weight: Parameter) -> Tensor:
        """Gather a weight that is in no unit, as it is stored (trl, `_fused_forward`)."""
        if unit_of(weight.name, self.asked) != APART:
            return weight
        # `DTensor.full_tensor` gathers rows in equal chunks with padding, and views the rows that
        # count.
        rows, *columns = weight.shape
        gathered_rows = ceil(rows / self.ranks) * self.ranks
        width = weight_width(self.asked.weights_dtype, self.asked.quantization)
        gathered = self.ledger.tensor("all_gather", (gathered_rows, *columns), width)
        return gathered.view(*weight.shape)

    def _gathered_bytes(self, unit: Unit) -> int:
        return sum(self._whole(weight) for weight in unit.weights)

    def _whole(self, weight: Parameter) -> int:
        """Return the bytes of a gathered weight with padding."""
        shape = weight.shape
        width = weight.width
        if weight.quantized:  # 4 bits are a column of bytes (`Params4bit`)
            shape = (ceil(prod(shape) / 2), 1)
            width = 1
        return self.ranks * padded(shape, self.ranks) * width

    def _gather(self, unit: Unit) -> None:
        """All-gather `unit` into its flat buffer, which one rank alone does not need."""
        if self.ranks == 1:
            return
        size = self._gathered_bytes(unit)
        unit.flat = self.ledger.group("all_gather", [(size, 1)], "workspace")

    def _copy_out(self, unit: Unit) -> None:
        """Copy the weights out of the flat buffer, or those of one rank from their shards."""
        if self.ranks == 1:
            unit.copied = self._copied_one_by_one(unit)
            return
        # Each weight has a storage of its own, which `free_storage` empties without the tensor
        # going.
        sizes = [(self._whole(weight), 1) for weight in unit.weights]
        unit.copied = self.ledger.group("gathered", sizes, "workspace")

    def _copied_one_by_one(self, unit: Unit) -> list[Block]:
        """Return the weights of `unit`, each copied from what was made of its shard.

        That is the shard on the GPU, in the precision that is gathered (`all_gather_inputs`). A
        variable holds it until the next one is there.
        """
        block = self.ledger.block
        copied = []
        source = None
        for weight in unit.weights:
            size = self._whole(weight)
            is_cast = self.mixed and not weight.quantized
            uploaded = None
            if self.asked.group.offload:
                numbers = size // weight.width if is_cast else size
                uploaded = block("to", (numbers,), FP32 if is_cast else 1)
            source = block("to", (size,), 1) if is_cast else uploaded
            uploaded = None
            copied.append(block("gathered", (size,), 1, "workspace"))
        del source  # with the last one's copy
        return copied

    def enter(self, key: str, needs: bool = False) -> None:
        """Gather the unit of `key`, which reduces its gradients where its input needs one."""
        # A tail that has the embedding too comes last in backward, with the root.
        tied_tail = key == TAIL and self.first_unit == TAIL
        if needs and not tied_tail:
            self.ledger.nodes.append(partial(self._reduce, key))
        unit = self.units.get(self.first_unit if key == EMBEDDING else key)
        # A unit that was kept is gathered already.
        if unit and unit.copied is None and unit.weights:
            self._gather(unit)
            self._copy_out(unit)
            # It is freed when the next unit is gathered (`wait_for_unshard`).
            self.flat = unit.flat
            unit.flat = None

    def leave(self, key: str, needs: bool = True) -> None:
        """Free the weights of `key` at stage 3."""
        if key == EMBEDDING:
            if self.first_unit in (ROOT, TAIL):
                return
            key = self.first_unit
        unit = self.units.get(key)
        if unit and unit.weights:
            if self.asked.group.stage == 3 and not unit.keep:
                unit.copied = None
            # Backward prefetches against this order.
            self.order.append(unit)
        if key == ROOT:
            self.flat = None
        # What it returns has the hook.
        if needs:
            self.ledger.nodes.append(partial(self._gather_again, key))

    def _gather_again(self, key: str) -> None:
        """Gather `key` where it was freed, and begin to gather the unit before it."""
        unit = self.units.get(key)
        if unit is None or unit not in self.order:
            return
        if unit.copied is None:
            if unit.flat is None:
                self._gather(unit)
            self._copy_out(unit)
            unit.flat = None
        # Backward goes through the forward pass's order from its end, so the unit to prefetch is
        # the one before.
        place = self.order.index(unit)
        if place == 0:
            return
        before = self.order[place - 1]
        if before.copied is None and before.flat is None:
            self._gather(before)

    def _reduce(self, key: str) -> None:
        """Reduce-scatter the gradients of `key`, once."""
        unit = self.units.get(key)
        if unit is None or unit.done:
            return
        # In the order of `post_backward`: the weights go, then the input of the reduce-scatter
        # before, and only then the new input is allocated.
        unit.done = True
        unit.copied = None
        self.reducing = None
        trained = [weight for weight in unit.weights if weight.needs]
        if not trained:
            return
        group = self.ledger.group
        width = trained[0].width
        shard = sum(padded(weight.shape, self.ranks) for weight in trained)
        whole = shard * width * self.ranks
        self.reducing = group("reduce_scatter", [(whole, 1)], "workspace", width)
        # They were copied into the input of the reduce-scatter. A loop over them in
        # `foreach_reduce` leaves the last in its variable until the result is there.
        last = trained[-1].gradient if self.ranks > 1 else None
        for weight in trained:
            weight.gradient = None
        result = group(
            "reduce_scatter",
            [(shard * width, 1)],
            "workspace" if self.mixed else "gradients",
            width,
        )
        # Shards of the weights are in fp32, and so are their gradients.
        if self.mixed:
            # until the backward pass is over (`AllReduceState`)
            if self.asked.group.dp_replicate_size > 1:
                self.averaged.append(result)
            result = group(
                "to",
                [(shard * FP32, 1)],
                "gradients",
                FP32,
            )
        del last
        if self.asked.group.offload is None and self.asked.loop.set_to_none:
            self.shards.append(result)

    def finish(self) -> None:
        """Reduce what the backward pass did not, and free what is gathered."""
        # Units whose input needed no gradient have had no hook
        # (`_root_post_backward_final_callback`).
        for key in (ROOT, *self.units):
            self._reduce(key)
        self.reducing = None
        self.averaged.clear()
        for unit in self.units.values():
            unit.flat = None
            unit.copied = None
