"""Operators that work number by number, casts, sums along a dimension and dropout."""

from math import prod
from typing import overload

from ..base.errors import RecipeError
from .graph import CAST, FULL, OWN, PASS, Parameter, Tensor
from .ledger import Ledger
from .numerics import BOOL, Numerics
from .tensor_sizes import FP32, HALF

OF_RESULT = ("relu", "sigmoid", "tanh")  # activations whose backward needs their result
OF_INPUT = (
    "gelu",
    "gelu_pytorch_tanh",
    "hardswish",
    "leaky_relu",
    "mish",
    "relu6",
    "silu",
    "swish",
)
# 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), one operator after the other
WRITTEN_OUT = ("gelu_accurate", "gelu_new", "gelu_python_tanh")


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the larger shape; a weight has as many numbers as one token, and fewer dimensions."""
    if a == b:  # most are
        return a
    return max(a, b, key=lambda shape: (prod(shape), len(shape)))


class Elementwise:
    """A method for each operator, which enters in `ledger` what it does as `numerics` say."""

    def __init__(self, ledger: Ledger, numerics: Numerics, parameters: dict[str, Parameter]):
        self.ledger = ledger
        self.numerics = numerics
        self.parameters = parameters
        self.op = ledger.op

    def to(self, x: Tensor, width: int) -> Tensor:
        """Cast with `x.to(dtype)`: saves nothing; the gradient is cast back."""
        # `Tensor.to` returns the tensor itself then.
        if x.width == width:
            return x
        return self.op(
            "to",
            [x],
            x.shape,
            width,
            grads=(CAST,),
        )

    @overload
    def cast(self, x: Tensor) -> Tensor: ...

    @overload
    def cast(self, x: None) -> None: ...

    def cast(self, x: Tensor | None) -> Tensor | None:
        """Cast an argument of a product under autocast.

        Copies of trained weights are cached (`cached_cast`).
        """
        autocast = self.numerics.autocast
        if autocast is None or x is None or x.width != FP32:
            return x
        # Only leaves that require a gradient are cached.
        if type(x) is not Parameter or not x.needs:
            return self.to(x, autocast)
        ledger = self.ledger
        if x.name not in ledger.casts:
            copy = self.to(x, autocast)
            ledger.casts[x.name] = copy
            assert copy.block is not None
            ledger.cast_entries.append(copy.block.entry)
        return ledger.casts[x.name]

    def fp32(self, x: Tensor) -> Tensor:
        """Cast an argument of an operator on autocast's fp32 list."""
        if self.numerics.autocast is None:
            return x
        return self.to(x, FP32)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Add: saves nothing; both get the incoming gradient, summed where they were broadcast."""
        shape = broadcast(a.shape, b.shape)
        width = max(a.width, b.width)
        return self.op(
            "add",
            [a, b],
            shape,
            width,
            grads=(PASS, PASS),
        )

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply: saves each factor for the other's gradient."""
        shape = broadcast(a.shape, b.shape)
        width = max(a.width, b.width)
        return self.op(
            "mul",
            [a, b],
            shape,
            width,
            saves=factors(a, b),
            grads=(FULL, FULL),
        )

    def scale(self, x: Tensor, op: str = "mul") -> Tensor:
        """Multiply by, divide by or ("add") add a number: saves nothing, makes a new tensor."""
        # Adding a number leaves the gradient as it is.
        how = PASS if op == "add" else OWN
        return self.op(
            op,
            [x],
            x.shape,
            x.width,
            grads=(how,),
        )

    def unary(self, name: str, x: Tensor) -> Tensor:
        """Apply a function to each element; save its input (silu) or its result (tanh)."""
        # A formula reads what is at hand: 1 - y² for tanh, x for silu.
        saved = x if name in OF_INPUT else True
        return self.op(
            name,
            [x],
            x.shape,
            x.width,
            saves=(saved,),
        )

    def softmax(self, x: Tensor, width: int | None = None) -> Tensor:
        """Save the result, in `width`.

        Backward first multiplies it with the gradient, as large again (`SoftMax.cu`).
        """
        width = width or x.width
        how = OWN if width == x.width else CAST
        product = prod(x.shape) * width
        return self.op(
            "softmax",
            [x],
            x.shape,
            width,
            saves=(True,),
            grads=(how,),
            extra=product,
        )

    def probabilities(self, x: Tensor, fp32: bool | None, width: int) -> Tensor:
        """Take a softmax, with `fp32` (or under autocast) in fp32, and cast it to `width`.

        With `fp32` False nothing is cast, with None only the result is.
        """
        if not fp32:
            y = self.softmax(self.fp32(x))
            return y if fp32 is False else self.to(y, width)
        # One kernel reads fp16 and writes fp32 (SoftMax.cpp, half_to_float); bf16 is cast first.
        fused = x.width == HALF and not self.numerics.bf16
        y = self.softmax(x if fused else self.to(x, FP32), FP32)
        return self.to(y, width)

    def reduce(self, x: Tensor, shape: tuple[int, ...], name: str = "mean") -> Tensor:
        """Sum or average to `shape`: saves nothing; the gradient is expanded to a new tensor."""
        return self.op(name, [x], shape, x.width)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Drop elements: the fused kernel saves a mask of one byte an element (`Dropout.cpp`)."""
        # `at::dropout` returns its input then.
        if not p:
            return x
        mask = self.ledger.tensor("native_dropout", x.shape, BOOL)
        return self.op(
            "native_dropout",
            [x],
            x.shape,
            x.width,
            saves=[mask],
        )

    def activation(self, x: Tensor, name: str) -> Tensor:
        """Apply transformers' `ACT2FN[name]`.

        Raises:
            RecipeError: the activation is not written down.
        """
        if name in WRITTEN_OUT:
            return self._gelu(x)
        if name not in OF_RESULT and name not in OF_INPUT:
            known = ", ".join(OF_RESULT + OF_INPUT + WRITTEN_OUT)
            raise RecipeError("model.activation", name, f"predict knows {known}: ask simulate")
        return self.unary(name, x)

    def _gelu(self, x: Tensor) -> Tensor:
        """Compute the activations of `WRITTEN_OUT`."""
        # Python evaluates 0.5 · x, on the left of the product, before the rest, so it lives
        # through all that follows.
        half = self.scale(x)
        # `pow` is on autocast's fp32 list, so from here to the last product the tensors are fp32
        # under autocast.
        cubed = self.scale(self.power(self.fp32(x)))
        # One name for all that follows: each result is freed when the next one has been made.
        y = self.add(x, cubed)
        del cubed
        y = self.scale(y)
        y = self.unary("tanh", y)
        y = self.scale(y, "add")
        return self.mul(half, y)

    def power(self, x: Tensor) -> Tensor:
        """Raise to a power: saves x; backward needs n · x ** (n - 1) besides its result."""
        # x ** (n - 1), and n times that.
        factors = 2 * prod(x.shape) * x.width
        return self.op(
            "pow",
            [x],
            x.shape,
            x.width,
            saves=[x],
            extra=factors,
        )


def factors(a: Tensor, b: Tensor) -> list[Tensor]:
    """List what a product saves: each factor if the other one requires a gradient."""
    saved = []
    if b.needs:
        saved.append(a)
    if a.needs:
        saved.append(b)
    return saved
