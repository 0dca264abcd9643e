"""The operators that transformers are made of: what each makes, what it keeps for the backward pass, what it spends there.

Each method is one PyTorch operator, or one module of transformers that is a line or two of them. What is kept is what
`tools/autograd/derivatives.yaml` names for the operator; dtypes follow PyTorch's promotion, autocast's two lists
(`aten/src/ATen/autocast_mode.h`: matrix products in half precision, norms and losses in fp32) and the modules' own casts.
"""

from math import prod

from .blocks import Entry, Tensor
from .ledger import CAST, FULL, PASS, SAME, Ledger, Node, Parameter, Piece

FP32, HALF, BOOL, INT64 = 4, 2, 1, 8


class Operators(Ledger):
    """A ledger with PyTorch's operators.

    Args:
        parameters: the weights of the model by name.
        autocast: the width that autocast computes matrix products in; None without autocast.
    """

    def __init__(self, parameters: dict[str, Parameter], autocast: int | None = None):
        super().__init__()
        self.parameters, self.autocast = parameters, autocast
        self.cast_entries: list[Entry] = []

    # --- dtypes ---------------------------------------------------------------------------------------------------

    def to(self, x: Tensor, width: int) -> Tensor:
        """`x.to(dtype)`: keeps nothing; the gradient is cast back."""
        if x.width == width:
            return x
        out = self.op("to", [x], x.shape, width, grads=(CAST,))
        out.packed = type(x) is Tensor and x.packed
        return out

    def cast(self, x: Tensor | Parameter) -> Tensor | Parameter:
        """An argument of a matrix product: in half precision under autocast.

        The copy of a trained fp32 weight is made once and kept until the autocast context ends (`cached_cast`).
        """
        if self.autocast is None or x.width != FP32:
            return x
        if type(x) is not Parameter or not x.needs:
            return self.to(x, self.autocast)
        if x.name not in self.casts:
            self.casts[x.name] = self.to(x, self.autocast)
            self.cast_entries.append(self.casts[x.name].block.entry)
        return self.casts[x.name]

    def fp32(self, x: Tensor) -> Tensor:
        """An argument of an operator on autocast's fp32 list."""
        return self.to(x, FP32) if self.autocast else x

    # --- elementwise ----------------------------------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor | Parameter) -> Tensor:
        """a + b keeps nothing; both get the incoming gradient itself, summed where they were broadcast."""
        shape = a.shape if prod(a.shape) >= prod(b.shape) else b.shape
        return self.op("add", [a, b], shape, max(a.width, b.width), grads=(PASS, PASS))

    def mul(self, a: Tensor, b: Tensor | Parameter) -> Tensor:
        """a · b keeps each factor for the other's gradient."""
        shape = a.shape if prod(a.shape) >= prod(b.shape) else b.shape
        saves = ([a] if b.needs else []) + ([b] if a.needs else [])
        return self.op("mul", [a, b], shape, max(a.width, b.width), saves=saves, grads=(FULL, FULL))

    def scale(self, x: Tensor, op: str = "mul") -> Tensor:
        """x times, plus or over a number: a new tensor each way, nothing kept ("add" passes its gradient on)."""
        return self.op(op, [x], x.shape, x.width, grads=(SAME,) if op == "add" else None)

    def unary(self, name: str, x: Tensor, keeps: str = "input") -> Tensor:
        """A function of each element that keeps its input (gelu, silu) or its result (tanh, relu, rsqrt, softmax)."""
        if not x.needs:
            return self.op(name, [x], x.shape, x.width)
        if keeps == "input":
            return self.op(name, [x], x.shape, x.width, saves=[x])
        out = self.tensor(name, x.shape, x.width)
        return self.op(name, [x], x.shape, x.width, saves=[out], block=out.block)

    def power(self, x: Tensor) -> Tensor:
        """x ** n keeps x; backward needs n · x ** (n - 1) beside its result."""
        return self.op("pow", [x], x.shape, x.width, saves=[x], extra=2 * prod(x.shape) * x.width)

    def reduce(self, x: Tensor, shape: tuple[int, ...], name: str = "mean") -> Tensor:
        """A sum or mean down to `shape`: nothing kept; the mean's gradient is spread out into a new tensor."""
        return self.op(name, [x], shape, x.width)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """CUDA's fused dropout keeps a mask of one byte an element (`Dropout.cpp`)."""
        if not p:
            return x
        out, mask = self.tensor("native_dropout", x.shape, x.width), self.tensor("native_dropout", x.shape, BOOL)
        return self.op("native_dropout", [x], x.shape, x.width, saves=[mask], block=out.block)

    def activation(self, x: Tensor, name: str) -> Tensor:
        """transformers' `ACT2FN[name]`."""
        if name in ("gelu_new", "gelu_fast", "gelu_python_tanh"):
            return self.gelu_new(x)
        if name in ("relu", "tanh", "sigmoid"):
            return self.unary(name, x, "result")
        if name == "quick_gelu":
            return self.mul(x, self.unary("sigmoid", self.scale(x), "result"))
        return self.unary(name, x)

    def gelu_new(self, x: Tensor) -> Tensor:
        """0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) written out, as GPT-2 has it: four tensors are kept."""
        half = self.scale(x)
        inner = self.add(x, self.scale(self.power(self.fp32(x))))
        return self.mul(half, self.scale(self.unary("tanh", self.scale(inner), "result"), "add"))

    # --- shapes ---------------------------------------------------------------------------------------------------

    def copy(self, x: Tensor, name: str = "clone", shape: tuple[int, ...] | None = None) -> Tensor:
        """`x.contiguous()` of a transposed view, or a clone: a new block forward, the gradient itself backward."""
        out = self.op(name, [x], shape or x.shape, x.width, grads=(SAME,))
        out.packed = True
        return out

    def split(self, x: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Views of `x`; backward joins their gradients into one new tensor (`torch.split`, `chunk`)."""
        whole = self.op("split", [x], x.shape, x.width, block=x.block)
        piece = Piece(whole.node) if type(whole.node) is Node else None
        return [Tensor(x.block, shape, x.width, piece, whole.needs) for shape in shapes]

    def slice(self, x: Tensor, *shape: int) -> Tensor:
        """x[..., :n]: a view; backward puts its gradient into a tensor of zeros as large as `x`."""
        return self.op("slice", [x], shape, x.width, block=x.block)

    def cat(self, tensors: list[Tensor], *shape: int, width: int = 0) -> Tensor:
        """Joined into one new tensor; backward hands out views of the gradient."""
        width = max(width, *(t.width for t in tensors))
        out = self.op("cat", tensors, shape, width, grads=(SAME,) * len(tensors))
        out.packed = True
        return out

    # --- lookups and products -------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, name: str) -> Tensor:
        """A row per id. The gradient is as large as the table; more than 3,072 ids are sorted first (`Embedding.cu`)."""
        weight = self.parameters[f"{name}.weight"]
        count, width = prod(ids.shape), weight.shape[-1]
        extra = 32 * count + 4 * min(count, weight.shape[0]) * width if count > 3072 else 0
        return self.op("embedding", [weight], (*ids.shape, width), weight.width, saves=[ids], extra=extra)

    def matmul(self, a: Tensor, b: Tensor, *shape: int) -> Tensor:
        """A batched product of two activations keeps both."""
        a, b = self.cast(a), self.cast(b)
        saves = ([a] if b.needs else []) + ([b] if a.needs else [])
        return self.op("bmm", [a, b], shape, a.width, saves=saves)

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None = None, name: str = "linear") -> Tensor:
        """x Wᵀ + b keeps x for the weight's gradient and W for that of x."""
        weight_, bias_, x = self.cast(weight), self.cast(bias) if bias is not None else None, self.cast(x)
        out = prod(weight.shape) // x.shape[-1]
        saves = ([x] if weight_.needs else []) + ([weight_] if x.needs else [])
        inputs = [x, weight_] if bias_ is None else [x, weight_, bias_]
        return self.op(name, inputs, (*x.shape[:-1], out), x.width, saves=saves)

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        """LayerNorm keeps its input, and mean and deviation of each row in fp32."""
        weight, bias = self.parameters.get(f"{name}.weight"), self.parameters.get(f"{name}.bias")
        x = self.fp32(x)
        rows = (*x.shape[:-1], 1)
        out = self.tensor("native_layer_norm", x.shape, x.width)
        mean, deviation = self.tensor("native_layer_norm", rows, FP32), self.tensor("native_layer_norm", rows, FP32)
        inputs = [t for t in (x, weight, bias) if t is not None]
        saves = [x, mean, deviation]
        return self.op("native_layer_norm", inputs, x.shape, x.width, saves=saves, block=out.block)

    def rms_norm(self, x: Tensor, name: str, style: str = "llama") -> Tensor:
        """x / √(mean x² + ε) · w, in single operators on fp32 copies (`LlamaRMSNorm`, `Gemma2RMSNorm`, `T5LayerNorm`)."""
        weight, width, rows = self.parameters[f"{name}.weight"], x.width, (*x.shape[:-1], 1)
        y = self.to(x, FP32)
        factor = self.unary("rsqrt", self.scale(self.reduce(self.power(y), rows), "add"), "result")
        if style == "t5":
            y = self.mul(x, factor)
            return self.mul(weight, self.to(y, weight.width) if weight.width == HALF else y)
        y = self.mul(y, factor)
        if style == "gemma":
            return self.to(self.mul(y, self.scale(self.to(weight, FP32), "add")), width)
        y = self.to(y, width)
        return self.mul(weight, y)
