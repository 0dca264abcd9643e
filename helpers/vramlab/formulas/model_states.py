"""Bytes of model states (parameters, gradients, optimizer states), buffers and inputs, summed over a parameter table.

Every tensor is rounded up to 512 bytes, as PyTorch's allocator does.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import Any

from ..hardware.overhead import rounded
from ..recipe import lora_modules
from ..recipe.knobs import unchecked
from ..recipe.optimizers import MODELLED, optimizer_arguments
from ..recipe.options import LoRA, Quantization
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from .reserved import pack

FP32, HALF = 4, 2
BLOCK = 64  # weights that share a scale in 4 bits (bitsandbytes.nn.Params4bit, blocksize)
NESTED_BLOCK = 256  # scales that share a scale with double quantization (bitsandbytes.functional.quantize_4bit)
SMALLEST_IN_8_BITS = 4096  # bitsandbytes: tensors under `min_8bit_size` keep fp32 states
STATE_BLOCK = 256  # and 8-bit states have one fp32 scale for so many numbers
SMALLEST_PAGED = 100_000  # `Optimizer8bit.get_state_buffer`: larger states go to unified memory
COPY = " (trained copy)"  # ends the name of what PEFT trains whole
Sizes = dict[str, int]  # category to bytes


class Settings:
    """A recipe with `changes` as the key of a cache, equal to others with the same settings; its own hash is slow."""

    def __init__(self, recipe: Recipe, **changes: Any):
        self.recipe = object.__new__(Recipe)  # `unchecked` takes longer than to look the key up
        vars(self.recipe).update(vars(recipe), model=None, **changes)
        self.key = tuple(vars(self.recipe).values())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: "Settings") -> bool:
        return self.key == other.key


@dataclass(frozen=True)
class RankBytes:
    """Bytes of model states that one rank holds, and what its engine (DDP, FSDP, DeepSpeed) adds to each phase."""

    parameters: int  # rounded sizes of the tensors, as the next two
    gradients: int
    optimizer_states: int
    temporaries: int  # peak of the optimizer step's
    fragmentation: Sizes = field(default_factory=dict)  # what the allocator's blocks hold beyond those sizes
    always: Sizes = field(default_factory=dict)  # added in every phase
    backward: Sizes = field(default_factory=dict)  # added at its peak
    backward_end: Sizes = field(default_factory=dict)
    reducing: int = 0  # workspace at the end of backward, freed before the phase ends
    existing: int | None = None  # gradients that earlier micro-batches left; None for `gradients`


@dataclass(frozen=True)
class ParameterRow:
    """`count` tensors of the model that have the same name but for the layer's number, and the same shape."""

    name: str  # with * for the layer's number
    shape: tuple[int, ...]  # before quantization packs it
    kind: str  # as in `recipe.shapes.Weight`, or "lora"
    count: int
    width: int  # bytes a number; of a quantized tensor, of its scales
    trained: bool
    quantized: str | None  # "nf4" or "fp4"
    decayed: bool  # in the Trainer's parameter group with weight decay (`Trainer.get_decay_parameter_names`)
    blocks: tuple[int, ...]  # bytes of each block that one tensor is stored in
    states: tuple[int, ...]  # bytes of each block of one tensor's optimizer states; () where it is frozen
    size: int  # bytes of one tensor's gradient, and of the tensor itself where it is not quantized


def weight_width(dtype: str, quantization: Quantization | None = None) -> int:
    """Bytes of a weight that is loaded in `dtype` and not quantized: 4 after `prepare_model_for_kbit_training`."""
    return FP32 if dtype == "float32" or (quantization and quantization.prepare) else HALF


def stored_sizes(shape: tuple[int, ...], width: int, quantized: str | None, double: bool = False) -> tuple[int, ...]:
    """Return the bytes of each block that one tensor is stored in: its numbers, scales and codes.

    4 bits (Dettmers et al. 2023, section 3): half a byte a number, an fp32 scale for 64 of them, or 8 bits and an fp32 scale
    for 256 of those (`double`: 4.5 and 4.127 bits a number), the format's 16 values, and for double 256 codes and an offset.
    """
    n = prod(shape)
    if quantized is None:
        return (rounded(n * width),)
    blocks = ceil(n / BLOCK)
    scales = [blocks, FP32 * ceil(blocks / NESTED_BLOCK), 256 * FP32, FP32] if double else [FP32 * blocks]
    return tuple(rounded(size) for size in (ceil(n / 2), *scales, 16 * FP32))


def state_sizes(shape, kind: str, width: int, optim: str, optim_args: str | None, trainer: bool) -> tuple[int, ...]:
    """Return the bytes of each block of one trained tensor's states, without those that are paged to unified memory.

    The Trainer keeps embeddings' out of 8 bits. Adafactor has a number a row and a column (Shazeer, Stern 2018, section 4).
    """
    n, blocks, state = prod(shape), MODELLED[optim].states, MODELLED[optim].width
    if optim == "adafactor":
        rows, columns = prod(shape[:-1]), prod(shape[:-2]) * shape[-1]
        return tuple(rounded(FP32 * size) for size in ((n,) if len(shape) < 2 else (rows, columns)))
    if state is None:
        given = optimizer_arguments(optim, optim_args)
        count = len(blocks) + sum(bool(given.get(name)) for name in ("momentum", "centered", "amsgrad"))
        return (rounded(n * width),) * count + ((rounded(FP32),) if optim == "adamw_torch_fused" else ())
    if state == 1 and (n < SMALLEST_IN_8_BITS or (kind == "embedding" and trainer)):
        state = FP32
    paged = optim.startswith("paged") and n >= SMALLEST_PAGED
    scales = FP32 * ceil(n / STATE_BLOCK) if state == 1 else 0
    return tuple(rounded(times * size) for times in blocks for size in (0 if paged else n * state, scales) if size)


def compute_recipe(recipe: Recipe) -> Recipe:
    """Return `recipe` as its forward pass computes: "-mixed" is a half-precision model under FSDP and DeepSpeed."""
    sharding = recipe.sharding
    if not recipe.precision.endswith("-mixed") or not sharding or sharding.engine == "ddp":
        return recipe
    third = (sharding.engine, sharding.stage) == ("deepspeed", 3)
    return unchecked(
        recipe,
        precision=recipe.precision.replace("-mixed", "-true"),
        quantization=recipe.quantization and replace(recipe.quantization, prepare=False),
        # adapters of a quantized base too are gathered in half precision, or cast; DeepSpeed's stage 3 leaves them in fp32
        lora=recipe.lora and unchecked(recipe.lora, autocast_adapter_dtype=third or None),
        dtype=None,
    )


def parameter_table(recipe: Recipe) -> tuple[ParameterRow, ...]:
    """List all tensors of `recipe`'s model, a row for equal ones, adapters last."""
    return cached_table(recipe.shape, table_format(recipe))


def table_format(r: Recipe) -> tuple:
    return r.weights_dtype, r.quantization, r.lora, r.optim, r.optim_args, r.loop.name == "trainer"


@lru_cache(maxsize=512)
def cached_table(shape: Shape, form: tuple) -> tuple[ParameterRow, ...]:
    """Compute `parameter_table` of a `table_format`. What PEFT trains whole is a trained copy beside the frozen module."""
    dtype, quantization, lora, optim, optim_args, trainer = form
    width, saved = weight_width(dtype, quantization), trained_whole(shape, lora)
    double = bool(quantization and quantization.double)
    targets = lora_modules.adapted(shape, lora)
    adapted = {name for name, _, _ in targets}
    rows: Counter[tuple] = Counter()
    copies: Counter[tuple] = Counter()
    for weight in shape.weights():
        name, kind = starred_name(weight.name), weight.kind
        quantized = quantization.quant_type if quantization and _can_quantize(shape, weight) else None
        copied = is_trained_whole(weight.name, saved)  # its original is used no more
        trained = lora is None or (not copied and lora_modules.trains_bias(weight.name, lora.bias, adapted))
        decayed = kind not in ("norm", "bias") and "bias" not in name and "norm" not in f".{name}".split(".")[-2]
        rows[name, weight.shape, kind, width, trained, quantized, decayed] += 1
        if copied:
            copies[name + COPY, weight.shape, kind, width, True, None, decayed] += 1
        if kind == "embedding" and weight.shape[0] == shape.vocab_size and is_tied_head_copied(shape, saved):
            copies[f"{shape.head}.weight{COPY}", weight.shape, "linear", width, True, None, True] += 1
    cast = lora and lora.autocast_adapter_dtype  # None: adapters are as wide as everything else (`compute_recipe`)
    adapter = FP32 if cast or (quantization and cast is not None) else width
    for name, inside, out in targets:
        copies[f"{starred_name(name)}.lora_A", (lora.r, inside), "lora", adapter, True, None, True] += 1
        copies[f"{starred_name(name)}.lora_B", (out, lora.r), "lora", adapter, True, None, True] += 1
    found = []
    for (name, size, kind, own, trained, quantized, decayed), count in (*rows.items(), *copies.items()):
        states = state_sizes(size, kind, own, optim, optim_args, trainer) if trained else ()
        rows_first = size[::-1] if kind == "conv1d" and quantized else size  # transposed when they are quantized
        blocks, whole = stored_sizes(rows_first, own, quantized, double), rounded(prod(size) * own)
        found.append(ParameterRow(name, size, kind, count, own, trained, quantized, decayed, blocks, states, whole))
    return tuple(found)


def trained_whole(shape: Shape, lora: LoRA | None) -> tuple[str, ...]:
    """Name the modules that PEFT trains whole."""
    return lora_modules.trained_whole(shape, lora.modules_to_save) if lora else ()


def is_trained_whole(name: str, saved: tuple[str, ...]) -> bool:
    """Tell whether the tensor `name` is in one of the modules `saved`, which are trained whole."""
    return any(f".{part}." in f".{name}" for part in saved)


def is_tied_head_copied(shape: Shape, saved: tuple[str, ...]) -> bool:
    """Tell whether PEFT trains a copy of the output head that was one matrix with the embedding, which unties them."""
    return shape.tied and is_trained_whole(f"{shape.head}.weight", saved)


@lru_cache(maxsize=1 << 16)
def starred_name(name: str) -> str:
    """Return a tensor's name with * for the layer's number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _can_quantize(shape: Shape, weight) -> bool:
    """Tell whether bitsandbytes quantizes it: `nn.Linear` and `Conv1D` but the output head; Falcon's class is neither."""
    module, _, part = weight.name.rpartition(".")
    if weight.kind not in ("linear", "conv1d") or part != "weight" or module == shape.head:
        return False
    return not shape.layout or shape.layout.quantizable


@lru_cache(maxsize=512)
def first_layers(shape: Shape, layers: int = 2) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """List (name, starred name, shape) of the weights outside the layers and of each stack's first layers."""
    stacks = shape.layout.stacks
    each = 2 * layers if len(set(shape.layout.kinds)) > 1 else layers
    starts = accumulate((stack.count for stack in stacks[:-1]), initial=0)
    kept = {None, *(start + i for start in starts for i in range(each))}
    return tuple((w.name, starred_name(w.name), w.shape) for w in shape.weights() if w.layer in kept)


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
    widths = {"int64": 8, "bool": 1, "float16": 2, "bfloat16": 2}
    return sum(rounded(prod(size) * widths.get(dtype, 4)) for _, size, dtype in shape.buffers())


def input_bytes(recipe: Recipe) -> int:
    """Sum the bytes of micro-batches on the device (the Trainer has all of a step): ids, labels, masks, or pixels."""
    (b, n), shape, joined = recipe.rows, recipe.shape, joined_samples(recipe)
    inputs, labels = 8 * b * n, b if "classification" in shape.task else b * n
    if shape.features:
        inputs = b * prod(shape.features[1]) * (HALF if recipe.precision.endswith("-true") else FP32)
    at_once = recipe.gradient_accumulation_steps if recipe.loop.name == "trainer" else 1
    if recipe.trainer == "transformers" and not recipe.is_ragged:
        return at_once * (rounded(inputs) + rounded(8 * labels))
    tensors, flags = {"transformers": (2, 8 * labels), "reward": (2, 0), "kto": (6, b)}.get(recipe.trainer, (3, 0))
    reference = 2 * rounded(FP32 * (b if flags else b // 2)) * recipe.precompute_ref_log_probs
    # joined samples have positions in place of a mask, the number of each sample and, twice, where samples end
    more = rounded(4 * n) + 2 * rounded(4 * joined + 4) if joined else 0
    return at_once * (tensors * rounded(inputs) + rounded(flags) + reference + more)


def joined_samples(recipe: Recipe) -> int:
    """Return the sequences that attention sees in a row of joined samples, each padding token one; 0 without such a row."""
    if not recipe.joins:
        return 0
    return len(recipe.samples) + recipe.rows[1] - sum(recipe.samples)


def fragmentation_bytes(recipe: Recipe) -> dict[str, int]:
    """Return by category what the allocator holds beyond the sizes of model states: rests that it does not split off."""
    order = tensors_in_order(recipe)
    sizes = {
        "parameters": [size for row in order for size in row.blocks],
        "gradients": [row.size for row in reversed(order) if row.trained],
        "optimizer_states": [size for row in order for size in row.states],
    }
    return {name: pack(found) - sum(found) for name, found in sizes.items()}


def tensors_in_order(recipe: Recipe) -> list[ParameterRow]:
    """List a row for each single tensor, in the order of `named_parameters()`, adapters and trained copies last."""
    return _in_order(recipe.shape, *table_format(recipe))


@lru_cache(maxsize=64)
def _in_order(shape: Shape, *form) -> list[ParameterRow]:
    table = cached_table(shape, form)
    rows = {(row.name, row.shape): row for row in table}
    order = [rows[starred_name(weight.name), weight.shape] for weight in shape.weights()]
    added = [row for row in table if row.name.endswith((".lora_A", ".lora_B", COPY))]
    return order + [row for row in added for _ in range(row.count)]
