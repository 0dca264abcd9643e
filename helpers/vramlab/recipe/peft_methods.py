"""PEFT's methods other than plain LoRA, as the library's own configuration says them.

A recipe keeps the method's name and what differs from its defaults, as JSON: frozen, and the same
for an object, its dictionary, the file that `save_pretrained` writes, or a name alone.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..base.errors import RecipeError, needing
from .configuration import read_json, read_json_file, reason
from .knobs import knobs
from .options import LoRA

# What says where a configuration comes from, and how it is loaded: the recipe says the rest.
NEUTRAL = (
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
)
# Values of these are drawn or computed, and no byte depends on them.
SAME_BYTES = {"init_lora_weights": (True, False, "gaussian", "orthogonal")}
REFUSED = {
    "XLORA": "it mixes adapters that were trained before, which no recipe has",
    "POLY": "its forward pass is given task_ids, which no batch of a recipe has",
    "MULTITASK_PROMPT_TUNING": "its forward pass is given task_ids, which no batch here has",
    "CPT": "its loss depends on the tokens' own values",
    "SHIRA": "its changes are a sparse matrix, which is not followed here",
    "FROD": "its projections are sparse matrices, which are not followed here",
    "ADAMSS": "it clusters the weights' own values, on which its sizes depend",
}
# Which compute with the base's own weights, and fail where those are packed (PEFT 0.21).
NEED_WHOLE_WEIGHTS = (
    "DEFT",
    "DELORA",
    "GLORA",
    "HRA",
    "LOHA",
    "LOKR",
    "PEANUT",
    "PSOFT",
    "SUPERTUNING",
    "TINYLORA",
)
# By argument of LoraConfig and value: what needs data before the first step.
FROM_DATA = {
    "eva": "its ranks follow from the data's variance: with rho=1 they stay, and plain LoRA has "
    "the same bytes",
    "corda": "it needs the covariance of data: 'pissa' decomposes the weights alone",
    "lora_ga": "it needs gradients of data: 'pissa' decomposes the weights alone",
}
WITH_CACHE = ("PREFIX_TUNING", "CARTRIDGE")  # that put keys and values before the sample's
PROMPTS = ("PROMPT_TUNING", "P_TUNING", *WITH_CACHE)


@dataclass(frozen=True, repr=False)
class Peft:
    """One of PEFT's methods, and its arguments that are not its defaults, as JSON."""

    peft_type: str
    text: str = "{}"

    @property
    def arguments(self) -> dict[str, Any]:
        """What the configuration's class is given."""
        return json.loads(self.text)

    @property
    def adds_tokens(self) -> bool:
        """Whether it puts tokens, or keys and values, before the sample's own."""
        return self.peft_type in PROMPTS

    @property
    def differs_by_layer(self) -> bool:
        """Whether layers may get other adapters than the rest, or one tensor has all layers'."""
        for name, value in self.arguments.items():
            targets = value if name == "target_modules" else ""
            has_number = any(character.isdigit() for character in str(targets))
            if "layer" in name or "pattern" in name or has_number:
                return True
        return self.adds_tokens or self.peft_type in ("ADAPTION_PROMPT", "SHADOW")

    @property
    def class_name(self) -> str:
        """The name of the configuration's class."""
        return _class_of(self.peft_type).__name__

    def config(self, task_type: str | None = None) -> Any:
        """Return the library's configuration. Raises RecipeError where it refuses the values."""
        kind = _class_of(self.peft_type)
        try:
            return kind(task_type=task_type, **self.arguments)
        except (TypeError, ValueError, ImportError) as error:
            raise RecipeError("peft", self.peft_type, f"PEFT refuses it: {reason(error)}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return it as `Recipe(peft=…)` takes it."""
        return {"peft_type": self.peft_type, **self.arguments}

    def __repr__(self) -> str:
        return repr(self.to_dict())

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        said = (f"{name}={value}" for name, value in self.arguments.items())
        return " ".join([self.peft_type, *said])


def read(value: Any) -> "Peft | LoRA | None":
    """Return the method that a configuration, its dictionary, a file or a name says.

    A LoraConfig of which `LoRA` knows every argument is that. Raises RecipeError.
    """
    if value is None or isinstance(value, Peft):
        return value
    said = _mapping(value)
    kind = _class_of(said["peft_type"])
    name = kind.__name__
    usual = {field.name: _default(field) for field in dataclasses.fields(kind)}
    given = {key: one for key, one in said.items() if key not in NEUTRAL}
    for key in given.keys() - usual.keys():
        raise RecipeError(f"peft.{key}", given[key], f"{name} has no such field")
    method = Peft(said["peft_type"], _text(given))
    # what the class makes of them, such as sets of lists
    made = _json_ready(method.config("CAUSAL_LM").to_dict())
    # What is the default, or changes no byte, is left out, so that two ways to say one method give
    # one recipe.
    kept = {}
    for key in given:
        is_same = made[key] == usual[key] or made[key] in SAME_BYTES.get(key, ())
        if not is_same:
            kept[key] = made[key]
    _refuse_data(kept)
    if method.peft_type == "LORA" and kept.keys() <= knobs(LoRA).keys():
        return LoRA(**kept)
    return Peft(method.peft_type, _text(kept))


def _mapping(value: Any) -> dict[str, Any]:
    """Return what `value` says as a dictionary with a method that a recipe can have."""
    if isinstance(value, str):
        value = _written(value)
    elif hasattr(value, "to_dict"):
        value = value.to_dict()
    if not isinstance(value, Mapping) or "peft_type" not in value:
        rest = "it must be a method of PEFT, its configuration, or a dictionary with a 'peft_type'"
        raise RecipeError("peft", value, rest)
    said = _json_ready(dict(value))
    said["peft_type"] = str(said["peft_type"]).upper()
    if said["peft_type"] in REFUSED:
        raise RecipeError("peft", said["peft_type"], REFUSED[said["peft_type"]])
    return said


def _written(text: str) -> Any:
    """Return what JSON, a file of it or a method's name says."""
    if text.lstrip().startswith("{"):
        return read_json("peft", text)
    if text.endswith(".json"):
        return read_json_file("peft", text)
    return {"peft_type": text.strip().replace("-", "_")}


def method_of(name: str) -> str:
    """Return the method of a configuration's class, "" where PEFT has none of that name."""
    for peft_type, kind in _classes().items():
        if kind.__name__ == name:
            return peft_type
    return ""


def fields_of(peft_type: str) -> list[str]:
    """Return the names of what a method's configuration says."""
    return [field.name for field in dataclasses.fields(_class_of(peft_type))]


def fields_said(peft_type: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's field that a configuration's arguments are for: `lora` or `peft`.

    Raises RecipeError for a method that no recipe has.
    """
    known = [name for knob in knobs(LoRA).values() for name in knob.elsewhere]
    if peft_type == "LORA" and said.keys() <= {*known, "inference_mode"}:
        return {"lora": {name: value for name, value in said.items() if name in known}}
    method = {"peft_type": peft_type, **said}
    read(method)
    return {"peft": method}


def _class_of(peft_type: str) -> Any:
    """Return the configuration's class. Raises RecipeError for a method that PEFT lacks."""
    known = _classes()
    if peft_type not in known:
        names = ", ".join(sorted(known.keys() - REFUSED.keys()))
        raise RecipeError("peft", peft_type, f"the installed PEFT has {names}")
    return known[peft_type]


def _classes() -> dict[str, Any]:
    """Return PEFT's configurations by method."""
    with needing("peft"):
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    mapping: Any = PEFT_TYPE_TO_CONFIG_MAPPING
    return {str(method.value): kind for method, kind in mapping.items()}


def _default(field: dataclasses.Field) -> Any:
    """Return a field's default as JSON gives it back."""
    if field.default_factory is not dataclasses.MISSING:
        return _json_ready(field.default_factory())
    return _json_ready(field.default)


def _json_ready(value: Any) -> Any:
    """Return `value` with lists for tuples and sets, text for enumerations and the like."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _json_ready(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_json_ready, value))
    if isinstance(value, list | tuple):
        return [_json_ready(one) for one in value]
    return value


def _text(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, sort_keys=True)
    except TypeError as error:  # a function, a tensor
        rest = f"a recipe keeps what JSON can say: {reason(error)}"
        raise RecipeError("peft", sorted(values), rest) from None


def notes(method: Peft | None) -> list[str]:
    """Return what a report has to say of a method."""
    said = []
    if method and method.peft_type == "ADALORA":
        said.append(
            "AdaLoRA's update_and_allocate, which the Trainer does not call, is not in the step; "
            "PEFT trains its ranknum where the base is on the GPU first, as here",
        )
    if method and method.peft_type == "BOFT":
        said.append("BOFT's own CUDA kernel, which PEFT compiles where it can, is not simulated")
    return said


def _refuse_data(arguments: Mapping[str, Any]) -> None:
    """Raise RecipeError for what needs data, or a sample's own tokens, before the first step."""
    start = arguments.get("init_lora_weights")
    if start in FROM_DATA:
        raise RecipeError("peft.init_lora_weights", start, FROM_DATA[start])
    for name in ("velora_config", "monteclora_config"):
        if name in arguments:
            rest = "its code asks for values that no simulation has: leave it out"
            raise RecipeError(f"peft.{name}", arguments[name], rest)
    tokens = arguments.get("alora_invocation_tokens")
    if tokens:
        rest = "its adapters begin at these tokens, which random samples do not have"
        raise RecipeError("peft.alora_invocation_tokens", tokens, rest)
