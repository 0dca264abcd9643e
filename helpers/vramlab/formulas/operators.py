"""PyTorch's operators in the ledger: the memory that each allocates, saves for the backward pass and needs there.

A method saves what `tools/autograd/derivatives.yaml` names; dtypes follow PyTorch's promotion, autocast's two lists
(`aten/src/ATen/autocast_mode.h`) and the modules' own casts.
"""

from math import ceil, prod

from ..report.errors import RecipeError
from .ledger import BIAS, CAST, FULL, OWN, PART, PASS, Ledger, Parameter, Tensor
from .model_states import BLOCK, FP32

BOOL, INT64 = 1, 8
OF_RESULT = ("relu", "sigmoid", "tanh")  # activations whose backward needs their result
OF_INPUT = ("gelu", "gelu_pytorch_tanh", "hardswish", "leaky_relu", "mish", "relu6", "silu", "swish")
WRITTEN_OUT = ("gelu_accurate", "gelu_new", "gelu_python_tanh")  # 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the larger shape; a weight has as many numbers as one token, and fewer dimensions."""
    return max(a, b, key=lambda shape: (prod(shape), len(shape)))


class Operators(Ledger):
    """A ledger with a method for each of PyTorch's operators.

    autocast: the width that autocast computes matrix products in, or None; `cast_entries`: copies of weights that it cached;
    `uncached`: linear layers that multiply by a view of their weight, which it casts anew (`FalconLinear`).
    compute, loaded: the widths in which quantized layers compute and had been loaded; `nested`: scales are quantized too.
    """

    def to(self, x: Tensor, width: int) -> Tensor:
        """Cast with `x.to(dtype)`: saves nothing; the gradient is cast back."""
        if x.width == width:
            return x
        return self.op("to", [x], x.shape, width, grads=(CAST,))

    def cast(self, x: Tensor | Parameter) -> Tensor | Parameter:
        """Cast an argument of a product under autocast, which caches copies of trained weights (`cached_cast`)."""
        if self.autocast is None or x is None or x.width != FP32:
            return x
        if type(x) is not Parameter or not x.needs:
            return self.to(x, self.autocast)
        if x.name not in self.casts:
            self.casts[x.name] = self.to(x, self.autocast)
            self.cast_entries.append(self.casts[x.name].block.entry)
        return self.casts[x.name]

    def fp32(self, x: Tensor) -> Tensor:
        """Cast an argument of an operator on autocast's fp32 list."""
        return self.to(x, FP32) if self.autocast else x

    def add(self, a: Tensor, b: Tensor | Parameter) -> Tensor:
        """Add: saves nothing; both get the incoming gradient itself, summed where they were broadcast."""
        shape = a.shape if a.shape == b.shape else broadcast(a.shape, b.shape)
        return self.op("add", [a, b], shape, max(a.width, b.width), grads=(PASS, PASS))

    def mul(self, a: Tensor, b: Tensor | Parameter) -> Tensor:
        """Multiply: saves each factor for the other's gradient."""
        shape = a.shape if a.shape == b.shape else broadcast(a.shape, b.shape)
        return self.op("mul", [a, b], shape, max(a.width, b.width), saves=_factors(a, b), grads=(FULL, FULL))

    def scale(self, x: Tensor, op: str = "mul") -> Tensor:
        """Multiply by, divide by or ("add") add a number: saves nothing, makes a new tensor; "add" passes its gradient on."""
        return self.op(op, [x], x.shape, x.width, grads=(PASS if op == "add" else OWN,))

    def unary(self, name: str, x: Tensor) -> Tensor:
        """Apply a function to each element; save its input (silu) or its result (tanh)."""
        return self.op(name, [x], x.shape, x.width, saves=(x if name in OF_INPUT else True,))

    def softmax(self, x: Tensor, width: int | None = None) -> Tensor:
        """Save the result, in `width`; backward first multiplies it with the gradient (`SoftMax.cu`), as large again."""
        width = width or x.width
        how = OWN if width == x.width else CAST
        return self.op("softmax", [x], x.shape, width, saves=(True,), grads=(how,), extra=prod(x.shape) * width)

    def reduce(self, x: Tensor, shape: tuple[int, ...], name: str = "mean") -> Tensor:
        """Sum or average down to `shape`: saves nothing; the gradient is expanded into a new tensor."""
        return self.op(name, [x], shape, x.width)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Drop elements: CUDA's fused kernel saves a mask of one byte an element (`Dropout.cpp`)."""
        if not p:
            return x
        mask = self.tensor("native_dropout", x.shape, BOOL)
        return self.op("native_dropout", [x], x.shape, x.width, saves=[mask])

    def activation(self, x: Tensor, name: str) -> Tensor:
        """Apply transformers' `ACT2FN[name]`. Raises RecipeError for those that are not written down."""
        if name in WRITTEN_OUT:
            half, inner = self.scale(x), [self.scale(self.add(x, self.scale(self.power(self.fp32(x)))))]
            return self.mul(half, self.scale(self.unary("tanh", inner.pop()), "add"))  # which nothing holds any more
        if name not in OF_RESULT + OF_INPUT:
            allowed = f"predict knows {', '.join(OF_RESULT + OF_INPUT + WRITTEN_OUT)}: ask simulate"
            raise RecipeError("model.activation", name, allowed)
        return self.unary(name, x)

    def power(self, x: Tensor) -> Tensor:
        """Raise to a power: saves x; backward needs n · x ** (n - 1) besides its result."""
        return self.op("pow", [x], x.shape, x.width, saves=[x], extra=2 * prod(x.shape) * x.width)

    def copy(self, x: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Copy with `contiguous` or `clone`: a new block forward, the incoming gradient itself backward."""
        out = self.op("clone", [x], shape or x.shape, x.width, grads=(PASS,))
        out.packed = True
        return out

    def split(self, x: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Split into views (`torch.split`, `chunk`); backward joins their gradients in a new tensor."""
        whole = self.op("split", [x], x.shape, x.width, view=x)
        return [Tensor(x.block, shape, x.width, whole.node, whole.needs) for shape in shapes]

    def slice(self, x: Tensor, *shape: int) -> Tensor:
        """Take a view such as x[..., :n]; backward writes its gradient into zeros as large as `x`."""
        return self.op("slice", [x], shape, x.width, view=x)

    def cat(self, tensors: list[Tensor], *shape: int, width: int = 0) -> Tensor:
        """Concatenate into a new tensor; backward hands out views of the gradient."""
        width = max(width, *(t.width for t in tensors))
        out = self.op("cat", tensors, shape, width, grads=(PART,) * len(tensors))
        out.packed = True
        return out

    def embedding(self, ids: Tensor, name: str) -> Tensor:
        """Look up a row for each id; the gradient is as large as the table."""
        weight = self.parameters[f"{name}.weight"]
        return self.op("embedding", [weight], (*ids.shape, weight.shape[-1]), weight.width, saves=[ids])

    def matmul(self, a: Tensor, b: Tensor, *shape: int) -> Tensor:
        """Multiply two activations, batched (`torch.bmm`): saves both."""
        a, b = self.cast(a), self.cast(b)
        y = self.op("bmm", [a, b], shape, a.width, saves=_factors(a, b))
        self.product_workspace()
        return y

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
        """Compute x Wᵀ + b: saves x for the weight's gradient and W for that of x."""
        weight, bias, x = self.cast(weight), self.cast(bias), self.cast(x)
        out = prod(weight.shape) // x.shape[-1]
        inputs, saves = [x, weight] if bias is None else [x, weight, bias], _factors(x, weight)
        y = self.op("linear", inputs, (*x.shape[:-1], out), x.width, saves=saves, grads=(OWN, OWN, BIAS))
        self.product_workspace(bias is not None)
        return y

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        """LayerNorm keeps its input, mean and deviation of each row in fp32, and what autocast made of half weights."""
        given = (x, self.parameters.get(f"{name}.weight"), self.parameters.get(f"{name}.bias"))
        x, *affine = (t and self.fp32(t) for t in given)
        rows = (*x.shape[:-1], 1)
        mean, deviation = self.tensor("native_layer_norm", rows, FP32), self.tensor("native_layer_norm", rows, FP32)
        inputs = [t for t in (x, *affine) if t is not None]
        saves = [x, mean, deviation, *(t for t in affine if type(t) is Tensor)]
        return self.op("native_layer_norm", inputs, x.shape, x.width, saves=saves)

    def rms_norm(self, x: Tensor, name: str, family: str, kind: str = "") -> Tensor:
        """Compute x / √(mean x² + ε) · w in single operators on fp32 copies, as `LlamaRMSNorm`, `Gemma2RMSNorm`
        or (of the kind "rmsnorm in fp32", cast back after the weight) `Olmo2RMSNorm` does."""
        weight, width, rows = self.parameters[f"{name}.weight"], x.width, (*x.shape[:-1], 1)
        y = self.to(x, FP32)
        factor = self.unary("rsqrt", self.scale(self.reduce(self.power(y), rows), "add"))
        y = self.mul(y, factor)
        if family == "gemma":
            return self.to(self.mul(y, self.scale(self.to(weight, FP32), "add")), width)
        if kind.endswith("in fp32"):
            return self.to(self.mul(weight, y), width)
        y = self.to(y, width)
        return self.mul(weight, y)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Apply the linear layer `name` (`nn.Linear` or `Conv1D`) with the recipe's quantization and adapter."""
        outer, self.where = self.where, name
        weight, bias = self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias")
        if self.autocast and name in self.uncached and weight.width == FP32:
            weight = self.to(weight, self.autocast)
        quantized = bool(self.parameters[f"{name}.weight"].quantized)
        base = [self.in_4_bits(x, weight, bias) if quantized else self.product(x, weight, bias)]
        y = self.adapted(x, base, name, quantized) if f"{name}.lora_A" in self.parameters else base.pop()
        self.where = outer
        return y

    def adapted(self, x: Tensor, base: list[Tensor], name: str, quantized: bool) -> Tensor:
        """Add B(A(dropout(x))) · α/r, which saves x in the adapter's dtype, and r numbers a token (peft, lora.Linear)."""
        down, up, y = self.parameters[f"{name}.lora_A"], self.parameters[f"{name}.lora_B"], base.pop()
        width = y.width
        if quantized:
            y = self.copy(y)
        if not (quantized and self.autocast):  # then PEFT leaves it to autocast
            x = self.to(x, down.width)
        update = self.scale(self.product(self.product(self.dropout(x, self.lora_dropout), down), up))
        if quantized and not self.autocast:
            update = self.to(update, width)
        y = self.add(y, update)
        del update
        return self.to(y, width)

    def in_4_bits(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        """Unpack the weight whole for each product, forward and backward (`bitsandbytes.autograd.MatMul4Bit`).

        Backward unpacks into the dtype that it was loaded in, and casts that; nested scales into two fp32 temporaries.
        """
        a, n = self.to(x, self.compute), prod(weight.shape)
        whole, scales = n * self.compute, 2 * FP32 * ceil(n / BLOCK) if self.nested else 0
        unpacked = n * self.loaded + max(scales, whole if self.loaded != self.compute else 0)
        workspace = self.workspaces[bias is not None] if self.workspaces else 0  # when scales are gone
        temporary = self.block("gemm_4bit", (whole + max(scales, workspace),), 1, "workspace")
        inputs, shape = [a] if bias is None else [a, bias], (*x.shape[:-1], n // x.shape[-1])
        y = self.op("gemm_4bit", inputs, shape, self.compute, grads=(OWN, BIAS), extra=whole, spike=unpacked)
        del temporary
        return self.to(y, x.width)


def _factors(a: Tensor | Parameter, b: Tensor | Parameter) -> list[Tensor | Parameter]:
    """List what a product saves: each factor if the other one requires a gradient."""
    return ([a] if b.needs else []) + ([b] if a.needs else [])
