"""A recipe's model on paper: embeddings, one layer that stands for all the others, head and loss."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from . import decoders, encoders
from .attention import Attention
from .blocks import Tensor
from .ledger import FULL, Leaf
from .operators import BOOL, FP32, INT64


@dataclass
class Stack:
    """A layer that stands for `more` others like it.

    `begin` and `end` are the events around it in the forward pass; `bottom` and `top` name the bounds around it in the
    backward pass; `taken` is the size of its input.
    """

    bottom: str
    top: str
    more: int
    begin: int
    end: int
    taken: int


class Model(Attention):
    """Operators that know the recipe's shape: batch × tokens, heads, positions, masks, caches."""

    def __init__(self, recipe, facts, parameters, **kwargs):
        super().__init__(parameters, **kwargs)
        self.recipe, self.facts, self.shape = recipe, facts, recipe.shape
        self.batch, self.tokens, self.checkpoints = recipe.batch_size, recipe.seq_len, recipe.gradient_checkpointing
        self.stacks: list[Stack] = []
        self.causal, self.grouping = recipe.shape.family not in ("bert", "vit"), recipe.shape.family != "falcon"
        self.caches: list[Tensor] | None = None
        self.table: tuple[Tensor, Tensor] | None = None
        self.leaves: list[Leaf] = []
        self.held: list[Tensor] = []  # what the model's forward keeps by name until it returns

    def setting(self, name: str, default):
        """A value of the configuration."""
        return self.facts.config.get(name, default)

    # --- pieces of a layer ----------------------------------------------------------------------------------------

    def heads(self, x: Tensor, *counts: int) -> list[Tensor]:
        """batch × tokens × (heads · channels) seen as batch × heads × tokens × channels, in one part or several."""
        b, n, *rest = x.shape
        d = prod(rest) // sum(counts)
        if len(counts) == 1:
            return [x.view(b, counts[0], n, d)]
        return self.split(x, *((b, count, n, d) for count in counts))

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with rotary positions."""
        dims = self.shape.rotary_dim
        q_ = self.rotary(q, self.table, dims)
        return q_, self.rotary(k, self.table, dims)

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """With `use_cache` keys and values are copied into the cache (`DynamicLayer.update`), which outlives forward."""
        if self.caches is None:
            return k, v
        k, v = self.cat([k], *k.shape), self.cat([v], *v.shape, width=k.width)  # the cache takes the keys' dtype
        self.caches += [k, v]
        return k, v

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The family's norm."""
        if self.shape.norm == "layernorm":
            return self.layer_norm(x, name)
        return self.rms_norm(x, name, "gemma" if self.shape.family.startswith("gemma") else "llama")

    def clamped(self, x: Tensor) -> Tensor:
        """T5 clamps fp16 so that it does not overflow."""
        if x.width == FP32 or self.bf16:
            return x
        return self.op("clamp", [x], x.shape, x.width, saves=[x], extra=2 * prod(x.shape) * BOOL)

    def bias_mask(self, bias: Tensor) -> Tensor:
        """T5's relative positions as the mask of a fused kernel: copied into order, with -∞ where a decoder must not
        look (`sdpa_attention.create_position_bias_mask`)."""
        if self.implementation == "eager" or bias.packed:
            return bias
        if self.decoding:
            allowed = self.tensor("ge", bias.shape[2:], BOOL)
            bias = self.op("where", [bias], bias.shape, bias.width, saves=[allowed])
        return self.copy(bias)

    def first(self, x: Tensor) -> Tensor:
        """The input embedding: with LoRA under checkpointing made to need a gradient (`enable_input_require_grads`)."""
        if self.recipe.lora and self.checkpoints:
            x.needs, x.node = True, Leaf(x.block)
            if self.recipe.loop.keep_outputs:  # outputs hold the graph, and the graph its leaves
                self.leaves.append(x.node)
        return x

    # --- what all layers share ------------------------------------------------------------------------------------

    def rotary_table(self) -> None:
        """cos and sin of every position, computed in fp32 and kept in the hidden states' dtype; without gradient."""
        rows = (1, self.tokens, self.shape.rotary_dim)
        cos, sin = self.tensor("cos", rows, FP32), self.tensor("sin", rows, FP32)
        width = self.hidden_width
        self.table = (self.to(cos, width), self.to(sin, width))

    def mask(self, causal: bool = True) -> Tensor | None:
        """What is added to written-out scores: 0 or the lowest number for each pair of tokens, for the whole batch.

        The fused kernels know causality by themselves, unless a sliding window is shorter than the sequence
        (`masking_utils._ignore_causal_mask_sdpa`). An encoder without padding has none.
        """
        n, window = self.tokens, self.shape.sliding_window
        if self.implementation == "flash_attention_2" or not causal:
            return None
        if self.implementation == "sdpa":
            if window is None or n <= window:
                return None
            return self.tensor("mask", (self.batch, 1, n, n), BOOL)
        seen = self.tensor("mask", (self.batch, 1, n, n), BOOL)
        mask = self.tensor("mask", (self.batch, 1, n, n), self.hidden_width)
        del seen
        return mask

    @property
    def hidden_width(self) -> int:
        """Bytes an element of what the embedding returns."""
        return self.facts.embedding_width

    # --- layers ---------------------------------------------------------------------------------------------------

    def stack(self, name: str, count: int, layer: Callable[[str, Tensor], Tensor], first: list[Tensor]) -> Tensor:
        """`count` layers: one is written out and stands for all the rest, which keep and need the same.

        Where no gradient flows into the first layer (LoRA), that one keeps less, and the second stands for the rest. In
        an encoder–decoder the last layer starts the gradients of what all share, so it is written out too, and under
        checkpointing the first one, which makes it.

        Args:
            first: holds the input of the first layer, which is taken out, so that it goes when that layer is done.
        """
        x = first.pop()
        leaf = x.node if type(x.node) is Leaf else None
        if leaf and not self.leaves:
            leaf.block = None  # it goes with the first layer then, or a little later
        both_ends = bool(self.shape.num_decoder_layers)
        typical = int((both_ends and self.checkpoints) or not x.needs or bool(leaf and leaf.block))
        written = min(count, typical + 1 + both_ends)
        for i in range(written):
            begin, taken = len(self.changes), x.block.entry.size
            self.bounds.setdefault(len(self.nodes), []).append(f"{name}.{i}")
            x = self.layer(layer, f"{name}.{i}", x)
            if i == min(typical, written - 1):
                end = len(self.changes)
                self.stacks.append(Stack(f"{name}.{i}", f"{name}.{i}.end", count - written, begin, end, taken))
                self.bounds.setdefault(len(self.nodes), []).append(f"{name}.{i}.end")
        return x

    def layer(self, function: Callable[[str, Tensor], Tensor], name: str, x: Tensor) -> Tensor:
        """One layer; under gradient checkpointing only its input is kept (Chen et al. 2016)."""
        self.where = name
        x = self.checkpoint(lambda inner: function(name, inner), x) if self.checkpoints else function(name, x)
        self.returned_weights = None
        return x


DECODERS = {
    "gpt2": ("transformer", "h", "ln_f", decoders.gpt2),
    "gpt_neox": ("gpt_neox", "layers", "final_layer_norm", decoders.gpt_neox),
    "opt": ("model.decoder", "layers", "final_layer_norm", decoders.opt),
    "falcon": ("transformer", "h", "ln_f", decoders.falcon),
    "phi": ("model", "layers", "final_layernorm", decoders.phi),
    "bert": ("bert", "encoder.layer", None, encoders.bert),
    "vit": ("vit", "layers", "layernorm", encoders.vit),
}
LLAMA = ("model", "layers", "norm", decoders.llama)
LIKE_LLAMA = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2")
WRITTEN = frozenset((*DECODERS, *LIKE_LLAMA, "t5"))


def hidden_states(m: Model) -> Tensor:
    """Everything before the output head, for models of one stack."""
    s = m.shape
    prefix, layers, final, function = DECODERS.get(s.family, LLAMA)
    m.where = prefix
    ids = Tensor(None, (m.batch, m.tokens), INT64)
    if s.family == "vit":
        first = [embed_image(m, f"{prefix}.embeddings")]
    elif s.family == "bert":
        first = [embed_bert(m, f"{prefix}.embeddings", ids)]
    else:
        first = [embed(m, prefix, ids)]
    mask = m.mask(causal=s.family not in ("bert", "vit"))
    if s.rotary_dim:
        m.rotary_table()
    x = m.stack(f"{prefix}.{layers}", s.num_layers, lambda name, y: function(m, name, y, mask), first)
    m.where = prefix
    if final and f"{prefix}.{final}.weight" in m.parameters:
        x = m.norm(x, f"{prefix}.{final}")
    m.held.clear()
    return x


def embed(m: Model, prefix: str, ids: Tensor) -> Tensor:
    """Token embeddings, with learned positions (GPT-2, OPT) or a factor (Gemma), and dropout."""
    s = m.shape
    table = {"gpt2": "wte", "gpt_neox": "embed_in", "falcon": "word_embeddings"}.get(s.family, "embed_tokens")
    x = m.first(m.embedding(ids, f"{prefix}.{table}"))
    if s.family.startswith("gemma"):
        x = m.scale(x)
    m.held.append(x)
    if s.family == "gpt2":
        m.held.append(m.embedding(Tensor(m.block("add", (m.tokens,), INT64), (1, m.tokens), INT64), f"{prefix}.wpe"))
        x = m.add(*m.held)
    if s.family == "opt":
        if f"{prefix}.project_in.weight" in m.parameters:
            x = m.linear(x, f"{prefix}.project_in")
            m.held[:] = [x]
        ids = Tensor(m.block("add", (m.batch, m.tokens), INT64), (m.batch, m.tokens), INT64)
        m.held.append(m.embedding(ids, f"{prefix}.embed_positions"))
        x = m.add(*m.held)
    return m.dropout(x, s.embedding_dropout)


def embed_bert(m: Model, prefix: str, ids: Tensor) -> Tensor:
    """Three embeddings added up, a norm, dropout."""
    words = m.first(m.embedding(ids, f"{prefix}.word_embeddings"))
    kinds = m.embedding(ids, f"{prefix}.token_type_embeddings")
    x = m.add(words, kinds)
    row = Tensor(m.block("positions", (m.tokens,), INT64), (1, m.tokens), INT64)
    places = m.embedding(row, f"{prefix}.position_embeddings")
    x = m.add(x, places)
    x = m.layer_norm(x, f"{prefix}.LayerNorm")
    return m.dropout(x, m.shape.embedding_dropout)


def embed_image(m: Model, prefix: str) -> Tensor:
    """Patches by a convolution, the class token before them, learned positions."""
    s, side = m.shape, m.setting("image_size", 224)
    pixels = m.to(
        Tensor(None, (m.batch, m.setting("num_channels", 3), side, side), m.facts.input_width), m.hidden_width
    )
    weight = m.parameters[f"{prefix}.patch_embeddings.projection.weight"]
    bias = m.parameters[f"{prefix}.patch_embeddings.projection.bias"]
    a, w, b = m.cast(pixels), m.cast(weight), m.cast(bias)
    patches = m.first(m.op("convolution", [a, w, b], (m.batch, s.hidden_size, m.tokens - 1), a.width, saves=[a, w]))
    token = m.parameters[f"{prefix}.cls_token"]
    token = m.op("expand", [token], (m.batch, 1, s.hidden_size), token.width, block=None, grads=(FULL,))
    x = m.cat([token, patches], m.batch, m.tokens, s.hidden_size)
    x = m.add(x, m.parameters[f"{prefix}.position_embeddings"])
    return m.dropout(x, s.hidden_dropout)
