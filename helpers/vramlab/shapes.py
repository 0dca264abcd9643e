"""The shapes of models: sizes, heads and layers read from a published configuration, without torch or transformers."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from . import lora_modules
from .catalogue import closest, find, model_names
from .errors import RecipeError
from .families import FAMILIES, Family, family_of
from .weights import Weight, list_buffers, list_weights

__all__ = ["Shape", "Weight", "model_names", "read_shape"]

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


@dataclass(frozen=True)
class Shape:
    """The sizes of one model with one head; all are counts.

    Attributes:
        name: short, for people.
        family: the configuration's `model_type`.
        task: which head is trained, and `head`, the module name of that head.
        hub_id: where the published weights are, None if the shape is not from the catalogue.
        config_json: the configuration, at this depth and for this head, as JSON text.
        num_layers: blocks, of the encoder where there is a decoder too.
        num_decoder_layers: 0 unless the model is an encoder–decoder.
        num_kv_heads: heads of keys and values, which groups of query heads share.
        max_positions: the longest sequence, None if the architecture sets no limit.
        num_labels: classes of a classification head.
        tied: one matrix serves as embedding and output head.
        gated_mlp: the feed-forward part has a gate beside its up-projection.
        norm: "layernorm" or "rmsnorm".
        rotary_dim: channels of a head that are rotated; 0 without rotary positions.
        sliding_window: how far back a token sees, None without such a limit (Gemma 2: in every second layer).
        hidden_dropout, attention_dropout, embedding_dropout: probabilities while training.
        image_tokens: patches of an image and the class token; 0 for text.
        dtype: the format in which the weights were published, None if unknown.
    """

    name: str
    family: str
    task: str
    hub_id: str | None
    config_json: str = field(repr=False)
    head: str
    num_layers: int
    num_decoder_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    num_labels: int
    tied: bool
    gated_mlp: bool
    activation: str
    norm: str
    rotary_dim: int
    sliding_window: int | None
    hidden_dropout: float
    attention_dropout: float
    embedding_dropout: float
    num_experts: int
    experts_per_token: int
    image_tokens: int
    dtype: str | None

    @property
    def config(self) -> dict[str, Any]:
        """What `transformers.AutoConfig.for_model(**config)` takes: a fresh copy, for transformers writes into it."""
        return json.loads(self.config_json)

    def weights(self) -> tuple[Weight, ...]:
        """Every parameter tensor, named and ordered as transformers' `named_parameters()`; shared ones once."""
        return self._weights

    def buffers(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Every buffer as (name, shape, dtype). Gemma's `embed_scale` follows the weights' dtype; fp32 is given."""
        return self._buffers

    @cached_property
    def _weights(self) -> tuple[Weight, ...]:
        return list_weights(self)

    @cached_property
    def _buffers(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        return list_buffers(self)

    @cached_property
    def num_parameters(self) -> int:
        """How many parameters the model has, shared ones once."""
        return sum(weight.size for weight in self.weights())

    def lora_targets(
        self, target_modules: lora_modules.Targets = None, modules_to_save: tuple[str, ...] | None = None
    ) -> list[lora_modules.Module]:
        """What PEFT would adapt, as (module name, inputs, outputs); see `vramlab.lora_modules.find`."""
        return lora_modules.find(self, target_modules, modules_to_save)

    def check_lora(self, target_modules: lora_modules.Targets, r: int) -> None:
        """Raise RecipeError when nothing matches `target_modules`, or `r` exceeds a target's smaller side."""
        lora_modules.check(self, target_modules, r)


def read_shape(model: str | Mapping, num_layers: int | None = None, task: str | None = None) -> Shape:
    """The shape of `model`: a name of the catalogue, a hub id, a path to a `config.json` or its folder, or its content.

    Args:
        num_layers: a depth other than the model's own; an encoder–decoder gets that depth on both sides.
        task: which head; None takes the one that the configuration names, else the usual one.
    Raises:
        RecipeError: no such model or file, a size is missing or impossible, or the model has no such head.
    """
    if isinstance(model, Mapping):
        text = json.dumps(model, default=str)
        name = model.get("_name_or_path") or model.get("model_type") or "config"
        return _shape(str(name), None, text, num_layers, task)
    entry = find(model)
    if entry:
        return _shape(entry.name, entry.hub_id, entry.config, num_layers, task)
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        hint = f"did you mean {closest(model)!r}? " if closest(model) else ""
        rest = "vramlab.model_names() lists the names, and the path of any config.json works too"
        raise RecipeError("model", model, f"no model and no readable file is called so; {hint}{rest}") from None
    folder, file_name = os.path.split(os.path.abspath(path))
    name = os.path.basename(folder) if file_name == "config.json" else file_name.removesuffix(".json")
    return _shape(name, None, text, num_layers, task)


@lru_cache(maxsize=512)
def _shape(name: str, hub_id: str | None, text: str, num_layers: int | None, task: str | None) -> Shape:
    config = _parse(name, text)
    if num_layers is not None:
        _cut(config, num_layers)
    family = family_of(name, config)
    task = _task(name, family, config, task)
    config["architectures"] = [family.classes[task]]
    sizes = {size: _size(name, config, size, family) for size in SIZES}
    _fill(config, sizes, family)
    others = {key: _first(config, names, family.defaults.get(key)) for key, names in OTHERS.items()}
    others["embedding_dropout"] = _embedding_dropout(config, others)
    may_tie = task in ("causal-lm", "masked-lm", "seq2seq-lm")
    shape = Shape(
        name=name,
        family=config["model_type"],
        task=task,
        hub_id=hub_id,
        config_json=json.dumps(config),
        head=family.head(task),
        **sizes,
        num_labels=len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2,
        tied=may_tie and (family.always_tied or bool(config.get("tie_word_embeddings", family.tied))),
        gated_mlp=family.gated or str(config.get("feed_forward_proj", "")).startswith("gated"),
        activation=_activation(config, others.pop("activation")),
        norm=family.norm,
        rotary_dim=_rotary_dim(config, family, sizes["head_dim"]),
        **{key: float(value or 0) for key, value in others.items()},
        image_tokens=sizes["max_positions"] if task == "image-classification" else 0,
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )
    return shape if shape.family in FAMILIES else _look_up(shape)


def _look_up(shape: Shape) -> Shape:
    """`shape`, with what no configuration says taken from the model itself."""
    from .meta import describe

    return dataclasses.replace(shape, **describe(shape))


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise RecipeError("model", name, f"its configuration is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise RecipeError("model", name, "its configuration must say a 'model_type', as every config.json does")
    if isinstance(config.get("text_config"), dict) and "hidden_size" not in config:
        raise RecipeError("model", name, "it reads more than text: give its 'text_config' for the language part")
    return config


def _cut(config: dict[str, Any], num_layers: int) -> None:
    """Set the depth of `config`, in every place that holds it."""
    for key in (*SIZES["num_layers"], *SIZES["num_decoder_layers"]):
        if config.get(key) is not None:
            config[key] = num_layers
    kinds = config.get("layer_types")
    if kinds:
        config["layer_types"] = [kinds[i % len(kinds)] for i in range(num_layers)]


def _task(name: str, family: Family, config: dict[str, Any], task: str | None) -> str:
    if task is None:
        named = (config.get("architectures") or [None])[0]
        return next((t for t, class_name in family.classes.items() if class_name == named), family.tasks[0])
    if task not in family.tasks:
        raise RecipeError("task", task, f"{name} can be trained for " + " or ".join(map(repr, family.tasks)))
    return task


def _first(config: dict[str, Any], keys: tuple[str, ...], default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _size(name: str, config: dict[str, Any], size: str, family: Family) -> int | None:
    """One size of `config`, None when it may be absent and is."""
    key = next((key for key in SIZES[size] if config.get(key) is not None), SIZES[size][0])
    value = config.get(key)
    if value is None or (size == "sliding_window" and not value):
        if size in REQUIRED or (size == "vocab_size" and "image-classification" not in family.tasks):
            raise RecipeError(f"model.{key}", None, f"the configuration of {name} must say it")
        return None if key in config and size == "sliding_window" else family.defaults.get(size)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"model.{key}", value, "it must be a whole number of at least 1")
    return value


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


def _embedding_dropout(config: dict[str, Any], others: dict[str, Any]) -> float | None:
    """Dropout after the embedding: a probability of its own, or the one of the blocks in families that reuse it."""
    own = others["embedding_dropout"]
    reuses = config["model_type"] in ("bert", "t5", "vit", "gpt_neox")
    return others["hidden_dropout"] if reuses else own


def _rotary_dim(config: dict[str, Any], family: Family, head_dim: int) -> int:
    """Channels of each head that are rotated, under the names that configurations of all ages use."""
    if not family.rotary:
        return 0
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return int(head_dim * (family.rotary if share is None else share))
