"""The experiment that asks the installed libraries: names, defaults, arguments, lists."""

import importlib
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from enum import EnumType
from functools import cache
from importlib import metadata
from typing import Any

from .expressions import Facts

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "pynvml")


def installed(
    name: str,
    takes: Mapping[str, Any] | None = None,
    called: Mapping[str, Any] | None = None,
    item: str = "",
    fresh: bool = False,
) -> Facts:
    """What a dotted name of an installed library is.

    `exists`; `takes`: whether it takes these arguments; `value`: itself, or what it gives when
    `called`; with `item`, `has`: whether that has such a member or attribute, and `value`, it.
    `fresh` asks a new process, for settings.
    """
    library = name.partition(".")[0]
    if library not in LIBRARIES:
        raise ValueError(f"{name}: libraries that a claim may ask are {', '.join(LIBRARIES)}")
    about = f"{name}, {_version(library)}"
    if fresh:
        # This process may have changed the setting by itself.
        return Facts({"exists": True, "value": _in_a_new_process(name)}, "measured", about)
    exists, thing = _find(name)
    names: dict[str, Any] = {
        "exists": exists,
        "takes": exists and _takes(thing, takes or {}),
    }
    if called is not None and exists:
        with (
            warnings.catch_warnings()
        ):  # transformers renames some arguments, and says so when they are given
            warnings.simplefilter("ignore", FutureWarning)
            thing = thing(**called)
    if item and exists:
        names["has"], thing = _item(thing, item)
    # Of an enum's member its value, so that claims compare plain texts.
    names["value"] = getattr(thing, "value", thing)
    return Facts(names, "measured", f"{about}{f', {item}' if item else ''}")


def _version(library: str) -> str:
    package = {"pynvml": "nvidia-ml-py"}.get(library, library)
    return f"{package} {metadata.version(package).split('+')[0]}"


def _find(name: str) -> tuple[bool, Any]:
    """Whether a dotted name is there, and what it is.

    The longest part that is a module is imported, then come attributes.
    """
    parts = name.split(".")
    # From the whole name down: `torch.utils.data` is a module, `torch.utils.data.DataLoader` is
    # none.
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(thing, part):
                return False, None
            thing = getattr(thing, part)
        return True, thing
    return False, None


def _takes(function: Any, arguments: Mapping[str, Any]) -> bool:
    try:
        # As a call would bind them, without making it.
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


def _item(thing: Any, item: str) -> tuple[bool, Any]:
    """Whether a list, an enum or an object has an item of this name, and what it is.

    Of an enum the values count, of an object its attributes.
    """
    if isinstance(thing, list | EnumType):
        return item in [getattr(member, "value", member) for member in thing], item
    return hasattr(thing, item), getattr(thing, item, None)


@cache
def _in_a_new_process(name: str) -> Any:
    # The value has to be one that JSON knows, such as a default or a setting.
    code = f"import json, {name.partition('.')[0]}; print(json.dumps({name}))"
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return json.loads(said)
