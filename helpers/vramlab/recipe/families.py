"""From a configuration, as published or as transformers writes it, to the sizes and settings that formulas need.

FAMILIES holds what a configuration leaves unsaid: the class defaults of transformers' `configuration_*.py`. transformers
itself is asked about other architectures.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report.errors import RecipeError, needing
from .options import words

AUTO_CLASS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}

# Task to the suffix of transformers' classes, the table of `modeling_auto` and the usual name of the output head.
TASKS = {
    "causal-lm": ("ForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "lm_head"),
    "seq2seq-lm": ("ForConditionalGeneration", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "lm_head"),
    "image-classification": (
        "ForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "classifier",
    ),
    "sequence-classification": (
        "ForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "score",
    ),
    "masked-lm": ("ForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "cls.predictions.decoder"),
}
FEW = 4  # a configuration's other lists are as short as this: image sizes, colours
MOST_LAYERS = 1000  # every weight is listed by name; the deepest model of the catalogue has 126 layers
MOST_SIZE, MOST_POSITIONS = 2**23, 2**31  # so that PyTorch can count the bytes of every tensor in signed 64 bits
WITHOUT_SDPA = ("gemma2",)  # transformers: Gemma2PreTrainedModel._supports_sdpa is False; others are asked (`meta`)
DECODER = ("causal-lm", "sequence-classification")
# Configurations name the same size differently; the first name found counts.
SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "num_decoder_layers": ("num_decoder_layers", "decoder_layers"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "sliding_window": ("sliding_window",),
}
OTHERS = {
    "activation": ("hidden_activation", "hidden_act", "activation_function", "dense_act_fn"),
    "hidden_dropout": ("hidden_dropout_prob", "hidden_dropout", "resid_pdrop", "dropout_rate", "dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate"),
    "embedding_dropout": ("embd_pdrop",),
}
MOST = dict.fromkeys((name for names in SIZES.values() for name in names), MOST_SIZE)
MOST |= dict.fromkeys((*SIZES["max_positions"], *SIZES["sliding_window"]), MOST_POSITIONS)
MOST |= dict.fromkeys((*SIZES["num_layers"], *SIZES["num_decoder_layers"]), MOST_LAYERS)
MOST |= dict.fromkeys(SIZES["num_experts"], 2**12) | {"image_size": 2**16, "patch_size": 2**16, "num_channels": 2**16}
# What configurations say besides sizes, and what it must be. transformers' classes check most of it too, later.
SWITCHES = words(
    """tie_word_embeddings attention_bias mlp_bias qkv_bias bias enable_bias parallel_attn multi_query alibi is_decoder
    new_decoder_architecture add_cross_attention use_sliding_window do_layer_norm_before layer_norm_elementwise_affine
    qk_layernorm use_parallel_residual is_encoder_decoder"""
)
SHARES = ("partial_rotary_factor", "rotary_pct")
NUMBERS = (
    "factor",
    "rope_theta",
    "rotary_emb_base",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
DROPOUTS = tuple(name for key, names in OTHERS.items() if "dropout" in key for name in names)
TEXTS = ("feed_forward_proj", *OTHERS["activation"])
DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")
ACTIVATIONS = words(  # transformers.activations.ACT2FN
    """gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace
    leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu"""
)


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        classes: the model class for each head that can be trained, the usual one first.
        tied: the default of `tie_word_embeddings`; "always": a configuration cannot change it.
        norm: "layernorm" or "rmsnorm".
        rotary: the default share of a head that is rotated; 0 for learned or relative positions.
        gated: the feed-forward part has a gate (T5's configuration decides).
        whole_heads: the hidden size must be a multiple of the heads even where `head_dim` is given.
        mlp: the one name under which the configuration says the feed-forward width; None takes any known name.
        required: sizes that a configuration must say.
        defaults: of `Shape` fields, by their names.
    """

    classes: Mapping[str, str]
    tied: bool | str = False
    norm: str = "layernorm"
    rotary: float = 0.0
    gated: bool = False
    whole_heads: bool = False
    mlp: str | None = "intermediate_size"
    required: tuple[str, ...] = ("hidden_size", "num_layers", "num_heads", "vocab_size", "intermediate_size")
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The heads that can be trained, the usual one first."""
        return tuple(self.classes)

    def head(self, task: str) -> str:
        """The module name of the output head."""
        return "classifier" if self.classes[task] == "BertForSequenceClassification" else TASKS[task][2]


def _family(prefix: str, activation: str, tasks: tuple[str, ...] = DECODER, dropout=0.0, **more) -> Family:
    classes = {
        task: "GPT2LMHeadModel" if (prefix, task) == ("GPT2", "causal-lm") else prefix + TASKS[task][0]
        for task in tasks
    }
    names = [name for name in Family.__dataclass_fields__ if name in more]
    options = {name: more.pop(name) for name in names}
    dropouts = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), dropout)
    return Family(classes, **options, defaults={"activation": activation, **dropouts, **more})


_LLAMA = dict(norm="rmsnorm", rotary=1.0, gated=True)
_GEMMA = dict(activation="gelu_pytorch_tanh", tied=True, head_dim=256, **_LLAMA)
_REQUIRED = Family.required
_LEARNED = (*_REQUIRED, "max_positions")  # positions are looked up in a table
_NO_MLP = _REQUIRED[:-1]  # its width may be left out, and is then four times the hidden size
_BERT_TASKS = ("sequence-classification", "masked-lm")
FAMILIES = {
    "bert": _family("Bert", "gelu", _BERT_TASKS, 0.1, tied=True, required=_LEARNED),
    "falcon": _family(
        "Falcon", "gelu", tied=True, rotary=1.0, mlp="ffn_hidden_size", required=_NO_MLP, max_positions=2048
    ),
    "gemma": _family("Gemma", num_kv_heads=16, **_GEMMA),
    "gemma2": _family("Gemma2", num_kv_heads=4, sliding_window=4096, whole_heads=True, **_GEMMA),
    "gpt2": _family(
        *("GPT2", "gelu_new", DECODER, 0.1),
        **dict(tied=True, whole_heads=True, mlp="n_inner", required=(*_NO_MLP, "max_positions")),
    ),
    "gpt_neox": _family("GPTNeoX", "gelu", rotary=0.25, whole_heads=True),
    "llama": _family("Llama", "silu", whole_heads=True, **_LLAMA),
    "mistral": _family("Mistral", "silu", num_kv_heads=8, sliding_window=4096, **_LLAMA),
    "mixtral": _family("Mixtral", "silu", num_kv_heads=8, num_experts=8, experts_per_token=2, **_LLAMA),
    "opt": _family("OPT", "relu", tied=True, whole_heads=True, mlp="ffn_dim", required=_LEARNED, hidden_dropout=0.1),
    "phi": _family("Phi", "gelu_new", rotary=0.5),
    "qwen2": _family("Qwen2", "silu", num_kv_heads=32, **_LLAMA),
    "qwen3": _family("Qwen3", "silu", head_dim=128, num_kv_heads=32, **_LLAMA),
    "t5": _family("T5", "relu", ("seq2seq-lm",), 0.1, tied="always", norm="rmsnorm", mlp="d_ff", head_dim=64),
    "vit": _family("ViT", "gelu", ("image-classification",), whole_heads=True, required=(*_NO_MLP[:3], _REQUIRED[-1])),
}


BUILT = "build it yourself and ask simulate(model=..., batch=..., optimizer=...)"


def family_of(name: str, config: dict[str, Any]) -> Family:
    """The family of `config`; one that has no entry here is asked from transformers, which also completes `config`.

    Raises:
        RecipeError: transformers does not know it, cannot read it, or has no head for it that can be trained.
    """
    if config["model_type"] in FAMILIES:
        return FAMILIES[config["model_type"]]
    with needing(f"The model type {config['model_type']!r}"):
        from transformers import AutoConfig
        from transformers.models.auto import modeling_auto

    try:
        full = AutoConfig.for_model(**config)
        completed = full.to_dict()
    except Exception as error:  # each configuration class has its own ways to refuse
        raise RecipeError("model", name, f"transformers cannot read its configuration: {reason(error)}") from error
    tables = {task: getattr(modeling_auto, table, {}) for task, (_, table, _) in TASKS.items()}
    classes = {task: table[full.model_type] for task, table in tables.items() if full.model_type in table}
    classes = {task: c if isinstance(c, str) else c[0] for task, c in classes.items()}
    if getattr(full, "is_encoder_decoder", False) or "masked-lm" in classes:
        classes.pop("causal-lm", None)  # half of the model, or an encoder made to look back only
    if not classes:
        raise RecipeError("model", name, f"recipes train {', '.join(TASKS)}, and a {full.model_type} does not: {BUILT}")
    for key, value in completed.items():
        config.setdefault(key, value)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):  # other names of the same
        with contextlib.suppress(Exception):  # Gemma 4 refuses to name one value of what differs by layer
            if isinstance(value := getattr(full, key, None), int):
                config.setdefault(key, value)
    tied, rotary = bool(getattr(full, "tie_word_embeddings", False)), 1.0 if config.get("rope_parameters") else 0.0
    required = _NO_MLP[:3] if "image-classification" in classes else _NO_MLP
    return Family(classes, tied=tied, rotary=rotary, mlp=None, required=required)


def reason(error: Exception) -> str:
    """The line of another library's error that says what is wrong, or the error's class if it says nothing."""
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def read_json(field: str, text: Any, name: str | None = None) -> Any:
    """What the JSON `text` says. Raises RecipeError about `field` (called `name`) if it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except (TypeError, ValueError) as error:
        reason = str(error)
    raise RecipeError(field, text if name is None else name, f"it is not JSON: {reason}")


def parse(name: str, text: str) -> dict[str, Any]:
    """The configuration in `text`. Raises RecipeError if it is none, or not of one language or image model."""
    config = read_json("model", text, name)
    if isinstance(config, dict):
        for key, value in config.items():
            if value is not None and (allowed := _wrong(key, value)):
                raise RecipeError(f"model.{key}", value, f"it must be {allowed}")
    if not isinstance(config, dict) or not config.get("model_type"):
        raise RecipeError("model", name, "its configuration must say a 'model_type', as every config.json does")
    if isinstance(config.get("text_config"), dict) and "hidden_size" not in config:
        raise RecipeError(
            "model", name, f"it reads more than text: give its 'text_config' for the language part, or {BUILT}"
        )
    stored = config.get("quantization_config") or config.get("compression_config")
    if stored:
        method = stored.get("quant_method") if isinstance(stored, dict) else None
        allowed = "weights stored so are not described: leave it out for weights in the recipe's precision, or say "
        allowed += "quantization=Quantization('nf4') for a base in 4 bits"
        raise RecipeError("model.quantization_config", method or "of an unknown method", allowed)
    return config


def _wrong(key: str, value: Any) -> str:
    """What `value` would have to be where a configuration has `key`, "" if it is that, or if any value may be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (most := MOST.get(key)) and is_number and value > most:
        return f"{most:,} at most"
    if "dropout" in key or key.endswith("pdrop"):
        other = isinstance(value, list | dict) or (
            isinstance(value, bool) and key not in DROPOUTS
        )  # a switch, or several
        return "" if other or (is_number and 0 <= value <= 1) else "a probability from 0 to 1"
    if key.endswith(("_eps", "_epsilon")) or key in NUMBERS:
        return "" if is_number and 0 < value < math.inf else "a number over 0"
    if key in SHARES:
        return "" if is_number and 0 < value <= 1 else "a number over 0 and up to 1"
    if key in SWITCHES:
        return "" if isinstance(value, bool) else "true or false"
    if key in ("rope_scaling", "rope_parameters"):
        if not isinstance(value, dict):
            return "a mapping, such as {'rope_type': 'linear', 'factor': 2.0}"
        wrong = ((inner, _wrong(inner, v)) for inner, v in value.items() if v is not None)
        return next((f"a mapping in which {inner} is {allowed}" for inner, allowed in wrong if allowed), "")
    if key in ("dtype", "torch_dtype"):
        known = isinstance(value, str) and value.removeprefix("torch.") in DTYPES
        return "" if known else "one of " + ", ".join(DTYPES)
    if key == "model_type" or key in TEXTS:
        return "" if isinstance(value, str) else "text"
    if key in ("architectures", "layer_types"):
        return "" if isinstance(value, list) and all(isinstance(v, str) for v in value) else "a list of names"
    if key == "id2label":
        return "" if isinstance(value, dict) else "a mapping of numbers to names"
    if key == "num_labels":
        return "" if isinstance(value, int) and is_number and 0 < value <= MOST_SIZE else "a whole number of at least 1"
    return ""


def cut(config: dict[str, Any], kept: list[int] | int) -> None:
    """Leave the layers `kept` (as many as a number says, from the first) in every place of `config` that counts them.

    Lists with an entry a layer lose those of the others; a number beyond the depth goes through them again.
    """
    keys = [key for key in (*SIZES["num_layers"], *SIZES["num_decoder_layers"]) if config.get(key) is not None]
    depth = len(config.get("layer_types") or ()) or next((config[key] for key in keys), None)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == depth and (depth > FEW or key == "layer_types"):
            config[key] = [value[i % depth] for i in (range(kept) if isinstance(kept, int) else kept)]
    for key in keys:
        config[key] = kept if isinstance(kept, int) else len(kept)
    for key in ("stage_names", "out_features", "out_indices"):  # a backbone's, made from its depth
        config.pop(key, None)


def choose_task(name: str, family: Family, config: dict[str, Any], task: str | None) -> str:
    """`task` if the family has such a head, else the configuration's, else the usual one. Raises RecipeError."""
    if task is None:
        named = (config.get("architectures") or [None])[0]
        return next((t for t, class_name in family.classes.items() if class_name == named), family.tasks[0])
    if task not in family.tasks:
        raise RecipeError("task", task, f"{name} can be trained for " + " or ".join(map(repr, family.tasks)))
    return task


def read(name: str, config: dict[str, Any], family: Family, task: str) -> dict[str, Any]:
    """The fields of `Shape` that the configuration says or implies. Raises RecipeError on impossible sizes."""
    sizes = {size: _size(name, config, size, family) for size in SIZES}
    _fill(config, sizes, family)
    others = {key: _first(config, names, family.defaults.get(key)) for key, names in OTHERS.items()}
    if config["model_type"] in ("bert", "t5", "vit", "gpt_neox"):
        others["embedding_dropout"] = others["hidden_dropout"]
    activation, packed = others.pop("activation") or "gelu", config.get("feed_forward_proj") or ""
    if packed:  # T5 packs it, with the gate; "gated-gelu" is GPT-2's GELU
        activation = "gelu_new" if packed == "gated-gelu" else packed.rpartition("-")[2]
    if config["model_type"] in FAMILIES and activation not in ACTIVATIONS:
        raise RecipeError("model.activation", activation, "allowed are " + ", ".join(sorted(ACTIVATIONS)))
    rope = config.get("rope_parameters") or {}  # the rotated share of a head, under the names of all ages
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    tied = family.tied == "always" or bool(config.get("tie_word_embeddings", family.tied))
    return {
        **sizes,
        "num_labels": len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2,
        "tied": tied and task in ("causal-lm", "masked-lm", "seq2seq-lm"),
        "gated_mlp": family.gated or packed.startswith("gated"),
        "activation": activation,
        "norm": family.norm,
        "rotary_dim": int(sizes["head_dim"] * (family.rotary if share is None else share)) if family.rotary else 0,
        **{key: float(value or 0) for key, value in others.items()},
        "image_tokens": sizes["max_positions"] if task == "image-classification" else 0,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "attention": "eager" if config["model_type"] in WITHOUT_SDPA else "sdpa",
    }


def _first(config: dict[str, Any], keys: tuple[str, ...], default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _size(name: str, config: dict[str, Any], size: str, family: Family) -> int | None:
    """One size of `config`, None when it may be absent and is."""
    keys = (family.mlp,) if size == "intermediate_size" and family.mlp else SIZES[size]
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value, otherwise = config.get(key), "" if config["model_type"] in FAMILIES else f"; or {BUILT}"
    if value is None or (size == "sliding_window" and not value):
        if size in family.required:
            raise RecipeError(f"model.{key}", None, f"the configuration of {name} must say it{otherwise}")
        return None if key in config else family.defaults.get(size)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"model.{key}", value, f"it must be a whole number of at least 1{otherwise}")
    return value


def _fill(config: dict[str, Any], sizes: dict[str, int | None], family: Family) -> None:
    """Derive the sizes that a configuration may leave out, as transformers does, and check that the heads fit."""
    kind, h, heads = config["model_type"], sizes["hidden_size"], sizes["num_heads"]
    if h % heads and (family.whole_heads or (kind in FAMILIES and not sizes["head_dim"])):
        raise RecipeError("model.hidden_size", h, f"it must be a multiple of the {heads} heads")
    sizes["head_dim"] = sizes["head_dim"] or h // heads
    if kind == "falcon" and not config.get("new_decoder_architecture"):
        sizes["num_kv_heads"] = 1 if config.get("multi_query", True) else heads
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or heads
    if family.rotary == 1 and kind in FAMILIES and sizes["head_dim"] % 2 and sizes["head_dim"] > 4:
        raise RecipeError(
            "model.head_dim", sizes["head_dim"], "rotary positions turn pairs of channels: it must be even"
        )
    if heads % sizes["num_kv_heads"]:
        raise RecipeError("model.num_key_value_heads", sizes["num_kv_heads"], f"it must divide the {heads} heads")
    sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * h
    if kind == "t5":
        sizes["max_positions"], sizes["num_decoder_layers"] = None, sizes["num_decoder_layers"] or sizes["num_layers"]
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        sizes["sliding_window"] = None
    if kind == "vit" or (config.get("image_size") and config.get("patch_size")):
        sizes["max_positions"] = _image_tokens(config)
    for size in ("num_decoder_layers", "num_experts", "experts_per_token", "vocab_size"):
        sizes[size] = sizes[size] or 0


def _image_tokens(config: dict[str, Any]) -> int:
    """Patches of one image, and the class token (Dosovitskiy et al. 2021, section 3.1)."""
    pairs = []
    for key, default in (("image_size", 224), ("patch_size", 16)):
        value = config.get(key, default)
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
            raise RecipeError(f"model.{key}", value, "it must be a whole number of at least 1, or two of them")
        pairs.append(pair)
    (height, width), (down, across) = pairs
    if height < down or width < across:
        raise RecipeError("model.patch_size", config.get("patch_size", 16), "a patch cannot exceed the image")
    return (height // down) * (width // across) + 1
