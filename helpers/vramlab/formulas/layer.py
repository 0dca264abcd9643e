"""One layer of a recipe's model: attention, feed-forward part, norms and residual sums.

One code serves decoders and encoders: the family's layout (`vramlab.recipe.families`) names the
module for each role. What GPT-2's layer saves in fp32 with a fused kernel, in bytes a token: 4 ·
(2 norms · h + 3h queries, keys, values + h attention + 2h inputs of norms + 4 · 4h gelu_new + 4h
its result) + 2h dropout masks: about 109 h.
"""

from ..recipe.shapes import Shape
from .feed_forward import FeedForward
from .graph import Tensor
from .norms import Norms
from .operators import Operators
from .self_attention import Modules, SelfAttention, Table


class Layer:
    """What each layer of a model of `shape` does."""

    def __init__(
        self,
        operators: Operators,
        norms: Norms,
        attention: SelfAttention,
        feed_forward: FeedForward,
        shape: Shape,
    ):
        self.operators = operators
        self.norms = norms
        self.attention = attention
        self.feed_forward = feed_forward
        self.layout = shape.known_layout
        self.dropout = shape.hidden_dropout
        self.scaled = bool(shape.settings.get("residual_multiplier"))  # Granite

    def run(
        self,
        name: str,
        parts: dict[str, str],
        x: Tensor,
        mask: Tensor | None,
        table: Table | None,
    ) -> Tensor:
        """Run the layer `name`, with the module name of each role in `parts`."""
        at = {role: f"{name}.{part}" for role, part in parts.items()}
        if self.layout.parallel or not ("norm2" in at or "after2" in at):
            return self._parallel(at, x, mask, table)
        return self._one_after_the_other(at, x, mask, table)

    def _parallel(
        self,
        at: Modules,
        x: Tensor,
        mask: Tensor | None,
        table: Table | None,
    ) -> Tensor:
        """Add attention and feed-forward part of the same input."""
        m = self.operators
        normed = self.norms.apply(x, at["norm1"])
        # What attention returned waits beside the whole feed-forward part.
        y = m.dropout(self.attention.run(at, normed, mask, table), self.dropout)
        # Some families norm each branch by itself (GPT-NeoX), others once for both.
        if "norm2" in at:
            normed = self.norms.apply(x, at["norm2"])
        z = self.feed_forward.run(at, normed)
        # GPT-NeoX adds mlp_output + attn_output + hidden_states from left to right: two sums of
        # the layer's width, none of which is saved.
        branches = m.add(m.dropout(z, self.dropout), y)
        return m.add(branches, x)

    def _one_after_the_other(
        self,
        at: Modules,
        x: Tensor,
        mask: Tensor | None,
        table: Table | None,
    ) -> Tensor:
        """Add attention to the input, and the feed-forward part to the sum."""
        y = self.attention.run(at, self._before(x, at, "norm1"), mask, table)
        if "after1" in at:  # Gemma 2 also norms what each branch returns, OLMo 2 that alone
            y = self.norms.apply(y, at["after1"])
        x = self._sum(x, y, at, "norm1")
        # The residual sum saves nothing, so what attention returned goes here, before the widest
        # tensors of the layer are made.
        del y
        z = self.feed_forward.run(at, self._before(x, at, "norm2"))
        if "after2" in at:
            z = self.norms.apply(z, at["after2"])
        return self._sum(x, z, at, "norm2")

    def _before(self, x: Tensor, at: Modules, role: str) -> Tensor:
        """Norm a branch's input, unless norms come after the sums or the branch has none."""
        if self.layout.post_norm or role not in at:
            return x
        return self.norms.apply(x, at[role])

    def _sum(
        self,
        x: Tensor,
        y: Tensor,
        at: Modules,
        role: str,
    ) -> Tensor:
        """Add dropout(y) to x; apply the norm `role` in a model with norms after the sums."""
        m = self.operators
        if self.scaled:
            y = m.scale(y)
        total = m.add(x, m.dropout(y, self.dropout))
        if self.layout.post_norm:
            return self.norms.apply(total, at[role])
        return total
