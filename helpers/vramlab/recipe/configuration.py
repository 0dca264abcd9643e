"""From a configuration, as published or as transformers writes it, to the sizes and settings that formulas need.

What it leaves unsaid is in the family's record (`families`). transformers itself is asked about other architectures.
"""

import contextlib
import json
import os
import textwrap
from collections.abc import Mapping
from typing import Any

from ..report.data import data_path
from ..report.errors import RecipeError, needing
from ..report.files import read_text
from .families import FAMILIES, REQUIRED, TASKS, Family
from .knobs import Knob

FEW = 4  # a configuration's other lists are as short as this: image sizes, colours
MOST_LAYERS = 1000  # every weight is listed by name; the deepest model of the catalogue has 126 layers
KEYS = json.loads(data_path("config_keys.json").read_text(encoding="utf-8"))
SIZES = KEYS["sizes"]  # configurations name the same size differently; the first name found counts
MOST_SIZE = 2**23  # so that PyTorch can count the bytes of every tensor in signed 64 bits
MOST = {"num_layers": MOST_LAYERS, "num_decoder_layers": MOST_LAYERS, "num_experts": 2**12, "image_size": 2**16}
MOST |= {"max_positions": 2**31, "sliding_window": 2**31}
BUILT = "build it yourself and ask simulate(model=..., batch=..., optimizer=...)"


def family_of(name: str, config: dict[str, Any]) -> Family:
    """Return the family of `config`; where it has no record, what transformers says, which also completes `config`.

    Raises RecipeError if that cannot read it either, or has no head for it that can be trained.
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
    tables = {task: getattr(modeling_auto, f"MODEL_FOR_{t.table}_MAPPING_NAMES", {}) for task, t in TASKS.items()}
    found = {task: table[full.model_type] for task, table in tables.items() if full.model_type in table}
    classes = {task: c if isinstance(c, str) else c[0] for task, c in found.items()}
    if getattr(full, "is_encoder_decoder", False) or "masked-lm" in classes:
        classes.pop("causal-lm", None)  # half of the model, or an encoder made to look back only
    if not completed.keys() >= {"num_mel_bins", "max_source_positions"}:
        classes.pop("speech-seq2seq", None)  # it hears something else than Whisper's features
    if not classes:
        raise RecipeError("model", name, f"recipes train {', '.join(TASKS)}, and a {full.model_type} does not: {BUILT}")
    config.update({**completed, **config})
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):  # other names of the same
        with contextlib.suppress(Exception):  # Gemma 4 refuses to name one value of what differs by layer
            if isinstance(value := getattr(full, key, None), int):
                config.setdefault(key, value)
    required = REQUIRED[:3] if "image-classification" in classes else REQUIRED[:4]
    return Family(classes, tied=bool(getattr(full, "tie_word_embeddings", False)), required=required)


def reason(error: Exception) -> str:
    """Return the line of another library's error that says what is wrong, shortened; its class if it says nothing."""
    text = str(error.__cause__ or error).strip()
    return textwrap.shorten(text.splitlines()[0].rstrip("."), 300, placeholder=" …") if text else type(error).__name__


def read_json(field: str, text: Any, name: str | None = None) -> Any:
    """Return what the JSON `text` says. Raises RecipeError about `field` (called `name`) if it is none."""
    try:
        return json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise RecipeError(field, text if name is None else name, f"it is not JSON: {why}") from None


def read_json_file(field: str, path: str | os.PathLike) -> Any:
    """Return what a JSON file says. Raises RecipeError about `field` if it cannot be read, or is none."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise RecipeError(field, str(path), f"it must be a JSON file that can be read ({why})") from None
    return read_json(field, text, str(path))


def plain(config: Mapping) -> dict[str, Any]:
    """Return `config` as JSON gives it back, with text for a torch.dtype and the like. Raises RecipeError."""
    try:
        return json.loads(json.dumps(dict(config), default=str))
    except (TypeError, ValueError, RecursionError) as error:
        rest = f"its configuration cannot be written as JSON: {error}"
        raise RecipeError("model", type(config).__name__, rest) from None


def parse(name: str, text: str) -> dict[str, Any]:
    """Return the configuration in `text`. Raises RecipeError if it is none, or not of one language or image model."""
    config = read_json("model", text, name)
    if isinstance(config, dict) and "_class_name" in config and "model_type" not in config:
        rest = (
            f"it is the configuration of diffusers' {config['_class_name']}, and recipes train transformers' models: "
        )
        rest += "simulate(model=…, batch=…) takes the module, vramlab run --gpu CARD -- python train.py its script"
        raise RecipeError("model", name, rest)
    if not isinstance(config, dict) or not config.get("model_type"):
        raise RecipeError("model", name, "its configuration must say a 'model_type', as every config.json does")
    for key in KEYS["counts"]:
        value = config.get(key)
        if (value is not None or (key in config and key in KEYS["never_null"])) and not _is_size(value, 0):
            raise RecipeError(f"model.{key}", value, f"it must be a whole number from 0 to {MOST_SIZE:,}")
    if isinstance(config.get("text_config"), dict) and "hidden_size" not in config:
        rest = f"it reads more than text: give its 'text_config' for the language part, or {BUILT}"
        raise RecipeError("model", name, rest)
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            rest = "weights stored so are not described: leave it out, and say Quantization('nf4') for 4 bits"
            raise RecipeError(f"model.{key}", config[key], rest)
    return config


def _is_size(value: Any, least: int = 1, most: int = MOST_SIZE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def keep_layers(config: dict[str, Any], kept: list[int] | int) -> None:
    """Leave the layers `kept`, or the first so many, in every place of `config` that counts or lists them; a number
    beyond the depth goes through them again."""
    keys = [key for key in (*SIZES["num_layers"], *SIZES["num_decoder_layers"]) if config.get(key) is not None]
    depth = len(config.get("layer_types") or ()) or next((config[key] for key in keys), None)
    kept = range(kept) if isinstance(kept, int) else kept
    for key, value in config.items():
        if isinstance(value, list) and len(value) == depth and (depth > FEW or key == "layer_types"):
            config[key] = [value[i % depth] for i in kept]
    if said := {int(i): value for i, value in (config.get("per_layer_config") or {}).items()}:  # keyed by "05"
        config["per_layer_config"] = {str(n): said[i % depth] for n, i in enumerate(kept) if i % depth in said}
    if shared := config.get("num_kv_shared_layers"):  # the last ones
        config["num_kv_shared_layers"] = sum(i % depth >= depth - shared for i in kept)
    for key in keys:
        config[key] = len(kept)
    for key in ("stage_names", "out_features", "out_indices"):  # a backbone's, made from its depth
        config.pop(key, None)


def read(name: str, config: dict[str, Any], family: Family, task: str) -> dict[str, Any]:
    """Return the fields of `Shape` that the configuration says or implies. Raises RecipeError on impossible sizes."""
    sizes = _sizes(name, config, family)
    others = {}
    for name, keys in KEYS["settings"].items():
        found = ((key, config[key]) for key in family.keys.get(name, keys) if config.get(key) is not None)
        key, others[name] = next(found, (name, family.defaults.get(name)))
        if name != "activation":
            Knob(share=True).check(f"model.{key}", others[name] or 0)
    rope = config.get("rope_parameters") or {}  # the rotated share of a head, under the names of all ages
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return {
        **sizes,
        "num_labels": len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2,
        "tied": bool(config.get("tie_word_embeddings", family.tied)) and "classification" not in task,
        "activation": others.pop("activation") or "gelu",
        "norm": family.norm,
        "rotary_dim": int(sizes["head_dim"] * (family.rotary if share is None else share)) if family.rotary else 0,
        **{key: float(value or 0) for key, value in others.items()},
        "image_tokens": sizes["max_positions"] if task == "image-classification" else 0,
        "attention": "sdpa" if family.sdpa else "eager",
    }


def _size(name: str, config: Mapping, size: str, family: Family) -> int | None:
    """Return one size of `config`, None when it may be absent and is."""
    keys = family.keys.get(size, SIZES[size]) or [""]
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value, most = config.get(key), MOST.get(size, MOST_SIZE)
    otherwise = "" if family.layout_options is not None else f"; or {BUILT}"
    if value is None and size in family.required:
        raise RecipeError(f"model.{key}", None, f"the configuration of {name} must say it{otherwise}")
    if value is None or (size == "sliding_window" and not value):
        return None if key in config else family.defaults.get(size)
    if not _is_size(value, 1, most):
        raise RecipeError(f"model.{key}", value, f"it must be a whole number from 1 to {most:,}{otherwise}")
    return value


def _sizes(name: str, config: Mapping, family: Family) -> dict[str, int | None]:
    """Return the sizes that a configuration says, and those that follow as in transformers; checks that the heads fit."""
    sizes = {size: _size(name, config, size, family) for size in SIZES}
    h, heads = sizes["hidden_size"], sizes["num_heads"]
    written = family.layout_options is not None
    if h % heads and written and not sizes["head_dim"]:
        raise RecipeError("model.hidden_size", h, f"it must be a multiple of the {heads} heads")
    sizes["head_dim"] = d = sizes["head_dim"] or h // heads
    if family.multi_query and not config.get("new_decoder_architecture"):
        sizes["num_kv_heads"] = 1 if config.get("multi_query", True) else heads
    sizes["num_kv_heads"] = kv = sizes["num_kv_heads"] or heads
    if family.rotary == 1 and written and d % 2 and d > 4:
        raise RecipeError("model.head_dim", d, "rotary positions turn pairs of channels: it must be even")
    if heads % kv:
        raise RecipeError("model.num_key_value_heads", kv, f"it must divide the {heads} heads")
    sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * h
    if not family.window and not config.get("use_sliding_window"):
        sizes["sliding_window"] = None
    if "seq2seq-lm" in family.classes:
        sizes["num_decoder_layers"] = sizes["num_decoder_layers"] or sizes["num_layers"]
    if "image-classification" in family.classes or (config.get("image_size") and config.get("patch_size")):
        # the patches of one image and the class token (Dosovitskiy et al. 2021, section 3.1)
        side, patch = (config.get(key, usual) for key, usual in (("image_size", 224), ("patch_size", 16)))
        if not isinstance(side, int) or not isinstance(patch, int) or not 0 < patch <= side <= MOST["image_size"]:
            rest = f"it and image_size, {side!r}, must be whole and fit each other"
            raise RecipeError("model.patch_size", patch, rest)
        sizes["max_positions"] = (side // patch) ** 2 + 1
    for size in ("num_decoder_layers", "num_experts", "experts_per_token", "vocab_size"):
        sizes[size] = sizes[size] or 0
    return sizes
