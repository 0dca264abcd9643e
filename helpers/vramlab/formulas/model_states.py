"""Bytes of model states (parameters, gradients, optimizer states), buffers and inputs.

Model states are sums over a parameter table, which has a row for equal tensors.

Every tensor is rounded up to 512 bytes, as PyTorch's allocator does.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ..hardware.overhead import rounded
from ..recipe import lora_modules
from ..recipe.knobs import unchecked
from ..recipe.options import LoRA, Quantization
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape, Weight
from .reserved import pack
from .tensor_sizes import FP32, HALF, state_sizes, stored_sizes, weight_width

COPY = " (trained copy)"  # ends the name of what PEFT trains whole
# Bytes of a buffer's number, 4 where its dtype is not here.
BUFFER_WIDTHS = {"int64": 8, "bool": 1, "float16": 2, "bfloat16": 2}
Sizes = dict[str, int]  # category to bytes


class Settings:
    """A recipe with `changes` as the key of a cache, equal to others with the same settings.

    A recipe's own hash is slow.
    """

    def __init__(self, recipe: Recipe, **changes: Any):
        self.recipe = object.__new__(Recipe)  # `unchecked` takes longer than to look the key up
        vars(self.recipe).update(vars(recipe), model=None, **changes)
        self.key = tuple(vars(self.recipe).values())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.key == other.key


@dataclass(frozen=True)
class RankBytes:
    """Bytes of model states that one rank holds, and what its engine (DDP, FSDP, DeepSpeed) adds.

    Attributes:
        parameters, gradients, optimizer_states: rounded sizes of the tensors.
        temporaries: peak of the optimizer step's.
        fragmentation: what the allocator's blocks hold beyond those sizes.
        always: added in every phase. `backward`: at its peak. `backward_end`: at its end.
        reducing: workspace at the end of backward, freed before the phase ends.
        existing: gradients that earlier micro-batches left; None for `gradients`.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    temporaries: int
    fragmentation: Sizes = field(default_factory=dict)
    always: Sizes = field(default_factory=dict)
    backward: Sizes = field(default_factory=dict)
    backward_end: Sizes = field(default_factory=dict)
    reducing: int = 0
    existing: int | None = None


@dataclass(frozen=True)
class ParameterRow:
    """`count` tensors that have the same shape, and the same name but for the layer's number.

    Attributes:
        name: with * for the layer's number.
        shape: before quantization packs it.
        kind: as in `recipe.shapes.Weight`, or "lora".
        width: bytes a number; of a quantized tensor, of its scales.
        quantized: "nf4" or "fp4".
        decayed: in the Trainer's group with weight decay (`Trainer.get_decay_parameter_names`).
        blocks: bytes of each block that one tensor is stored in.
        states: bytes of each block of one tensor's optimizer states; () where it is frozen.
        size: bytes of one tensor's gradient, and of the tensor itself where it is not quantized.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    count: int
    width: int
    trained: bool
    quantized: str | None
    decayed: bool
    blocks: tuple[int, ...]
    states: tuple[int, ...]
    size: int


class Format(NamedTuple):
    """What a parameter table depends on besides the shape."""

    dtype: str
    quantization: Quantization | None
    lora: LoRA | None
    optim: str
    optim_args: str | None
    trainer: bool


def compute_recipe(recipe: Recipe) -> Recipe:
    """Return `recipe` as its forward pass computes.

    "-mixed" is a half-precision model under FSDP and DeepSpeed.
    """
    sharding = recipe.group
    if not recipe.precision.endswith("-mixed") or sharding.engine == "ddp":
        return recipe
    quantization = recipe.quantization
    if quantization:
        quantization = replace(quantization, prepare=False)
    lora = recipe.lora
    if lora:
        # Adapters of a quantized base too are gathered in half precision, or cast; DeepSpeed's
        # stage 3 leaves them in fp32.
        third = sharding.engine == "deepspeed" and sharding.stage == 3
        lora = unchecked(lora, autocast_adapter_dtype=True if third else None)
    return unchecked(
        recipe,
        precision=recipe.precision.replace("-mixed", "-true"),
        quantization=quantization,
        lora=lora,
        dtype=None,
    )


def parameter_table(recipe: Recipe) -> tuple[ParameterRow, ...]:
    """List all tensors of `recipe`'s model, a row for equal ones, adapters last."""
    return cached_table(recipe.shape, table_format(recipe))


def table_format(recipe: Recipe) -> Format:
    """Return the format of `recipe`'s table."""
    return Format(
        recipe.weights_dtype,
        recipe.quantization,
        recipe.lora,
        recipe.optim,
        recipe.optim_args,
        recipe.loop.name == "trainer",
    )


class _Kind(NamedTuple):
    """What equal tensors have in common, as the fields of `ParameterRow`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    width: int
    trained: bool
    quantized: str | None
    decayed: bool


@lru_cache(maxsize=512)
def cached_table(shape: Shape, form: Format) -> tuple[ParameterRow, ...]:
    """Compute `parameter_table` of a format.

    What PEFT trains whole is a trained copy beside the frozen module.
    """
    form = Format(*form)
    kinds = _weights(shape, form)
    kinds.update(_adapters(shape, form))
    return tuple(_row(kind, count, form) for kind, count in kinds.items())


def _weights(shape: Shape, form: Format) -> Counter[_Kind]:
    """Count the model's own tensors, then PEFT's copies of some."""
    lora = form.lora
    width = weight_width(form.dtype, form.quantization)
    saved = trained_whole(shape, lora)
    copies_head = is_tied_head_copied(shape, saved)
    adapted = {name for name, _, _ in lora_modules.adapted(shape, lora)}
    # Equal tensors fall into one kind. A counter keeps the order of first sight, which is that of
    # the model, and copies stand at its end.
    originals: Counter[_Kind] = Counter()
    copies: Counter[_Kind] = Counter()
    for weight in shape.weights():
        name = starred_name(weight.name)
        kind = weight.kind
        quantized = None
        if form.quantization and _can_quantize(shape, weight, form.quantization):
            quantized = form.quantization.quant_type
        copied = is_trained_whole(weight.name, saved)  # its original is used no more
        trained = lora is None
        if lora and not copied:
            trained = lora_modules.trains_bias(weight.name, lora.bias, adapted)
        original = _Kind(
            name=name,
            shape=weight.shape,
            kind=kind,
            width=width,
            trained=trained,
            quantized=quantized,
            decayed=_is_decayed(name, kind),
        )
        originals[original] += 1
        copy = original._replace(trained=True, quantized=None)
        if copied:
            copies[copy._replace(name=name + COPY)] += 1
        # The copy of a tied head is a matrix of its own.
        if copies_head and kind == "embedding" and weight.shape[0] == shape.vocab_size:
            head = f"{shape.head}.weight{COPY}"
            copies[copy._replace(name=head, kind="linear", decayed=True)] += 1
    originals.update(copies)
    return originals


def _is_decayed(name: str, kind: str) -> bool:
    """Tell whether the Trainer decays a weight: by its kind, or by names in it and its module."""
    # With a dot in front, the module of a bare name is "".
    module = f".{name}".split(".")[-2]
    return kind not in ("norm", "bias") and "bias" not in name and "norm" not in module


def _adapters(shape: Shape, form: Format) -> Counter[_Kind]:
    """Count LoRA's matrices."""
    lora = form.lora
    kinds: Counter[_Kind] = Counter()
    if lora is None:
        return kinds
    width = weight_width(form.dtype, form.quantization)
    cast = lora.autocast_adapter_dtype
    # None: adapters are as wide as everything else (`compute_recipe`).
    if cast or (form.quantization and cast is not None):
        width = FP32
    for name, inside, out in lora_modules.adapted(shape, lora):
        starred = starred_name(name)
        down = _Kind(
            name=f"{starred}.lora_A",
            shape=(lora.r, inside),
            kind="lora",
            width=width,
            trained=True,
            quantized=None,
            decayed=True,
        )
        up = down._replace(name=f"{starred}.lora_B", shape=(out, lora.r))
        kinds[down] += 1
        kinds[up] += 1
    return kinds


def _row(kind: _Kind, count: int, form: Format) -> ParameterRow:
    """Return the row of `count` equal tensors."""
    states: tuple[int, ...] = ()
    if kind.trained:
        states = state_sizes(
            kind.shape,
            kind.kind,
            kind.width,
            form.optim,
            form.optim_args,
            form.trainer,
        )
    # Only a quantized tensor asks for it.
    double = form.quantization is not None and form.quantization.double
    return ParameterRow(
        name=kind.name,
        shape=kind.shape,
        kind=kind.kind,
        count=count,
        width=kind.width,
        trained=kind.trained,
        quantized=kind.quantized,
        decayed=kind.decayed,
        blocks=stored_sizes(kind.shape, kind.width, kind.quantized, double),
        states=states,
        size=rounded(prod(kind.shape) * kind.width),
    )


def trained_whole(shape: Shape, lora: LoRA | None) -> tuple[str, ...]:
    """Name the modules that PEFT trains whole."""
    if lora is None:
        return ()
    return lora_modules.trained_whole(shape, lora.modules_to_save)


def is_trained_whole(name: str, saved: tuple[str, ...]) -> bool:
    """Tell whether the tensor `name` is in one of the modules `saved`, which are trained whole."""
    return any(f".{part}." in f".{name}" for part in saved)


def is_tied_head_copied(shape: Shape, saved: tuple[str, ...]) -> bool:
    """Tell whether PEFT trains a copy of a tied output head, which unties it from the embedding."""
    return shape.tied and is_trained_whole(f"{shape.head}.weight", saved)


@lru_cache(maxsize=1 << 16)
def starred_name(name: str) -> str:
    """Return a tensor's name with * for the layer's number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _can_quantize(shape: Shape, weight: Weight, quantization: Quantization) -> bool:
    """Tell whether bitsandbytes quantizes it: `nn.Linear` and `Conv1D` but the output head.

    Falcon's class is neither; fused experts are if the recipe says so.
    """
    if weight.kind == "expert":
        return quantization.experts is not None
    module, _, part = weight.name.rpartition(".")
    if weight.kind not in ("linear", "conv1d") or part != "weight":
        return False
    # `skip_modules` takes the place of the loader's own choice, the output head.
    is_left = quantization.skips(module) if quantization.skip_modules else module == shape.head
    if is_left:
        return False
    return shape.layout is None or shape.known_layout.quantizable


@lru_cache(maxsize=512)
def first_layers(shape: Shape, layers: int = 2) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """List (name, starred name, shape) of weights outside layers and in the first layers."""
    stacks = shape.known_layout.stacks
    if len(set(shape.known_layout.kinds)) > 1:
        # Each kind of attention has first layers, and the first layer may be one by itself.
        layers = 2 * layers + 1
    counts = (stack.count for stack in stacks[:-1])
    kept: set[int | None] = {None}
    for start in accumulate(counts, initial=0):
        kept.update(range(start, start + layers))
    weights = []
    for weight in shape.weights():
        if weight.layer in kept:
            weights.append((weight.name, starred_name(weight.name), weight.shape))
    return tuple(weights)


def parameter_bytes(recipe: Recipe) -> int:
    """Sum the bytes of all weights as loaded, with adapters and the scales of quantized ones."""
    return sum(row.count * sum(row.blocks) for row in parameter_table(recipe))


def gradient_bytes(recipe: Recipe) -> int:
    """Sum the bytes of the gradients: one number for each trained number, in its weight's dtype."""
    return sum(row.count * row.size for row in parameter_table(recipe) if row.trained)


def optimizer_state_bytes(recipe: Recipe) -> int:
    """Sum the bytes that the optimizer keeps on the GPU between steps."""
    return sum(row.count * sum(row.states) for row in parameter_table(recipe))


@lru_cache(maxsize=512)
def buffer_bytes(shape: Shape) -> int:
    """Sum the bytes of the model's buffers (position numbers, rotary frequencies)."""
    total = 0
    for _, size, dtype in shape.buffers():
        total += rounded(prod(size) * BUFFER_WIDTHS.get(dtype, FP32))
    return total


def input_bytes(recipe: Recipe) -> int:
    """Sum the bytes of micro-batches on the device: ids, labels, masks, or pixels."""
    # The Trainer has all micro-batches of a step.
    at_once = recipe.gradient_accumulation_steps if recipe.loop.name == "trainer" else 1
    batch, tokens = recipe.rows
    shape = recipe.shape
    # Ids and labels are int64.
    inputs = 8 * batch * tokens
    if shape.features:
        _, sizes = shape.features
        width = HALF if recipe.precision.endswith("-true") else FP32
        inputs = batch * prod(sizes) * width
    labels = 8 * batch if "classification" in shape.task else 8 * batch * tokens
    if recipe.trainer == "transformers" and not recipe.is_ragged:
        return at_once * (rounded(inputs) + rounded(labels))

    # Tensors as large as the ids, and bytes of one more.
    tensors = 3
    others = 0
    if recipe.trainer == "transformers":
        tensors = 2
        others = labels
    elif recipe.trainer == "reward":
        tensors = 2
    elif recipe.trainer == "kto":
        tensors = 6
        others = batch
    size = tensors * rounded(inputs) + rounded(others)
    if recipe.precompute_ref_log_probs:
        # KTO has one a sequence, DPO one a pair.
        logarithms = batch if recipe.trainer == "kto" else batch // 2
        size += 2 * rounded(FP32 * logarithms)
    # Samples that lie in one row are told apart by numbers, not by a mask.
    joined = joined_samples(recipe)
    if joined:
        # Positions in place of a mask, the number of each sample and, twice, where samples end.
        size += rounded(4 * tokens) + 2 * rounded(4 * joined + 4)
    return at_once * size


def joined_samples(recipe: Recipe) -> int:
    """Return the sequences that attention sees in a row of joined samples, each padding token one.

    It is 0 without such a row.
    """
    if not recipe.joins:
        return 0
    _, tokens = recipe.rows
    padding = tokens - sum(recipe.samples)
    return len(recipe.samples) + padding


def fragmentation_bytes(recipe: Recipe) -> dict[str, int]:
    """Return by category what the allocator holds beyond the sizes of model states.

    These are rests that it does not split off.
    """
    # A rest is filled by whichever request comes next, so what is lost depends on the order of the
    # tensors.
    order = tensors_in_order(recipe)
    parameters: list[int] = []
    states: list[int] = []
    for row in order:
        parameters += row.blocks
        states += row.states
    # Backward makes them from the last weight to the first.
    gradients = [row.size for row in reversed(order) if row.trained]
    return {
        "parameters": pack(parameters) - sum(parameters),
        "gradients": pack(gradients) - sum(gradients),
        "optimizer_states": pack(states) - sum(states),
    }


def tensors_in_order(recipe: Recipe) -> list[ParameterRow]:
    """List a row for each tensor in the order of `named_parameters()`, adapters and copies last."""
    return _in_order(recipe.shape, table_format(recipe))


@lru_cache(maxsize=64)
def _in_order(shape: Shape, form: Format) -> list[ParameterRow]:
    table = cached_table(shape, form)
    rows = {(row.name, row.shape): row for row in table}
    order = [rows[starred_name(weight.name), weight.shape] for weight in shape.weights()]
    for row in table:
        if row.name.endswith((".lora_A", ".lora_B", COPY)):
            order += row.count * [row]
    return order
