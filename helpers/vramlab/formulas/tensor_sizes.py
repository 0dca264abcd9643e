"""Bytes of one tensor as it is stored, quantized or not, and of its optimizer states.

Every block is rounded up to 512 bytes, as PyTorch's allocator does.
"""

from math import ceil, prod

from ..hardware.overhead import rounded
from ..recipe.optimizers import MODELLED, optimizer_arguments
from ..recipe.options import Quantization

FP32 = 4
HALF = 2
BLOCK = 64  # weights that share a scale in 4 bits (bitsandbytes.nn.Params4bit, blocksize)
# Scales that share a scale with double quantization (bitsandbytes.functional.quantize_4bit).
NESTED_BLOCK = 256
SMALLEST_IN_8_BITS = 4096  # bitsandbytes: tensors under `min_8bit_size` keep fp32 states
STATE_BLOCK = 256  # and 8-bit states have one fp32 scale for so many numbers
SMALLEST_PAGED = 100_000  # `Optimizer8bit.get_state_buffer`: larger states go to unified memory


def weight_width(dtype: str, quantization: Quantization | None = None) -> int:
    """Return the bytes of a weight that is loaded in `dtype` and not quantized.

    There are 4 of them after `prepare_model_for_kbit_training`.
    """
    prepared = quantization is not None and quantization.prepare
    return FP32 if dtype == "float32" or prepared else HALF


def stored_sizes(
    shape: tuple[int, ...],
    width: int,
    quantized: str | None,
    double: bool = False,
) -> tuple[int, ...]:
    """Return the bytes of each block that one tensor is stored in: its numbers, scales and codes.

    4 bits (Dettmers et al. 2023, section 3): half a byte a number, an fp32 scale for 64 of them,
    or 8 bits and an fp32 scale for 256 of those (`double`: 4.5 and 4.127 bits a number), the
    format's 16 values, and for double 256 codes and an offset.
    """
    numbers = prod(shape)
    if quantized is None:
        return (rounded(numbers * width),)
    scales = ceil(numbers / BLOCK)
    sizes = [ceil(numbers / 2)]
    if double:
        sizes += [scales, FP32 * ceil(scales / NESTED_BLOCK), FP32 * 256, FP32]
    else:
        sizes += [FP32 * scales]
    sizes += [FP32 * 16]
    return tuple(rounded(size) for size in sizes)


def state_sizes(
    shape: tuple[int, ...],
    kind: str,
    width: int,
    optim: str,
    optim_args: str | None,
    trainer: bool,
) -> tuple[int, ...]:
    """Return the bytes of each block of one trained tensor's states, but those that are paged."""
    numbers = prod(shape)
    optimizer = MODELLED[optim]
    if optim == "adafactor":
        return _factored_sizes(shape)
    if optimizer.width is None:
        return _states_like_weights(numbers * width, optim, optim_args)
    state = state_width(numbers, kind, optim, trainer)
    paged = optim.startswith("paged") and numbers >= SMALLEST_PAGED
    sizes = []
    for times in optimizer.states:
        if numbers and not paged:  # FSDP's last ranks may have none
            sizes.append(rounded(times * numbers * state))
        if state == 1:
            scales = ceil(numbers / STATE_BLOCK)
            sizes.append(rounded(times * FP32 * scales))
    return tuple(sizes)


def state_width(numbers: int, kind: str, optim: str, trainer: bool) -> int:
    """Return the bytes of a number in a state of bitsandbytes' optimizers.

    The Trainer keeps embeddings' out of 8 bits (transformers/trainer.py, `create_optimizer`).
    """
    in_32_bits = numbers < SMALLEST_IN_8_BITS or (kind == "embedding" and trainer)
    return FP32 if in_32_bits else MODELLED[optim].width or FP32


def _factored_sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return Adafactor's states: a number a row and a column (Shazeer, Stern 2018, section 4)."""
    if len(shape) < 2:
        return (rounded(FP32 * prod(shape)),)
    rows = prod(shape[:-1])
    columns = prod(shape[:-2]) * shape[-1]
    return rounded(FP32 * rows), rounded(FP32 * columns)


def _states_like_weights(size: int, optim: str, optim_args: str | None) -> tuple[int, ...]:
    """Return the states of an optimizer of PyTorch's, as large as the weights."""
    given = optimizer_arguments(optim, optim_args)
    # Each of these arguments adds one state as large as the weights (torch/optim/sgd.py,
    # rmsprop.py, adam.py).
    count = len(MODELLED[optim].states)
    for name in ("momentum", "centered", "amsgrad"):
        if given.get(name):
            count += 1
    sizes = [rounded(size)] * count
    if optim == "adamw_torch_fused":  # its kernel reads the step's number on the device
        sizes.append(rounded(FP32))
    return tuple(sizes)
