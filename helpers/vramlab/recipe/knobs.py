"""A recipe's fields as data: what each may be is said with the field, what it is called in `data/knobs.json`.

The checks here, `TrainingArguments`, the command line and the calculator all read it from here.
"""

import copy
import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any

from ..report.data import data_path
from ..report.errors import RecipeError

WORDS = json.loads(data_path("knobs.json").read_text(encoding="utf-8"))  # by dataclass and field
Refusals = Iterator[tuple[str, Any, str]]  # (field, whether its value is refused, what is allowed)


@dataclass(frozen=True)
class Knob:
    """One field of a recipe; `knobs` fills in its words and what follows from the field itself."""

    choices: tuple = ()  # the values allowed; () where a number, a switch or free text is asked for
    least: int = 1  # of a whole number, as is `most`
    most: int = 2**24
    share: bool = False  # another number is a share, and not just over 0
    shown: str | Callable[[Any], Any] = ""  # its words in `str(recipe)`, with {} for the value, or what gives them
    quiet: tuple | list = ()  # values that it has no words for
    help: str = ""  # one sentence
    option: str = ""  # on the command line, without dashes; "": it has none
    label: str = ""  # in the calculator
    elsewhere: tuple[str, ...] = ()  # names in other libraries; one name only where the value is the same there
    kind: Any = None  # the type of its values
    optional: bool = False  # None is a value too
    many: bool = False  # a list of values to try
    default: Any = None

    def check(self, name: str, value: Any) -> None:
        """Raise RecipeError, which calls the field `name`, unless `value` is allowed. Parts check themselves."""
        if value is None and self.optional:
            return
        for one in value if self.many and isinstance(value, list | tuple) else (value,):
            if allowed := self._wrong(one):
                raise RecipeError(name, one, allowed + " or None" * self.optional)

    def _wrong(self, value: Any) -> str:
        """Return what would be allowed in place of `value`, "" if it is."""
        switch = isinstance(value, bool)
        if dataclasses.is_dataclass(self.kind):
            return "" if isinstance(value, self.kind) else f"it must be a {self.kind.__name__}"
        if self.choices:
            alike = (one for one in self.choices if isinstance(value, type(one)) and switch is isinstance(one, bool))
            return "" if value in alike else "allowed are " + ", ".join(map(repr, self.choices))
        right, allowed = RULES.get("share" if self.share else self.kind, (None, ""))
        good = right is None or ((self.kind is bool or not switch) and right(self, value))
        return "" if good else f"it must be {allowed.format(self)}"

    def words(self, value: Any) -> str:
        """Return what `str(recipe)` says of the value, "" for nothing."""
        if value is None or value is False or value in self.quiet:
            return ""
        return self.shown.format(value) if isinstance(self.shown, str) else self.shown(value)


RULES = {  # by a field's type: whether a value is allowed, and what would be
    bool: (lambda knob, value: isinstance(value, bool), "True or False"),
    int: (
        lambda knob, value: isinstance(value, int) and knob.least <= value <= knob.most,
        "a whole number from {0.least} to {0.most:,}",
    ),
    # 1e300 so that it is a finite number for torch too
    float: (lambda knob, value: isinstance(value, int | float) and 0 < value < 1e300, "a number over 0"),
    "share": (lambda knob, value: isinstance(value, int | float) and 0 <= value < 1, "a number from 0 to under 1"),
    str: (lambda knob, value: isinstance(value, str), "text"),
    tuple[str, ...]: (
        lambda knob, value: isinstance(value, tuple | str) and all(isinstance(name, str) for name in value),
        "a name or a list of names",
    ),
    Callable: (lambda knob, value: callable(value), "a function, which only Python can give"),
}


def knob(default: Any, **rules: Any) -> Any:
    """Return a dataclass field with what `Knob` says of it."""
    return dataclasses.field(default=default, metadata={"knob": Knob(default=default, **rules)})


def same_knob(part: type, name: str) -> Any:
    """Return a dataclass field with the default and the knob of the field `name` of `part`."""
    return dataclasses.field(default=knobs(part)[name].default, metadata={"knob": knobs(part)[name]})


@cache
def knobs(part: type) -> dict[str, Knob]:
    """Return the knobs of a dataclass by field name, with kinds and words filled in."""
    found = {field.name: field.metadata["knob"] for field in dataclasses.fields(part) if "knob" in field.metadata}
    for name, said in found.items():
        if said.kind is None:  # not another part's
            words, kind = WORDS[part.__name__][name], part.__dataclass_fields__[name].type
            words = words | {key: name for key in ("option", "elsewhere") if words.get(key) is True}
            words["elsewhere"] = tuple(words.get("elsewhere", "").split())
            kinds = typing.get_args(kind) or (kind,)
            kind, optional = next(filter(dataclasses.is_dataclass, kinds), kinds[0]), NoneType in kinds
            found[name] = dataclasses.replace(said, kind=kind, optional=optional, **words)
    return found


def options(part: type, *path: str) -> Iterator[tuple[tuple[str, ...], Knob]]:
    """Return each knob with a name on the command line, of `part` and its parts, and the way to it, such as ("lora", "r")."""
    for name, said in knobs(part).items():
        if said.option:
            yield (*path, name), said
        elif dataclasses.is_dataclass(said.kind):
            yield from options(said.kind, *path, name)


def documented(part: type) -> type:
    """Append the fields' help to the docstring of a dataclass."""
    lines = (f"    {name}: {said.help}" for name, said in knobs(part).items())
    part.__doc__ = "\n".join([inspect.cleandoc(part.__doc__), "", "Attributes:", *lines])
    return part


def check(part: Any, prefix: str = "") -> None:
    """Raise RecipeError at the first field of `part` whose value is not allowed."""
    values = vars(part)
    for name, said in knobs(type(part)).items():
        if values[name] is not said.default:  # most are, and plans make many recipes
            said.check(prefix + name, values[name])


def refuse(part: Any, refusals: Refusals, prefix: str = "") -> None:
    """Raise RecipeError at the first refusal of a value of `part`; those after it are not evaluated."""
    for field, refused, allowed in refusals:
        if refused:
            raise RecipeError(prefix + field, attrgetter(field)(part), allowed)


def unchecked(part: Any, **changes: Any) -> Any:
    """Return a copy of a recipe, or of its part, with `changes` that nothing validates again."""
    found = copy.copy(part)
    for name, value in changes.items():
        object.__setattr__(found, name, value)
    return found


def python_arguments(
    part: Any, usual: Any, always: tuple[str, ...] = (), literal: Callable[[Any], str] = repr
) -> list[str]:
    """Return as Python the arguments of `part` that differ from those of `usual`, and those in `always`; `literal` writes
    each value."""
    found = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.init and field.name != "model" and (field.name in always or value != getattr(usual, field.name)):
            found.append(f"{field.name}={_python(value, knobs(type(part)).get(field.name, Knob()).choices, literal)}")
    return found


def _python(value: Any, names: tuple, literal: Callable[[Any], str]) -> str:
    """Return `value` as Python; a part with one of `names`, such as a loop, by its name."""
    if not dataclasses.is_dataclass(value):
        return literal(value)
    kind = type(value)
    name = next((literal(name) for name in names if kind.named(name) == value), "")
    return name or f"{kind.__name__}({', '.join(python_arguments(value, kind(), literal=literal))})"


def rebuild(kind: type, name: str, values: Mapping) -> Any:
    """Return `kind(**values)` with an error that names the unknown field."""
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for key in values:
        if key not in known:
            raise RecipeError(f"{name}.{key}", values[key], "no such field exists; known are " + ", ".join(known))
    return kind(**values)
