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
# Fields that an error shows by an attribute.
SHOWN = {"loop": "loop.name", "quantization": "quantization.quant_type", "sharding": "sharding.engine"}
SHOWN |= {"dtype": "weights_dtype"}
MAX_NUMBER = 1e300  # so that it is a finite number for torch too


@dataclass(frozen=True)
class Knob:
    """One field of a recipe; `knobs` fills in its words and what follows from the field itself."""

    choices: tuple = ()  # the values allowed; () where a number, a switch or free text is asked for
    least: int = 1  # of a whole number, as is `most`
    most: int | None = None
    bounds: str = ""  # of any other number, of BOUNDS
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
        part = dataclasses.is_dataclass(self.kind)
        rule = _part if part else _choice if self.choices else RULES.get(self.kind)
        for one in value if self.many and isinstance(value, list | tuple) else (value,):
            if rule and (allowed := rule(self, one)):
                raise RecipeError(name, one, allowed)

    def words(self, value: Any) -> str:
        """Return what `str(recipe)` says of the value, "" for nothing."""
        if value is None or value is False or value in self.quiet:
            return ""
        if dataclasses.is_dataclass(value):
            return value.words()
        return self.shown.format(value) if isinstance(self.shown, str) else self.shown(value)


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
            own = {key: name for key in ("option", "elsewhere") if words.get(key) is True}
            words = {**words, **own, "elsewhere": tuple((words | own).get("elsewhere", "").split())}
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
            raise RecipeError(prefix + field, attrgetter(SHOWN.get(field, field))(part), allowed)


def unchecked(part: Any, **changes: Any) -> Any:
    """Return a copy of a recipe, or of its part, with `changes` that nothing validates again."""
    found = copy.copy(part)
    for name, value in changes.items():
        object.__setattr__(found, name, value)
    return found


def python_arguments(part: Any, usual: Any, always: tuple[str, ...] = ()) -> list[str]:
    """Return as Python the arguments of `part` that differ from those of `usual`, and those in `always`."""
    found = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.init and field.name != "model" and (field.name in always or value != getattr(usual, field.name)):
            found.append(f"{field.name}={_python(value, knobs(type(part)).get(field.name, Knob()).choices)}")
    return found


def _python(value: Any, names: tuple) -> str:
    """Return `value` as Python; a part with one of `names`, such as a loop, by its name."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    kind = type(value)
    name = next((repr(name) for name in names if kind.named(name) == value), "")
    return name or f"{kind.__name__}({', '.join(python_arguments(value, kind()))})"


def rebuild(kind: type, name: str, values: Mapping) -> Any:
    """Return `kind(**values)` with an error that names the unknown field."""
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for key in values:
        if key not in known:
            raise RecipeError(f"{name}.{key}", values[key], "no such field exists; known are " + ", ".join(known))
    return kind(**values)


# Each rule says what would be allowed in place of `value`, "" if it is.


def _part(knob: Knob, value: Any) -> str:
    if isinstance(value, knob.kind):
        return ""
    others = [*map(repr, knob.choices), *(["None"] if knob.optional else [])]
    return " or ".join([f"it must be a {knob.kind.__name__}", *others])


def _choice(knob: Knob, value: Any) -> str:
    switch = isinstance(value, bool)
    alike = (one for one in knob.choices if isinstance(value, type(one)) and switch is isinstance(one, bool))
    return "" if value in alike else "allowed are " + ", ".join(map(repr, knob.choices))


def _whole(knob: Knob, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < knob.least:
        return f"it must be a whole number of at least {knob.least}"
    return "" if knob.most is None or value <= knob.most else f"it must be {knob.most:,} at most"


def _number(knob: Knob, value: Any) -> str:
    right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return "" if right and BOUNDS[knob.bounds](value) else f"it must be a number {knob.bounds}"


BOUNDS = {
    "over 0": lambda value: value > 0,
    "over 0, or None for no clipping": lambda value: value > 0,
    "of bytes a second, over 0": lambda value: value > 0,
    "of at least 0 and under 1": lambda value: 0 <= value < 1,
}
RULES = {
    bool: lambda knob, value: (
        "" if isinstance(value, bool) else "it must be True or False" + " or None" * knob.optional
    ),
    int: _whole,
    float: _number,
    str: lambda knob, value: "" if isinstance(value, str) else "it must be text",
    Callable: lambda knob, value: "" if callable(value) else "it must be a function, which only Python can give",
}
