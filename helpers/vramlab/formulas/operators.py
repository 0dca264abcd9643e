"""PyTorch's operators: the memory that each allocates, saves for the backward pass and needs there.

A method saves what `tools/autograd/derivatives.yaml` names; dtypes follow PyTorch's promotion,
autocast's two lists (`aten/src/ATen/autocast_mode.h`) and the modules' own casts.
"""

from math import ceil, prod

from ..hardware.fused_4bit import is_fused
from .elementwise import Elementwise, factors
from .graph import BIAS, OWN, PART, PASS, Parameter, Tensor
from .tensor_sizes import BLOCK, FP32


class Operators(Elementwise):
    """Those of numbers, and others: copies, views, lookups and products of matrices."""

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
        # Backward reads the ids alone; the gradient is dense, a row of zeros for each id that did
        # not come (derivatives.yaml, `embedding`).
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
        # transformers' `repeat_kv` expands and reshapes, and the reshape copies.
        out = self.op("repeat_kv", [x], shape, x.width)
        out.packed = True
        return out

    def contiguous(self, x: Tensor) -> Tensor:
        """Copy a view whose batch and heads do not lie in order, as a batched product needs."""
        # `torch.matmul` views batch × heads as one dimension for `bmm`, which needs one stride
        # from head to head. A projection's result has it only if there is one sample; with more
        # the view becomes a copy.
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
            saves=factors(a, b),
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
        # The width comes from the weight's size, because `Conv1D` stores inputs × outputs and
        # `nn.Linear` outputs × inputs.
        shape = (*x.shape[:-1], prod(weight.shape) // x.shape[-1])
        y = self.op(
            "linear",
            inputs,
            shape,
            x.width,
            saves=factors(x, weight),
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
        # The sum has the wider dtype of the two, and PEFT casts it back to that of the layer
        # (`torch_result_dtype` in peft's lora/layer.py).
        return self.to(y, width)

    def unpacked(self, weight: Parameter) -> Tensor:
        """Unpack a weight outside of 4-bit layers (`bitsandbytes.nn.parametrize`)."""
        numerics = self.numerics
        # `dequantize_4bit` unpacks nested scales first, to one fp32 number for each block of 64
        # weights, and holds them until the weight is there.
        scales: list[Tensor] = []
        if numerics.nested:
            numbers = ceil(prod(weight.shape) / BLOCK)
            scales.append(self.ledger.tensor("dequantize_4bit", (numbers,), FP32))
        return self.ledger.tensor("dequantize_4bit", weight.shape, numerics.unpacked)

    def in_4_bits(self, x: Tensor, weight: Tensor, bias: Parameter | None) -> Tensor:
        """Unpack the weight whole for each product, backward, and forward unless it `is_fused`.

        Backward unpacks into the dtype that it was loaded in, and casts that; nested scales into
        two fp32 temporaries (`bitsandbytes.autograd.MatMul4Bit`).
        """
        numerics = self.numerics
        # `Linear4bit.forward` casts its input to compute_dtype and its result back to the input's
        # dtype.
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
        # For few rows a kernel may read the packed weight as it is.
        rows = prod(x.shape[:-1])
        outputs = numbers // x.shape[-1]
        shape = (outputs, x.shape[-1])
        if is_fused(rows, shape, numerics.compute, not numerics.bf16, numerics.chip):
            size = 0
        # It is there before the result and goes before the result is cast.
        temporary = self.ledger.block("gemm_4bit", (size,), 1, "workspace")
        y = self.op(
            "gemm_4bit",
            [a] if bias is None else [a, bias],
            (*x.shape[:-1], outputs),
            numerics.compute,
            grads=(OWN, BIAS),
            extra=whole,
            spike=numbers * numerics.unpacked + max(scales, cast),
        )
        del temporary
        return self.to(y, x.width)
