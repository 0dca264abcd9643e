"""A layer's attention: projections, rotary positions, a cache, attention itself, the way back."""

from functools import cache

from ..base.versions import installed
from ..recipe.shapes import Shape
from . import liger_kernels
from .attention import AttentionKernels
from .graph import Tensor
from .norms import Norms
from .operators import Operators

Table = tuple[Tensor, Tensor]  # cos and sin of every position
Modules = dict[str, str]  # role in a layer to the module's name

# The transformers from which a cache has values in their own dtype (`DynamicLayer.update`). Until
# then it had them in that of the keys, which autocast leaves in fp32 where they are rotated.
VALUES_OF_THEIR_OWN = [5, 24]


class SelfAttention:
    """Attention of a model of `shape`.

    `caches`: keys and values of each layer that ran, None where none is kept.
    """

    def __init__(
        self,
        operators: Operators,
        norms: Norms,
        kernels: AttentionKernels,
        shape: Shape,
        caches: list[Tensor] | None,
    ):
        self.operators = operators
        self.norms = norms
        self.kernels = kernels
        self.shape = shape
        self.layout = shape.known_layout
        self.caches = caches

    def run(
        self,
        at: Modules,
        x: Tensor,
        mask: Tensor | None,
        table: Table | None,
    ) -> Tensor:
        """Project, rotate and cache where the model does, attend, and project back."""
        if "kv_a" in at:
            assert table is not None  # all such models have rotary positions
            q, k, v = self._latent(at, x, table)
        else:
            q, k, v = self._by_head(at, x, table)
        sinks = "sinks" in at
        y = self.kernels.attend(q, k, v, mask, sinks)
        return self.operators.linear(y, at["out"])

    def _by_head(
        self,
        at: Modules,
        x: Tensor,
        table: Table | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; the latter are what is cached."""
        m = self.operators
        if "qkv" in at:
            q, k, v = self._joint(at, x)
        else:
            q, k, v = self._separate(at, x)
        if table and "rope" in m.numerics.liger:
            # One kernel turns both where they lie.
            q, k = liger_kernels.turned(m, q, k)
        elif table:
            q, k = [self._turned(x, table) for x in (q, k)]
        if self.caches is not None:
            # `use_cache` copies both (`DynamicLayer.update`).
            copy = m.cat([k], k.shape)
            v = m.cat([v], v.shape, width=_cached_width(k, v))
            k = copy
            self.caches += [k, v]
        return q, k, v

    def _joint(self, at: Modules, x: Tensor) -> list[Tensor]:
        """Project to queries, keys and values with one matrix."""
        m = self.operators
        qkv = m.linear(x, at["qkv"])
        queries = self.shape.num_heads
        # What is left of the width is keys and values in equal parts.
        others = qkv.shape[-1] // self.shape.head_dim - queries
        counts = (queries, others // 2, others // 2)
        shapes = [self._heads(qkv, count).shape for count in counts]
        return m.split(qkv, *shapes)

    def _separate(self, at: Modules, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values with a matrix each."""
        m = self.operators
        # In the order of `LlamaAttention.forward`. Backward comes to values first, and adds the
        # other two gradients for x to theirs in place.
        q = m.linear(x, at["q"])
        scaled = self.layout.scaled_queries
        q = m.scale(q) if scaled else self._head_norm(q, at, "q_norm")
        q = self._heads(q, self.shape.num_heads)
        k = self._head_norm(m.linear(x, at["k"]), at, "k_norm")
        # Norms of each head leave the keys head by head.
        count = k.shape[2]
        if len(k.shape) == 3:
            count //= self.shape.head_dim
        k = self._heads(k, count)
        v = self._heads(m.linear(x, at["v"]), count)
        return q, k, v

    def _latent(self, at: Modules, x: Tensor, table: Table) -> tuple[Tensor, Tensor, Tensor]:
        """Expand queries, keys and values from compressed ones (DeepSeek-V2, section 2.1).

        The compressed ones are what is cached.
        """
        m = self.operators
        settings = self.shape.settings
        b, tokens, _ = x.shape
        heads = self.shape.num_heads
        rope = self.shape.head_dim
        nope = settings["qk_nope_head_dim"]
        # Queries and keys of a head have a part without positions, and one that is rotated.
        plain = (b, heads, tokens, nope)
        rotated = (b, heads, tokens, rope)
        both = (b, heads, tokens, nope + rope)
        values = (b, heads, tokens, settings["v_head_dim"])
        compressed = (b, tokens, settings["kv_lora_rank"])
        shared = (b, 1, tokens, rope)  # all heads share the rotated part of the keys

        q = self._latent_queries(at, x)
        q, turned = m.split(q, plain, rotated)
        kv, key = m.split(m.linear(x, at["kv_a"]), compressed, shared)
        kv = self.norms.apply(kv, at["kv_a_norm"])
        turned, key = [self._rotary(x, table, rope, False) for x in (turned, key)]
        if self.caches is not None:
            copy = m.cat([kv], kv.shape)
            key = m.cat([key], key.shape, width=_cached_width(kv, key))
            kv = copy
            self.caches += [kv, key]
        q = m.cat([q, turned], both)
        del turned
        k, v = m.split(m.linear(kv, at["kv_b"]), plain, values)
        k = m.cat([k, key], both)
        return q, k, v

    def _latent_queries(self, at: Modules, x: Tensor) -> Tensor:
        """Project to queries, of a compressed input where the model has one."""
        m = self.operators
        if "q" in at:
            return m.linear(x, at["q"])
        narrow = self.norms.apply(m.linear(x, at["q_a"]), at["q_a_norm"])
        return m.linear(narrow, at["q_b"])

    def _turned(self, x: Tensor, table: Table) -> Tensor:
        """Rotate queries or keys as the family does."""
        dims = self.shape.rotary_dim
        partial = dims < self.shape.head_dim or self.layout.joined_rotary
        return self._rotary(x, table, dims, partial)

    def _rotary(
        self,
        x: Tensor,
        table: Table,
        dims: int,
        partial: bool,
    ) -> Tensor:
        """Compute x · cos + rotate_half(x) · sin on the first `dims` channels (Su et al. 2021).

        It saves cos and sin only. `partial`: the family joins rotated and other channels, even if
        there are no others, so the result lies head by head.
        """
        m = self.operators
        cos, sin = table
        *rest, channels = x.shape
        turned = x
        passed = []
        if dims < channels:
            turned = m.slice(x, (*rest, dims))
            passed = [m.slice(x, (*rest, channels - dims))]
        # (q * cos) + (rotate_half(q) * sin) from left to right: the first product waits while
        # rotate_half and the second are made.
        first = m.mul(turned, cos)
        # rotate_half: the second half, negated, before the first.
        left = m.slice(turned, (*rest, dims // 2))
        right = m.slice(turned, (*rest, dims - dims // 2))
        half = m.cat([m.scale(right, "neg"), left], turned.shape)
        del left, right
        second = m.mul(half, sin)
        del half
        out = m.add(first, second)
        del first, second
        if not partial:
            return out
        return m.cat([out, *passed], x.shape)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        """View batch × tokens × (heads · channels) as batch × heads × tokens × channels."""
        # No copy, so the numbers still lie token by token, whatever the shape says; hence `packed`
        # is False.
        return x.view(x.shape[0], count, x.shape[1], self.shape.head_dim)

    def _head_norm(self, x: Tensor, at: Modules, role: str) -> Tensor:
        """Norm queries or keys: of each head (Qwen 3), or of all heads at once (OLMo 2)."""
        if role not in at:
            return x
        b, tokens, width = x.shape
        weight = self.operators.parameters[f"{at[role]}.weight"]
        # A weight as wide as all heads norms them at once.
        if weight.shape == (width,):
            return self.norms.apply(x, at[role])
        channels = self.shape.head_dim
        # The norm's result is written anew with a row for each head, whose mean square is one
        # number in fp32.
        by_head = x.view(b, tokens, width // channels, channels)
        return self.norms.apply(by_head, at[role])


def _cached_width(keys: Tensor, values: Tensor) -> int:
    """Return the bytes of a value in the cache of the installed transformers."""
    return values.width if _values_of_their_own() else keys.width


@cache
def _values_of_their_own() -> bool:
    """Tell whether a cache keeps its values' dtype; without transformers the larger is counted."""
    release = installed("transformers")
    if release is None:
        return False
    return [int(part) for part in release.split(".")[:2]] >= VALUES_OF_THEIR_OWN
