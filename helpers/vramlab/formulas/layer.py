"""One layer of a recipe's model in the ledger: attention, feed-forward part or experts, norms and residual sums.

One code serves decoders and encoders: the family's layout (`vramlab.recipe.families`) names the module for each role.
What GPT-2's layer saves in fp32 with a fused kernel, in bytes a token: 4 · (2 norms · h + 3h queries, keys, values
+ h attention + 2h inputs of norms + 4 · 4h gelu_new + 4h its result) + 2h dropout masks: about 109 h.
"""

from math import prod

from ..hardware.gpu import Chip
from ..hardware.overhead import CUBLASLT_WORKSPACE, cublas_workspace, frees_workspaces
from ..recipe.liger import kernels
from ..recipe.recipe import Recipe
from . import liger
from .attention import Attention
from .ledger import Parameter, Tensor
from .model_states import FP32, HALF, joined_samples, weight_width
from .operators import INT64


class Layer(Attention):
    """The ledger of a micro-batch; `parameters`: of layers that are run, and outside."""

    def __init__(self, recipe: Recipe, parameters: dict[str, Parameter], chip: Chip):
        super().__init__()
        shape, precision, quantization = recipe.shape, recipe.precision, recipe.quantization
        self.recipe, self.shape, self.layout, self.setting = recipe, shape, shape.layout, shape.settings.get
        self.parameters, self.chip, self.cast_entries = parameters, chip, []
        own_class = not shape.layout.quantizable
        self.uncached = {name.removesuffix(".weight") for name in parameters} - {shape.head} if own_class else set()
        if frees_workspaces():
            self.workspaces = cublas_workspace(chip.capability), CUBLASLT_WORKSPACE
        (self.batch, self.tokens), self.checkpoints = recipe.rows, recipe.gradient_checkpointing
        self.autocast = HALF if precision.endswith("-mixed") else None
        self.compute, self.loaded = weight_width(recipe.implied_dtype), weight_width(recipe.weights_dtype)
        self.nested = bool(quantization and quantization.double)
        self.lora_dropout = recipe.lora.lora_dropout if recipe.lora else 0.0
        self.implementation, self.bf16 = recipe.attn_implementation, not precision.startswith("fp16")
        self.joined_samples = joined_samples(recipe)
        self.padded = recipe.samples if not recipe.joins and min(recipe.samples) < recipe.rows[1] else ()
        self.hidden_width = weight_width(recipe.weights_dtype, quantization)  # bytes an element of embedded tokens
        self.liger = kernels(recipe)
        self.table: tuple[Tensor, Tensor] | None = None  # cos and sin of rotary positions
        caching = self.setting("use_cache", True) if recipe.loop.use_cache is None else recipe.loop.use_cache
        self.caches: list[Tensor] | None = [] if caching and not self.checkpoints and shape.layout.causal else None

    def layer(self, parts: dict[str, str], mask: Tensor | None, name: str, x: Tensor) -> Tensor:
        """Run the layer `name`, with the module name of each role in `parts`."""
        s = self.shape
        at = {role: f"{name}.{part}" for role, part in parts.items()}
        if self.layout.parallel or not at.keys() & {"norm2", "after2"}:
            p, normed = s.hidden_dropout, self.norm(x, at["norm1"])
            y = self.dropout(self.attention(at, normed, mask), p)
            if "norm2" in at:
                normed = self.norm(x, at["norm2"])
            z = self.feed_forward(at, normed)
            return self.add(self.add(self.dropout(z, p), y), x)
        after = self.layout.post_norm
        y = self.attention(at, x if after or "norm1" not in at else self.norm(x, at["norm1"]), mask)
        if "after1" in at:  # Gemma 2 also norms what each branch returns, OLMo 2 that alone
            y = self.norm(y, at["after1"])
        x = self.joined(x, y, at["norm1"] if after else None)
        del y
        z = self.feed_forward(at, x if after or "norm2" not in at else self.norm(x, at["norm2"]))
        if "after2" in at:
            z = self.norm(z, at["after2"])
        return self.joined(x, z, at["norm2"] if after else None)

    def joined(self, x: Tensor, y: Tensor, norm: str | None) -> Tensor:
        """Add dropout(y) to x; apply `norm` in a model with norms after the sums."""
        if self.setting("residual_multiplier", None):  # Granite
            y = self.scale(y)
        total = self.add(x, self.dropout(y, self.shape.hidden_dropout))
        return self.norm(total, norm) if norm else total

    def attention(self, at: dict[str, str], x: Tensor, mask: Tensor | None) -> Tensor:
        """Project to queries, keys and values, rotate and cache them where the model does, attend, and project back."""
        s, layout = self.shape, self.layout
        if "kv_a" in at:
            q, k, v = self.latent(at, x)
            return self.linear(self.attend(q, k, v, mask, s.attention_dropout), at["out"])
        if "qkv" in at:
            qkv = self.linear(x, at["qkv"])
            kv = qkv.shape[-1] // s.head_dim - s.num_heads
            q, k, v = self.split(qkv, *(self.heads(qkv, n).shape for n in (s.num_heads, kv // 2, kv // 2)))
            del qkv
        else:
            q = self.linear(x, at["q"])
            q = self.heads(self.scale(q) if layout.scaled_queries else self.head_norm(q, at, "q_norm"), s.num_heads)
            k = self.head_norm(self.linear(x, at["k"]), at, "k_norm")
            k = self.heads(k, k.shape[-1] // s.head_dim if len(k.shape) == 3 else k.shape[2])
            v = self.heads(self.linear(x, at["v"]), k.shape[1])
        if self.table and "rope" in self.liger:
            q, k = liger.turned(self, q, k)
        elif self.table:
            partial = s.rotary_dim < s.head_dim or layout.joined_rotary
            q, k = self.rotary(q, s.rotary_dim, partial), self.rotary(k, s.rotary_dim, partial)
        if self.caches is not None:
            # `use_cache` copies keys and values (`DynamicLayer.update`); the cache takes the keys' dtype
            k, v = self.cat([k], *k.shape), self.cat([v], *v.shape, width=k.width)
            self.caches += [k, v]
        return self.linear(self.attend(q, k, v, mask, s.attention_dropout, "sinks" in at), at["out"])

    def latent(self, at: dict[str, str], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expand queries, keys and values from compressed ones (DeepSeek-V2, section 2.1), which are what is cached."""
        s, (b, n, _) = self.shape, x.shape
        heads, rope = s.num_heads, s.head_dim
        nope, values, rank = (self.setting(key) for key in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
        narrow = [x if "q" in at else self.norm(self.linear(x, at["q_a"]), at["q_a_norm"])]
        q = self.linear(narrow.pop(), at["q" if "q" in at else "q_b"])
        q, turned = self.split(q, (b, heads, n, nope), (b, heads, n, rope))
        kv, key = self.split(self.linear(x, at["kv_a"]), (b, n, rank), (b, 1, n, rope))
        kv = self.norm(kv, at["kv_a_norm"])
        turned, key = self.rotary(turned, rope, False), self.rotary(key, rope, False)
        if self.caches is not None:
            kv, key = self.cat([kv], *kv.shape), self.cat([key], *key.shape, width=kv.width)
            self.caches += [kv, key]
        q = self.cat([q, turned], b, heads, n, nope + rope)
        del turned
        k, v = self.split(self.linear(kv, at["kv_b"]), (b, heads, n, nope), (b, heads, n, values))
        return q, self.cat([k, key], b, heads, n, nope + rope), v

    def heads(self, x: Tensor, count: int) -> Tensor:
        """View batch × tokens × (heads · channels) as batch × heads × tokens × channels."""
        return x.view(x.shape[0], count, x.shape[1], self.shape.head_dim)

    def head_norm(self, x: Tensor, at: dict[str, str], role: str) -> Tensor:
        """Norm queries or keys: of each head (Qwen 3), or of all heads at once (OLMo 2)."""
        if role not in at:
            return x
        b, n, width = x.shape
        if self.parameters[f"{at[role]}.weight"].shape == (width,):
            return self.norm(x, at[role])
        return self.norm(x.view(b, n, width // self.shape.head_dim, self.shape.head_dim), at[role])

    def feed_forward(self, at: dict[str, str], x: Tensor) -> Tensor:
        """Compute down(act(up(x))), or down(act(gate(x)) · up(x)), which saves four wide tensors, or `experts`."""
        s = self.shape
        if "router" in at:
            return self.experts(at, x)
        if "gate_up" in at:
            half = (*x.shape[:-1], s.intermediate_size)
            parts = self.split(self.linear(x, at["gate_up"]), half, half)
            z = self.mul(self.activation(parts.pop(0), s.activation), parts.pop())
        elif "gate" in at and self.liger & {"swiglu", "geglu"}:
            z = liger.gated(self, self.linear(x, at["gate"]), self.linear(x, at["up"]))
        elif "gate" in at:
            z = self.mul(self.activation(self.linear(x, at["gate"]), s.activation), self.linear(x, at["up"]))
        else:
            z = self.activation(self.linear(x, at["up"]), s.activation)
        if self.layout.held_feed_forward:
            self.layer_holds.append(z)
        return self.linear(z, at["down"])

    def experts(self, at: dict[str, str], x: Tensor) -> Tensor:
        """Run `MixtralSparseMoeBlock` with grouped products: a token's row is copied to each expert it goes to."""
        s, (b, n, h) = self.shape, x.shape
        m = prod(self.parameters[at["experts_down"]].shape) // (s.num_experts * h)
        rows, k = b * n, s.experts_per_token
        flat, router = x.view(rows, h), self.parameters[at["router"]]
        if self.layout.sigmoid_router:
            probabilities = self.unary("sigmoid", self.product(self.to(flat, FP32), self.to(router, FP32)))
        else:
            probabilities = self.probabilities(self.product(flat, router), True, FP32)
        top = self.op("topk", [probabilities], (rows, k), FP32, saves=[self.tensor("topk", (rows, k), INT64)])
        weights = self.op("div", [top], (rows, k), FP32, saves=[top])
        order = self.tensor("sort", (rows * k,), INT64)

        def index(x: Tensor, width: int) -> Tensor:
            return self.op("index", [x], (rows * k, width), x.width, saves=[order])

        def grouped(x: Tensor, role: str, out: int) -> Tensor:  # autocast leaves it alone, x takes the weight's dtype
            weight = self.parameters[at[role]]
            x = self.to(x, weight.width)
            one_by_one = self.chip.capability < (8, 0)  # transformers' fallback
            saves = ([x] if weight.needs or one_by_one else []) + ([weight] if x.needs else [])
            unused = prod(weight.shape) * weight.width if one_by_one and not weight.needs else 0  # gradient
            return self.op("grouped_mm", [x, weight], (rows * k, out), weight.width, saves=saves, extra=unused)

        gate, up = self.split(grouped(index(flat, h), "experts_up", 2 * m), (rows * k, m), (rows * k, m))
        if f"{at['experts_up']}_bias" in self.parameters:  # GPT-OSS: gate · σ(α · gate) · (up + 1), both clamped first
            gate, up = (self.op("clamp", [t], t.shape, t.width, saves=[t]) for t in (gate, up))
            glu = self.mul(gate, self.unary("sigmoid", self.scale(gate)))
            out = grouped(self.mul(self.scale(up, "add"), glu), "experts_down", h)
        else:
            out = grouped(self.mul(self.activation(gate, s.activation), up), "experts_down", h)
        weighted = index(self.mul(out, index(weights, 1)), h)
        y = self.to(self.reduce(weighted, (rows, h), "sum"), x.width).view(b, n, h)
        if "shared_up" not in at:
            return y
        del out, weighted, gate, up
        return self.add(y, self.feed_forward({part: at[f"shared_{part}"] for part in ("gate", "up", "down")}, x))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply the family's norm."""
        if self.shape.norm == "layernorm":
            return self.layer_norm(x, name)
        if "rms_norm" in self.liger:
            return liger.rms_norm(self, x, name)
        return self.rms_norm(x, name, self.layout.rms_norm, self.shape.norm)
