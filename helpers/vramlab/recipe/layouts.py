"""What each architecture is made of: one `Layout`, as `transformers` 5.23 writes it.

Modules outside the layers, and the parts of a layer by the role they play in it, which is also how `formulas.layer`
walks through one. The source of each is the `__init__` of the architecture's `modeling_*.py`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .shape import ShapeData


@dataclass(frozen=True)
class Stack:
    """Equal layers: `count` of them under `prefix`, with `parts`, role to module, in the order of definition."""

    prefix: str
    count: int
    parts: dict[str, str]


@dataclass(frozen=True)
class Layout:
    """What a model is made of, in order: "module kind size …; …" outside the layers, and stacks of layers.

    Sizes are the letters of `weights._sizes`. The other attributes say how a layer differs from Llama's.

    Attributes:
        biased: roles of linear layers with a bias.
        causal: a token sees earlier ones only, and keys and values are cached.
        parallel: attention and feed-forward part read the same input.
        post_norm: norms come after the residual sums; there is none after the last layer.
        rms_norm: whose RMSNorm: "llama", "gemma" (times 1 + weight, in fp32) or "t5" (cast to its weight's dtype).
        fp32_softmax: written-out attention asks for an fp32 softmax.
        grouped_keys: shared keys go to the kernel as they are (`enable_gqa`); `repeated_keys`: copied before positions.
        scores_in_place: written-out scores are scaled in place, and one head of keys broadcasts over one sequence.
        scaled_queries: queries are scaled before the kernel.
        joined_rotary: turned and other channels are joined even where all are turned.
        scaled_embedding: the embedding is multiplied by a number.
        shared_positions: one row of positions serves the whole batch.
        held_feed_forward: the wide feed-forward tensor lives to the end of the layer.
        quantizable: linear layers are `nn.Linear` or `Conv1D`, which bitsandbytes replaces.
        fp32_modules: linear layers that stay in fp32 in an fp16 model and are never quantized.
    """

    items: tuple[str | Stack, ...]
    biased: frozenset[str] = frozenset()
    causal: bool = True
    parallel: bool = False
    post_norm: bool = False
    rms_norm: str = "llama"
    fp32_softmax: bool = True
    grouped_keys: bool = True
    repeated_keys: bool = False
    scores_in_place: bool = False
    scaled_queries: bool = False
    joined_rotary: bool = False
    scaled_embedding: bool = False
    shared_positions: bool = False
    held_feed_forward: bool = False
    quantizable: bool = True
    fp32_modules: tuple[str, ...] = ()

    @property
    def stacks(self) -> list[Stack]:
        """The stacks alone: one, or an encoder's and a decoder's."""
        return [item for item in self.items if isinstance(item, Stack)]

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """(name, kind) of the modules outside the layers."""
        rows = [row.split() for item in self.items if isinstance(item, str) for row in item.split(";")]
        return [(row[0], row[1]) for row in rows if row]


ATTENTION = frozenset(("q", "k", "v", "qkv", "out"))
ALL = ATTENTION | {"up", "gate", "down"}
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral")
SEPARATE = "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.o_proj"
TWO_NORMS = "norm1=input_layernorm norm2=post_attention_layernorm"
ONE_BY_FOUR = "up=mlp.dense_h_to_4h down=mlp.dense_4h_to_h"


def layout(s: "ShapeData") -> Layout | None:
    """The layout of `s`; None for an architecture, or a variant of one, that is not written down here."""
    c = s.config
    family = "llama" if s.family in LLAMA_LIKE else s.family
    return LAYOUTS[family](s, c) if family in LAYOUTS else None


def _one_stack(
    s: "ShapeData", before: str, prefix: str, parts: str, after: str, biased=(), head: str | None = None, **how
) -> Layout:
    after = f"{after}; {_head(s) if head is None else head}"
    return Layout((before, Stack(prefix, s.num_layers, _parts(parts)), after), frozenset(biased), **how)


def _parts(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.split())


def _head(s: "ShapeData", bias: str = "") -> str:
    """The decoder families' output head: a classifier's `score`, or `lm_head` unless the embedding serves as it."""
    if "classification" in s.task:
        return "score linear L w"
    if s.tied:
        return "lm_head.bias bias V" if bias else ""
    return f"lm_head linear{bias} V w"


def _gpt2(s: "ShapeData", c: dict) -> Layout | None:
    if c.get("add_cross_attention"):
        return None
    parts = "norm1=ln_1 qkv=attn.c_attn out=attn.c_proj norm2=ln_2 up=mlp.c_fc down=mlp.c_proj"
    before = "transformer.wte embedding V h; transformer.wpe embedding P h"
    how = dict(fp32_softmax=False, shared_positions=True)
    return _one_stack(s, before, "transformer.h", parts, "transformer.ln_f norm h", ALL, **how)


def _gpt_neox(s: "ShapeData", c: dict) -> Layout:
    parts = f"{TWO_NORMS} qkv=attention.query_key_value out=attention.dense {ONE_BY_FOUR}"
    biased = ALL if c.get("attention_bias", True) else ALL - ATTENTION
    before, after = "gpt_neox.embed_in embedding V h", "gpt_neox.final_layer_norm norm h"
    how = dict(parallel=c.get("use_parallel_residual", True), joined_rotary=True)
    return _one_stack(s, before, "gpt_neox.layers", parts, after, biased, **how)


def _llama(s: "ShapeData", c: dict) -> Layout:
    """Llama and its descendants, which differ in biases, extra norms and the feed-forward part."""
    kind = s.family
    norms = {"qwen3": " q_norm=self_attn.q_norm k_norm=self_attn.k_norm"}.get(kind, "")
    mlp = "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj"
    if kind == "mixtral":
        mlp = "router=mlp.gate.weight experts_up=mlp.experts.gate_up_proj experts_down=mlp.experts.down_proj"
    four = "norm1=input_layernorm after1=post_attention_layernorm"
    four += " norm2=pre_feedforward_layernorm after2=post_feedforward_layernorm"
    biased = ATTENTION - {"out"} if kind == "qwen2" else ATTENTION if c.get("attention_bias") else frozenset()
    if kind == "llama" and c.get("mlp_bias"):
        biased |= ALL - ATTENTION
    parts = f"{SEPARATE}{norms} {mlp} {four if kind == 'gemma2' else TWO_NORMS}"
    how = dict(rms_norm="gemma", scaled_embedding=True) if kind in ("gemma", "gemma2") else {}
    before, after = "model.embed_tokens embedding V h", "model.norm norm h"
    return _one_stack(s, before, "model.layers", parts, after, biased, **how)


def _bert(s: "ShapeData", c: dict) -> Layout | None:
    classifies = s.task == "sequence-classification"
    if c.get("add_cross_attention") or c.get("is_decoder") or not (classifies or s.tied):
        return None
    tables = (("word", "V"), ("position", "P"), ("token_type", "T"))
    before = "; ".join(f"bert.embeddings.{name}_embeddings embedding {rows} h" for name, rows in tables)
    parts = " ".join(f"{role[0]}=attention.self.{role}" for role in ("query", "key", "value"))
    parts += " out=attention.output.dense norm1=attention.output.LayerNorm"
    parts += " up=intermediate.dense down=output.dense norm2=output.LayerNorm"
    after = "bert.pooler.dense linear+ h h; classifier linear+ L h"
    if not classifies:
        after = "cls.predictions.bias bias V; cls.predictions.transform.dense linear+ h h"
        after += "; cls.predictions.transform.LayerNorm norm h"
    before += "; bert.embeddings.LayerNorm norm h"
    how = dict(causal=False, post_norm=True, fp32_softmax=False, shared_positions=True, held_feed_forward=True)
    return _one_stack(s, before, "bert.encoder.layer", parts, after, ALL, "", **how)


def _opt(s: "ShapeData", c: dict) -> Layout | None:
    if not (c.get("enable_bias", True) and c.get("layer_norm_elementwise_affine", True)):
        return None
    # two rows more than positions: OPT counts from 2, as the code it was converted from does
    before = "model.decoder.embed_tokens embedding V w; model.decoder.embed_positions embedding P+2 h"
    if (c.get("word_embed_proj_dim") or s.hidden_size) != s.hidden_size:
        before += "; model.decoder.project_out linear w h; model.decoder.project_in linear h w"
    if c.get("do_layer_norm_before", True) and not c.get("_remove_final_layer_norm"):
        before += "; model.decoder.final_layer_norm norm h"
    parts = "k=self_attn.k_proj v=self_attn.v_proj q=self_attn.q_proj out=self_attn.out_proj"
    parts += " norm1=self_attn_layer_norm up=fc1 down=fc2 norm2=final_layer_norm"
    how = dict(post_norm=not c.get("do_layer_norm_before", True), scaled_queries=True)
    return _one_stack(s, before, "model.decoder.layers", parts, "", ALL, **how)


def _phi(s: "ShapeData", c: dict) -> Layout | None:
    if c.get("qk_layernorm"):
        return None
    parts = f"{SEPARATE.replace('o_proj', 'dense')} up=mlp.fc1 down=mlp.fc2 norm1=input_layernorm"
    before, after = "model.embed_tokens embedding V h", "model.final_layernorm norm h"
    how = dict(parallel=True, joined_rotary=True)
    return _one_stack(s, before, "model.layers", parts, after, ALL, _head(s, "+"), **how)


def _falcon(s: "ShapeData", c: dict) -> Layout:
    new, norms = c.get("new_decoder_architecture", False), "norm1=input_layernorm"
    if not c.get("parallel_attn", True):
        norms = "norm2=post_attention_layernorm norm1=input_layernorm"
    elif c.get("num_ln_in_parallel_attn", 2 if new else 1) == 2:
        norms = "norm1=ln_attn norm2=ln_mlp"
    parts = f"qkv=self_attention.query_key_value out=self_attention.dense {ONE_BY_FOUR} {norms}"
    biased = ALL if c.get("bias", False) else ()
    before, after = "transformer.word_embeddings embedding V h", "transformer.ln_f norm h"
    how = dict(parallel=new or c.get("parallel_attn", True), repeated_keys=new, quantizable=False)
    how |= dict(fp32_softmax=False, grouped_keys=False, scores_in_place=True)
    return _one_stack(s, before, "transformer.h", parts, after, biased, **how)


def _t5(s: "ShapeData", c: dict) -> Layout:
    def attention(prefix: str, module: str) -> str:
        norm = "cross_norm" if prefix else "norm1"
        parts = [f"{prefix}{role}={module}.{role[0]}" for role in ("q", "k", "v", "out")]
        position = [] if prefix else [f"position={module}.relative_attention_bias"]
        return " ".join([*parts, *position, f"{norm}={module.rpartition('.')[0]}.layer_norm"])

    def mlp(sub: str) -> str:
        up = [f"{role}={sub}.DenseReluDense.wi_{i}" for i, role in enumerate(("gate", "up"))]
        names = up if s.gated_mlp else [f"up={sub}.DenseReluDense.wi"]
        return " ".join([*names, f"down={sub}.DenseReluDense.wo", f"norm2={sub}.layer_norm"])

    own, cross = attention("", "layer.0.SelfAttention"), attention("cross_", "layer.1.EncDecAttention")
    encoder = Stack("encoder.block", s.num_layers, _parts(f"{own} {mlp('layer.1')}"))
    decoder = Stack("decoder.block", s.num_decoder_layers, _parts(f"{own} {cross} {mlp('layer.2')}"))
    norms = [f"{side}.final_layer_norm norm h" for side in ("encoder", "decoder")]
    items = ("shared embedding V h", encoder, norms[0], decoder, norms[1])
    return Layout(items, rms_norm="t5", fp32_softmax=False, fp32_modules=("wo",))


def _vit(s: "ShapeData", c: dict) -> Layout:
    before = "vit.embeddings.cls_token other 1 1 h; vit.embeddings.position_embeddings other 1 I h"
    before += "; vit.embeddings.patch_embeddings.projection.weight conv h C p0 p1"
    before += "; vit.embeddings.patch_embeddings.projection.bias bias h"
    parts = SEPARATE.replace("self_attn", "attention")
    parts += " norm1=layernorm_before norm2=layernorm_after up=mlp.fc1 down=mlp.fc2"
    biased = ALL if c.get("qkv_bias", True) else ALL - {"q", "k", "v"}
    head = "classifier linear+ L h"
    return _one_stack(s, before, "vit.layers", parts, "vit.layernorm norm h", biased, head, causal=False)


LAYOUTS = {
    **{"gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama, "bert": _bert, "opt": _opt, "phi": _phi},
    **{"falcon": _falcon, "t5": _t5, "vit": _vit},
}
