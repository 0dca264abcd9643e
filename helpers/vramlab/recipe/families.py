"""Model families: what the package knows of one `model_type`, from its record in `data/families.json` and its layout here.

A model that differs from Llama in names, norms or biases is a record alone; another needs a layout too. Sources,
of transformers 5.23: the class defaults of `configuration_*.py`, the `__init__` and `forward` of `modeling_*.py`; of PEFT
0.21: `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..report.data import data_path


class Task(NamedTuple):
    """A head."""

    auto_class: str  # of transformers, which builds any family with it
    table: str  # in `transformers.models.auto.modeling_auto`
    head: str  # usual name of the output module
    peft: str | None = None  # what PEFT calls the task


TASKS = {
    "causal-lm": Task("AutoModelForCausalLM", "CAUSAL_LM", "lm_head", "CAUSAL_LM"),
    "seq2seq-lm": Task("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "lm_head", "SEQ_2_SEQ_LM"),
    "speech-seq2seq": Task("AutoModelForSpeechSeq2Seq", "SPEECH_SEQ_2_SEQ", "proj_out"),
    "image-classification": Task("AutoModelForImageClassification", "IMAGE_CLASSIFICATION", "classifier"),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", "score", "SEQ_CLS"
    ),
    "masked-lm": Task("AutoModelForMaskedLM", "MASKED_LM", "cls.predictions.decoder"),
}
REQUIRED = ("hidden_size", "num_layers", "num_heads", "vocab_size", "intermediate_size")


@dataclass(frozen=True)
class Stack:
    """Equal layers: `count` of them under `prefix`, with `parts`, role to module, in the order of definition.

    A role may come with sizes of its own ("experts_up:E.h.2m"), which are then in `sizes`. `first`: number of the first.
    """

    prefix: str
    count: int
    parts: dict[str, str]
    sizes: dict[str, str] = field(default_factory=dict)
    first: int = 0

    @classmethod
    def of(cls, prefix: str, count: int, text: str, first: int = 0) -> "Stack":
        """Read "role=module role:sizes=module …"."""
        said = [part.split("=") for part in text.split()]
        sizes = dict(role.split(":") for role, _ in said if ":" in role)
        return cls(prefix, count, {role.partition(":")[0]: module for role, module in said}, sizes, first)


@dataclass(frozen=True)
class Layout:
    """What a model is made of, in order: "module kind size …; …" outside the layers, and stacks of layers.

    Sizes are the letters of `shapes._letter_sizes`. The other fields say how a layer differs from Llama's.
    """

    items: tuple[str | Stack, ...]
    biased: frozenset[str] = frozenset()  # roles of linear layers with a bias
    linear: str = "linear"  # their kind in the layers; "conv1d" is stored transposed
    buffers: tuple[str, ...] = ()  # those of one int64 a position; rotary frequencies go without saying
    causal: bool = True  # a token sees earlier ones only, and keys and values are cached
    parallel: bool = False  # attention and feed-forward part read the same input
    post_norm: bool = False  # norms come after the residual sums; there is none after the last layer
    rms_norm: str = "llama"  # whose: "gemma" is times 1 + weight, in fp32
    fp32_softmax: bool | None = True  # written-out attention asks for an fp32 softmax, casts it back; None: casts only
    grouped_keys: bool = True  # shared keys go to the kernel as they are (`enable_gqa`)
    scores_in_place: bool = False  # written-out scores are scaled in place; one head of keys is broadcast
    scaled_queries: bool = False  # before the kernel
    joined_rotary: bool = False  # turned and other channels are joined even where all are turned
    scaled_embedding: bool | float = False  # the embedding is multiplied by a number, which True keeps in a buffer
    kinds: tuple[str, ...] = ()  # of attention, layer by layer, where some look back `sliding_window` tokens only
    kinds_tables: bool = False  # each kind has rotary frequencies of its own
    halved_rotary: bool = False  # cos and sin are half as wide as what they turn
    sigmoid_router: bool = False  # scores are computed in fp32, with a correction for each expert in a buffer
    shared_positions: bool = False  # one row of positions serves the whole batch
    held_feed_forward: bool = False  # the wide feed-forward tensor lives to the end of the layer
    quantizable: bool = True  # linear layers are `nn.Linear` or `Conv1D`, which bitsandbytes replaces

    @property
    def stacks(self) -> list[Stack]:
        """The stacks alone: one, or those of dense and of sparse layers."""
        return [item for item in self.items if isinstance(item, Stack)]

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """(name, kind) of the modules outside the layers."""
        rows = [row.split() for item in self.items if isinstance(item, str) for row in item.split(";")]
        return [(row[0], row[1]) for row in rows if row]


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    classes: Mapping[str, str]  # for each head that can be trained, the usual one first
    heads: Mapping[str, str] = field(default_factory=dict)  # module names of heads that have not the usual one
    layout_options: Mapping[str, Any] | None = None  # what differs from LLAMA; None: transformers is asked for layers
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of `Shape` fields
    required: tuple[str, ...] = REQUIRED  # sizes that a configuration must say
    keys: Mapping[str, list[str]] = field(default_factory=dict)  # how a configuration calls sizes, other than usual
    tied: bool = False  # default of `tie_word_embeddings`
    norm: str = "layernorm"  # or "rmsnorm"
    rotary: float = 0.0  # default share of a head that is rotated; 0 for learned or relative positions
    multi_query: bool = False  # one head of keys unless the configuration says otherwise, in Falcon's way
    window: bool = True  # `sliding_window` always counts; else only where `use_sliding_window` is true
    sdpa: bool = True  # transformers has it (`Gemma2PreTrainedModel._supports_sdpa` is False)
    lora: tuple[str, ...] = ("q_proj", "v_proj")  # PEFT's default targets
    divisible: bool = False  # among tensor and pipeline ranks: matrices are `nn.Linear`, transformers has a `tp_plan`
    whole_embedding: bool = False  # which that plan leaves out


SEPARATE = "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.o_proj"
GATED = "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj"
# Llama's layout; a record's "layout_options" say what differs, and fields of `Layout`.
LLAMA = {
    "before": "model.embed_tokens embedding V h",
    "prefix": "model.layers",
    "parts": f"{SEPARATE} {GATED} norm1=input_layernorm norm2=post_attention_layernorm",
    "after": "model.norm norm h; {head}",
    "head": "linear",  # kind of the language model's head
    "biased": "",  # roles of linear layers with a bias
    "biased_if": {"attention_bias": (False, "q k v qkv out")},  # a key of the configuration: its default, such roles
    "set_by": {},  # a field of `Layout`: the key of the configuration that says it, and its default
    "parts_if": {},  # a key of the configuration: parts where it is true, and where it is not
    "says": (),  # keys whose defaults are not written down
    "sparse": None,  # parts of layers with experts, and the key that counts the dense ones before them
    "full_every": 0,  # each so many layers one that sees all tokens, unless the configuration says "layer_types"
    "unknown": {},  # keys of the configuration, with the value (or size) that leaves the architecture as it is
}


def layout_of(s: Any, c: Mapping) -> Layout | None:
    """Return the layout of a shape with the configuration `c`: embeddings, equal layers, a norm and a head.

    None for a family, or a variant of one, that is not written down.
    """
    family = FAMILIES.get(s.family)
    if family is None or family.layout_options is None:
        return None
    options = dict(family.layout_options)
    said = {name: options.pop(name, usual) for name, usual in LLAMA.items()}
    unknown = {key: getattr(s, usual) if isinstance(usual, str) else usual for key, usual in said["unknown"].items()}
    if any(c.get(key) not in (None, usual) for key, usual in unknown.items()) or not c.keys() >= {*said["says"]}:
        return None
    found = (roles for key, (default, roles) in said["biased_if"].items() if c.get(key, default))
    biased = frozenset(" ".join([said["biased"], *found]).split())
    options |= {field: c.get(key, default) for field, (key, default) in said["set_by"].items()}
    if said["full_every"]:
        every = c.get("sliding_window_pattern") or said["full_every"]
        usual = ("full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(s.num_layers))
        options["kinds"] = tuple(c.get("layer_types") or usual)
        if len(options["kinds"]) != s.num_layers:
            return None
    more = " ".join(parts[not c.get(key)] for key, parts in said["parts_if"].items())
    parts, key = said["sparse"] or ("", "")
    dense = min(c.get(key) or 0, s.num_layers) if key else s.num_layers
    stacks = [Stack.of(said["prefix"], dense, said["parts"].format(more=more))]
    stacks += [Stack.of(said["prefix"], s.num_layers - dense, parts.format(more=more), dense)]
    after = said["after"] if isinstance(said["after"], str) else said["after"][s.task]
    after = after.format(head=_head(s, said["head"]))
    return Layout((said["before"], *(stack for stack in stacks if stack.count), after), biased, **options)


def _head(s: Any, kind: str) -> str:
    """Return the decoder families' output head: a classifier's `score`, or `lm_head` unless the embedding serves as it."""
    if "classification" in s.task:
        return "score linear L h"
    if s.tied:
        return "lm_head.bias bias V" if kind.endswith("+") else ""
    return f"lm_head {kind} V h"


_RECORDS = json.loads(data_path("families.json").read_text(encoding="utf-8"))
FAMILIES = {name: Family(**record) for name, record in _RECORDS.items()}
