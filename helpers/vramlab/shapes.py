"""The shapes of models: sizes, heads and layers read from a published configuration, without torch or transformers."""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from . import lora_modules
from .data import data_path
from .errors import RecipeError
from .weights import Weight, list_buffers, list_weights

# Configurations name the same size differently; the first name found counts.
SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "num_decoder_layers": ("num_decoder_layers",),
    "num_experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
CLASS_SUFFIX = {
    "causal-lm": "ForCausalLM",
    "masked-lm": "ForMaskedLM",
    "sequence-classification": "ForSequenceClassification",
    "seq2seq-lm": "ForConditionalGeneration",
    "image-classification": "ForImageClassification",
}
DECODER = ("causal-lm", "sequence-classification")


@dataclass(frozen=True)
class Family:
    """What a configuration of this `model_type` leaves unsaid: the class defaults of transformers' `configuration_*.py`.

    Attributes:
        prefix: of the model classes: "GPT2" of `GPT2LMHeadModel`.
        tasks: heads that can be trained, the usual one first.
        tied: the default of `tie_word_embeddings`.
        norm: "layernorm" or "rmsnorm".
        rotary: the default share of a head that is rotated; 0 for learned or relative positions.
    """

    prefix: str
    tasks: tuple[str, ...] = DECODER
    tied: bool = False
    norm: str = "layernorm"
    rotary: float = 0.0
    gated: bool = False
    activation: str = "gelu"
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _llama_like(prefix: str, **more) -> Family:
    return Family(prefix, **{"norm": "rmsnorm", "rotary": 1.0, "gated": True, "activation": "silu", **more})


_GEMMA = {"tied": True, "activation": "gelu_pytorch_tanh", "defaults": {"head_dim": 256}}
FAMILIES = {
    "gpt2": Family("GPT2", tied=True, activation="gelu_new"),
    "gpt_neox": Family("GPTNeoX", rotary=0.25),
    "llama": _llama_like("Llama"),
    "mistral": _llama_like("Mistral", defaults={"num_kv_heads": 8, "sliding_window": 4096}),
    "mixtral": _llama_like("Mixtral", defaults={"num_kv_heads": 8, "num_experts": 8, "experts_per_token": 2}),
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3", defaults={"head_dim": 128}),
    "gemma": _llama_like("Gemma", **_GEMMA),
    "gemma2": _llama_like("Gemma2", **_GEMMA),
    "bert": Family("Bert", tasks=("sequence-classification", "masked-lm"), tied=True),
}
OUTPUT_HEAD = {
    "causal-lm": "lm_head",
    "seq2seq-lm": "lm_head",
    "masked-lm": "cls.predictions.decoder",
    "sequence-classification": "score",
    "image-classification": "classifier",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of one model with one head. All are counts; `config` is what `AutoConfig.for_model(**config)` takes.

    Attributes:
        family: the configuration's `model_type`.
        head: the module name of the output head.
        num_layers: blocks, of the encoder where there is a decoder too.
        num_decoder_layers: 0 unless the model is an encoder–decoder.
        max_positions: the longest sequence, None if the architecture sets no limit.
        tied: one matrix serves as embedding and output head.
        gated_mlp: the feed-forward part has a gate beside its up-projection.
        image_tokens: patches of an image and the class token; 0 for text.
        rotary_dim: channels of a head that are rotated; 0 without rotary positions.
        dtype: the format in which the weights were published, None if unknown.
    """

    name: str
    family: str
    task: str
    hub_id: str | None
    config: dict[str, Any] = field(repr=False, hash=False)
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
    num_experts: int = 0
    experts_per_token: int = 0
    image_tokens: int = 0
    dtype: str | None = None

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
        self, target_modules: lora_modules.Targets = None, modules_to_save=None
    ) -> list[lora_modules.Module]:
        """What PEFT would adapt, as (module name, inputs, outputs); see `vramlab.lora_modules.find`."""
        return lora_modules.find(self, target_modules, modules_to_save)

    def check_lora(self, target_modules: lora_modules.Targets, r: int) -> None:
        """Raise RecipeError when nothing matches `target_modules`, or `r` exceeds a target's smaller side."""
        lora_modules.check(self, target_modules, r)


@dataclass(frozen=True)
class Entry:
    """One file of the catalogue: published facts of one model."""

    name: str
    hub_id: str
    task: str
    parameters: int
    source: str
    config: str
    aliases: tuple[str, ...]


@lru_cache(maxsize=1)
def catalogue() -> dict[str, Entry]:
    """The published models by name, families together, small ones first."""
    entries = []
    for path in data_path("models").glob("*.json"):
        d = json.loads(path.read_text(encoding="utf-8"))
        config, aliases = json.dumps(d["config"]), tuple(d.get("aliases", ()))
        entries.append(Entry(d["name"], d["hub_id"], d["task"], d["parameters"], d["source"], config, aliases))
    entries.sort(key=lambda entry: (json.loads(entry.config)["model_type"], entry.parameters))
    return {entry.name: entry for entry in entries}


def model_names() -> list[str]:
    """The names of the catalogue, families together, small models first."""
    return list(catalogue())


@lru_cache(maxsize=1)
def _names() -> dict[str, Entry]:
    """Every spelling that finds an entry, in lower case: name, hub id and alias, with and without organisation."""
    found = {}
    for entry in catalogue().values():
        for spelling in (*entry.aliases, entry.hub_id, entry.name):
            found[spelling.lower()] = found[spelling.lower().rpartition("/")[2]] = entry
    return found


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
        return _shape(
            str(model.get("_name_or_path") or model.get("model_type") or "model"), None, text, num_layers, task
        )
    entry = _names().get(model.lower())
    if entry:
        return _shape(entry.name, entry.hub_id, entry.config, num_layers, task)
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    if not os.path.isfile(path):
        close = difflib.get_close_matches(model.lower(), _names(), n=1) or difflib.get_close_matches(
            model.lower().rpartition("/")[2], _names(), n=1
        )
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise RecipeError(
            "model",
            model,
            f"the catalogue has no such name and there is no such file; {hint}vramlab.model_names() lists the names, and the path of any config.json works too",
        )
    with open(path, encoding="utf-8") as file:
        text = file.read()
    name = (
        os.path.basename(os.path.dirname(os.path.abspath(path)))
        if path.endswith("config.json")
        else os.path.basename(path)
    )
    return _shape(name, None, text, num_layers, task)


@lru_cache(maxsize=512)
def _shape(name: str, hub_id: str | None, text: str, num_layers: int | None, task: str | None) -> Shape:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise RecipeError("model", name, f"its configuration is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise RecipeError(
            "model", name, "a configuration needs a 'model_type', as every config.json of transformers has"
        )
    family_name = config["model_type"]
    family = FAMILIES[family_name]
    if num_layers is not None:
        _cut(config, num_layers)
    task = _task(name, family, config, task)
    config["architectures"] = [architecture(family_name, family, task)]
    sizes = {size: _size(name, config, size, family) for size in SIZES}
    h, heads = sizes["hidden_size"], sizes["num_heads"]
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or heads
    if heads % sizes["num_kv_heads"]:
        raise RecipeError("model.num_key_value_heads", sizes["num_kv_heads"], f"it must divide the {heads} heads")
    if not sizes["head_dim"]:
        if h % heads:
            raise RecipeError("model.hidden_size", h, f"it must be a multiple of the {heads} heads")
        sizes["head_dim"] = h // heads
    sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * h
    tied = bool(config.get("tie_word_embeddings", family.tied)) and task in ("causal-lm", "masked-lm", "seq2seq-lm")
    head = "classifier" if family_name == "bert" and task == "sequence-classification" else OUTPUT_HEAD[task]
    return Shape(
        name=name,
        family=family_name,
        task=task,
        hub_id=hub_id,
        config=config,
        head=head,
        **{key: value or 0 for key, value in sizes.items() if key != "max_positions"},
        max_positions=sizes["max_positions"],
        num_labels=_labels(config),
        tied=tied,
        gated_mlp=family.gated,
        activation=next(
            (config[k] for k in ("hidden_activation", "hidden_act", "activation_function") if config.get(k)),
            family.activation,
        ),
        norm=family.norm,
        rotary_dim=int(sizes["head_dim"] * _rotated(config, family)),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def architecture(family_name: str, family: Family, task: str) -> str:
    """The name of the transformers class with that head."""
    if family_name == "gpt2" and task == "causal-lm":
        return "GPT2LMHeadModel"
    return family.prefix + CLASS_SUFFIX[task]


def _cut(config: dict[str, Any], num_layers: int) -> None:
    """Set the depth of `config`, in every place that holds it."""
    for key in (*SIZES["num_layers"], "num_decoder_layers"):
        if key in config:
            config[key] = num_layers
    kinds = config.get("layer_types")
    if kinds:
        config["layer_types"] = [kinds[i % len(kinds)] for i in range(num_layers)]


def _task(name: str, family: Family, config: dict[str, Any], task: str | None) -> str:
    if task is None:
        classes = config.get("architectures") or [""]
        return next((t for t in family.tasks if classes[0] == family.prefix + CLASS_SUFFIX[t]), family.tasks[0])
    if task not in family.tasks:
        raise RecipeError("task", task, f"{name} can be trained for " + " or ".join(map(repr, family.tasks)))
    return task


def _size(name: str, config: dict[str, Any], size: str, family: Family) -> int | None:
    """One size of `config`, None when it may be and is absent."""
    key = next((key for key in SIZES[size] if config.get(key) is not None), None)
    value = family.defaults.get(size) if key is None else config[key]
    if value is None:
        if size in ("hidden_size", "num_layers", "num_heads", "vocab_size"):
            raise RecipeError(f"model.{SIZES[size][0]}", None, f"the configuration of {name} must say it")
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"model.{key}", value, "it must be a whole number of at least 1")
    return value


def _labels(config: dict[str, Any]) -> int:
    """Classes of a classification head, as transformers counts them."""
    return len(config["id2label"]) if config.get("id2label") else config.get("num_labels") or 2


def _rotated(config: dict[str, Any], family: Family) -> float:
    """The share of each head that is rotated, under the names that configurations of all ages use."""
    if not family.rotary:
        return 0.0
    rope = config.get("rope_parameters") or {}
    for value in (rope.get("partial_rotary_factor"), config.get("partial_rotary_factor"), config.get("rotary_pct")):
        if value is not None:
            return value
    return family.rotary
