"""The shapes of models: sizes, heads, layers and every tensor, from a published configuration, without torch.

Names, shapes and order of parameters follow from the architecture's layout (`families.py`); the tests hold every list
against the model of `transformers` 5.23 on the meta device. What no layout covers is read off that model.
"""

import dataclasses
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ..report.data import data_path
from ..report.errors import FileError, RecipeError, needing
from ..report.files import read_text
from . import configuration, hub_names, lora_modules
from .configuration import plain
from .families import TASKS, Layout, layout_of
from .from_transformers import describe, read_off


@dataclass(frozen=True)
class Weight:
    """One parameter tensor.

    Kinds: "linear" (out × in), "conv1d" (GPT-2's in × out), "embedding" (a shared output head is one too), "norm", "bias",
    "conv", "expert" (experts × out × in) and "other".
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int | None = None  # its block

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


# Kind and sizes of what plays a role in a layer. A cross-attention's roles begin with "cross_"; "position" is in a
# stack's first layer only.
ROLES = json.loads(data_path("layer_roles.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Shape:
    """The sizes of one model with one head, as its configuration gives them, all counts; and what follows from them."""

    name: str  # short, for people
    family: str  # the configuration's `model_type`
    task: str  # which head is trained
    hub_id: str | None  # where the published weights are; None outside the catalogue
    config_json: str = field(repr=False)  # the configuration, at this depth and for this head
    head: str  # module name of the head
    num_layers: int  # blocks, of the encoder where there is a decoder too
    num_decoder_layers: int  # 0 unless the model is an encoder–decoder
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # heads of keys and values, which groups of query heads share
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None  # the longest sequence; None if the architecture sets no limit
    num_labels: int  # classes of a classification head
    tied: bool  # one matrix serves as embedding and output head
    activation: str
    norm: str  # "layernorm" or "rmsnorm"; either "in fp32" casts back after its weight
    rotary_dim: int  # channels of a head that are rotated; 0 without rotary positions
    sliding_window: int | None  # how far back a token sees (Gemma 2: in every second layer)
    hidden_dropout: float  # probabilities while training
    attention_dropout: float
    embedding_dropout: float
    num_experts: int
    experts_per_token: int
    image_tokens: int  # patches of an image and the class token; 0 for text
    attention: str  # the kernel that transformers takes by itself: "eager" for an architecture without sdpa
    shares: str = field(default="", compare=False)  # where the architecture was taken from, if not from that name

    def __hash__(self) -> int:
        return hash(self.config_json)  # a text's hash is kept, that of thirty fields is not

    @property
    def features(self) -> tuple[str, tuple[int, ...]] | None:
        """Name and sizes of what one sample is to a model that sees or hears; None where it is tokens."""
        said = self.settings
        if self.task == "speech-seq2seq":  # a convolution halves the frames
            return "input_features", (said["num_mel_bins"], 2 * said["max_source_positions"])
        sides = 2 * (said.get("image_size", 224),)
        return ("pixel_values", (said.get("num_channels", 3), *sides)) if self.image_tokens else None

    @property
    def config(self) -> dict[str, Any]:
        """What `transformers.AutoConfig.for_model(**config)` takes: a fresh copy, for transformers writes into it."""
        return json.loads(self.config_json)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """`config`, parsed once; not to be written to."""
        return self.config

    @cached_property
    def layout(self) -> Layout | None:
        """The modules by the roles they play; None for a family, or a variant of one, that is not written down."""
        return layout_of(self, self.settings)

    @lru_cache(maxsize=512)  # noqa: B019 — shapes are kept anyway
    def weights(self) -> tuple[Weight, ...]:
        """Return every parameter tensor, named and ordered as transformers' `named_parameters()`; shared ones once."""
        if self.layout is None:
            return tuple(Weight(*row) for row in read_off(self)[0])
        found, sizes = [], _letter_sizes(self)
        for item in self.layout.items:
            if isinstance(item, str):
                for name, kind, *letters in filter(None, map(str.split, item.split(";"))):
                    found += (Weight(*row) for row in _tensors(self, sizes, name, kind, letters))
                continue
            rows = []
            for role, name in item.parts.items():
                kind, letters = ROLES[role]
                letters = item.sizes.get(role, letters).replace(".", " ")
                if kind == "linear":
                    kind = self.layout.linear + ("+" if role in self.layout.biased else "")
                rows += _tensors(self, sizes, name, kind, letters.split())
            for i in range(item.first, item.first + item.count):
                found += (Weight(f"{item.prefix}.{i}.{name}", shape, kind, i) for name, shape, kind in rows)
        return tuple(found)

    @lru_cache(maxsize=512)  # noqa: B019
    def buffers(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return every buffer as (name, shape, dtype), whether or not it is saved with the weights.

        Gemma's `embed_scale` follows the weights' dtype; fp32 is given.
        """
        if self.layout is None:
            return read_off(self)[1]
        rows = [(name, (1, self.max_positions), "int64") for name in self.layout.buffers]
        if self.layout.scaled_embedding is True:
            rows.append((f"{self.layout.modules[0][0]}.embed_scale", (), "float32"))
        for stack in self.layout.stacks if self.layout.sigmoid_router else ():
            numbers = range(stack.first, stack.first + stack.count if "router" in stack.parts else 0)
            rows += [
                (f"{stack.prefix}.{i}.mlp.gate.e_score_correction_bias", (self.num_experts,), "float32")
                for i in numbers
            ]
        if self.rotary_dim:
            module = self.layout.stacks[0].prefix.rpartition(".")[0] + ".rotary_emb"
            # one frequency per pair of channels, and a second copy that transformers keeps to undo dynamic scaling
            kinds = [f"{kind}_" for kind in sorted(set(self.layout.kinds))] if self.layout.kinds_tables else [""]
            names = (f"{module}.{kind}{name}" for kind in kinds for name in ("inv_freq", "original_inv_freq"))
            rows += [(name, ((self.rotary_dim + 1) // 2,), "float32") for name in names]
        return tuple(rows)

    @cached_property
    def num_parameters(self) -> int:
        """How many parameters the model has, shared ones once."""
        return sum(weight.size for weight in self.weights())

    @property
    def shares_keys(self) -> bool:
        """Whether query heads share keys that a known family hands to the kernel as they are."""
        return bool(self.layout and self.layout.grouped_keys and self.num_kv_heads < self.num_heads)

    @property
    def stores_tied_head(self) -> bool:
        """Whether the published checkpoint has the head's matrix too, though it is the embedding's."""
        entry = catalogue().get(self.name, {})
        same = self.hub_id is not None and entry.get("task") == self.task
        return same and "stored_parameters" in entry

    def lora_targets(self, target_modules: lora_modules.Targets = None) -> list[lora_modules.Module]:
        """Return what PEFT would adapt, as (module name, inputs, outputs); see `vramlab.recipe.lora_modules.find`."""
        return lora_modules.find(self, target_modules)


def _letter_sizes(s: Shape) -> dict[str, int]:
    """Return the sizes that a layout's letters mean.

    h hidden, m feed-forward, q and k all heads, d one head, a heads, V vocabulary, P positions,
    T token types, L labels, E experts, e and s the width of one and of the shared ones, I image tokens,
    C channels, p a side of a patch; ql, qb, kl, kva, kvb and vo compressed queries, keys and values, and what these become.
    """
    c, h, q, k = s.config, s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    expert = c.get("moe_intermediate_size") or s.intermediate_size
    rope, nope, values = (c.get(key) or 0 for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    compressed = c.get("kv_lora_rank") or 0
    found = {"1": 1, "2e": 2 * expert, "2m": 2 * s.intermediate_size, "P+2": (s.max_positions or 0) + 2}
    found |= dict(e=expert, s=expert * (c.get("n_shared_experts") or 0), ql=c.get("q_lora_rank"), kl=compressed)
    found |= dict(qb=s.num_heads * (nope + rope), kva=compressed + rope, kvb=s.num_heads * (nope + values))
    found |= dict(h=h, m=s.intermediate_size, q=q, k=k, qkv=q + 2 * k, d=s.head_dim)
    found |= dict(
        a=s.num_heads, V=max(s.vocab_size, 1), P=s.max_positions, T=c.get("type_vocab_size", 2), L=s.num_labels
    )
    found |= dict(E=s.num_experts, I=s.image_tokens, p=c.get("patch_size", 16), C=c.get("num_channels", 3))
    return found | dict(vo=s.num_heads * values)


def _tensors(s: Shape, sizes: dict[str, int], name: str, kind: str, letters: list[str]) -> Iterator[tuple]:
    """Return (name, shape, kind) of a module's tensors; kinds that are no module are the tensor itself."""
    shape, bias = tuple(sizes[letter] for letter in letters), kind.endswith("+")
    kind = kind.removesuffix("+")
    if kind not in ("linear", "conv1d", "embedding", "norm"):
        yield name, shape, kind
        return
    yield f"{name}.weight", shape[::-1] if kind == "conv1d" else shape, kind  # Conv1D is stored transposed
    if bias or (kind == "norm" and s.norm == "layernorm"):
        yield f"{name}.bias", shape[:1], "norm" if kind == "norm" else "bias"


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return the published models by name, families together, small ones first; their configurations as JSON text.

    `parameters` counts shared ones once, `stored_parameters` a tied head that the published file has too; `aliases` are hub
    ids of the same shape, such as the instruction-tuned variant; `source` says where the facts are from.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in data_path("models").glob("*.json")]
    found.sort(key=lambda entry: (entry["config"]["model_type"], entry["parameters"]))
    return {entry["name"]: entry | {"config": json.dumps(entry["config"])} for entry in found}


def model_names() -> list[str]:
    """Return the names of the catalogue, families together, small models first."""
    return list(catalogue())


@cache
def _spellings() -> dict[str, dict[str, Any]]:
    """Return every spelling that finds an entry, in lower case: name, hub id and aliases, with and without organisation."""
    found = {}
    for entry in catalogue().values():
        for spelling in (*entry.get("aliases", ()), entry["hub_id"], entry["name"]):
            found[spelling.lower()] = found[spelling.lower().rpartition("/")[2]] = entry
    return found


def read_shape(
    model: str | Mapping, num_layers: int | None = None, task: str | None = None, num_labels: int | None = None
) -> Shape:
    """Return the shape of `model`: a name, a hub id, a path to a `config.json` or its folder, or its content.

    Args:
        num_layers: a depth other than the model's own; an encoder–decoder gets that depth on both sides.
        task: which head; None takes the one that the configuration names, else the usual one.
        num_labels: of a classifier, other than the configuration's.
    Raises:
        RecipeError: no such model or file, a size is missing or impossible, or the model has no such head.
    """
    if isinstance(model, Mapping):
        model = plain(model)
        name = str(model.get("_name_or_path") or model.get("model_type") or "config")
        return _shape(name, None, json.dumps(model), num_layers, task, num_labels)
    if not isinstance(model, str):
        rest = "it must be a name, a path to a config.json or a configuration, such as a model's own `config`; "
        rest += "a module goes to simulate(model=...)"
        raise RecipeError("model", model, rest)
    if entry := _spellings().get(model.lower()):
        stem = model.lower().rpartition("/")[2]
        others = [alias for alias in entry.get("aliases", ()) if alias.lower().rpartition("/")[2] == stem]
        hub_id = (others or [entry["hub_id"]])[0]
        return _shape(entry["name"], hub_id, entry["config"], num_layers, task, num_labels)
    path = Path(model)
    if not os.path.exists(model):  # Path.exists raises for a name that is too long
        if found := _named_elsewhere(model, num_layers, task, num_labels):
            return found
    elif path.suffix.lower() in (".yaml", ".yml"):
        rest = "a YAML holds the settings of axolotl, LLaMA-Factory or accelerate: give the model that it names "
        rest += "(base_model, model_name_or_path) and its settings as options, or run the trainer itself: "
        rest += "vramlab run --gpu CARD -- axolotl train FILE"
        raise RecipeError("model", model, rest)
    try:
        path = path / "config.json" if path.is_dir() else path
        text = read_text(path)
    except FileError as error:
        rest = f"{str(error).rstrip('.')}: it must be a name, or the path of a config.json"
        raise RecipeError("model", model, rest) from None
    except (OSError, ValueError):  # no such file, or a zero byte in a name
        near = difflib.get_close_matches(model.lower().rpartition("/")[2], _spellings(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        rest = "`vramlab models` lists the names, the path of any config.json works too, and --download reads it "
        rest += "from the hub (organisation/model)"
        raise RecipeError("model", model, f"no model and no readable file is called so; {hint}{rest}") from None
    name = path.resolve().parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    return _shape(name, None, text, num_layers, task, num_labels)


def _named_elsewhere(model: str, *said: Any) -> Shape | None:
    """Return the shape of a hub's name that is none of the catalogue's: one that shares an entry's architecture, or whose
    config.json is in the hub's local cache. None for others."""
    table = _spellings()
    exact = hub_names.KNOWN["names"].get(next(hub_names.stems(model)))
    cached = None if exact else hub_names.cached_config(model)
    if cached:
        name = model.rpartition("/")[2]
        shape = _shape(name, model, read_text(cached), *said)
        return dataclasses.replace(shape, shares=f"{model}: its config.json in the hub's local cache")
    shared = hub_names.shared_entry(model, table)
    if shared is None:
        return None
    entry, differs = shared
    config = entry["config"]
    if differs:
        config = json.dumps(json.loads(config) | differs)
    shape = _shape(entry["name"], hub_names.published_name(model, entry), config, *said)
    other = ", ".join(f"{key} {value}" for key, value in differs.items())
    words = f"{model} has the architecture of {entry['name']}" + (f", but {other}" if other else "")
    return dataclasses.replace(shape, shares=words)


def _shown(name: str) -> str:
    """Return `name`, which anybody may have written, without what a terminal takes for an order or cannot print."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)


@lru_cache(maxsize=512)
def _shape(name: str, *said: Any) -> Shape:
    try:
        return _described(_shown(name), *said)
    except RecipeError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # a value of another kind than its key's
        rest = f"its configuration cannot be read: {configuration.reason(error)}"
        raise RecipeError("model", name, rest) from error


def _described(
    name: str, hub_id: str | None, text: str, num_layers: int | None, task: str | None, num_labels: int | None
) -> Shape:
    config = configuration.parse(name, text)
    if num_labels:
        config = {k: v for k, v in config.items() if k not in ("id2label", "label2id")} | {"num_labels": num_labels}
    if num_layers is not None:
        configuration.keep_layers(config, num_layers)
    family = configuration.family_of(name, config)
    if task is None:
        (usual, *_), (named, *_) = family.classes, config.get("architectures") or [None]
        task = next((task for task, class_name in family.classes.items() if class_name == named), usual)
    elif task not in family.classes:
        raise RecipeError("task", task, f"{name} can be trained for " + " or ".join(map(repr, family.classes)))
    config["architectures"] = [family.classes[task]]
    fields = configuration.read(name, config, family, task)
    shape = Shape(
        name, config["model_type"], task, hub_id, json.dumps(config), family.heads.get(task, TASKS[task].head), **fields
    )
    if family.layout_options is not None:
        if empty := [weight.name for weight in shape.weights() if not weight.size]:
            raise RecipeError("model", name, f"a size that its configuration sets to 0 or null would empty {empty[0]}")
        return shape
    with needing(name):
        return dataclasses.replace(shape, **describe(shape))
