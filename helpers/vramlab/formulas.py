"""What stays for the whole run, in closed formulas: parameters, gradients, buffers, inputs, bytes a parameter.

    parameters        Σ over tensors of numbers × bytes a number                     `parameter_bytes`
    gradients         the same sum over what is trained                               `gradient_bytes`
    optimizer states  two more for Adam, one for momentum, ¼ of that in 8 bits, …     `states.optimizer_state_bytes`

PyTorch's allocator rounds every tensor up to 512 bytes; so do the sums here, tensor by tensor.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Any

from .blocks import rounded
from .linears import BLOCK, NESTED_BLOCK
from .operators import FP32, HALF
from .recipe import LoRA, Quantization, Recipe
from .shapes import Shape

# States an optimizer keeps for each trained number: (how many, bytes of each; None is the parameter's own width).
# torch.optim keeps them in the parameter's dtype (`torch.zeros_like`), bitsandbytes in fp32 or in 8 bits (Optimizer2State
# and Optimizer1State.init_state), Adafactor a row and a column for each matrix (Shazeer and Stern 2018, section 4).
STATES = {
    "adamw_torch": (2, None),
    "adamw_torch_fused": (2, None),
    "sgd": (0, None),
    "rmsprop": (1, None),
    "adagrad": (1, None),
    "adafactor": (0, FP32),
    "adamw_bnb_8bit": (2, 1),
    "paged_adamw_8bit": (2, 1),
    "paged_adamw_32bit": (2, FP32),
    "lion_8bit": (1, 1),
    "paged_lion_8bit": (1, 1),
    "lion_32bit": (1, FP32),
    "paged_lion_32bit": (1, FP32),
}
SMALLEST_IN_8_BITS = 4096  # bitsandbytes: tensors under `min_8bit_size` keep fp32 states
STATE_BLOCK = 256  # and 8-bit states have one fp32 scale for so many numbers
SMALLEST_PAGED = 100_000  # `Optimizer8bit.get_state_buffer`: larger states go to unified memory


@dataclass(frozen=True)
class Row:
    """`count` equal tensors of the model.

    Attributes:
        name: of one of them. `shape` is that of the numbers, whatever they are stored in.
        width: bytes a number; of a quantized tensor, of its scales.
        quantized: "nf4", "fp4", "int8" or None.
        decayed: in the Trainer's first parameter group (`Trainer.get_decay_parameter_names`).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    count: int
    width: int
    trained: bool
    quantized: str | None = None
    decayed: bool = True

    @property
    def numbers(self) -> int:
        """In one tensor."""
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of one tensor, rounded up as the allocator does."""
        return rounded(self.numbers * self.width)


def weight_width(precision: str, quantization: Quantization | None) -> int:
    """Bytes of a weight that is not quantized: 2 for "-true" precisions, else 4; beside a quantized base its compute
    dtype's, or 4 after `prepare_model_for_kbit_training`, which casts to fp32 all that is not quantized."""
    if quantization and quantization.prepare:
        return FP32
    return compute_width(precision, quantization) if quantization else HALF if precision.endswith("-true") else FP32


def compute_width(precision: str, quantization: Quantization) -> int:
    """Bytes a number of what a 4-bit layer computes in (`bnb_4bit_compute_dtype`)."""
    if quantization.compute_dtype:
        return FP32 if quantization.compute_dtype == "float32" else HALF
    return HALF if precision[:4] in ("fp16", "bf16") else FP32


@lru_cache(maxsize=512)
def table(shape: Shape, precision: str, quantization: Quantization | None, lora: LoRA | None) -> tuple[Row, ...]:
    """Every tensor that is loaded, equal ones counted together, adapters last."""
    width = weight_width(precision, quantization)
    saved = saved_modules(shape, lora)
    rows: Counter[tuple] = Counter()
    copies: Counter[tuple] = Counter()
    for weight in shape.weights():
        kind = weight.kind
        quantized = quantization.quant_type if quantization and _can_quantize(shape, weight) else None
        fp32 = shape.family == "t5" and precision.startswith("fp16") and weight.name.endswith(".wo.weight")
        own = FP32 if fp32 else width
        trained = lora is None or (kind == "bias" and _bias_trained(lora, shape, weight.name))
        decayed = _decayed(weight.name, kind)
        key = (role(weight.name), weight.shape, kind, own, trained, quantized, decayed)
        rows[key] += 1
        if is_saved(weight.name, saved):
            copies[(f"{role(weight.name)} (trained copy)", weight.shape, kind, own, True, None, decayed)] += 1
    if lora:
        r, adapter = lora.r, adapter_width(precision, quantization, lora)
        for name, inside, out in adapted(shape, lora):
            copies[(f"{role(name)}.lora_A", (r, inside), "lora", adapter, True, None, True)] += 1
            copies[(f"{role(name)}.lora_B", (out, r), "lora", adapter, True, None, True)] += 1
    return tuple(Row(n, s, k, c, w, t, q, d) for (n, s, k, w, t, q, d), c in (*rows.items(), *copies.items()))


def is_saved(name: str, saved: tuple[str, ...]) -> bool:
    """Whether the tensor `name` is in one of the modules that are trained whole."""
    return any(f".{part}." in f".{name}" for part in saved)


def adapter_width(precision: str, quantization: Quantization | None, lora: LoRA) -> int:
    """Bytes of an adapter's weight: fp32 unless `autocast_adapter_dtype` is off and the base is in half precision."""
    return FP32 if quantization or lora.autocast_adapter_dtype else weight_width(precision, None)


@lru_cache(maxsize=512)
def written_out(shape: Shape) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """(name, name without layer numbers, shape) of the weights outside the layers and of the first in each stack."""
    first = range(3 if shape.num_decoder_layers else 2)
    kept = {None, *first, *(shape.num_layers + i for i in first if shape.num_decoder_layers)}
    return tuple((w.name, role(w.name), w.shape) for w in shape.weights() if w.layer in kept)


def held(recipe: Recipe) -> tuple[Row, ...]:
    """The tensors of `recipe`'s model; cached by shape and format."""
    return table(recipe.shape, recipe.precision, recipe.quantization, recipe.lora)


@lru_cache(maxsize=512)
def adapted(shape: Shape, lora: LoRA) -> tuple[tuple[str, int, int], ...]:
    """(name, inputs, outputs) of the modules that get an adapter; see `vramlab.lora_modules`."""
    return tuple(shape.lora_targets(lora.target_modules, lora.modules_to_save))


def stored_sizes(row: Row, double: bool = False) -> list[int]:
    """Bytes of the blocks of one tensor: its numbers, and what is stored beside them.

    4 bits: half a byte a number, one scale for 64 numbers (fp32, or 8 bits and an fp32 scale for 256 of those with
    double quantization: 4.5 and 4.127 bits a number, Dettmers et al. 2023, section 3), the format's 16 values, an offset.
    8 bits: one byte, and an fp32 scale for each row (Dettmers et al. 2022, section 2.2).
    """
    n = row.numbers
    if row.quantized is None:
        return [row.size]
    if row.quantized == "int8":
        return [rounded(n), rounded(FP32 * row.shape[0])]
    blocks = ceil(n / BLOCK)
    # with double quantization every matrix has its own copy of the scales' 256 codes (`functional.quantize_blockwise`)
    scales = [blocks, FP32 * ceil(blocks / NESTED_BLOCK), 256 * FP32, FP32] if double else [FP32 * blocks]
    return [rounded(size) for size in (ceil(n / 2), *scales, 16 * FP32)]


def row_bytes(row: Row, double: bool = False) -> int:
    """Bytes of one tensor with all that is stored beside it."""
    return row.size if row.quantized is None else sum(stored_sizes(row, double))


def parameter_bytes(recipe: Recipe) -> int:
    """Bytes of all weights as loaded, adapters and the scales of quantized ones included."""
    double = bool(recipe.quantization and recipe.quantization.double)
    return sum(row.count * row_bytes(row, double) for row in held(recipe))


def gradient_bytes(recipe: Recipe) -> int:
    """Bytes of the gradients: one number for each trained number, in its weight's dtype."""
    return sum(row.count * row.size for row in held(recipe) if row.trained)


def buffer_bytes(recipe: Recipe) -> int:
    """Bytes of the model's buffers (position numbers, rotary frequencies)."""
    return _buffers(recipe.shape)


@lru_cache(maxsize=512)
def _buffers(shape: Shape) -> int:
    widths = {"float32": 4, "int64": 8, "bool": 1, "float16": 2, "bfloat16": 2}
    return sum(rounded(prod(size) * widths.get(dtype, 4)) for _, size, dtype in shape.buffers())


def input_bytes(recipe: Recipe) -> int:
    """Bytes of the micro-batches on the device, with ids and labels of 8 bytes each, or pixels.

    It is one, except that the Trainer fetches all of an optimizer step before it begins (`Trainer.get_batch_samples`).
    """
    b, n, shape = recipe.batch_size, recipe.seq_len, recipe.shape
    at_once = recipe.gradient_accumulation_steps if recipe.loop.name == "trainer" else 1
    if shape.task == "image-classification":
        config = config_of(shape)
        side = config.get("image_size", 224)
        width = HALF if recipe.precision.endswith("-true") else FP32
        return at_once * (rounded(b * config.get("num_channels", 3) * side * side * width) + rounded(8 * b))
    labels = b if shape.task == "sequence-classification" else b * n
    return at_once * (rounded(8 * b * n) + rounded(8 * labels))


@lru_cache(maxsize=512)
def config_of(shape: Shape) -> dict[str, Any]:
    """The configuration, parsed once; not to be written to."""
    return shape.config


def bytes_per_parameter(precision: str, optim: str) -> dict[str, float]:
    """Bytes a trained parameter of a full fine-tune: weights, gradients, states, the step's temporary, and their sum.

    The numbers that are quoted for "a parameter" are sums over different rows of this: 16 is fp32 (or autocast) with
    AdamW; 18 counts autocast's half-precision copy of the weights too, and 20 the copy that the foreach step makes; 12
    is one with 8-bit or missing states, 8 is "-true" with AdamW and no fp32 anywhere (ZeRO's 16 = 2 + 2 + 12 keeps fp32
    weights among the states, Rajbhandari et al. 2020, section 3.1).
    """
    width = HALF if precision.endswith("-true") else FP32
    count, state = STATES[optim]
    states = count * (width if state is None else state + (4 / STATE_BLOCK if state == 1 else 0))
    temporary = {"adamw_torch": 1, "rmsprop": 1, "adagrad": 2}.get(optim, 0) * width
    copy = HALF if precision.endswith("-mixed") else 0
    parts = {"weights": width, "gradients": width, "states": states, "autocast copy": copy, "foreach": temporary}
    return {**parts, "kept": width + width + states, "most": sum(parts.values())}


def role(name: str) -> str:
    """A tensor's name without the layer's number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _decayed(name: str, kind: str) -> bool:
    return (
        kind not in ("norm", "bias") and "bias" not in name and "norm" not in name.split(".")[-2 if "." in name else 0]
    )


def saved_modules(shape: Shape, lora: LoRA | None) -> tuple[str, ...]:
    """Modules that PEFT trains whole, in a copy beside the frozen one: those asked for, and a classifier's head."""
    if lora is None:
        return ()
    heads = ("classifier", "score") if shape.task == "sequence-classification" else ()
    return tuple(lora.modules_to_save or ()) + heads


def _bias_trained(lora: LoRA, shape: Shape, name: str) -> bool:
    if lora.bias == "lora_only":
        return name.removesuffix(".bias") in {target[0] for target in adapted(shape, lora)}
    return lora.bias == "all"


def _can_quantize(shape: Shape, weight) -> bool:
    """bitsandbytes takes every `nn.Linear` and `Conv1D` but the output head's; Falcon's own linear class is neither."""
    module = weight.name.removesuffix(".weight")
    if weight.kind not in ("linear", "conv1d") or shape.family == "falcon" or not weight.name.endswith(".weight"):
        return False
    if module == shape.head:
        return False
    return shape.family != "t5" or not module.endswith(".wo")
