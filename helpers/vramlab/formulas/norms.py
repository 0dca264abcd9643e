"""LayerNorm and the families' RMSNorms: what each saves for the backward pass."""

from ..recipe.shapes import Shape
from . import liger_kernels
from .graph import Tensor
from .operators import Operators
from .tensor_sizes import FP32


class Norms:
    """The norms of a model of `shape`."""

    def __init__(self, operators: Operators, shape: Shape):
        self.operators = operators
        self.shape = shape

    def apply(self, x: Tensor, name: str) -> Tensor:
        """Apply the family's norm `name`."""
        if self.shape.norm == "layernorm":
            return self.layer_norm(x, name)
        if "rms_norm" in self.operators.numerics.liger:
            return liger_kernels.rms_norm(self.operators, self.shape.family, x, name)
        return self.rms_norm(x, name)

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        """Apply a LayerNorm.

        It keeps its input, mean and deviation of each row in fp32, and autocast's copies of
        weights.
        """
        m = self.operators
        # LayerNorm is on autocast's fp32 list.
        x = m.fp32(x)
        inputs = [x]
        copies = []
        for part in ("weight", "bias"):
            affine: Tensor | None = m.parameters.get(f"{name}.{part}")
            if affine is not None:
                affine = m.fp32(affine)
                inputs.append(affine)
                # A parameter is saved without memory of its own; a copy of one has some.
                if type(affine) is Tensor:
                    copies.append(affine)
        rows = (*x.shape[:-1], 1)
        mean = m.ledger.tensor("native_layer_norm", rows, FP32)
        deviation = m.ledger.tensor("native_layer_norm", rows, FP32)
        return m.op(
            "native_layer_norm",
            inputs,
            x.shape,
            x.width,
            saves=[x, mean, deviation, *copies],
        )

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        """Compute x / √(mean x² + ε) · w in single operators on fp32 copies.

        As `LlamaRMSNorm`, `Gemma2RMSNorm` or (of the kind "rmsnorm in fp32", cast back after the
        weight) `Olmo2RMSNorm` does.
        """
        m = self.operators
        weight = m.parameters[f"{name}.weight"]
        width = x.width
        y = m.to(x, FP32)
        mean = m.reduce(m.power(y), (*x.shape[:-1], 1))
        mean = m.scale(mean, "add")
        factor = m.unary("rsqrt", mean)
        del mean
        y = m.mul(y, factor)
        # Families cast back at different places, which decides how wide the last tensors are.
        if self.shape.known_layout.rms_norm == "gemma":
            shifted = m.scale(m.to(weight, FP32), "add")
            weighted = m.mul(y, shifted)
            del shifted
            return m.to(weighted, width)
        if self.shape.norm.endswith("in fp32"):
            weighted = m.mul(weight, y)
            return m.to(weighted, width)
        y = m.to(y, width)
        return m.mul(weight, y)
