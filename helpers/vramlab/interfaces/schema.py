"""What each command's --json prints, as JSON Schema, derived from the dataclasses that are printed.

The version rises when a field is removed or means something else; a new field does not raise it.
"""

import dataclasses
import json
import typing
from types import NoneType, UnionType
from typing import Any

from ..base.data import data_path
from ..base.files import read_text
from ..formulas.whole_run import Run
from ..planning.plan import Plan
from ..recipe.recipe import Recipe
from ..report.compare import Comparison
from ..report.report import Bytes, Report
from .doctor import Doctor
from .explain import Explanation

VERSION = 1
DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAIN = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
    dict: "object",
}
# Properties that `to_dict` adds to a dataclass's fields.
ADDED: dict[type, dict[str, Any]] = {
    Bytes: {"total": {"type": "integer"}},
    Plan: {"not_simulated": {"type": "object", "additionalProperties": {"type": "string"}}},
    Doctor: {"ok": {"type": "boolean"}},
}
# Properties of one of what `models` and `gpus` list, which are no dataclasses.
LISTED = json.loads(read_text(data_path("lists.schema.json")))
# The classes of what each command prints.
PRINTED: dict[str, tuple[type, ...]] = {
    "predict": (Report, Run),
    "simulate": (Report,),
    "evaluate": (Report,),
    "generate": (Report,),
    "diffusion": (Report,),
    "measure": (Report,),
    "plan": (Plan,),
    "explain": (Explanation,),
    "doctor": (Doctor,),
    "diff": (Comparison,),
}
EXIT_CODES = {
    0: "answered; where a card was named it fits, safe or likely (explain: answered)",
    1: "it does not fit or is only tight, no plan fits, the run failed, or doctor misses what the "
    "package needs",
    2: "asked wrongly: one sentence on stderr",
    130: "stopped with Ctrl-C",
}


def schema_of(command: str) -> dict[str, Any]:
    """Return the schema of what `vramlab COMMAND --json` prints."""
    definitions: dict[str, Any] = {}
    head = {"$schema": DIALECT, "title": f"vramlab {command} --json", "version": VERSION}
    # Their rows are plain dictionaries with no class to derive a schema from.
    if command in LISTED:
        return head | _of_list(command)
    if command == "record":  # recipes, to be read as a list again
        return head | {"type": "array", "items": {"type": "object"}}
    # predict answers with a report, or with a whole run where it is given lengths.
    shown = [_top(kind, definitions) for kind in PRINTED[command]]
    return head | {"anyOf": shown, "$defs": definitions}


def schemas() -> dict[str, Any]:
    """Return the schemas of all commands by name, with their version and what exit codes mean."""
    found = {command: schema_of(command) for command in (*PRINTED, *LISTED, "record")}
    codes = {str(code): words for code, words in EXIT_CODES.items()}
    return {"version": VERSION, "exit_codes": codes, "commands": found}


def _of_list(command: str) -> dict[str, Any]:
    fields = LISTED[command]
    entry = {"type": "object", "properties": fields, "required": list(fields)}
    properties = {"schema": {"const": VERSION}, command: {"type": "array", "items": entry}}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _top(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a whole answer, which says its version."""
    versioned = {"properties": {"schema": {"const": VERSION}}, "required": ["schema"]}
    return {"allOf": [_described(kind, definitions), versioned]}


def _described(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type as annotations say it; dataclasses go into `definitions`."""
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    # An empty schema allows everything.
    if kind is Any:
        return {}
    # Its fields change with each new knob, and leaving out defaults is allowed; the recipe checks
    # itself.
    if kind is Recipe:
        return {"type": "object", "required": ["model"]}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _of_dataclass(kind, definitions)
    if origin in (UnionType, typing.Union):
        return {"anyOf": [_described(each, definitions) for each in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _described(inner[1], definitions)}
    if origin in (list, tuple):
        # Tuples of one kind only: no printed class has a mixed one.
        return {"type": "array", "items": _described(inner[0], definitions)}
    return {"type": PLAIN[kind]}


def _of_dataclass(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in definitions:
        definitions[name] = {}  # so that a class may have one of its own kind
        # Annotations are texts where a class names itself; this evaluates them.
        types = typing.get_type_hints(kind)
        fields = [field.name for field in dataclasses.fields(kind)]
        properties = {field: _described(types[field], definitions) for field in fields}
        properties |= ADDED.get(kind, {})
        definitions[name] = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
        }
    return {"$ref": f"#/$defs/{name}"}


def versioned(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a command's answer with the version of its schema first."""
    return {"schema": VERSION, **answer}
