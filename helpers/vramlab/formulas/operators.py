"""PyTorch's operators: the memory that each allocates, saves for the backward pass and needs there.

A method saves what `tools/autograd/derivatives.yaml` names; dtypes follow PyTorch's promotion,
autocast's two lists (`aten/src/ATen/autocast_mode.h`) and the modules' own casts.
"""

from math import ceil, prod
from typing import overload

from ..base.errors import RecipeError
from ..hardware.kernels import FEW_ROWS
from .ledger import BIAS, CAST, FULL, OWN, PART, PASS, Ledger, Parameter, Tensor
from .numerics import BOOL, Numerics
from .tensor_sizes import BLOCK, FP32, HALF

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


class Operators:
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
            saves=_factors(a, b),
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

        With False nothing is cast.
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
        half = self.scale(x)
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

    def copy(self, x: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Copy with `contiguous` or `clone`; the incoming gradient itself is that for `x`."""
        out = self.op(
            "clone",
            [x],
            shape or x.shape,
            x.width,
            grads=(PASS,),
        )
        out.packed = True
        return out

    def split(self, x: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Split into views (`torch.split`); backward joins their gradients in a new tensor."""
        # One node for all pieces, which are views of one block.
        whole = self.op(
            "split",
            [x],
            x.shape,
            x.width,
            view=x,
        )
        return [
            Tensor(
                x.block,
                shape,
                x.width,
                whole.node,
                whole.needs,
            )
            for shape in shapes
        ]

    def slice(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Take a view such as x[..., :n]; backward writes its gradient into zeros like `x`."""
        return self.op(
            "slice",
            [x],
            shape,
            x.width,
            view=x,
        )

    def cat(self, tensors: list[Tensor], shape: tuple[int, ...], width: int = 0) -> Tensor:
        """Concatenate into a new tensor; backward hands out views of the gradient."""
        # `torch.cat` promotes to the widest dtype.
        width = max(width, *(tensor.width for tensor in tensors))
        out = self.op(
            "cat",
            tensors,
            shape,
            width,
            grads=(PART,) * len(tensors),
        )
        out.packed = True
        return out

    def embedding(self, ids: Tensor, name: str) -> Tensor:
        """Look up a row for each id; the gradient is as large as the table."""
        weight = self.parameters[f"{name}.weight"]
        shape = (*ids.shape, weight.shape[-1])
        return self.op(
            "embedding",
            [weight],
            shape,
            weight.width,
            saves=[ids],
        )

    def repeat(self, x: Tensor, heads: int) -> Tensor:
        """Copy keys or values to every query head; their gradients are summed.

        A single head is only viewed as many.
        """
        b, few, tokens, channels = x.shape
        if few == heads:
            return x
        shape = (b, heads, tokens, channels)
        if few == 1:
            return self.op(
                "expand",
                [x],
                shape,
                x.width,
                view=x,
            )
        out = self.op("repeat_kv", [x], shape, x.width)
        out.packed = True
        return out

    def contiguous(self, x: Tensor) -> Tensor:
        """Copy a view whose batch and heads do not lie in order, as a batched product needs."""
        if x.packed or x.shape[0] == 1:
            return x
        return self.copy(x)

    def factor(self, x: Tensor) -> Tensor:
        """Cast a factor of `matmul`, and copy it where it does not lie in order."""
        x = self.cast(x)
        return self.contiguous(x)

    def matmul(self, a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply two activations as `bmm`, in autocast's format."""
        a, b = self.cast(a), self.cast(b)
        return self.bmm(a, b, shape)

    def bmm(self, a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply two activations, batched (`torch.bmm`): saves both."""
        y = self.op(
            "bmm",
            [a, b],
            shape,
            a.width,
            saves=_factors(a, b),
        )
        self.ledger.product_workspace()
        return y

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute x Wᵀ + b: saves x for the weight's gradient and W for that of x."""
        # All casts are there before what was cast may go.
        weight, bias, x = self.cast(weight), self.cast(bias), self.cast(x)
        inputs = [x, weight]
        if bias is not None:
            inputs.append(bias)
        shape = (*x.shape[:-1], prod(weight.shape) // x.shape[-1])
        y = self.op(
            "linear",
            inputs,
            shape,
            x.width,
            saves=_factors(x, weight),
            grads=(OWN, OWN, BIAS),
        )
        self.ledger.product_workspace(bias is not None)
        return y

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Apply the linear layer `name` with the recipe's quantization and adapter."""
        ledger = self.ledger
        parameters = self.parameters
        # What runs inside is named after this layer in the report.
        outer = ledger.where
        ledger.where = name
        stored = parameters[f"{name}.weight"]
        weight: Tensor = stored
        bias = parameters.get(f"{name}.bias")
        quantized = bool(stored.quantized)
        # A view of the weight is no leaf, so autocast's cache does not take it.
        if name in self.numerics.views and weight.width == FP32 and self.numerics.autocast:
            weight = self.to(weight, self.numerics.autocast)
        # The list hands the result on, so that no name here keeps it alive while the adapter runs.
        base = [self.in_4_bits(x, weight, bias) if quantized else self.product(x, weight, bias)]
        adapted = f"{name}.lora_A" in parameters
        y = self.adapted(x, base, name, quantized) if adapted else base.pop()
        ledger.where = outer
        return y

    def adapted(
        self,
        x: Tensor,
        base: list[Tensor],
        name: str,
        quantized: bool,
    ) -> Tensor:
        """Add B(A(dropout(x))) · α/r to a layer's result, which is in the list `base`.

        It saves x in the adapter's dtype, and r numbers a token (peft, lora.Linear).
        """
        down = self.parameters[f"{name}.lora_A"]
        up = self.parameters[f"{name}.lora_B"]
        autocast = self.numerics.autocast
        y = base.pop()
        width = y.width
        # PEFT clones it, as backward may fail on a view that is changed (peft, lora/bnb.py).
        if quantized:
            y = self.copy(y)
        if not (quantized and autocast):  # then PEFT leaves it to autocast
            x = self.to(x, down.width)
        update = self.product(self.dropout(x, self.numerics.lora_dropout), down)
        update = self.product(update, up)
        update = self.scale(update)
        # PEFT adds the update in the base's dtype.
        if quantized and not autocast:
            update = self.to(update, width)
        y = self.add(y, update)
        del update
        return self.to(y, width)

    def in_4_bits(self, x: Tensor, weight: Tensor, bias: Parameter | None) -> Tensor:
        """Unpack the weight whole for each product, forward with more than a few rows and backward.

        Backward unpacks into the dtype that it was loaded in, and casts that; nested scales into
        two fp32 temporaries (`bitsandbytes.autograd.MatMul4Bit`).
        """
        numerics = self.numerics
        a = self.to(x, numerics.compute)
        numbers = prod(weight.shape)
        whole = numbers * numerics.compute
        scales = 2 * FP32 * ceil(numbers / BLOCK) if numerics.nested else 0
        # Backward casts what it unpacked where the dtypes differ.
        cast = whole if numerics.unpacked != numerics.compute else 0
        # The workspace is allocated when the scales are gone, so the larger of the two counts.
        workspace = 0
        if self.ledger.workspaces:
            without, biased = self.ledger.workspaces
            workspace = without if bias is None else biased
        size = whole + max(scales, workspace)
        if prod(x.shape[:-1]) <= FEW_ROWS:
            size = 0
        temporary = self.ledger.block("gemm_4bit", (size,), 1, "workspace")
        y = self.op(
            "gemm_4bit",
            [a] if bias is None else [a, bias],
            (*x.shape[:-1], numbers // x.shape[-1]),
            numerics.compute,
            grads=(OWN, BIAS),
            extra=whole,
            spike=numbers * numerics.unpacked + max(scales, cast),
        )
        del temporary
        return self.to(y, x.width)


def _factors(a: Tensor, b: Tensor) -> list[Tensor]:
    """List what a product saves: each factor if the other one requires a gradient."""
    saved = []
    if b.needs:
        saved.append(a)
    if a.needs:
        saved.append(b)
    return saved
