"""Attention in the ledger: what each kernel saves for the backward pass and needs while it runs.

Fused kernels save queries, keys, values, their output and one number a row; single operators ("eager", and sdpa's "math")
the matrix of scores, batch × heads × tokens².
"""

from math import prod

from ..hardware.kernels import efficient_scratch, sdp_backend
from ..hardware.overhead import efficient_takes_groups, rounded
from .ledger import Tensor
from .model_states import FP32, HALF
from .operators import BOOL, INT64, Operators


class Attention(Operators):
    """A ledger with operators of attention. q is batch × heads × tokens × channels; k and v may have fewer heads.

    joined_samples: sequences that one row is joined of, 0 if rows are samples. `padded`: tokens of each sample, where rows
    are padded. `bf16`: half precision is bf16. `layout`, `setting`: the family's layout, and the configuration's `get`.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, sinks: bool = False) -> Tensor:
        """Attend with dropout `p`; return batch × tokens × (heads · channels). `sinks`: see `eager_attention`."""
        if self.implementation == "eager":
            return self.eager_attention(q, k, v, mask, p, sinks)
        b, heads, n, d = q.shape
        if self.implementation == "flash_attention_2" and self.padded:
            return self.unpadded_attention(q, k, v, p)
        grouping = self.layout.grouped_keys
        if mask is not None and grouping:  # then transformers repeats shared keys and values itself
            k, v = self.repeat(k, heads), self.repeat(v, heads)
        head_by_head = q.packed and heads > 1 and n > 1
        q, k, v, mask = self.cast(q), self.cast(k), self.cast(v), self.cast(mask)
        m, fewer, values = k.shape[2], k.shape[1] != heads, v.shape[-1]
        if mask is not None and mask.width == BOOL:  # made a bias of the queries' dtype, with rows of a multiple of 16
            mask = self.tensor("where", (*mask.shape[:-1], -(-m // 16) * 16), q.width)
        masked = mask is not None
        grouped = fewer and grouping and not efficient_takes_groups()
        options = (q.width, d, masked, grouped, self.bf16, self.chip.capability, p, values)
        kernel = sdp_backend(*options, broadcast=fewer and not grouping)
        if self.implementation == "flash_attention_2":
            kernel = "flash"
        if kernel == "math":
            return self.math_attention(q, k, v, mask, p)
        wide, lines = FP32 * -(-d // 32) * 32, (b, heads, n)  # dQ is summed up in fp32
        if kernel == "flash":  # flash_api.cpp, mha_bwd and mha_varlen_bwd
            joined = self.joined_samples if self.implementation == "flash_attention_2" else 0
            extra = b * heads * (n + 128 * joined if joined else -(-n // 128) * 128) * (wide + FP32)
            if fewer:  # dK, dV exist for every query head before they are summed
                extra += 2 * b * heads * m * d * k.width
        else:
            blocks = efficient_scratch(b * heads, (n, m), (d, v.shape[-1]), q.width, p > 0, self.chip)
            extra, lines = sum(map(rounded, blocks)), (b, heads, -(-n // 32) * 32)
        name = f"{kernel}_attention"
        sums, inputs = self.tensor(name, lines, FP32), [q, k, v, mask] if masked else [q, k, v]
        y = self.op(name, inputs, (b, n, heads * values), q.width, saves=[*inputs, True, sums], extra=extra)
        # flash_api.cpp, mha_fwd: `out = at::empty_like(q_padded)` lies as q does, and the projection takes a copy of it
        return self.copy(y) if kernel == "flash" and head_by_head else y

    def unpadded_attention(self, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        """Attend with flash-attn to the rows that are no padding, and put the result back (`_upad_input`, `pad_input`)."""
        (b, _, n, d), (rows, samples) = q.shape, (sum(self.padded), self.padded)
        places = self.tensor("nonzero", (rows,), INT64)

        def taken(x: Tensor) -> Tensor:
            flat = self.copy(x) if x.packed and x.shape[1] > 1 else x
            shape, extra = (1, x.shape[1], rows, d), prod(x.shape) * x.width
            return self.op("index", [flat], shape, x.width, saves=[places], extra=extra)

        inputs = [taken(x) for x in (self.cast(q), self.cast(k), self.cast(v))]
        del q, k, v
        self.joined_samples, self.padded = len(samples), ()
        y = self.attend(*inputs, None, p)
        del inputs
        self.joined_samples, self.padded = 0, samples
        return self.op("index_put", [y], (b, n, y.shape[-1]), y.width, saves=[places])

    def math_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
        """Attend in fp32 with `_scaled_dot_product_attention_math` (attention.cpp), inside which autocast is off."""
        width, (b, heads, n, _), m = q.width, q.shape, k.shape[2]
        autocast, self.autocast = self.autocast, None
        q, k, v = self.to(q, FP32), self.to(k, FP32), self.to(v, FP32)
        scaled = self.scale(q)
        if mask is None and self.layout.causal:
            mask = self.tensor("where", (n, m), FP32)
        if self.layout.grouped_keys:
            k, v = self.repeat(k, heads), self.repeat(v, heads)
        turned = self.scale(k)
        turned.packed, scaled.packed = k.packed, q.packed
        if b > 1:
            turned, v = self.repeat(turned, heads), self.repeat(v, heads)  # a product copies what is broadcast
        scores = self.matmul(self.copied(scaled), self.copied(turned), b, heads, n, m)
        del turned
        scores = scores if mask is None else self.add(scores, mask)
        scores = self.dropout(self.softmax(scores), p)
        y = self.matmul(scores, self.copied(v), b, heads, n, v.shape[-1])
        y = self.to(self.copy(y, shape=(b, n, heads * v.shape[-1])), width)
        self.autocast = autocast
        return y

    def eager_attention(self, q, k, v, mask, p: float, sinks: bool) -> Tensor:
        """Compute softmax(q kᵀ · scale + mask) v in single operators, as transformers' `eager_attention_forward`.

        `sinks`: a column more, cut off after the softmax (GPT-OSS).
        """
        (b, heads, n, _), in_place = q.shape, self.layout.scores_in_place
        if not (in_place and b == 1):
            k, v = self.repeat(k, heads), self.repeat(v, heads)
        scores = self.matmul(self.copied(q), self.copied(k), b, heads, n, k.shape[2])
        if not in_place:
            scores = self.scale(scores)
        if self.setting("attn_logit_softcapping", None):  # Gemma 2
            scores = self.scale(self.unary("tanh", self.scale(scores)))
        unmasked = scores if in_place else None
        if mask is not None:
            scores = self.add(scores, mask)
        if sinks:
            scores = self.scale(self.cat([scores], b, heads, n, k.shape[2] + 1), "add")
        scores = self.softmax(scores) if sinks else self.probabilities(scores, self.layout.fp32_softmax, q.width)
        del unmasked
        scores = self.dropout(scores, p)
        self.layer_holds.append(scores)  # returned beside the output
        y = self.matmul(scores, self.copied(v), b, heads, n, v.shape[-1])
        return self.copy(y, shape=(b, n, heads * v.shape[-1]))

    def repeat(self, x: Tensor, heads: int) -> Tensor:
        """Copy keys or values to every query head; their gradients are summed. A single head is only viewed as many."""
        b, few, m, d = x.shape
        if few == heads:
            return x
        if few == 1:
            return self.op("expand", [x], (b, heads, m, d), x.width, view=x)
        out = self.op("repeat_kv", [x], (b, heads, m, d), x.width)
        out.packed = True
        return out

    def copied(self, x: Tensor) -> Tensor:
        """Copy a view whose batch and heads do not lie in order, as a batched product needs."""
        x = self.cast(x)
        return x if x.packed or x.shape[0] == 1 else self.copy(x)

    def probabilities(self, x: Tensor, fp32: bool | None, width: int) -> Tensor:
        """Take a softmax, with `fp32` (or under autocast) in fp32, and cast it to `width`; with False nothing is cast."""
        if not fp32:
            y = self.softmax(self.fp32(x))
            return y if fp32 is False else self.to(y, width)
        fused = x.width == HALF and not self.bf16  # one kernel reads fp16 and writes fp32 (SoftMax.cpp, half_to_float)
        return self.to(self.softmax(x if fused else self.to(x, FP32), FP32), width)

    def rotary(self, x: Tensor, dims: int, partial: bool) -> Tensor:
        """Compute x · cos + rotate_half(x) · sin on the first `dims` channels (Su et al. 2021); saves cos and sin only.

        `partial`: the family joins rotated and other channels, even if there are no others, so the result lies head by head.
        """
        (*rest, d), table = x.shape, self.table
        turned = self.slice(x, *rest, dims) if dims < d else x
        passed = self.slice(x, *rest, d - dims) if dims < d else None
        first = self.mul(turned, table[0])
        left, right = self.slice(turned, *rest, dims // 2), self.slice(turned, *rest, dims - dims // 2)
        half = self.cat([self.scale(right, "neg"), left], *rest, dims)
        del left, right
        second = self.mul(half, table[1])
        del half
        out = self.add(first, second)
        del first, second
        return self.cat([out] if passed is None else [out, passed], *rest, d) if partial else out
