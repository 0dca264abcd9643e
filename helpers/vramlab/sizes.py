"""From a configuration, as published or as transformers writes it, to the sizes and settings that formulas need."""

import json
from typing import Any

from .errors import RecipeError
from .families import Family

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
REQUIRED = ("hidden_size", "num_layers", "num_heads")
OTHERS = {
    "activation": ("hidden_activation", "hidden_act", "activation_function", "dense_act_fn"),
    "hidden_dropout": ("hidden_dropout_prob", "hidden_dropout", "resid_pdrop", "dropout_rate", "dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate"),
    "embedding_dropout": ("embd_pdrop",),
}


def parse(name: str, text: str) -> dict[str, Any]:
    """The configuration in `text`. Raises RecipeError if it is none, or not of one language or image model."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise RecipeError("model", name, f"its configuration is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise RecipeError("model", name, "its configuration must say a 'model_type', as every config.json does")
    if isinstance(config.get("text_config"), dict) and "hidden_size" not in config:
        raise RecipeError("model", name, "it reads more than text: give its 'text_config' for the language part")
    return config


def cut(config: dict[str, Any], num_layers: int) -> None:
    """Set the depth of `config`, in every place that holds it."""
    for key in (*SIZES["num_layers"], *SIZES["num_decoder_layers"]):
        if config.get(key) is not None:
            config[key] = num_layers
    kinds = config.get("layer_types")
    if kinds:
        config["layer_types"] = [kinds[i % len(kinds)] for i in range(num_layers)]


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
    activation = _activation(config, others.pop("activation"))
    may_tie = task in ("causal-lm", "masked-lm", "seq2seq-lm")
    return {
        **sizes,
        "num_labels": len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2,
        "tied": may_tie and (family.always_tied or bool(config.get("tie_word_embeddings", family.tied))),
        "gated_mlp": family.gated or str(config.get("feed_forward_proj", "")).startswith("gated"),
        "activation": activation,
        "norm": family.norm,
        "rotary_dim": _rotary_dim(config, family, sizes["head_dim"]),
        **{key: float(value or 0) for key, value in others.items()},
        "image_tokens": sizes["max_positions"] if task == "image-classification" else 0,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
    }


def _first(config: dict[str, Any], keys: tuple[str, ...], default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _size(name: str, config: dict[str, Any], size: str, family: Family) -> int | None:
    """One size of `config`, None when it may be absent and is."""
    keys = (family.mlp,) if size == "intermediate_size" and family.mlp else SIZES[size]
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key)
    if value is None or (size == "sliding_window" and not value):
        if _required(size, family):
            raise RecipeError(f"model.{key}", None, f"the configuration of {name} must say it")
        return None if key in config else family.defaults.get(size)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"model.{key}", value, "it must be a whole number of at least 1")
    return value


def _required(size: str, family: Family) -> bool:
    return (
        size in REQUIRED
        or (size == "vocab_size" and "image-classification" not in family.tasks)
        or (size == "intermediate_size" and not family.four_times)
        or (size == "max_positions" and family.learned)
    )


def _fill(config: dict[str, Any], sizes: dict[str, int | None], family: Family) -> None:
    """Derive the sizes that a configuration may leave out, as transformers does, and check that the heads fit."""
    kind, h, heads = config["model_type"], sizes["hidden_size"], sizes["num_heads"]
    if h % heads and (family.whole_heads or not sizes["head_dim"]):
        raise RecipeError("model.hidden_size", h, f"it must be a multiple of the {heads} heads")
    sizes["head_dim"] = sizes["head_dim"] or h // heads
    if kind == "falcon" and not config.get("new_decoder_architecture"):
        sizes["num_kv_heads"] = 1 if config.get("multi_query", True) else heads
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or heads
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


def _activation(config: dict[str, Any], named: str | None) -> str:
    """The name in transformers; T5 packs it into `feed_forward_proj`, where "gated-gelu" is GPT-2's GELU."""
    packed = config.get("feed_forward_proj")
    if packed:
        return "gelu_new" if packed == "gated-gelu" else packed.rpartition("-")[2]
    return named or "gelu"


def _rotary_dim(config: dict[str, Any], family: Family, head_dim: int) -> int:
    """Channels of each head that are rotated, under the names that configurations of all ages use."""
    if not family.rotary:
        return 0
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return int(head_dim * (family.rotary if share is None else share))
