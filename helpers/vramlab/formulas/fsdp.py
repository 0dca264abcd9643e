"""FSDP2 in the ledger: what a rank gathers, copies and reduces, when `fully_shard`'s hooks do it.

With N ranks a weight of d₀ rows is divided by rows: ⌈d₀/N⌉ on each rank, so N·⌈d₀/N⌉ with padding when it is gathered.

    before a unit's forward     a flat buffer of all its weights, and the weights copied out of it; then the flat buffer
                                of the unit before is freed (`FSDPParamGroup.wait_for_unshard`)
    after it                    the weights are freed at stage 3, unless the unit is kept (`reshard`)
    before its backward         gathered again if it was freed; then the flat buffer of the unit whose forward ran before
                                it (`_backward_prefetch`), which is copied out when its turn comes
    after its backward          weights freed, the last unit's reduce-scatter input too; whole gradients copied into this
                                unit's, freed, one shard of them left (`post_backward`, `foreach_reduce`)

A "-mixed" precision gathers and reduces in half precision, from and to fp32 shards. A unit whose inputs need no gradient
is divided when the whole backward pass is over. Sources: torch/distributed/fsdp/_fully_shard/.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from math import ceil, prod

from ..recipe.recipe import Recipe
from .ledger import Block, Parameter
from .model import EMBEDDING, ROOT, TAIL, Model
from .model_states import FP32, parameter_table
from .reserved import internal_fragmentation


@dataclass
class Unit:
    """Weights that are gathered together (an `FSDPParamGroup`)."""

    weights: list[Parameter] = field(default_factory=list)  # those that are in the ledger
    keep: bool = False  # stays gathered from the forward to the backward pass
    flat: Block | None = None  # the buffer it is gathered into
    copied: Block | None = None  # the weights copied out of that
    done: bool = False  # its gradients are reduced


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Return how many numbers a rank's shard of a weight has with padding: rows in equal chunks (`Shard(0)`)."""
    return ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1


def own(shape: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """Return the shape of `rank`'s shard of a weight: the last ranks may have fewer rows, or none."""
    chunk = ceil(shape[0] / ranks)
    return (min(chunk, max(0, shape[0] - rank * chunk)), *shape[1:])


def unit_of(name: str, recipe: Recipe) -> str:
    """Return the key of the unit of a weight (* may be a layer's number): a layer's prefix, TAIL, ROOT or a module."""
    if layer := re.match(r".*?\.(\d+|\*)(?=\.)", name):
        return layer[0]
    if recipe.loop.name != "trainer":  # accelerate gives units to the embedding and to the last norm and head
        return ROOT
    shape, module = recipe.shape, name.rpartition(".")[0]
    embedding, last = shape.layout.modules[0][0], [m for m, kind in shape.layout.modules if kind == "norm"][-1:]
    if module in (shape.head, *last) or (module == embedding and shape.tied):
        return TAIL
    return embedding if module == embedding else ROOT


class FsdpModel(Model):
    """The ledger of an FSDP rank: `Model` with the hooks of `fully_shard`."""

    gathers_layers = True

    def shard(self, asked: Recipe, gradients_exist: bool) -> None:
        self.asked, self.ranks, self.mixed = asked, asked.sharding.world_size, asked.precision.endswith("-mixed")
        self.flat = self.reducing = None  # what the next all-gather frees, and the input of the last reduce-scatter
        self.shards: list[Block] = []
        self.order: list[Unit] = []  # in which forward passes come
        self.units: defaultdict[str, Unit] = defaultdict(Unit)
        for name, weight in self.parameters.items():
            unit = self.units[unit_of(name, asked)]
            if weight not in unit.weights:  # a tied head is the embedding
                unit.weights.append(weight)
        self.units[TAIL].keep = self.units[ROOT].keep = True
        self.first_unit = unit_of(f"{self.embeddings[0]}.weight", asked) if self.embeddings else ROOT
        if gradients_exist and asked.gradient_accumulation_steps > 1:
            self._enter_whole_gradients()

    def _enter_whole_gradients(self) -> None:
        """Enter gradients that earlier micro-batches left whole."""
        self.other_gradients = self._whole_gradients()
        for weight in (weight for unit in self.units.values() for weight in unit.weights if weight.needs):
            weight.gradient = self.block("backward", weight.shape, weight.width, "gradients")
            self.other_gradients -= weight.gradient.entry.allocated

    def _whole_gradients(self) -> int:
        trained = (row for row in parameter_table(self.recipe) if row.trained)
        return sum((row.size + internal_fragmentation(row.size)) * row.count for row in trained)

    def unreduced(self, steps: int) -> dict[str, int]:
        """Return the bytes at the end of the backward pass of a micro-batch that is not the last of `steps`: it reduces
        nothing, so all gradients are whole when the embedding's comes, whose unit is still gathered.

        A tied head's gradient waits for the lookup's, and their sum is made beside both; it is the gradient itself in the
        first micro-batch, and is added to that in later ones.
        """
        found = {"gradients": self._whole_gradients()}
        table = self.parameters.get(f"{self.embeddings[0]}.weight") if self.embeddings else None
        if table is not None and table.needs:
            tied = self.recipe.shape.tied and not self.recipe.lora
            copies = (2 if tied else 0) + (1 if steps > 2 else 0)
            found["temporaries"] = copies * prod(table.shape) * table.width
            found["workspace"] = sum(map(self._whole, self.units[self.first_unit].weights))
        return found

    def _gather(self, unit: Unit) -> None:
        """All-gather `unit` into its flat buffer."""
        unit.flat = self.group("all_gather", [(sum(map(self._whole, unit.weights)), 1)], "workspace")

    def _copy_out(self, unit: Unit) -> None:
        unit.copied = self.group("gathered", [(self._whole(weight), 1) for weight in unit.weights], "workspace")

    def _whole(self, weight: Parameter) -> int:
        """Return the bytes of a gathered weight with padding; 4 bits are a column of bytes (`Params4bit`)."""
        shape, width = ((ceil(prod(weight.shape) / 2), 1), 1) if weight.quantized else (weight.shape, weight.width)
        return self.ranks * padded(shape, self.ranks) * width

    def enter(self, key: str, needs: bool = False) -> None:
        if needs and not (key == TAIL and self.first_unit == TAIL):
            self.nodes.append(lambda: self._reduce(key))
        unit = self.units.get(self.first_unit if key == EMBEDDING else key)
        if unit and unit.copied is None and unit.weights:
            self._gather(unit)
            self._copy_out(unit)
            self.flat, unit.flat = unit.flat, None

    def leave(self, key: str) -> None:
        if key == EMBEDDING:
            if self.first_unit in (ROOT, TAIL):
                return
            key = self.first_unit
        unit = self.units.get(key)
        if unit and unit.weights:
            if self.asked.sharding.stage == 3 and not unit.keep:
                unit.copied = None
            self.order.append(unit)
        if key == ROOT:
            self.flat = None
        self.nodes.append(lambda: self._gather_again(key))

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
        at = self.order.index(unit)
        if at > 0 and self.order[at - 1].copied is None and self.order[at - 1].flat is None:
            self._gather(self.order[at - 1])

    def _reduce(self, key: str) -> None:
        """Reduce-scatter the gradients of `key`, once."""
        unit = self.units.get(key)
        if unit is None or unit.done:
            return
        unit.done, unit.copied, self.reducing = True, None, None
        trained = [weight for weight in unit.weights if weight.needs]
        if not trained:
            return
        shard, width = sum(padded(weight.shape, self.ranks) for weight in trained), trained[0].width
        self.reducing = self.group("reduce_scatter", [(shard * width * self.ranks, 1)], "workspace", width)
        for weight in trained:
            weight.gradient = None
        result = self.group("reduce_scatter", [(shard * width, 1)], "gradients", width)
        if self.mixed:
            result = self.group("to", [(shard * FP32, 1)], "gradients", FP32)
        if self.asked.sharding.offload is None and self.asked.loop.set_to_none:
            self.shards.append(result)

    def finish(self) -> None:
        for key in (ROOT, *self.units):
            self._reduce(key)
        self.reducing = None
        for unit in self.units.values():
            unit.flat = unit.copied = None
