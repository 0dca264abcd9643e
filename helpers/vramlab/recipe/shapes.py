"""The shapes of models: sizes, heads and layers read from a published configuration, without torch or transformers."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..report.data import data_path
from ..report.errors import RecipeError
from . import configuration, lora_modules
from .configuration import plain
from .families import FAMILIES, TASKS, Layout
from .shape import ShapeData
from .weights import Weight, list_buffers, list_weights


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


class Shape(ShapeData):
    """A model's sizes, and what follows from them."""

    def weights(self) -> tuple[Weight, ...]:
        """Return every parameter tensor, named and ordered as transformers' `named_parameters()`; shared ones once."""
        return list_weights(self)

    def buffers(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return every buffer as (name, shape, dtype). Gemma's `embed_scale` follows the weights' dtype; fp32 is given."""
        return list_buffers(self)

    def __hash__(self) -> int:
        return hash(self.config_json)  # a text's hash is kept, that of thirty fields is not

    @cached_property
    def layout(self) -> Layout | None:
        """The modules by the roles they play; None for a family, or a variant of one, that is not written down."""
        return FAMILIES[self.family].layout(self, self.settings) if self.family in FAMILIES else None

    @cached_property
    def num_parameters(self) -> int:
        """How many parameters the model has, shared ones once."""
        return sum(weight.size for weight in self.weights())

    @property
    def stores_tied_head(self) -> bool:
        """Whether the published checkpoint has the head's matrix too, though it is the embedding's."""
        entry = catalogue().get(self.name, {})
        same = (entry.get("hub_id"), entry.get("task")) == (self.hub_id, self.task)
        return same and "stored_parameters" in entry

    def lora_targets(self, target_modules: lora_modules.Targets = None) -> list[lora_modules.Module]:
        """Return what PEFT would adapt, as (module name, inputs, outputs); see `vramlab.recipe.lora_modules.find`."""
        return lora_modules.find(self, target_modules)


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
        text = json.dumps(model)
        name = model.get("_name_or_path") or model.get("model_type") or "config"
        return _shape(str(name), None, text, num_layers, task, num_labels)
    if not isinstance(model, str):
        rest = "it must be a name, a path to a config.json or a configuration, such as a model's own `config`; "
        rest += "a module goes to simulate(model=...)"
        raise RecipeError("model", model, rest)
    if entry := _spellings().get(model.lower()):
        return _shape(entry["name"], entry["hub_id"], entry["config"], num_layers, task, num_labels)
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):  # no text, or a zero byte in a name
        near = difflib.get_close_matches(model.lower().rpartition("/")[2], _spellings(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        rest = "vramlab.model_names() lists the names, and the path of any config.json works too"
        raise RecipeError("model", model, f"no model and no readable file is called so; {hint}{rest}") from None
    name = path.resolve().parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    return _shape(name, None, text, num_layers, task, num_labels)


@lru_cache(maxsize=512)
def _shape(
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
    if family.layout:
        if empty := [weight.name for weight in shape.weights() if not all(weight.shape)]:
            raise RecipeError("model", name, f"a size that its configuration sets to 0 or null would empty {empty[0]}")
        return shape
    from .from_transformers import describe  # what no configuration says is taken from the model itself

    return dataclasses.replace(shape, **describe(shape))
