"""FSDP2 on paper: what a rank gathers, copies and divides, entered in the ledger where `fully_shard`'s hooks do it.

With N ranks a weight of d₀ rows is divided by rows: ⌈d₀/N⌉ on each rank, so N·⌈d₀/N⌉ with padding when it is gathered.

    before a unit's forward     a flat buffer of all its weights, and the weights copied out of it; the flat buffer of
                                the unit before goes after that (`FSDPParamGroup.wait_for_unshard`)
    after it                    the weights are freed at stage 3, unless the unit is kept (`reshard`)
    before its backward         gathered again if it was freed; then the flat buffer of the unit whose forward ran before
                                it (`_backward_prefetch`), which is copied out when its turn comes
    after its backward          weights freed, the last unit's reduce-scatter input too; whole gradients copied into this
                                unit's, freed, one shard of them left (`post_backward`, `foreach_reduce`)

A "-mixed" precision gathers and reduces in half precision, from and to fp32 shards: the shards are cast to half before
they are gathered (`_get_param_all_gather_inputs`), and the reduced gradient to fp32 after. A unit whose inputs need no
gradient (embeddings, the root) is divided when the whole backward pass is over (`_root_post_backward_final_callback`).
Places in torch/distributed/fsdp/_fully_shard/. Which modules make a unit: `vramlab.training.engines.fsdp.units`.
"""

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any, Protocol

from ..hardware.overhead import rounded
from ..hardware.reserved import internal_fragmentation
from ..recipe.recipe import Recipe
from .ledger import Block, Parameter
from .model_states import FP32, HALF, Row, held
from .nearest import nearest


class LedgerModel(Protocol):
    """What engines use of `formulas.model.Model`."""

    parameters: dict[str, Parameter]
    embeddings: list[str]
    refilled: Any

    def group(self, op: str, sizes: list[tuple[int, int]], category: str, width: int) -> Block:
        """A block of several tensors, entered in the ledger."""


ROOT, TAIL = "", "tail"
FP64, AT_ONCE = 8, 250_000_000  # elements of a norm that DeepSpeed computes at a time


@dataclass(eq=False)
class Unit:
    """Weights that are gathered together.

    Attributes:
        sizes: (shape, width, how many, trained) of them. `written` are those that the ledger knows.
        keep: from the forward to the backward pass in any case.
        flat, copied: what it is gathered into, and its weights copied out of that. `done`: its gradients are divided.
    """

    sizes: list[tuple[tuple[int, ...], int, int, bool]] = field(default_factory=list)
    written: list[Parameter] = field(default_factory=list)
    keep: bool = False
    flat: Block | None = None
    copied: Block | None = None
    done: bool = False


def divides(recipe: Recipe) -> bool:
    """Whether FSDP divides `recipe`'s model among several ranks."""
    sharding = recipe.sharding
    return sharding is not None and sharding.engine == "fsdp"


def computed(recipe: Recipe) -> Recipe:
    """`recipe` as its forward pass computes: FSDP's and DeepSpeed's "-mixed" is a model in half precision, no autocast."""
    sharding = recipe.sharding
    if not recipe.precision.endswith("-mixed") or not (
        divides(recipe) or (sharding and sharding.engine == "deepspeed")
    ):
        return recipe
    quantization, lora = recipe.quantization, copy.copy(recipe.lora)
    if lora:  # adapters of a quantized base too are gathered in half precision, or cast
        object.__setattr__(lora, "autocast_adapter_dtype", None)
    found = copy.copy(recipe)  # not `replace`, which would check all again
    object.__setattr__(found, "precision", recipe.precision.replace("-mixed", "-true"))
    object.__setattr__(found, "quantization", quantization and dataclasses.replace(quantization, prepare=False))
    object.__setattr__(found, "lora", lora)
    return found


def at_once(recipe: Recipe) -> bool | str:
    """What DeepSpeed does with a gradient that is complete: False, it stays; True, it is reduced and goes when the next
    one is complete; "fp32", it stays in fp32."""
    sharding = recipe.sharding
    if sharding is None or sharding.engine != "deepspeed" or sharding.stage == 0:
        return False
    if sharding.stage == 1:
        return "fp32" if recipe.precision.endswith("-true") else False
    return True


def own_linear(recipe: Recipe) -> bool:
    """Whether DeepSpeed puts its own linear layers into the model: at stage 3 (`zero.Init`, memory_efficient_linear)."""
    return recipe.sharding is not None and recipe.sharding.engine == "deepspeed" and recipe.sharding.stage == 3


def copies_outputs(recipe: Recipe) -> bool:
    """Whether DDP looks for parameters without gradients, and for that copies the outputs (`_DDPSink`): the Trainer asks
    for it unless layers are recomputed, and always with PEFT (`Trainer._build_accelerator_args`)."""
    sharding = recipe.sharding
    if sharding is None or sharding.engine != "ddp" or recipe.loop.name != "trainer":
        return False
    return not recipe.gradient_checkpointing or recipe.lora is not None


class OneByOne:
    """DeepSpeed's hook for a gradient that is complete (`reduce_independent_p_g_buckets_and_remove_grads`).

    Stages 1 and 2 reduce a copy of it; in fp32 where the model is in half precision and DeepSpeed does not know it, and
    then in pieces, one for each rank that has a part of it. Stage 3 scatters it as it is; offloaded, the rank's part
    comes back to the device and is copied to fp64 for its norm (`partition_grads`), when the module's gathered weights
    have just been freed, unless it is the embedding.
    """

    def __init__(self, m: LedgerModel, recipe: Recipe, exist: bool):
        self.m, self.exist, self.kind, self.kept, self.last = m, exist, at_once(recipe), [], None
        self.fp32, self.sharding = recipe.precision.endswith("-true"), recipe.sharding
        trained = sum(prod(row.shape) * row.count for row in held(recipe) if row.trained)
        self.part = ceil(trained / self.sharding.world_size)

    def __call__(self, parameter: Parameter, block: Block) -> None:
        elements, width = prod(parameter.shape), FP32 if self.fp32 else parameter.width
        if self.kind == "fp32":
            new = self.m.group("to", [(elements * FP32, 1)], "gradients", FP32)
            if not self.exist:
                self.kept.append(new)
            return
        size = (min(elements, self.part) if self.fp32 else elements) * width
        if self.sharding.stage == 3:
            part = ceil(elements / self.sharding.world_size)
            back = part * width + min(part, AT_ONCE) * FP64 if self.sharding.offload else 0
            cast = elements * width if width > parameter.width else 0
            embedding = parameter.name == f"{self.m.embeddings[0]}.weight" if self.m.embeddings else False
            size = max(0, cast + back - (0 if embedding else elements * parameter.width))
        if size:
            self.m.group("reduced", [(size, 1)], "workspace", width)
        self.last = block


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Numbers of one rank's part of a weight, padded: its rows are dealt out in equal chunks (`Shard(0)`)."""
    return ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1


def packed(shape: tuple[int, ...], width: int, quantized: str | None) -> tuple[tuple[int, ...], int]:
    """(shape, bytes a number) of a weight as it is stored: two numbers of 4 bits in a byte, in a column
    (`bitsandbytes.nn.Params4bit`)."""
    if quantized in (None, "int8"):
        return shape, 1 if quantized else width
    return (ceil(prod(shape) / 2), 1), 1


def own(shape: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """The shape of what `rank` really has of a weight: the last ranks may have fewer rows, or none."""
    chunk = ceil(shape[0] / ranks)
    return (min(chunk, max(0, shape[0] - rank * chunk)), *shape[1:])


def unit_of(name: str, recipe: Recipe) -> str:
    """The unit that the weight `name` (layers' numbers may be "*") is in: a layer's prefix, TAIL, ROOT or a module.

    As `training.engines.fsdp.units`: plain loops leave to the root what is in no layer; accelerate gives the embedding
    a unit, and the last norm and the head together another, with the embedding if that is the head's too.
    """
    shape = recipe.shape
    if recipe.sharding.wrap == "model":
        return ROOT
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part == "*" or part.isdigit()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    if recipe.loop.name != "trainer":
        return ROOT
    layout = shape.layout or nearest(recipe).layout
    module, embedding = name.rpartition(".")[0], layout.modules[0][0]
    last = [other for other, kind in layout.modules if kind == "norm"][-1:]
    if module == shape.head or module in last or (module == embedding and shape.tied):
        return TAIL
    return embedding if module == embedding else ROOT


class Units:
    """The hooks of `fully_shard` for the ledger `m`, which calls them as its modules run.

    Attributes:
        base: bytes of whole gradients, from earlier micro-batches, that are in no entry of the ledger: those of layers
            not written out (negative where such bytes were entered ahead, to be freed at the end).
        first: the unit of the input embedding.
        by_layer: each layer is a unit.
    """

    def __init__(self, m: LedgerModel, recipe: Recipe, gradients_exist: bool):
        sharding = recipe.sharding
        self.m, self.recipe, self.ranks, self.frees = m, recipe, sharding.world_size, sharding.stage == 3
        self.mixed = recipe.precision.endswith("-mixed")
        self.flat: Block | None = None  # the buffer that the next gathering frees
        self.reducing: Block | None = None  # the input of the last reduce-scatter
        self.shards: list[Block] = []
        self.order: list[Unit] = []
        self.units: dict[str, Unit] = {}
        self.rows = held(recipe)
        for row in self.rows:
            if "*" not in (key := unit_of(row.name, recipe)):
                self._unit(key).sizes.append(
                    (*packed(row.shape, self._width(row), row.quantized), row.count, row.trained)
                )
        names = {}
        for name, parameter in m.parameters.items():
            names[name] = key = unit_of(name, recipe)
            unit = self._unit(key)
            if not any(parameter is other for other in unit.written):
                unit.written.append(parameter)
                if key and key[-1].isdigit():
                    size = packed(parameter.shape, parameter.width, parameter.quantized)
                    unit.sizes.append((*size, 1, parameter.needs))
        if TAIL in self.units:
            self.units[TAIL].keep = True
        if ROOT in self.units:
            self.units[ROOT].keep = sharding.wrap != "model"
        self.first = names.get(f"{m.embeddings[0]}.weight", ROOT) if m.embeddings else ROOT
        self.by_layer = sharding.wrap == "layers"
        self.base, self.ghost = self._whole(gradients_exist)

    def _whole(self, exist: bool) -> tuple[int, Block | None]:
        """(`base`, what stands for layers' gradients that are freed at the end); enters gradients that exist."""
        accumulates = exist and self.recipe.gradient_accumulation_steps > 1
        if not accumulates and self.recipe.sharding.wrap != "model":
            return 0, None
        rest = _held((prod(row.shape) * self._width(row), row.count) for row in self.rows if row.trained)
        for unit in self.units.values():
            for parameter in unit.written:
                if parameter.needs:
                    size = prod(parameter.shape) * parameter.width
                    rest -= _held([(size, 1)])
                    if accumulates:
                        parameter.gradient = self.m.group("backward", [(size, 1)], "gradients", parameter.width)
        if self.recipe.sharding.wrap != "model":
            return rest, None
        return (0 if accumulates else -rest), self.m.group("backward", [(rest, 1)], "gradients")

    def _width(self, row: Row) -> int:
        return HALF if self.mixed else row.width

    def _unit(self, key: str) -> Unit:
        return self.units.setdefault(key, Unit())

    # --- forward --------------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        """The flat buffer of `unit`, gathered into."""
        shard = sum(padded(shape, self.ranks) * width * count for shape, width, count, _ in unit.sizes)
        if shard:
            width = self._common(unit)
            cast = self.m.group("cast", [(shard, 1)], "temporaries", width) if self.mixed else None
            unit.flat = self.m.group("all_gather", [(shard * self.ranks, 1)], "workspace", width)
            del cast

    def _common(self, unit: Unit) -> int:
        """Bytes of a number of `unit`; weights of several dtypes are gathered as bytes."""
        widths = {width for _, width, _, _ in unit.sizes}
        return widths.pop() if len(widths) == 1 else 1

    def _copy_out(self, unit: Unit) -> None:
        sizes = [(self.ranks * padded(shape, self.ranks) * width, count) for shape, width, count, _ in unit.sizes]
        if sizes:
            unit.copied = self.m.group("gathered", sizes, "workspace", self._common(unit))

    def before_forward(self, key: str) -> None:
        """`key`'s weights are needed. Nothing when it is gathered, or runs again under checkpointing."""
        unit = self.units.get(key)
        if unit and self.m.refilled is None and unit.copied is None and unit.sizes:
            self._gather(unit)
            self._copy_out(unit)
            self.flat, unit.flat = unit.flat, None

    def after_forward(self, key: str) -> None:
        """`key` has run; its backward pass will be before that of those in `order`."""
        unit = self.units.get(key)
        if unit and self.m.refilled is None and unit.sizes:
            if self.frees and not unit.keep:
                unit.copied = None
            self.order.append(unit)

    def end_forward(self) -> None:
        """The root has run."""
        self.after_forward(ROOT)
        self.flat = None

    # --- backward -------------------------------------------------------------------------------------------------

    def before_backward(self, key: str) -> None:
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

    def after_backward(self, key: str) -> None:
        """Divide `key`'s gradients, once."""
        unit = self.units.get(key)
        if unit is None or unit.done:
            return
        unit.done, unit.copied, self.reducing = True, None, None
        trained = [(shape, width, count) for shape, width, count, trained in unit.sizes if trained]
        shard = sum(padded(shape, self.ranks) * count for shape, _, count in trained)
        if not shard:
            return
        width = max(width for _, width, _ in trained)
        self.reducing = self.m.group("reduce_scatter", [(shard * width * self.ranks, 1)], "workspace", width)
        for parameter in unit.written:
            parameter.gradient = None
        if unit is self.units.get(ROOT):
            self.ghost = None
        result = self.m.group("reduce_scatter", [(shard * width, 1)], "gradients", width)
        if self.mixed:
            result = self.m.group("to", [(shard * FP32, 1)], "gradients", FP32)
        if self.recipe.sharding.offload is None and self.recipe.loop.set_to_none:
            self.shards.append(result)

    def end(self) -> None:
        """The backward pass is over."""
        for key in (ROOT, *self.units):
            self.after_backward(key)
        self.reducing = None
        for unit in self.units.values():
            unit.flat = unit.copied = None


def _held(sizes: Iterable[tuple[int, int]]) -> int:
    """What the allocator gives for `sizes`, (bytes of one, how many)."""
    return sum((rounded(size) + internal_fragmentation(rounded(size))) * count for size, count in sizes)
