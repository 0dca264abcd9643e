"""From a configuration to the sizes and settings that formulas need.

It is read as published or as transformers writes it. What it leaves unsaid is in the
family's record (`families`). transformers itself is asked about other architectures.
"""

import contextlib
import json
import os
import textwrap
from collections.abc import Mapping
from typing import Any

from ..base.data import data_path
from ..base.errors import RecipeError, needing
from ..base.files import read_text
from .families import FAMILIES, REQUIRED, TASKS, Family
from .knobs import Knob

FEW = 4  # a configuration's other lists are as short as this: image sizes, colours
MOST_LAYERS = (
    1000  # every weight is listed by name; the deepest model of the catalogue has 126 layers
)
KEYS = json.loads(data_path("config_keys.json").read_text(encoding="utf-8"))
# Configurations name the same size differently; the first name that they say counts.
SIZES = KEYS["sizes"]
MOST_SIZE = 2**23  # so that PyTorch can count the bytes of every tensor in signed 64 bits
MOST = {
    "num_layers": MOST_LAYERS,
    "num_decoder_layers": MOST_LAYERS,
    "num_experts": 2**12,
    "image_size": 2**16,
    "max_positions": 2**31,
    "sliding_window": 2**31,
}
MAY_BE_ZERO = ("sliding_window", "num_experts", "experts_per_token")  # where there is none
# By `model_type`: how an architecture reads images (`images.py`).
READERS: dict[str, dict[str, Any]] = json.loads(
    data_path("image_readers.json").read_text(encoding="utf-8"),
)
BUILT = "build it yourself and ask simulate(model=..., batch=..., optimizer=...)"


def family_of(name: str, config: dict[str, Any]) -> Family:
    """Return the family of `config`.

    Where it has no record, it is what transformers says, which also completes `config`. Raises
    RecipeError if that cannot read it either, or has no head for it that can be trained.
    """
    if config["model_type"] in FAMILIES:
        return FAMILIES[config["model_type"]]
    with needing(f"The model type {config['model_type']!r}"):
        from transformers import AutoConfig

    try:
        full = AutoConfig.for_model(**config)
        completed = full.to_dict()
    except Exception as error:  # each configuration class has its own ways to refuse
        rest = f"transformers cannot read its configuration: {reason(error)}"
        raise RecipeError("model", name, rest) from error
    classes = _classes(full, completed)
    if not classes:
        tasks = ", ".join(TASKS)
        rest = f"recipes train {tasks}, and a {full.model_type} does not: {BUILT}"
        raise RecipeError("model", name, rest)
    # The configuration's own values count before the defaults of its class.
    config.update({**completed, **config})
    # other names of the same
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        # Gemma 4 refuses to name one value of what differs by layer
        with contextlib.suppress(Exception):
            value = getattr(full, key, None)
            if isinstance(value, int):
                config.setdefault(key, value)
    needed = 3 if "image-classification" in classes else 4
    tied = bool(getattr(full, "tie_word_embeddings", False))
    return Family(classes, tied=tied, required=REQUIRED[:needed])


def with_parts(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model that reads images as transformers completes it.

    Older ones say the language model's sizes beside the tower's. Raises RecipeError.
    """
    with needing(f"The model type {config['model_type']!r}"):
        from transformers import AutoConfig

    try:
        completed = AutoConfig.for_model(**config).to_dict()
    except Exception as error:  # each configuration class has its own ways to refuse
        rest = f"transformers cannot read its configuration: {reason(error)}"
        raise RecipeError("model", name, rest) from error
    return plain(completed | {"architectures": config.get("architectures")})


def of_language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `config` with the sizes of its language model where they are looked for."""
    if config["model_type"] not in READERS:
        return config
    return {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}


def _classes(full: Any, completed: Mapping[str, Any]) -> dict[str, str]:
    """Return transformers' class for each head of a configuration that can be trained."""
    from transformers.models.auto import modeling_auto

    classes = {}
    for name, task in TASKS.items():
        # a language model alone is its text_config
        if (name == "image-text") is not (full.model_type in READERS):
            continue
        table = getattr(modeling_auto, f"MODEL_FOR_{task.table}_MAPPING_NAMES", {})
        if full.model_type in table:
            known = table[full.model_type]
            classes[name] = known if isinstance(known, str) else known[0]
    # half of the model, or an encoder made to look back only
    if getattr(full, "is_encoder_decoder", False) or "masked-lm" in classes:
        classes.pop("causal-lm", None)
    # it hears something else than Whisper's features
    if not completed.keys() >= {"num_mel_bins", "max_source_positions"}:
        classes.pop("speech-seq2seq", None)
    return classes


def reason(error: Exception) -> str:
    """Return the line of another library's error that says what is wrong, shortened.

    It is the error's class if it says nothing.
    """
    text = str(error.__cause__ or error).strip()
    if not text:
        return type(error).__name__
    return textwrap.shorten(text.splitlines()[0].rstrip("."), 300, placeholder=" …")


def read_json(field: str, text: Any, name: str | None = None) -> Any:
    """Return what the JSON `text` says.

    Raises RecipeError about `field` (called `name`) if it is none.
    """
    try:
        return json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        rest = f"it is not JSON: {why}"
        if name and name.endswith(".py"):
            rest = f"it is a script: vramlab explain {name} reads it, vramlab run starts it"
        raise RecipeError(field, text if name is None else name, rest) from None


def read_json_file(field: str, path: str | os.PathLike) -> Any:
    """Return what a JSON file says.

    Raises RecipeError about `field` if it cannot be read, or is none.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        rest = f"it must be a JSON file that can be read ({why})"
        raise RecipeError(field, str(path), rest) from None
    return read_json(field, text, str(path))


def plain(config: Mapping) -> dict[str, Any]:
    """Return `config` as JSON gives it back, with text for a torch.dtype and the like.

    Raises RecipeError.
    """
    try:
        return json.loads(json.dumps(dict(config), default=str))
    except (TypeError, ValueError, RecursionError) as error:
        rest = f"its configuration cannot be written as JSON: {error}"
        raise RecipeError("model", type(config).__name__, rest) from None


def parse(name: str, text: str) -> dict[str, Any]:
    """Return the configuration in `text`.

    Raises RecipeError if it is none, or not of one language or image model.
    """
    config = read_json("model", text, name)
    if not isinstance(config, dict) or not config.get("model_type"):
        rest = "its configuration must say a 'model_type', as every config.json does"
        raise RecipeError("model", name, rest)
    for key in KEYS["counts"]:
        value = config.get(key)
        is_said = value is not None or (key in config and key in KEYS["never_null"])
        if is_said and not _is_size(value, 0):
            rest = f"it must be a whole number from 0 to {MOST_SIZE:,}"
            raise RecipeError(f"model.{key}", value, rest)
    has_parts = isinstance(config.get("text_config"), dict) and "hidden_size" not in config
    if has_parts and config["model_type"] not in READERS:
        rest = f"it reads more than text: give its 'text_config' for the language part, or {BUILT}"
        raise RecipeError("model", name, rest)
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            rest = "weights stored so are not described: leave it out, and say Quantization('nf4') "
            raise RecipeError(f"model.{key}", config[key], rest + "for 4 bits")
    return config


def _is_size(value: Any, least: int = 1, most: int = MOST_SIZE) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and least <= value <= most


def keep_layers(config: dict[str, Any], layers: list[int] | int) -> None:
    """Leave some layers in every place of `config` that counts or lists them.

    They are those numbers, or the first so many; a number beyond the depth goes through them again.
    """
    kept = list(range(layers)) if isinstance(layers, int) else layers
    names = (*SIZES["num_layers"], *SIZES["num_decoder_layers"])
    keys = [key for key in names if config.get(key) is not None]
    depth: Any = len(config.get("layer_types") or ())
    if not depth:
        depth = next((config[key] for key in keys), None)
    for key, value in config.items():
        if not isinstance(value, list) or len(value) != depth:
            continue
        # In a shallow model a list of image sizes or colours may be as long as the model is deep
        # by chance.
        if depth > FEW or key == "layer_types":
            config[key] = [value[i % depth] for i in kept]
    _keep_per_layer(config, kept, depth)
    for key in keys:
        config[key] = len(kept)
    # a backbone's, made from its depth
    for key in ("stage_names", "out_features", "out_indices"):
        config.pop(key, None)


def _keep_per_layer(config: dict[str, Any], kept: list[int], depth: Any) -> None:
    """Leave layers in what is said of some of them alone."""
    per_layer = config.get("per_layer_config")
    if per_layer:
        said = {int(i): value for i, value in per_layer.items()}  # keyed by "05"
        left = {}
        for number, i in enumerate(kept):
            if i % depth in said:
                left[str(number)] = said[i % depth]
        config["per_layer_config"] = left
    shared = config.get("num_kv_shared_layers")  # the last ones
    if shared:
        config["num_kv_shared_layers"] = sum(i % depth >= depth - shared for i in kept)


def read(
    name: str,
    config: Mapping[str, Any],
    family: Family,
    task: str,
) -> dict[str, Any]:
    """Return the fields of `Shape` that the configuration says or implies.

    Raises RecipeError on impossible sizes.
    """
    sizes = _sizes(name, config, family)
    others = _settings(config, family)
    rates = {key: float(value or 0) for key, value in others.items() if key != "activation"}
    is_classifier = "classification" in task
    labels = config.get("num_labels") or 2
    if config.get("id2label"):
        labels = len(config["id2label"])
    tied = config.get("tie_word_embeddings", family.tied)
    return {
        **sizes,
        "num_labels": labels,
        "tied": bool(tied) and not is_classifier,
        "activation": others["activation"] or "gelu",
        "norm": family.norm,
        "rotary_dim": _rotary_dim(config, family, sizes["head_dim"]),
        **rates,
        "image_tokens": sizes["max_positions"] if task == "image-classification" else 0,
        "attention": "sdpa" if family.sdpa else "eager",
    }


def _settings(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the activation and the rates of dropout. Raises RecipeError on impossible rates."""
    settings = {}
    for name, usual_keys in KEYS["settings"].items():
        key = name
        value = family.defaults.get(name)
        # From the last name to the first, so that the first one that is said is kept.
        for own_key in reversed(family.keys.get(name, usual_keys)):
            if config.get(own_key) is not None:
                key = own_key
                value = config[own_key]
        if name != "activation":
            Knob(share=True).check(f"model.{key}", value or 0)
        settings[name] = value
    return settings


def _rotary_dim(config: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """Return the channels of a head that are rotated."""
    if not family.rotary:
        return 0
    # the rotated share of a head, under the names of all ages
    share = config.get("partial_rotary_factor", config.get("rotary_pct"))
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", share)
    return int(head_dim * (family.rotary if share is None else share))


def _size(
    name: str,
    config: Mapping,
    size: str,
    family: Family,
) -> int | None:
    """Return one size of `config`, None when it may be absent and is. Raises RecipeError."""
    keys = family.keys.get(size, SIZES[size]) or [""]
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key)
    otherwise = "" if family.layout_options is not None else f"; or {BUILT}"
    if value is None and size in family.required:
        rest = f"the configuration of {name} must say it{otherwise}"
        raise RecipeError(f"model.{key}", None, rest)
    if value is None or (size in MAY_BE_ZERO and not value):
        return None if key in config else family.defaults.get(size)
    most = MOST.get(size, MOST_SIZE)
    if not _is_size(value, 1, most):
        rest = f"it must be a whole number from 1 to {most:,}{otherwise}"
        raise RecipeError(f"model.{key}", value, rest)
    return value


def _sizes(name: str, config: Mapping, family: Family) -> dict[str, Any]:
    """Return the sizes that a configuration says, and those that follow as in transformers.

    Raises RecipeError where the heads do not fit.
    """
    sizes: dict[str, Any] = {size: _size(name, config, size, family) for size in SIZES}
    _fill_in_heads(sizes, config, family)
    sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * sizes["hidden_size"]
    if not family.window and not config.get("use_sliding_window"):
        sizes["sliding_window"] = None
    if "seq2seq-lm" in family.classes:
        sizes["num_decoder_layers"] = sizes["num_decoder_layers"] or sizes["num_layers"]
    has_patches = config.get("image_size") and config.get("patch_size")
    if "image-classification" in family.classes or has_patches:
        sizes["max_positions"] = _image_tokens(config)
    for size in ("num_decoder_layers", "num_experts", "experts_per_token", "vocab_size"):
        sizes[size] = sizes[size] or 0
    return sizes


def _fill_in_heads(sizes: dict[str, Any], config: Mapping, family: Family) -> None:
    """Fill in the number and width of heads, and check that they fit. Raises RecipeError."""
    hidden = sizes["hidden_size"]
    heads = sizes["num_heads"]
    is_written = family.layout_options is not None
    if hidden % heads and is_written and not sizes["head_dim"]:
        rest = f"it must be a multiple of the {heads} heads"
        raise RecipeError("model.hidden_size", hidden, rest)
    # A head's width is said on its own where heads together are not as wide as the hidden states
    # (Gemma, Mistral Nemo).
    width = sizes["head_dim"] or hidden // heads
    sizes["head_dim"] = width
    if family.multi_query and not config.get("new_decoder_architecture"):
        sizes["num_kv_heads"] = 1 if config.get("multi_query", True) else heads
    key_heads = sizes["num_kv_heads"] or heads
    sizes["num_kv_heads"] = key_heads
    is_rotated_whole = family.rotary == 1 and is_written
    if is_rotated_whole and width % 2 and width > 4:
        rest = "rotary positions turn pairs of channels: it must be even"
        raise RecipeError("model.head_dim", width, rest)
    if heads % key_heads:
        rest = f"it must divide the {heads} heads"
        raise RecipeError("model.num_key_value_heads", key_heads, rest)


def _image_tokens(config: Mapping) -> int:
    """Return the patches of one image and the class token. Raises RecipeError.

    Source: Dosovitskiy et al. 2021, section 3.1.
    """
    side = config.get("image_size", 224)
    patch = config.get("patch_size", 16)
    are_whole = isinstance(side, int) and isinstance(patch, int)
    if not are_whole or not 0 < patch <= side <= MOST["image_size"]:
        rest = f"it and image_size, {side!r}, must be whole and fit each other"
        raise RecipeError("model.patch_size", patch, rest)
    return (side // patch) ** 2 + 1
