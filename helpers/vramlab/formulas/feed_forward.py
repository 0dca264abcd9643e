"""A layer's feed-forward part: wide and narrow again, gated or not, or of experts."""

from math import prod

from ..recipe.shapes import Shape
from . import liger_kernels
from .graph import Tensor
from .numerics import INT64
from .operators import Operators
from .self_attention import Modules
from .tensor_sizes import FP32


class FeedForward:
    """The feed-forward part of a model of `shape`."""

    def __init__(self, operators: Operators, shape: Shape):
        self.operators = operators
        self.shape = shape
        self.layout = shape.known_layout

    def run(self, at: Modules, x: Tensor) -> Tensor:
        """Compute down(act(up(x))), or down(act(gate(x)) · up(x)) with four wide tensors saved."""
        if "router" in at:
            return self._experts(at, x)
        m = self.operators
        activation = self.shape.activation
        if "gate_up" in at:
            # One matrix makes both (Phi-3), and the halves are views: the block lives until the
            # second of them is no more needed.
            half = (*x.shape[:-1], self.shape.intermediate_size)
            # Popped, so that no name here keeps a half alive.
            parts = m.split(m.linear(x, at["gate_up"]), half, half)
            z = m.mul(m.activation(parts.pop(0), activation), parts.pop())
        elif "gate" in at:
            z = self._gated(at, x)
        else:
            z = m.activation(m.linear(x, at["up"]), activation)
        if self.layout.held_feed_forward:
            m.ledger.layer_holds.append(z)
        return m.linear(z, at["down"])

    def _gated(self, at: Modules, x: Tensor) -> Tensor:
        """Compute act(gate(x)) · up(x)."""
        m = self.operators
        if m.numerics.liger & {"swiglu", "geglu"}:
            gate = m.linear(x, at["gate"])
            up = m.linear(x, at["up"])
            return liger_kernels.gated(m, gate, up)
        gate = m.activation(m.linear(x, at["gate"]), self.shape.activation)
        up = m.linear(x, at["up"])
        return m.mul(gate, up)

    def _experts(self, at: Modules, x: Tensor) -> Tensor:
        """Run `MixtralSparseMoeBlock` with grouped products.

        A token's row is copied to each expert that it goes to.
        """
        m = self.operators
        b, tokens, hidden = x.shape
        rows = b * tokens
        chosen = self.shape.experts_per_token
        down = m.parameters[at["experts_down"]]
        # The experts' own width, from the weight's size: families store it as experts × hidden ×
        # width or the other way round.
        wide = prod(down.shape) // (self.shape.num_experts * hidden)
        flat = x.view(rows, hidden)
        unpacked: list[Tensor] = []
        # The block names all of these until it returns; the last ones are the weights.
        routed = self._routed(at, flat)
        order = m.ledger.tensor("sort", (rows * chosen,), INT64)
        # Named to the end; the results between are freed as soon as the next one is made.
        selected = self._index(flat, order, hidden)
        both = self._grouped(selected, at["experts_up"], 2 * wide, unpacked)
        half = (rows * chosen, wide)
        gate, up = m.split(both, half, half)
        del both
        if f"{at['experts_up']}_bias" in m.parameters:
            # GPT-OSS: gate · σ(α · gate) · (up + 1), both clamped first
            gate, up = [self._clamped(half) for half in (gate, up)]
            glu = m.mul(gate, m.unary("sigmoid", m.scale(gate)))
            # In a list, so that no name keeps it alive in the next product.
            inner = [m.mul(m.scale(up, "add"), glu)]
        else:
            inner = [m.mul(m.activation(gate, self.shape.activation), up)]
        del gate, up
        out = self._grouped(inner.pop(), at["experts_down"], hidden, unpacked)
        # Weights of the chosen experts in the sorted order, one number a row (`sample_weights_g`).
        weights = self._index(routed[-1], order, 1)
        scaled = m.mul(out, weights)
        del weights
        # Back in the tokens' order (`weighted_out[inv_perm]`), a copy as large as the experts'
        # output.
        weighted = self._index(scaled, order, hidden)
        del scaled
        y = m.to(m.reduce(weighted, (rows, hidden), "sum"), x.width)
        y = y.view(b, tokens, hidden)
        if "shared_up" not in at:
            return y
        # `grouped_mm_experts_forward` has returned before the shared experts run, and its names
        # with it.
        del out, weighted, selected
        unpacked.clear()
        # Experts that every token goes to, beside those that it is routed to.
        shared = {part: at[f"shared_{part}"] for part in ("gate", "up", "down")}
        return m.add(y, self.run(shared, x))

    def _routed(self, at: Modules, flat: Tensor) -> list[Tensor]:
        """Return each token's probabilities of all experts, of those chosen, and their weights."""
        m = self.operators
        chosen = (flat.shape[0], self.shape.experts_per_token)
        router = m.parameters[at["router"]]
        if self.layout.sigmoid_router:
            logits = m.product(m.to(flat, FP32), m.to(router, FP32))
            probabilities = m.unary("sigmoid", logits)
        else:
            logits = m.product(flat, router)
            probabilities = m.probabilities(logits, True, FP32)
        del logits
        # Indices of the experts, which backward scatters the gradient by.
        places = m.ledger.tensor("topk", chosen, INT64)
        width = probabilities.width  # autocast's, of a router that is no softmax
        top = m.op("topk", [probabilities], chosen, width, saves=[places])
        del places
        weights = m.op("div", [top], chosen, width, saves=[top])
        return [probabilities, top, weights]

    def _index(self, x: Tensor, order: Tensor, width: int) -> Tensor:
        """Gather rows of `width` numbers in the experts' order, or back."""
        return self.operators.op(
            "index",
            [x],
            (order.shape[0], width),
            x.width,
            saves=[order],
        )

    def _clamped(self, x: Tensor) -> Tensor:
        """Clamp, which saves the input."""
        return self.operators.op("clamp", [x], x.shape, x.width, saves=[x])

    def _grouped(self, x: Tensor, name: str, out: int, unpacked: list[Tensor]) -> Tensor:
        """Multiply each expert's rows by its part of `name`.

        Autocast leaves that alone; x takes the weight's dtype. What is `unpacked` stays until the
        block returns, and longer where backward needs it.
        """
        m = self.operators
        stored = m.parameters[name]
        weight: Tensor = stored
        if stored.quantized:
            weight = m.unpacked(stored)
            unpacked.append(weight)
        x = m.to(x, weight.width)
        one_by_one = m.numerics.chip.capability < (8, 0)  # transformers' fallback
        saves = []
        # The fallback is an operator of its own, which saves its input even for a frozen weight
        # (`_grouped_mm_fallback_setup_context`).
        if weight.needs or one_by_one:
            saves.append(x)
        if x.needs:
            saves.append(weight)
        unused = 0
        if one_by_one and not weight.needs:  # the gradient that the fallback makes all the same
            unused = prod(weight.shape) * weight.width
        return m.op(
            "grouped_mm",
            [x, weight],
            (x.shape[0], out),
            weight.width,
            saves=saves,
            extra=unused,
        )
