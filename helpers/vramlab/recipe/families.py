"""Model families: what the package knows of one `model_type`, from its record in `data/families.json` and its layout here.

A dense decoder that differs from Llama in names, norms or biases is a record alone; another needs a layout too. Sources,
of transformers 5.23: the class defaults of `configuration_*.py`, the `__init__` and `forward` of `modeling_*.py`; of PEFT
0.21: `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..report.data import data_path
from .layouts import Layout, Stack

if TYPE_CHECKING:
    from .shape import ShapeData


class Task(NamedTuple):
    """A head: the ends of transformers' auto class and of each family's own, its table in `modeling_auto`, the usual name
    of the output module, and what PEFT calls the task."""

    auto: str
    own: str
    table: str
    head: str
    peft: str | None = None

    @property
    def auto_class(self) -> str:
        """The class of transformers that builds any family with this head."""
        return f"AutoModelFor{self.auto}"


TASKS = {
    "causal-lm": Task("CausalLM", "CausalLM", "CAUSAL_LM", "lm_head", "CAUSAL_LM"),
    "seq2seq-lm": Task("Seq2SeqLM", "ConditionalGeneration", "SEQ_TO_SEQ_CAUSAL_LM", "lm_head", "SEQ_2_SEQ_LM"),
    "image-classification": Task("ImageClassification", "ImageClassification", "IMAGE_CLASSIFICATION", "classifier"),
    "sequence-classification": Task(
        "SequenceClassification", "SequenceClassification", "SEQUENCE_CLASSIFICATION", "score", "SEQ_CLS"
    ),
    "masked-lm": Task("MaskedLM", "MaskedLM", "MASKED_LM", "cls.predictions.decoder"),
}
REQUIRED = ("hidden_size", "num_layers", "num_heads", "vocab_size", "intermediate_size")


@dataclass(frozen=True)
class Family:
    """One `model_type`. One without a layout is not written down, and transformers is asked about it."""

    classes: Mapping[str, str]  # for each head that can be trained, the usual one first
    heads: Mapping[str, str] = field(default_factory=dict)  # module names of heads that have not the usual one
    layout: "Callable[[ShapeData, Mapping], Layout | None] | None" = None  # of a shape; None for an unknown variant
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of `Shape` fields
    required: tuple[str, ...] = REQUIRED  # sizes that a configuration must say
    mlp: str | None = "intermediate_size"  # how a configuration calls the feed-forward width; None: by any known name
    tied: bool | str = False  # default of `tie_word_embeddings`; "always": a configuration cannot change it
    norm: str = "layernorm"  # or "rmsnorm"
    rotary: float = 0.0  # default share of a head that is rotated; 0 for learned or relative positions
    relative_positions: bool = False  # of any number, whatever the configuration says
    whole_heads: bool = False  # the hidden size must be a multiple of the heads even where `head_dim` is given
    multi_query: bool = False  # one head of keys unless the configuration says otherwise, in Falcon's way
    window: bool = True  # `sliding_window` counts unless `use_sliding_window` is false; else where it is true
    embedding_dropout: bool = False  # `hidden_dropout` follows the embedding too
    sdpa: bool = True  # transformers has it (`Gemma2PreTrainedModel._supports_sdpa` is False)
    lora: tuple[str, ...] = ("q_proj", "v_proj")  # PEFT's default targets
    divisible: bool = False  # among tensor and pipeline ranks: matrices are `nn.Linear`, transformers has a `tp_plan`
    whole_embedding: bool = False  # which that plan leaves out

    @property
    def tasks(self) -> tuple[str, ...]:
        """The heads that can be trained, the usual one first."""
        return tuple(self.classes)

    def head(self, task: str) -> str:
        """The module name of the output head."""
        return self.heads.get(task, TASKS[task].head)


ATTENTION = frozenset(("q", "k", "v", "qkv", "out"))
MLP = frozenset(("up", "gate", "down"))
SEPARATE = "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.o_proj"
GATED = "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj"
TWO_NORMS = "norm1=input_layernorm norm2=post_attention_layernorm"
ONE_BY_FOUR = "up=mlp.dense_h_to_4h down=mlp.dense_4h_to_h"


def _one_stack(s: "ShapeData", before: str, prefix: str, parts: str, after: str, biased=frozenset(), **how) -> Layout:
    """The usual model: embeddings, equal layers, a norm and a head."""
    return Layout((before, Stack(prefix, s.num_layers, _parts(parts)), after), biased, **how)


def _parts(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.split())


def _head(s: "ShapeData", bias: str = "") -> str:
    """The decoder families' output head: a classifier's `score`, or `lm_head` unless the embedding serves as it."""
    if "classification" in s.task:
        return "score linear L w"
    if s.tied:
        return "lm_head.bias bias V" if bias else ""
    return f"lm_head linear{bias} V w"


def _llama(s, c, parts=f"{SEPARATE} {GATED} {TWO_NORMS}", biased="", mlp_bias=False, **how) -> Layout:
    """Llama and its descendants, which differ in biases, extra norms and the feed-forward part."""
    biases = frozenset(biased.split()) or (ATTENTION if c.get("attention_bias") else frozenset())
    biases |= MLP if mlp_bias and c.get("mlp_bias") else frozenset()
    before, after = "model.embed_tokens embedding V h", f"model.norm norm h; {_head(s)}"
    return _one_stack(s, before, "model.layers", parts, after, biases, **how)


def _gpt2(s, c) -> Layout | None:
    if c.get("add_cross_attention"):
        return None
    parts = "norm1=ln_1 qkv=attn.c_attn out=attn.c_proj norm2=ln_2 up=mlp.c_fc down=mlp.c_proj"
    before = "transformer.wte embedding V h; transformer.wpe embedding P h"
    after = f"transformer.ln_f norm h; {_head(s)}"
    how = dict(linear="conv1d", fp32_softmax=False, shared_positions=True)
    return _one_stack(s, before, "transformer.h", parts, after, ATTENTION | MLP, **how)


def _gpt_neox(s, c) -> Layout:
    parts = f"{TWO_NORMS} qkv=attention.query_key_value out=attention.dense {ONE_BY_FOUR}"
    biased = MLP | (ATTENTION if c.get("attention_bias", True) else frozenset())
    before, after = "gpt_neox.embed_in embedding V h", f"gpt_neox.final_layer_norm norm h; {_head(s)}"
    how = dict(parallel=c.get("use_parallel_residual", True), joined_rotary=True)
    return _one_stack(s, before, "gpt_neox.layers", parts, after, biased, **how)


def _bert(s, c) -> Layout | None:
    classifies = s.task == "sequence-classification"
    if c.get("add_cross_attention") or c.get("is_decoder") or not (classifies or s.tied):
        return None
    before = (
        "bert.embeddings.word_embeddings embedding V h; bert.embeddings.position_embeddings embedding P h; "
        "bert.embeddings.token_type_embeddings embedding T h; bert.embeddings.LayerNorm norm h"
    )
    parts = (
        "q=attention.self.query k=attention.self.key v=attention.self.value out=attention.output.dense "
        "norm1=attention.output.LayerNorm up=intermediate.dense down=output.dense norm2=output.LayerNorm"
    )
    after = "bert.pooler.dense linear+ h h; classifier linear+ L h"
    if not classifies:
        after = "cls.predictions.bias bias V; cls.predictions.transform.dense linear+ h h"
        after += "; cls.predictions.transform.LayerNorm norm h"
    buffers = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
    how = dict(causal=False, post_norm=True, fp32_softmax=False, shared_positions=True, held_feed_forward=True)
    return _one_stack(s, before, "bert.encoder.layer", parts, after, ATTENTION | MLP, buffers=buffers, **how)


def _opt(s, c) -> Layout | None:
    if not (c.get("enable_bias", True) and c.get("layer_norm_elementwise_affine", True)):
        return None
    # two rows more than positions: OPT counts from 2, as the code it was converted from does
    before = "model.decoder.embed_tokens embedding V w; model.decoder.embed_positions embedding P+2 h"
    if (c.get("word_embed_proj_dim") or s.hidden_size) != s.hidden_size:
        before += "; model.decoder.project_out linear w h; model.decoder.project_in linear h w"
    first = c.get("do_layer_norm_before", True)
    if first and not c.get("_remove_final_layer_norm"):
        before += "; model.decoder.final_layer_norm norm h"
    parts = (
        "k=self_attn.k_proj v=self_attn.v_proj q=self_attn.q_proj out=self_attn.out_proj "
        "norm1=self_attn_layer_norm up=fc1 down=fc2 norm2=final_layer_norm"
    )
    how = dict(post_norm=not first, scaled_queries=True)
    return _one_stack(s, before, "model.decoder.layers", parts, _head(s), ATTENTION | MLP, **how)


def _phi(s, c) -> Layout | None:
    if c.get("qk_layernorm"):
        return None
    parts = f"{SEPARATE.replace('o_proj', 'dense')} up=mlp.fc1 down=mlp.fc2 norm1=input_layernorm"
    before, after = "model.embed_tokens embedding V h", f"model.final_layernorm norm h; {_head(s, '+')}"
    how = dict(parallel=True, joined_rotary=True)
    return _one_stack(s, before, "model.layers", parts, after, ATTENTION | MLP, **how)


def _falcon(s, c) -> Layout:
    new, norms = c.get("new_decoder_architecture", False), "norm1=input_layernorm"
    if not c.get("parallel_attn", True):
        norms = "norm2=post_attention_layernorm norm1=input_layernorm"
    elif c.get("num_ln_in_parallel_attn", 2 if new else 1) == 2:
        norms = "norm1=ln_attn norm2=ln_mlp"
    parts = f"qkv=self_attention.query_key_value out=self_attention.dense {ONE_BY_FOUR} {norms}"
    biased = ATTENTION | MLP if c.get("bias", False) else frozenset()
    before, after = "transformer.word_embeddings embedding V h", f"transformer.ln_f norm h; {_head(s)}"
    how = dict(parallel=new or c.get("parallel_attn", True), repeated_keys=new, quantizable=False)
    how |= dict(fp32_softmax=False, grouped_keys=False, scores_in_place=True)
    return _one_stack(s, before, "transformer.h", parts, after, biased, **how)


def _t5(s, c) -> Layout:
    def attention(prefix: str, module: str) -> str:
        norm = f"{prefix or 'norm1'}{'norm' if prefix else ''}={module.rpartition('.')[0]}.layer_norm"
        position = "" if prefix else f"position={module}.relative_attention_bias "
        return " ".join(f"{prefix}{role}={module}.{role[0]}" for role in ("q", "k", "v", "out")) + f" {position}{norm}"

    def mlp(sub: str) -> str:
        up = f"gate={sub}.DenseReluDense.wi_0 up={sub}.DenseReluDense.wi_1"
        up = up if (c.get("feed_forward_proj") or "").startswith("gated") else f"up={sub}.DenseReluDense.wi"
        return f"{up} down={sub}.DenseReluDense.wo norm2={sub}.layer_norm"

    own, cross = attention("", "layer.0.SelfAttention"), attention("cross_", "layer.1.EncDecAttention")
    encoder = Stack("encoder.block", s.num_layers, _parts(f"{own} {mlp('layer.1')}"))
    decoder = Stack("decoder.block", s.num_decoder_layers, _parts(f"{own} {cross} {mlp('layer.2')}"))
    norms = [f"{side}.final_layer_norm norm h" for side in ("encoder", "decoder")]
    items = ("shared embedding V h", encoder, norms[0], decoder, norms[1])
    return Layout(items, rms_norm="t5", fp32_softmax=False, fp32_modules=("wo",))


def _vit(s, c) -> Layout:
    before = (
        "vit.embeddings.cls_token other 1 1 h; vit.embeddings.position_embeddings other 1 I h; "
        "vit.embeddings.patch_embeddings.projection.weight conv h C p0 p1; "
        "vit.embeddings.patch_embeddings.projection.bias bias h"
    )
    parts = SEPARATE.replace("self_attn", "attention")
    parts += " norm1=layernorm_before norm2=layernorm_after up=mlp.fc1 down=mlp.fc2"
    biased = MLP | {"out"} | (ATTENTION if c.get("qkv_bias", True) else frozenset())
    after = "vit.layernorm norm h; classifier linear+ L h"
    return _one_stack(s, before, "vit.layers", parts, after, biased, causal=False)


LAYOUTS: dict[str, Callable] = {
    **{"bert": _bert, "falcon": _falcon, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama},
    **{"opt": _opt, "phi": _phi, "t5": _t5, "vit": _vit},
}


def _family(layout: str, layout_options: Mapping | None = None, **record) -> Family:
    """The family of a record; lists become tuples."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    return Family(layout=partial(LAYOUTS[layout], **(layout_options or {})), **values)


_RECORDS = json.loads(data_path("families.json").read_text(encoding="utf-8"))
FAMILIES = {name: _family(**record) for name, record in _RECORDS.items()}
