"""Model families: all that the package knows of one `model_type`, in one record each.

A dense decoder is added here alone. Sources, of transformers 5.23: the class defaults of `configuration_*.py` and the
`__init__` and `forward` of `modeling_*.py`; of PEFT 0.21: `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
LEARNED = (*REQUIRED, "max_positions")  # positions are looked up in a table
NO_MLP = REQUIRED[:-1]  # its width may be left out, and is then four times the hidden size


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        classes: the model class for each head that can be trained, the usual one first.
        layout: what a shape of this family is made of, None for a variant that is not written down; None for a family
            that is not, which transformers is asked about.
        tied: the default of `tie_word_embeddings`; "always": a configuration cannot change it.
        norm: "layernorm" or "rmsnorm".
        rotary: the default share of a head that is rotated; 0 for learned or relative positions.
        gated: the feed-forward part has a gate (T5's configuration decides).
        whole_heads: the hidden size must be a multiple of the heads even where `head_dim` is given.
        embedding_dropout: `hidden_dropout` follows the embedding too.
        sdpa: transformers has it (`Gemma2PreTrainedModel._supports_sdpa` is False).
        mlp: the one name under which the configuration says the feed-forward width; None takes any known name.
        required: sizes that a configuration must say.
        defaults: of `Shape` fields, by their names.
        sizes: what else follows for sizes from the configuration and the sizes that it says.
        lora: PEFT's default targets.
        divisible: tensor and pipeline parallel can cut it (matrices are `nn.Linear`, transformers has a `tp_plan`).
        whole_embedding: that plan leaves the embedding out.
    """

    classes: Mapping[str, str]
    layout: "Callable[[ShapeData, Mapping], Layout | None] | None" = None
    tied: bool | str = False
    norm: str = "layernorm"
    rotary: float = 0.0
    gated: bool = False
    whole_heads: bool = False
    embedding_dropout: bool = False
    sdpa: bool = True
    mlp: str | None = "intermediate_size"
    required: tuple[str, ...] = REQUIRED
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sizes: Callable[[Mapping, Mapping], Mapping] = lambda config, sizes: {}
    lora: tuple[str, ...] = ("q_proj", "v_proj")
    divisible: bool = False
    whole_embedding: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        """The heads that can be trained, the usual one first."""
        return tuple(self.classes)

    def head(self, task: str) -> str:
        """The module name of the output head."""
        return "classifier" if self.classes[task] == "BertForSequenceClassification" else TASKS[task].head


# --- layouts ----------------------------------------------------------------------------------------------------------

ATTENTION = frozenset(("q", "k", "v", "qkv", "out"))
MLP = frozenset(("up", "gate", "down"))
SEPARATE = "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.o_proj"
GATED = "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj"
EXPERTS = "router=mlp.gate.weight experts_up=mlp.experts.gate_up_proj experts_down=mlp.experts.down_proj"
TWO_NORMS = "norm1=input_layernorm norm2=post_attention_layernorm"
FOUR_NORMS = (
    "norm1=input_layernorm after1=post_attention_layernorm "
    "norm2=pre_feedforward_layernorm after2=post_feedforward_layernorm"
)
ONE_BY_FOUR = "up=mlp.dense_h_to_4h down=mlp.dense_4h_to_h"


def _one_stack(
    s: "ShapeData", before: str, prefix: str, parts: str, after: str, biased=frozenset(), head: str | None = None, **how
) -> Layout:
    """The usual model: embeddings, equal layers, a norm and a head."""
    after = f"{after}; {_head(s) if head is None else head}"
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


def _llama(s, c, parts=f"{SEPARATE} {GATED} {TWO_NORMS}", biased=frozenset(), mlp_bias=False, **how) -> Layout:
    """Llama and its descendants, which differ in biases, extra norms and the feed-forward part."""
    biased = biased or (ATTENTION if c.get("attention_bias") else frozenset())
    biased |= MLP if mlp_bias and c.get("mlp_bias") else frozenset()
    before, after = "model.embed_tokens embedding V h", "model.norm norm h"
    return _one_stack(s, before, "model.layers", parts, after, biased, **how)


def _gpt2(s, c) -> Layout | None:
    if c.get("add_cross_attention"):
        return None
    parts = "norm1=ln_1 qkv=attn.c_attn out=attn.c_proj norm2=ln_2 up=mlp.c_fc down=mlp.c_proj"
    before, after = "transformer.wte embedding V h; transformer.wpe embedding P h", "transformer.ln_f norm h"
    how = dict(linear="conv1d", fp32_softmax=False, shared_positions=True)
    return _one_stack(s, before, "transformer.h", parts, after, ATTENTION | MLP, **how)


def _gpt_neox(s, c) -> Layout:
    parts = f"{TWO_NORMS} qkv=attention.query_key_value out=attention.dense {ONE_BY_FOUR}"
    biased = MLP | (ATTENTION if c.get("attention_bias", True) else frozenset())
    before, after = "gpt_neox.embed_in embedding V h", "gpt_neox.final_layer_norm norm h"
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
    return _one_stack(s, before, "bert.encoder.layer", parts, after, ATTENTION | MLP, "", buffers=buffers, **how)


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
    return _one_stack(s, before, "model.decoder.layers", parts, "", ATTENTION | MLP, **how)


def _phi(s, c) -> Layout | None:
    if c.get("qk_layernorm"):
        return None
    parts = f"{SEPARATE.replace('o_proj', 'dense')} up=mlp.fc1 down=mlp.fc2 norm1=input_layernorm"
    before, after = "model.embed_tokens embedding V h", "model.final_layernorm norm h"
    how = dict(parallel=True, joined_rotary=True)
    return _one_stack(s, before, "model.layers", parts, after, ATTENTION | MLP, _head(s, "+"), **how)


def _falcon(s, c) -> Layout:
    new, norms = c.get("new_decoder_architecture", False), "norm1=input_layernorm"
    if not c.get("parallel_attn", True):
        norms = "norm2=post_attention_layernorm norm1=input_layernorm"
    elif c.get("num_ln_in_parallel_attn", 2 if new else 1) == 2:
        norms = "norm1=ln_attn norm2=ln_mlp"
    parts = f"qkv=self_attention.query_key_value out=self_attention.dense {ONE_BY_FOUR} {norms}"
    biased = ATTENTION | MLP if c.get("bias", False) else frozenset()
    before, after = "transformer.word_embeddings embedding V h", "transformer.ln_f norm h"
    how = dict(parallel=new or c.get("parallel_attn", True), repeated_keys=new, quantizable=False)
    how |= dict(fp32_softmax=False, grouped_keys=False, scores_in_place=True)
    return _one_stack(s, before, "transformer.h", parts, after, biased, **how)


def _falcon_sizes(config, sizes) -> dict:
    if config.get("new_decoder_architecture"):
        return {}
    return {"num_kv_heads": 1 if config.get("multi_query", True) else sizes["num_heads"]}


def _t5(s, c) -> Layout:
    def attention(prefix: str, module: str) -> str:
        norm = f"{prefix or 'norm1'}{'norm' if prefix else ''}={module.rpartition('.')[0]}.layer_norm"
        position = "" if prefix else f"position={module}.relative_attention_bias "
        return " ".join(f"{prefix}{role}={module}.{role[0]}" for role in ("q", "k", "v", "out")) + f" {position}{norm}"

    def mlp(sub: str) -> str:
        up = f"gate={sub}.DenseReluDense.wi_0 up={sub}.DenseReluDense.wi_1"
        up = up if s.gated_mlp else f"up={sub}.DenseReluDense.wi"
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
    head = "classifier linear+ L h"
    return _one_stack(s, before, "vit.layers", parts, "vit.layernorm norm h", biased, head, causal=False)


# --- records ----------------------------------------------------------------------------------------------------------

DECODER = ("causal-lm", "sequence-classification")


def _family(prefix: str, layout: Callable, activation: str, tasks=DECODER, dropout: float = 0.0, **more) -> Family:
    """The record of the classes that begin with `prefix`; what is no field of `Family` is a default of `Shape`."""
    classes = {task: f"{prefix}For{TASKS[task].own}" for task in tasks}
    if prefix == "GPT2":
        classes["causal-lm"] = "GPT2LMHeadModel"
    options = {name: more.pop(name) for name in Family.__dataclass_fields__ if name in more}
    dropouts = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), dropout)
    return Family(classes, layout, **options, defaults={"activation": activation, **dropouts, **more})


_decoder = partial(_family, activation="silu", norm="rmsnorm", rotary=1.0, gated=True)
_gemma = partial(_decoder, activation="gelu_pytorch_tanh", tied=True, head_dim=256)
_qwen = partial(
    _decoder,
    num_kv_heads=32,
    divisible=True,
    sizes=lambda config, sizes: {} if config.get("use_sliding_window") else {"sliding_window": None},
)
_GEMMA = dict(rms_norm="gemma", scaled_embedding=True)
FAMILIES = {
    "bert": _family(
        *("Bert", _bert, "gelu", ("sequence-classification", "masked-lm"), 0.1),
        **dict(tied=True, embedding_dropout=True, required=LEARNED, lora=("query", "value")),
    ),
    "falcon": _family(
        *("Falcon", _falcon, "gelu"),
        **dict(tied=True, rotary=1.0, mlp="ffn_hidden_size", required=NO_MLP, sizes=_falcon_sizes),
        **dict(max_positions=2048, lora=("query_key_value",)),
    ),
    "gemma": _gemma("Gemma", partial(_llama, **_GEMMA), num_kv_heads=16),
    "gemma2": _gemma(
        *("Gemma2", partial(_llama, parts=f"{SEPARATE} {GATED} {FOUR_NORMS}", **_GEMMA)),
        **dict(num_kv_heads=4, sliding_window=4096, whole_heads=True, sdpa=False, divisible=True),
    ),
    "gpt2": _family(
        *("GPT2", _gpt2, "gelu_new", DECODER, 0.1),
        **dict(tied=True, whole_heads=True, mlp="n_inner", required=(*NO_MLP, "max_positions"), lora=("c_attn",)),
    ),
    "gpt_neox": _family(
        *("GPTNeoX", _gpt_neox, "gelu"),
        **dict(rotary=0.25, whole_heads=True, embedding_dropout=True, lora=("query_key_value",)),
        **dict(divisible=True, whole_embedding=True),
    ),
    "llama": _decoder("Llama", partial(_llama, mlp_bias=True), whole_heads=True, divisible=True),
    "mistral": _decoder("Mistral", _llama, num_kv_heads=8, sliding_window=4096, divisible=True),
    "mixtral": _decoder(
        *("Mixtral", partial(_llama, parts=f"{SEPARATE} {EXPERTS} {TWO_NORMS}")),
        **dict(num_kv_heads=8, num_experts=8, experts_per_token=2),
    ),
    "opt": _family(
        *("OPT", _opt, "relu"),
        **dict(tied=True, whole_heads=True, mlp="ffn_dim", required=LEARNED, hidden_dropout=0.1),
    ),
    "phi": _family("Phi", _phi, "gelu_new", rotary=0.5, divisible=True, lora=("q_proj", "v_proj", "fc1", "fc2")),
    "qwen2": _qwen("Qwen2", partial(_llama, biased=ATTENTION - {"out"})),
    "qwen3": _qwen(
        *(
            "Qwen3",
            partial(_llama, parts=f"{SEPARATE} q_norm=self_attn.q_norm k_norm=self_attn.k_norm {GATED} {TWO_NORMS}"),
        ),
        **dict(head_dim=128),
    ),
    "t5": _family(
        *("T5", _t5, "relu", ("seq2seq-lm",), 0.1),
        **dict(tied="always", norm="rmsnorm", mlp="d_ff", head_dim=64, embedding_dropout=True, lora=("q", "v")),
        sizes=lambda _, s: {"max_positions": None, "num_decoder_layers": s["num_decoder_layers"] or s["num_layers"]},
    ),
    "vit": _family(
        *("ViT", _vit, "gelu", ("image-classification",)),
        **dict(whole_heads=True, embedding_dropout=True, required=(*NO_MLP[:3], REQUIRED[-1]), lora=()),
    ),
}
