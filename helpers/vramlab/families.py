"""The architectures this package has formulas for: what a configuration leaves unsaid and which heads exist.

The values are the class defaults of transformers' `configuration_*.py`; transformers itself is asked about others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import RecipeError

CLASS_SUFFIX = {
    "causal-lm": "ForCausalLM",
    "masked-lm": "ForMaskedLM",
    "sequence-classification": "ForSequenceClassification",
    "seq2seq-lm": "ForConditionalGeneration",
    "image-classification": "ForImageClassification",
}
# `transformers.models.auto.modeling_auto`'s table for each task.
AUTO_TABLE = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}
OUTPUT_HEAD = {
    "causal-lm": "lm_head",
    "seq2seq-lm": "lm_head",
    "masked-lm": "cls.predictions.decoder",
    "sequence-classification": "score",
    "image-classification": "classifier",
}


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        classes: the model class for each head that can be trained, the usual one first.
        tied: the default of `tie_word_embeddings`; `always_tied` says that a configuration cannot change it.
        norm: "layernorm" or "rmsnorm".
        rotary: the default share of a head that is rotated; 0 for learned or relative positions.
        gated: the feed-forward part has a gate (T5's configuration decides).
        whole_heads: the hidden size must be a multiple of the heads even where `head_dim` is given.
        mlp: the one name under which the configuration says the feed-forward width; None takes any known name.
        four_times: that width may be left out, and is then four times the hidden size.
        learned: positions are looked up in a table, so their number must be said.
        defaults: of `Shape` fields, by their names.
        heads: module names of output heads, where they are not OUTPUT_HEAD's.
    """

    classes: Mapping[str, str]
    tied: bool = False
    always_tied: bool = False
    norm: str = "layernorm"
    rotary: float = 0.0
    gated: bool = False
    whole_heads: bool = False
    mlp: str | None = "intermediate_size"
    four_times: bool = False
    learned: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The heads that can be trained, the usual one first."""
        return tuple(self.classes)

    def head(self, task: str) -> str:
        """The module name of the output head."""
        return self.heads.get(task, OUTPUT_HEAD[task])


def _classes(prefix: str, *tasks: str) -> dict[str, str]:
    return {task: prefix + CLASS_SUFFIX[task] for task in tasks or ("causal-lm", "sequence-classification")}


def _llama(prefix: str, activation: str = "silu", **more) -> Family:
    defaults = {"activation": activation, **more.pop("defaults", {})}
    return Family(_classes(prefix), norm="rmsnorm", rotary=1.0, gated=True, defaults=defaults, **more)


_ONE_TENTH = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1}
_GEMMA = {"activation": "gelu_pytorch_tanh", "tied": True}
FAMILIES = {
    "bert": Family(
        _classes("Bert", "sequence-classification", "masked-lm"),
        tied=True,
        learned=True,
        defaults={"activation": "gelu", **_ONE_TENTH},
        heads={"sequence-classification": "classifier"},
    ),
    "falcon": Family(
        _classes("Falcon"),
        tied=True,
        rotary=1.0,
        mlp="ffn_hidden_size",
        four_times=True,
        defaults={"activation": "gelu", "max_positions": 2048},
    ),
    "gemma": _llama("Gemma", defaults={"head_dim": 256, "num_kv_heads": 16}, **_GEMMA),
    "gemma2": _llama(
        "Gemma2", defaults={"head_dim": 256, "num_kv_heads": 4, "sliding_window": 4096}, whole_heads=True, **_GEMMA
    ),
    "gpt2": Family(
        {"causal-lm": "GPT2LMHeadModel", "sequence-classification": "GPT2ForSequenceClassification"},
        tied=True,
        whole_heads=True,
        mlp="n_inner",
        four_times=True,
        learned=True,
        defaults={"activation": "gelu_new", **_ONE_TENTH},
    ),
    "gpt_neox": Family(_classes("GPTNeoX"), rotary=0.25, whole_heads=True, defaults={"activation": "gelu"}),
    "llama": _llama("Llama", whole_heads=True),
    "mistral": _llama("Mistral", defaults={"num_kv_heads": 8, "sliding_window": 4096}),
    "mixtral": _llama("Mixtral", defaults={"num_kv_heads": 8, "num_experts": 8, "experts_per_token": 2}),
    "opt": Family(
        _classes("OPT"),
        tied=True,
        whole_heads=True,
        mlp="ffn_dim",
        learned=True,
        defaults={"activation": "relu", "hidden_dropout": 0.1},
    ),
    "phi": Family(_classes("Phi"), rotary=0.5, defaults={"activation": "gelu_new"}),
    "qwen2": _llama("Qwen2", defaults={"num_kv_heads": 32}),
    "qwen3": _llama("Qwen3", defaults={"head_dim": 128, "num_kv_heads": 32}),
    "t5": Family(
        _classes("T5", "seq2seq-lm"),
        always_tied=True,
        norm="rmsnorm",
        mlp="d_ff",
        defaults={"activation": "relu", "head_dim": 64, **_ONE_TENTH},
    ),
    "vit": Family(_classes("ViT", "image-classification"), whole_heads=True, defaults={"activation": "gelu"}),
}


def family_of(name: str, config: dict[str, Any]) -> Family:
    """The family of `config`; one that has no entry here is asked from transformers, which also completes `config`.

    Raises:
        RecipeError: transformers does not know it, cannot read it, or has no head for it that can be trained.
    """
    known = FAMILIES.get(config["model_type"])
    return known or _ask_transformers(name, config)


def _ask_transformers(name: str, config: dict[str, Any]) -> Family:
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    try:
        full = AutoConfig.for_model(**config)
    except Exception as error:  # each configuration class has its own ways to refuse
        raise RecipeError("model", name, f"transformers cannot read its configuration: {reason(error)}") from error
    tables = {task: getattr(modeling_auto, table, {}) for task, table in AUTO_TABLE.items()}
    classes = {task: table[full.model_type] for task, table in tables.items() if full.model_type in table}
    classes = {task: c if isinstance(c, str) else c[0] for task, c in classes.items()}
    if getattr(full, "is_encoder_decoder", False) or "masked-lm" in classes:
        classes.pop("causal-lm", None)  # half of the model, or an encoder made to look back only
    if not classes:
        raise RecipeError("model", name, f"a {full.model_type} has no head for any of " + ", ".join(CLASS_SUFFIX))
    for key, value in full.to_dict().items():
        config.setdefault(key, value)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):  # other names of the same
        value = getattr(full, key, None)
        if isinstance(value, int):
            config.setdefault(key, value)
    tied = bool(getattr(full, "tie_word_embeddings", False))
    rotary = 1.0 if config.get("rope_parameters") else 0.0
    return Family(classes, tied=tied, rotary=rotary, mlp=None, four_times=True)


def reason(error: Exception) -> str:
    """The line of another library's error that says what is wrong."""
    return str(error.__cause__ or error).strip().splitlines()[0].rstrip(".")
