"""The kernels of attention: what each saves for the backward pass and needs while it runs.

Fused kernels save queries, keys, values, their output and one number a row; single operators
("eager", and sdpa's "math") the matrix of scores, batch × heads × tokens².
"""

from math import prod

from ..hardware.kernels import efficient_scratch, sdp_backend
from ..hardware.overhead import efficient_takes_groups, rounded
from ..recipe.shapes import Shape
from .graph import Tensor
from .numerics import BOOL, INT64, Rows
from .operators import Operators
from .tensor_sizes import FP32


def _multiple(number: int, of: int) -> int:
    """Return the least multiple of `of` that is no less than `number`."""
    return -(-number // of) * of


class AttentionKernels:
    """Attention of queries, batch × heads × tokens × channels, to keys and values.

    Keys and values may have fewer heads.
    """

    def __init__(self, operators: Operators, shape: Shape, rows: Rows):
        self.operators = operators
        self.layout = shape.known_layout
        self.dropout = shape.attention_dropout
        self.softcapped = bool(shape.settings.get("attn_logit_softcapping"))  # Gemma 2
        self.rows = rows

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: bool = False,
    ) -> Tensor:
        """Attend with the recipe's kernel; return batch × tokens × (heads · channels).

        `sinks`: the softmax has a column more, cut off afterwards (GPT-OSS); only eager attention
        does so.
        """
        m = self.operators
        implementation = m.numerics.attention
        if m.numerics.repeats_keys:
            heads = q.shape[1]
            k, v = [m.repeat(x, heads) for x in (k, v)]
        if implementation == "eager":
            return self._eager(q, k, v, mask, sinks)
        # sdpa takes joined samples for one row, with a mask.
        if implementation != "flash_attention_2":
            return self._fused(q, k, v, mask, joined=0)
        # flash-attn takes no mask: padding is left out of what it sees.
        if self.rows.padded:
            return self._unpadded(q, k, v)
        return self._fused(q, k, v, mask, joined=self.rows.joined)

    def _fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        joined: int,
    ) -> Tensor:
        """Attend with one kernel, or with PyTorch's own fallback.

        `joined`: sequences in a row, 0 if rows are samples.
        """
        m = self.operators
        b, heads, tokens, _ = q.shape
        grouping = self.layout.grouped_keys
        if mask is not None and grouping:  # then transformers repeats shared keys and values itself
            k, v = [m.repeat(x, heads) for x in (k, v)]
        # Queries that an operator wrote anew lie head by head, those of a projection token by
        # token.
        head_by_head = q.packed and heads > 1 and tokens > 1
        q, k, v, mask = m.cast(q), m.cast(k), m.cast(v), m.cast(mask)
        if mask is not None and mask.width == BOOL:
            # It is made a bias of the queries' dtype, whose rows are aligned to 16 numbers.
            columns = _multiple(k.shape[2], 16)
            mask = m.ledger.tensor("where", (*mask.shape[:-1], columns), q.width)
        kernel = self._kernel(q, k, v, mask)
        # No fused kernel takes this card, dtype or head size.
        if kernel == "math":
            return self._math(q, k, v, mask)
        if kernel == "flash":
            lines = tokens
            extra = self._flash_scratch(q, k, joined)
        else:
            # Rows of the log-sum-exp are aligned (kAlignLSE).
            lines = _multiple(tokens, 32)
            extra = self._efficient_scratch(q, k, v)
        name = f"{kernel}_attention"
        # One log-sum-exp for each row of scores, from which backward computes the probabilities
        # again instead of keeping tokens² of them.
        sums = m.ledger.tensor(name, (b, heads, lines), FP32)
        inputs = [q, k, v]
        if mask is not None:
            inputs.append(mask)
        y = m.op(
            name,
            inputs,
            (b, tokens, heads * v.shape[-1]),
            q.width,
            saves=[*inputs, True, sums],
            extra=extra,
        )
        if kernel == "flash" and head_by_head:
            # `out = at::empty_like(q_padded)` (flash_api.cpp, mha_fwd) lies as q does, and the
            # projection takes a copy of it.
            return m.copy(y)
        return y

    def _kernel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> str:
        """Return which kernel runs: "flash", "efficient" or "math"."""
        numerics = self.operators.numerics
        if numerics.attention == "flash_attention_2":
            return "flash"
        fewer = k.shape[1] != q.shape[1]
        grouping = self.layout.grouped_keys
        return sdp_backend(
            q.width,
            q.shape[3],
            mask is not None,
            fewer and grouping and not efficient_takes_groups(),
            numerics.bf16,
            numerics.chip.capability,
            self.dropout,
            v.shape[-1],
            broadcast=fewer and not grouping,
        )

    def _flash_scratch(self, q: Tensor, k: Tensor, joined: int) -> int:
        """Return the bytes of flash-attn's backward pass (flash_api.cpp, mha_varlen_bwd)."""
        b, heads, tokens, channels = q.shape
        # dQ is summed up in fp32, beside one number a row; rows of tiles, or one tile more a
        # sequence.
        wide = FP32 * _multiple(channels, 32) + FP32
        lines = tokens + 128 * joined if joined else _multiple(tokens, 128)
        scratch = b * heads * lines * wide
        if k.shape[1] != heads:  # dK, dV exist for every query head before they are summed
            scratch += 2 * b * heads * k.shape[2] * channels * k.width
        return scratch

    def _efficient_scratch(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        """Return the bytes of the memory-efficient kernel's backward pass."""
        b, heads, tokens, channels = q.shape
        blocks = efficient_scratch(
            b * heads,
            (tokens, k.shape[2]),
            (channels, v.shape[-1]),
            q.width,
            self.dropout > 0,
            self.operators.numerics.chip,
        )
        return sum(rounded(block) for block in blocks)

    def _unpadded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to rows that are no padding, and put the result back (`_upad_input`)."""
        m = self.operators
        padded = self.rows.padded
        # Positions in the flattened batch. Backward needs them to take rows of the result's
        # gradient, and to put back those of queries, keys and values.
        places = m.ledger.tensor("nonzero", (sum(padded),), INT64)
        # `_upad_input` returns all three at once, so the padded ones live until the last of them
        # has been taken.
        given = [m.cast(x) for x in (q, k, v)]
        taken = [self._taken(x, places) for x in given]
        del given
        y = self._fused(taken[0], taken[1], taken[2], None, joined=len(padded))
        del taken
        b, _, tokens, _ = q.shape
        shape = (b, tokens, y.shape[-1])
        return m.op(
            "index_put",
            [y],
            shape,
            y.width,
            saves=[places],
        )

    def _taken(self, x: Tensor, places: Tensor) -> Tensor:
        """Take the rows `places` of a batch, as one row."""
        m = self.operators
        # The rows are taken from batch · tokens × heads × channels. That is a view of a
        # projection's result, but a copy of queries that an operator wrote head by head.
        flat = m.copy(x) if x.packed and x.shape[1] > 1 else x
        return m.op(
            "index",
            [flat],
            (1, x.shape[1], places.shape[0], x.shape[3]),
            x.width,
            saves=[places],
            extra=prod(x.shape) * x.width,
        )

    def _math(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Attend in fp32 with `_scaled_dot_product_attention_math`.

        Autocast is off inside it (attention.cpp).
        """
        m = self.operators
        width = q.width
        b, heads, tokens, _ = q.shape
        seen = k.shape[2]
        by_head = (b, heads, tokens, v.shape[-1])
        q, k, v = [m.to(x, FP32) for x in (q, k, v)]
        # Queries and keys are both scaled, by the root, before the product.
        scaled = m.scale(q)
        # `is_causal` becomes a triangle of booleans, and that a bias of the queries' dtype,
        # tokens² numbers for all heads together (`convert_boolean_attn_mask`).
        if mask is None and self.layout.causal:
            mask = m.ledger.tensor("where", (tokens, seen), FP32)
        if self.layout.grouped_keys:
            k, v = [m.repeat(x, heads) for x in (k, v)]
        turned = m.scale(k)
        # Numbers of a result lie as those of its input do.
        turned.packed = k.packed
        scaled.packed = q.packed
        if b > 1:  # a product copies what is broadcast
            turned, v = [m.repeat(x, heads) for x in (turned, v)]
        pairs = (b, heads, tokens, seen)
        scores = m.bmm(m.contiguous(scaled), m.contiguous(turned), pairs)
        del turned
        if mask is not None:
            scores = m.add(scores, mask)
        scores = m.dropout(m.softmax(scores), self.dropout)
        y = m.bmm(scores, m.contiguous(v), by_head)
        # transformers' `sdpa_attention_forward` returns `transpose(1, 2).contiguous()`.
        side_by_side = m.copy(y, shape=(b, tokens, heads * v.shape[-1]))
        return m.to(side_by_side, width)

    def _eager(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: bool,
    ) -> Tensor:
        """Compute softmax(q kᵀ · scale + mask) v step by step (`eager_attention_forward`)."""
        m = self.operators
        b, heads, tokens, _ = q.shape
        pairs = (b, heads, tokens, k.shape[2])
        by_head = (b, heads, tokens, v.shape[-1])
        in_place = self.layout.scores_in_place
        if not (in_place and b == 1):
            k, v = [m.repeat(x, heads) for x in (k, v)]
        # Each step makes a tensor of batch × heads × tokens², and this name lets go of the one
        # before when the next has been made; only what a step saves remains.
        scores = m.matmul(m.factor(q), m.factor(k), pairs)
        if not in_place:
            scores = m.scale(scores)
        if self.softcapped:
            # tanh(scores / cap) · cap: three tensors, of which backward keeps tanh's result alone.
            scores = m.scale(m.unary("tanh", m.scale(scores)))
        # Scores in place are a name of the module's, which lives until it has probabilities.
        unmasked = scores if in_place else None
        if mask is not None:
            scores = m.add(scores, mask)
        if sinks:
            # The sink is a score more for each row, which takes part in the softmax.
            with_sink = (b, heads, tokens, k.shape[2] + 1)
            scores = m.scale(m.cat([scores], with_sink), "add")
            scores = m.softmax(scores)
        else:
            scores = m.probabilities(scores, self.layout.fp32_softmax, q.width)
        del unmasked
        scores = m.dropout(scores, self.dropout)
        m.ledger.layer_holds.append(scores)  # returned beside the output
        y = m.matmul(scores, m.factor(v), by_head)
        return m.copy(y, shape=(b, tokens, heads * v.shape[-1]))
