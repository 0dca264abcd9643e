"""The linear layers of a recipe: plain, with a LoRA adapter beside them, and with a base in 4 or 8 bits."""

from math import ceil, prod

from .blocks import Tensor
from .operators import FP32, HALF, Operators

BLOCK = 64  # weights that share a scale in 4 bits (bitsandbytes.nn.Params4bit, blocksize)
NESTED_BLOCK = 256  # scales that share a scale with double quantization (bitsandbytes.functional.quantize_4bit)
FEW_ROWS = 8  # up to so many rows bitsandbytes multiplies without dequantizing the whole weight (backends/cuda/ops.py)


def scale_bytes(weights: int, nested: bool) -> int:
    """Bytes of the block scales of a 4-bit matrix as its kernels need them: in fp32.

    One fp32 for 64 weights; with double quantization they are stored in 8 bits and unpacked into two temporaries, the
    scales and their sum with the offset (`bitsandbytes.functional.dequantize_4bit`).
    """
    return 2 * FP32 * ceil(weights / BLOCK) if nested else 0


class Linears(Operators):
    """Operators that know which linear layers are quantized and adapted.

    Args:
        compute: the width in which quantized layers compute.
        nested: their scales are quantized too.
        adapted: names of the modules that have an adapter; `lora_dropout` is the adapters' own.
    """

    def __init__(self, parameters, autocast=None, compute=HALF, nested=False, adapted=frozenset(), lora_dropout=0.0):
        super().__init__(parameters, autocast)
        self.compute, self.nested, self.adapted, self.lora_dropout = compute, nested, adapted, lora_dropout

    def linear(self, x: Tensor, name: str, bias: bool = True) -> Tensor:
        """`nn.Linear` or `Conv1D` called `name`, as the recipe has it."""
        outer, self.where = self.where, name
        weight, offset = self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias") if bias else None
        if weight.quantized == "int8":
            y = self._in_8_bits(x, weight, offset)
        elif weight.quantized:
            y = self._in_4_bits(x, weight, offset)
        else:
            y = self.product(x, weight, offset)
        if name in self.adapted:
            base = [y]
            del y
            y = self._adapted(x, base, name, weight.quantized)
        self.where = outer
        return y

    def _adapted(self, x: Tensor, base: list[Tensor], name: str, quantized: str | None) -> Tensor:
        """base + B(A(dropout(x))) · α/r: the adapter keeps x, in its own dtype, and r numbers a token (peft, lora.Linear).

        The frozen layer beside it keeps nothing of x: that is what LoRA saves of activations, and all it saves.
        """
        down, up, y = self.parameters[f"{name}.lora_A"], self.parameters[f"{name}.lora_B"], base.pop()
        width = y.width
        if quantized in ("nf4", "fp4"):
            y = self.copy(y)
        x = self.to(x, down.width)
        if quantized:
            update = self.scale(self.product(self.product(self.dropout(x, self.lora_dropout), down), up))
            update = self.to(update, width)
            return self.add(y, update)
        y = self.add(y, self.scale(self.product(self.product(self.dropout(x, self.lora_dropout), down), up)))
        return self.to(y, width)

    def _in_4_bits(self, x: Tensor, weight, bias) -> Tensor:
        """The weight is unpacked whole for each product, forward and backward (Dettmers et al. 2023, section 3).

        Nothing is kept: the packed weight is a parameter (`bitsandbytes.autograd.MatMul4Bit`). Backward unpacks into the
        dtype that the weight had when it was quantized (`QuantState.dtype`), here the one that is computed in.
        """
        a, rows, n = self.to(x, self.compute), prod(x.shape[:-1]), prod(weight.shape)
        scales = scale_bytes(n, self.nested)
        temporary = self.block("gemm_4bit", (n * self.compute + scales,), 1, "workspace") if rows > FEW_ROWS else None
        inputs = [a] if bias is None else [a, bias]
        y = self.op(
            "gemm_4bit",
            inputs,
            (*x.shape[:-1], n // x.shape[-1]),
            self.compute,
            extra=n * self.compute,
            spike=n * self.compute + scales,
        )
        del temporary
        return self.to(y, x.width)

    def _in_8_bits(self, x: Tensor, weight, bias) -> Tensor:
        """LLM.int8() keeps its input where no checkpoint can drop it (`ctx.tensors`), and unpacks the weight to go back.

        Forward it needs the input in 8 bits, and the product in 32 (`bitsandbytes.autograd.MatMul8bitLt`).
        """
        out = prod(weight.shape) // x.shape[-1]
        whole, rows = prod(weight.shape) * x.width, prod(x.shape[:-1])
        temporary = self.block("int8_linear_matmul", (rows * (x.shape[-1] + FP32 * out),), 1)
        inputs = [x] if bias is None else [x, bias]
        y = self.op("matmul_8bit", inputs, (*x.shape[:-1], out), x.width, held=[x], extra=whole)
        del temporary
        return y
