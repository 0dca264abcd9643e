"""The shapes of models: sizes, heads, layers and every tensor, without torch.

They follow from a published configuration.
"""

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..base.data import data_path
from ..base.errors import FileError, RecipeError, needing
from ..base.files import read_text
from . import configuration, denoisers, hub_names, lora_modules
from .configuration import plain
from .families import TASKS, Layout
from .from_transformers import describe
from .weights import ModelWeights, Weight

__all__ = ["Shape", "Weight", "catalogue", "model_names", "read_shape"]


@dataclass(frozen=True, eq=False)
class Shape(ModelWeights):
    """The sizes of one model with one head, and what follows from them."""

    @property
    def known_layout(self) -> Layout:
        """The layout, of a shape that the formulas know."""
        assert self.layout is not None, f"{self.family} has no layout"
        return self.layout

    @property
    def shares_keys(self) -> bool:
        """Whether query heads share keys that a known family hands to the kernel as they are."""
        reader = configuration.READERS.get(self.family, {})
        is_grouped = self.layout.grouped_keys if self.layout else reader.get("shares_keys")
        return bool(is_grouped and self.num_kv_heads < self.num_heads)

    def too_few_positions(self, length: int) -> str:
        """Return that a sample of `length` tokens has no positions, and how it may have them."""
        longest = self.max_positions
        rest = f"{self.name} has {longest} positions"
        # Tables of learned positions have a row for each.
        if not (self.rotary_dim and longest):
            return rest
        return (
            f"{rest}: for more, give a copy of its config.json as MODEL, with "
            f"max_position_embeddings {length} and rope_parameters that stretch it, such as "
            f"rope_type yarn with factor {math.ceil(length / longest)}"
        )

    @property
    def stores_tied_head(self) -> bool:
        """Whether the published checkpoint has the head's matrix too, though it is tied."""
        entry = catalogue().get(self.name, {})
        is_published = self.hub_id is not None and entry.get("task") == self.task
        return is_published and "stored_parameters" in entry

    def lora_targets(
        self,
        target_modules: lora_modules.Targets | None = None,
    ) -> list[lora_modules.Module]:
        """Return what PEFT would adapt, as (module name, inputs, outputs).

        See `vramlab.recipe.lora_modules.find`.
        """
        return lora_modules.find(self, target_modules)


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return the published models by name, families together, small ones first.

    Their configurations are JSON text. `parameters` counts shared ones once, `stored_parameters` a
    tied head that the published file has too; `aliases` are hub ids of the same shape, such as the
    instruction-tuned variant; `source` says where the facts are from.
    """
    paths = data_path("models").glob("*.json")
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    entries.sort(key=lambda entry: (entry["config"]["model_type"], entry["parameters"]))
    by_name = {}
    for entry in entries:
        by_name[entry["name"]] = entry | {"config": json.dumps(entry["config"])}
    return by_name


def model_names() -> list[str]:
    """Return the names of the catalogue, families together, small models first."""
    return list(catalogue())


@cache
def _spellings() -> dict[str, dict[str, Any]]:
    """Return every spelling that finds an entry, in lower case.

    That is the name, the hub id and aliases, with and without organisation.
    """
    entries = {}
    for entry in catalogue().values():
        for spelling in (*entry.get("aliases", ()), entry["hub_id"], entry["name"]):
            lower = spelling.lower()
            entries[lower] = entry
            entries[lower.rpartition("/")[2]] = entry
    return entries


def read_shape(
    model: str | Mapping,
    num_layers: int | None = None,
    task: str | None = None,
    num_labels: int | None = None,
) -> Shape:
    """Return the shape of `model`.

    That is a name, a hub id, a path to a `config.json` or its folder, or its content.

    Args:
        num_layers: a depth other than the model's own; an encoder–decoder gets that depth on both
            sides.
        task: which head; None takes the one that the configuration names, else the usual one.
        num_labels: of a classifier, other than the configuration's.
    Raises:
        RecipeError: no such model or file, a size is missing or impossible, or the model has no
            such head.
    """
    if isinstance(model, Mapping):
        config = plain(model)
        denoisers.refuse_as_recipe("", config)
        name = str(config.get("_name_or_path") or config.get("model_type") or "config")
        return _shape(name, None, json.dumps(config), num_layers, task, num_labels)
    if not isinstance(model, str):
        rest = (
            "it must be a name, a path to a config.json or a configuration, such as a model's "
            "own `config`; a module goes to simulate(model=...)"
        )
        raise RecipeError("model", model, rest)
    # A catalogued name counts before a file or folder of that name.
    entry = _spellings().get(model.lower())
    if entry:
        hub_id = _spelled_like(model, entry)
        return _shape(entry["name"], hub_id, entry["config"], num_layers, task, num_labels)
    path = Path(model)
    if not os.path.exists(model):  # False too where a name is too long for a file's
        elsewhere = _named_elsewhere(model, num_layers, task, num_labels)
        if elsewhere:
            return elsewhere
    elif path.suffix.lower() in (".yaml", ".yml"):
        rest = (
            "the command line reads the YAML of axolotl, LLaMA-Factory and TRL; a recipe takes the "
            "model that stands in it, and its settings as fields"
        )
        raise RecipeError("model", model, rest)
    path, text = _read_file(model)
    denoisers.refuse_as_recipe(model, configuration.read_json("model", text, model))
    is_usual = path.name == "config.json"
    name = path.resolve().parent.name if is_usual else path.name.removesuffix(".json")
    return _shape(name, None, text, num_layers, task, num_labels)


def _spelled_like(model: str, entry: Mapping[str, Any]) -> str | None:
    """Return the hub's name of a catalogued model that `model` spells: an alias or its own."""
    stem = model.lower().rpartition("/")[2]
    for alias in entry.get("aliases", ()):
        if alias.lower().rpartition("/")[2] == stem:
            return alias
    return entry["hub_id"]


def _named_elsewhere(model: str, *said: Any) -> Shape | None:
    """Return the shape of a hub's name that is none of the catalogue's; None for others.

    It shares an entry's architecture, or its config.json is in the hub's local cache.
    """
    first = next(hub_names.stems(model))
    is_listed = first in hub_names.KNOWN["names"]
    # A listed name is known to share an architecture. For any other its own configuration, if it
    # is here, is surer than a likeness of names.
    cached = None if is_listed else hub_names.cached_config(model)
    if cached:
        name = model.rpartition("/")[2]
        shape = _shape(name, model, read_text(cached), *said)
        words = f"{model}: its config.json in the hub's local cache"
        return dataclasses.replace(shape, shares=words)
    shared = hub_names.shared_entry(model, _spellings())
    if shared is None:
        return None
    entry, differs = shared
    config = entry["config"]
    if differs:
        config = json.dumps(json.loads(config) | differs)
    shape = _shape(entry["name"], hub_names.published_name(model, entry), config, *said)
    words = f"{model} has the architecture of {entry['name']}"
    if differs:
        words += ", but " + ", ".join(f"{key} {value}" for key, value in differs.items())
    if model.lower().endswith("-4bit"):
        words += (
            "; its weights are stored in 4 bits: with --quantization nf4 and --lora-r 16 they "
            "are counted so"
        )
    return dataclasses.replace(shape, shares=words)


def _read_file(model: str) -> tuple[Path, str]:
    """Return the path of a configuration and its text. Raises RecipeError."""
    path = Path(model)
    try:
        if path.is_dir() or path.name == denoisers.INDEX:
            path = denoisers.config_file(model) or path / "config.json"
        return path, read_text(path)
    except FileError as error:
        reason = str(error).rstrip(".")
        rest = f"{reason}: it must be a name, or the path of a config.json"
        raise RecipeError("model", model, rest) from None
    except (OSError, ValueError):  # no such file, or a zero byte in a name
        for name, record in denoisers.MODELS.items():
            if model.lower() in (name, record["published"].lower()):
                rest = f"it makes images: vramlab diffusion {name} simulates its training"
                raise RecipeError("model", model, rest) from None
        last_part = model.lower().rpartition("/")[2]
        near = difflib.get_close_matches(last_part, _spellings(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        rest = (
            f"no model and no readable file is called so; {hint}`vramlab models` lists the "
            "names, the path of any config.json works too, and --download reads it from the "
            "hub (organisation/model)"
        )
        raise RecipeError("model", model, rest) from None


def _shown(name: str) -> str:
    """Return `name`, which anybody may have written, without what a terminal does not print."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)


@lru_cache(maxsize=512)
def _shape(name: str, *said: Any) -> Shape:
    try:
        return _described(_shown(name), *said)
    except RecipeError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        # a value of another kind than its key's
        rest = f"its configuration cannot be read: {configuration.reason(error)}"
        raise RecipeError("model", name, rest) from error


def _described(
    name: str,
    hub_id: str | None,
    text: str,
    num_layers: int | None,
    task: str | None,
    num_labels: int | None,
) -> Shape:
    config = configuration.parse(name, text)
    # transformers counts the labels by these two (`PretrainedConfig.num_labels`).
    if num_labels:
        config.pop("id2label", None)
        config.pop("label2id", None)
        config["num_labels"] = num_labels
    if config["model_type"] in configuration.READERS:
        config = configuration.with_parts(name, config)
    if num_layers is not None:
        configuration.keep_layers(config.get("text_config") or config, num_layers)
    family = configuration.family_of(name, config)
    if task is None:
        task = _named_task(family.classes, config)
    elif task not in family.classes:
        known = " or ".join(map(repr, family.classes))
        raise RecipeError("task", task, f"{name} can be trained for {known}")
    config["architectures"] = [family.classes[task]]
    language = configuration.of_language(config)
    fields = configuration.read(name, language, family, task)
    head = family.heads.get(task, TASKS[task].head)
    shape = Shape(name, config["model_type"], task, hub_id, json.dumps(config), head, **fields)
    if family.layout_options is None:
        with needing(name):
            return dataclasses.replace(shape, **describe(shape))
    empty = [weight.name for weight in shape.weights() if not weight.size]
    if empty:
        rest = f"a size that its configuration sets to 0 or null would empty {empty[0]}"
        raise RecipeError("model", name, rest)
    return shape


def _named_task(classes: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Return the task whose class a configuration names, else the usual one, which is first."""
    named, *_ = config.get("architectures") or [None]
    for task, class_name in classes.items():
        if class_name == named:
            return task
    return next(iter(classes))
