"""Model families: what the package knows of one `model_type`.

It is in the family's record in `data/families.json` (`data/families.schema.json` says each of its
words) and its layout here. A model that differs from
Llama in names, norms or biases is a record alone; another needs a layout too. Sources, of
transformers 5.23: the class defaults of `configuration_*.py`, the `__init__` and `forward` of
`modeling_*.py`; of PEFT 0.21: `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..base.data import data_path
from .model_sizes import Sizes


class Task(NamedTuple):
    """A head that can be trained, and what libraries call it."""

    auto_class: str  # of transformers, which builds any family with it
    table: str  # in `transformers.models.auto.modeling_auto`
    head: str  # usual name of the output module
    peft: str | None = None  # what PEFT calls the task


TASKS = {
    "causal-lm": Task("AutoModelForCausalLM", "CAUSAL_LM", "lm_head", "CAUSAL_LM"),
    "seq2seq-lm": Task(
        "AutoModelForSeq2SeqLM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "lm_head",
        "SEQ_2_SEQ_LM",
    ),
    "speech-seq2seq": Task("AutoModelForSpeechSeq2Seq", "SPEECH_SEQ_2_SEQ", "proj_out"),
    "image-classification": Task(
        "AutoModelForImageClassification",
        "IMAGE_CLASSIFICATION",
        "classifier",
    ),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification",
        "SEQUENCE_CLASSIFICATION",
        "score",
        "SEQ_CLS",
    ),
    "image-text": Task("AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT", "lm_head", "CAUSAL_LM"),
    "masked-lm": Task("AutoModelForMaskedLM", "MASKED_LM", "cls.predictions.decoder"),
}
REQUIRED = ("hidden_size", "num_layers", "num_heads", "vocab_size", "intermediate_size")


@dataclass(frozen=True)
class Stack:
    """Equal layers: `count` of them under `prefix`.

    `parts` leads from a role to a module, in the order of definition. A role may come with sizes of
    its own ("experts_down:experts.feed_forward.hidden"), which are then in `sizes`.
    """

    prefix: str
    count: int
    parts: dict[str, str]
    sizes: dict[str, str] = field(default_factory=dict)
    first: int = 0  # number of the first layer

    @classmethod
    def of(
        cls,
        prefix: str,
        count: int,
        text: str,
        first: int = 0,
    ) -> "Stack":
        """Read "role=module role:sizes=module …"."""
        parts = {}
        sizes = {}
        for part in text.split():
            said, module = part.split("=")
            role, has_sizes, own = said.partition(":")
            parts[role] = module
            if has_sizes:
                sizes[role] = own
        return cls(prefix, count, parts, sizes, first)


@dataclass(frozen=True)
class Layout:
    """What a model is made of, in order, and how a layer differs from Llama's.

    `items` are "module kind size …; …" outside the layers, and stacks of layers. Sizes are the
    words of `weights._sizes_by_word`.
    """

    items: tuple[str | Stack, ...]
    biased: frozenset[str] = frozenset()  # roles of linear layers with a bias
    linear: str = "linear"  # their kind in the layers; "conv1d" is stored transposed
    # those of one int64 a position; rotary frequencies go without saying
    buffers: tuple[str, ...] = ()
    causal: bool = True  # a token sees earlier ones only, and keys and values are cached
    parallel: bool = False  # attention and feed-forward part read the same input
    # norms come after the residual sums; there is none after the last layer
    post_norm: bool = False
    rms_norm: str = "llama"  # whose: "gemma" is times 1 + weight, in fp32
    # written-out attention asks for an fp32 softmax, casts it back; None: casts only
    fp32_softmax: bool | None = True
    grouped_keys: bool = True  # shared keys go to the kernel as they are (`enable_gqa`)
    # written-out scores are scaled in place; one head of keys is broadcast
    scores_in_place: bool = False
    scaled_queries: bool = False  # before the kernel
    joined_rotary: bool = False  # turned and other channels are joined even where all are turned
    # the embedding is multiplied by a number, which True keeps in a buffer
    scaled_embedding: bool | float = False
    # of attention, layer by layer, where some look back `sliding_window` tokens only
    kinds: tuple[str, ...] = ()
    kinds_tables: bool = False  # each kind has rotary frequencies of its own
    halved_rotary: bool = False  # cos and sin are half as wide as what they turn
    # scores are computed in fp32, with a correction for each expert in a buffer
    sigmoid_router: bool = False
    shared_positions: bool = False  # one row of positions serves the whole batch
    held_feed_forward: bool = False  # the wide feed-forward tensor lives to the end of the layer
    # linear layers are `nn.Linear` or `Conv1D`, which bitsandbytes replaces
    quantizable: bool = True

    @property
    def stacks(self) -> list[Stack]:
        """The stacks alone: one, or those of dense and of sparse layers."""
        return [item for item in self.items if isinstance(item, Stack)]

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """(name, kind) of the modules outside the layers."""
        modules = []
        for item in self.items:
            if isinstance(item, Stack):
                continue
            for row in item.split(";"):
                words = row.split()
                if words:
                    modules.append((words[0], words[1]))
        return modules


@dataclass(frozen=True)
class Family:
    """What is written down of one `model_type`."""

    classes: Mapping[str, str]  # for each head that can be trained, the usual one first
    # module names of heads that have not the usual one
    heads: Mapping[str, str] = field(default_factory=dict)
    # what differs from LLAMA; None: transformers is asked for layers
    layout_options: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of `Shape` fields
    required: tuple[str, ...] = REQUIRED  # sizes that a configuration must say
    # how a configuration calls sizes, other than usual
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    tied: bool = False  # default of `tie_word_embeddings`
    norm: str = "layernorm"  # or "rmsnorm"
    # default share of a head that is rotated; 0 for learned or relative positions
    rotary: float = 0.0
    # one head of keys unless the configuration says otherwise, in Falcon's way
    multi_query: bool = False
    # `sliding_window` always counts; else only where `use_sliding_window` is true
    window: bool = True
    sdpa: bool = True  # transformers has it (`Gemma2PreTrainedModel._supports_sdpa` is False)
    lora: tuple[str, ...] = ("q_proj", "v_proj")  # PEFT's default targets
    # among tensor and pipeline ranks: matrices are `nn.Linear`, transformers has a `tp_plan`
    divisible: bool = False
    whole_embedding: bool = False  # which that plan leaves out
    # `Shape` fields of dropout that is a module, which TRL takes out (`disable_dropout_in_model`)
    dropout_modules: tuple[str, ...] = ()
    # it gives itself a mask of ones, so it sees joined samples as one
    own_mask: bool = False
    # Parts of weights' names to what they sort as in the published file, in whose order loading
    # takes them (`transformers.conversion_mapping`): Mixtral's w1 and w3 are before w2.
    stored_as: Mapping[str, str] = field(default_factory=dict)
    # that file has experts as the model has them; others have each expert's matrices apart
    stored_fused: bool = False


SEPARATE = "q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.o_proj"
GATED = "gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj"
# Llama's layout; a record's "layout_options" say what differs, and fields of `Layout`.
LLAMA: dict[str, Any] = {
    "before": "model.embed_tokens embedding vocabulary hidden",
    "prefix": "model.layers",
    "parts": f"{SEPARATE} {GATED} norm1=input_layernorm norm2=post_attention_layernorm",
    "after": "model.norm norm hidden; {head}",
    "head": "linear",  # kind of the language model's head
    "biased": "",  # roles of linear layers with a bias
    # a key of the configuration: its default, such roles
    "biased_if": {"attention_bias": (False, "q k v qkv out")},
    # a field of `Layout`: the key of the configuration that says it, and its default
    "set_by": {},
    # a key of the configuration: parts where it is true, and where it is not
    "parts_if": {},
    "says": (),  # keys whose defaults are not written down
    # parts of layers with experts, and the key that counts the dense ones before them
    "sparse": None,
    # each so many layers one that sees all tokens, unless the configuration says "layer_types"
    "full_every": 0,
    # keys of the configuration, with the value (or size) that leaves the architecture as it is
    "unknown": {},
}


def layout_of(sizes: Sizes, config: Mapping) -> Layout | None:
    """Return the layout of a model with `config`: embeddings, equal layers, a norm and a head.

    It is None for a family, or a variant of one, that is not written down.
    """
    family = FAMILIES.get(sizes.family)
    if family is None or family.layout_options is None:
        return None
    options = dict(family.layout_options)
    said = {name: options.pop(name, usual) for name, usual in LLAMA.items()}
    if not _is_known(sizes, config, said):
        return None
    for name, (key, default) in said["set_by"].items():
        options[name] = config.get(key, default)
    if said["full_every"]:
        options["kinds"] = _attention_kinds(sizes, config, said["full_every"])
        if len(options["kinds"]) != sizes.num_layers:
            return None
    after = said["after"]
    if not isinstance(after, str):
        after = after[sizes.task]
    items = (
        said["before"],
        *_stacks(sizes, config, said),
        after.format(head=_head(sizes, said["head"])),
    )
    return Layout(items, _biased(config, said), **options)


def _is_known(sizes: Sizes, config: Mapping, said: Mapping[str, Any]) -> bool:
    """Tell whether a configuration leaves the architecture as it is written down."""
    for key, usual in said["unknown"].items():
        if isinstance(usual, str):  # a size's name
            usual = getattr(sizes, usual)
        if config.get(key) not in (None, usual):
            return False
    return config.keys() >= set(said["says"])


def _biased(config: Mapping, said: Mapping[str, Any]) -> frozenset[str]:
    """Return the roles of linear layers with a bias."""
    roles = said["biased"].split()
    for key, (default, more) in said["biased_if"].items():
        if config.get(key, default):
            roles += more.split()
    return frozenset(roles)


def _attention_kinds(sizes: Sizes, config: Mapping, every: int) -> tuple[str, ...]:
    """Return the kind of each layer's attention."""
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    every = config.get("sliding_window_pattern") or every
    kinds = []
    for number in range(1, sizes.num_layers + 1):
        kinds.append("full_attention" if number % every == 0 else "sliding_attention")
    return tuple(kinds)


def _stacks(sizes: Sizes, config: Mapping, said: Mapping[str, Any]) -> list[Stack]:
    """Return the stacks of layers: the dense ones, and those with experts."""
    prefix = said["prefix"]
    chosen = []
    for key, (where_true, otherwise) in said["parts_if"].items():
        chosen.append(where_true if config.get(key) else otherwise)
    more = " ".join(chosen)
    dense = sizes.num_layers
    sparse_parts = ""
    if said["sparse"]:
        sparse_parts, key = said["sparse"]
        if key:
            dense = min(config.get(key) or 0, sizes.num_layers)
    stacks = [
        Stack.of(prefix, dense, said["parts"].format(more=more)),
        Stack.of(prefix, sizes.num_layers - dense, sparse_parts.format(more=more), dense),
    ]
    return [stack for stack in stacks if stack.count]


def _head(sizes: Sizes, kind: str) -> str:
    """Return the decoder families' output head.

    That is a classifier's `score`, or `lm_head` unless the embedding serves as it.
    """
    if "classification" in sizes.task:
        return "score linear labels hidden"
    if sizes.tied:
        return "lm_head.bias bias vocabulary" if kind.endswith("+") else ""
    return f"lm_head {kind} vocabulary hidden"


_RECORDS = json.loads(data_path("families.json").read_text(encoding="utf-8"))
FAMILIES = {name: Family(**record) for name, record in _RECORDS.items()}
_UNKNOWN = Family(classes={})


def family_of(sizes: Sizes) -> Family:
    """Return the record of a model's family, an empty one where it has none."""
    return FAMILIES.get(sizes.family, _UNKNOWN)
