"""A recipe's fields as data: what each is called and may be is said with the field.

The checks here, `TrainingArguments`, the command line and the calculator all read it from here.
"""

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, dataclass_transform

from ..base.errors import RecipeError
from ..base.text import nearest

# (field, whether its value is refused, what is allowed)
Refusals = Iterator[tuple[str, Any, str]]
MOST_FLOAT = 1e300  # so that it is a finite number for torch too

Given = TypeVar("Given")
Read = TypeVar("Read")
Part = TypeVar("Part")

if TYPE_CHECKING:

    class FilledIn(Generic[Given, Read]):
        """A field that may be given otherwise than it is read: a default is filled in, say."""

        def __get__(self, instance: Any, owner: Any) -> Read: ...
        def __set__(self, instance: Any, value: Given) -> None: ...

else:

    class FilledIn:
        """A field that may be given otherwise than it is read: `FilledIn[given, read]`.

        At run time it is a field of the type that may be given.
        """

        def __class_getitem__(cls, types):
            given, _ = types
            return given


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
def frozen(part: type[Part]) -> type[Part]:
    """Make a frozen dataclass of `part`, whose fields may be `FilledIn`.

    Type checkers take it for one that is not frozen: of those that are they read each field as it
    may be given.
    """
    return dataclass(frozen=True, eq=False)(part)


@dataclass(frozen=True)
class Knob:
    """One field of a recipe, as `knob` says it; `knobs` fills in what follows from the field.

    Said with `knob(…)`, `option` and `elsewhere` may be True: the field's own name.
    """

    # the values allowed; () where a number, a switch or free text is asked for
    choices: tuple = ()
    least: int = 1  # of a whole number, as is `most`
    most: int = 2**24
    share: bool = False  # another number is a share, and not just over 0
    # what is said, in place of the choices, of a value that others use and that is none of them
    instead: dict[str, str] = dataclasses.field(default_factory=dict)
    # its words in `str(recipe)`, with {} for the value, or what gives them
    shown: str | Callable[[Any], Any] = ""
    quiet: tuple = ()  # values that it has no words for
    help: str = ""  # one sentence: in the docstring, and on the command line
    option: str = ""  # on the command line, without dashes; "": it has none
    label: str = ""  # in the calculator; "": it is no control there
    # in TrainingArguments, LoraConfig or BitsAndBytesConfig; one name only where the value is the
    # same there
    elsewhere: tuple[str, ...] = ()
    kind: Any = None  # the type of its values
    optional: bool = False  # None is a value too
    many: bool = False  # a list of values to try
    default: Any = None

    def check(self, name: str, value: Any) -> None:
        """Raise RecipeError, which calls the field `name`, unless `value` is allowed.

        Parts check themselves.
        """
        if value is None and self.optional:
            return
        values = value if self.many and isinstance(value, list | tuple) else (value,)
        for one in values:
            allowed = self._wrong(one)
            if allowed:
                if allowed not in self.instead.values():
                    if self.optional:
                        allowed += " or None"
                    allowed += nearest(one, self.choices)
                raise RecipeError(name, one, allowed)

    def _wrong(self, value: Any) -> str:
        """Return what would be allowed in place of `value`, "" if it is."""
        kind = self.kind
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return "" if isinstance(value, kind) else f"it must be a {kind.__name__}"
        if kind is Callable and callable(value):
            return ""
        if self.choices:
            if isinstance(value, str) and value in self.instead:
                return self.instead[value]
            is_allowed = any(_is_same(value, choice) for choice in self.choices)
            others = " and functions, which only Python can give" if kind is Callable else ""
            names = ", ".join(map(repr, self.choices))
            return "" if is_allowed else f"allowed are {names}{others}"
        rule = RULES.get("share" if self.share else kind)
        if rule is None:
            return ""
        # True is a number to Python
        is_switch = isinstance(value, bool) and kind is not bool
        if not is_switch and rule.allows(self, value):
            return ""
        return f"it must be {rule.allowed.format(self)}"

    def words(self, value: Any) -> str:
        """Return what `str(recipe)` says of the value, "" for nothing."""
        if value is None or value is False or value in self.quiet:
            return ""
        if isinstance(self.shown, str):
            return self.shown.format(value)
        return self.shown(value)


def _is_same(value: Any, choice: Any) -> bool:
    """Tell whether a value is a choice: True is no 1, and text no number."""
    are_switches = isinstance(value, bool) is isinstance(choice, bool)
    return isinstance(value, type(choice)) and are_switches and value == choice


class _Rule(NamedTuple):
    """What a field of some type may be."""

    allows: Callable[[Knob, Any], bool]
    allowed: str  # in words


def _is_whole(knob: Knob, value: Any) -> bool:
    return isinstance(value, int) and knob.least <= value <= knob.most


def _is_positive(knob: Knob, value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < MOST_FLOAT


def _is_share(knob: Knob, value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1


def _is_names(knob: Knob, value: Any) -> bool:
    if not isinstance(value, tuple | str):
        return False
    return all(isinstance(name, str) for name in value)


RULES: dict[Any, _Rule] = {  # by a field's type
    bool: _Rule(lambda knob, value: isinstance(value, bool), "True or False"),
    int: _Rule(_is_whole, "a whole number from {0.least} to {0.most:,}"),
    float: _Rule(_is_positive, "a number over 0"),
    "share": _Rule(_is_share, "a number from 0 to under 1"),
    str: _Rule(lambda knob, value: isinstance(value, str), "text"),
    tuple[str, ...]: _Rule(_is_names, "a name or a list of names"),
}


def knob(default: Any, **rules: Any) -> Any:
    """Return a dataclass field with what `Knob` says of it."""
    metadata = {"knob": Knob(default=default, **rules)}
    return dataclasses.field(default=default, metadata=metadata)


def same_knob(part: type, name: str) -> Any:
    """Return a dataclass field with the default and the knob of the field `name` of `part`."""
    same = knobs(part)[name]
    return dataclasses.field(default=same.default, metadata={"knob": same})


@cache
def knobs(part: Any) -> dict[str, Knob]:
    """Return the knobs of a dataclass by field name, with kinds and words filled in."""
    filled = {}
    for field in dataclasses.fields(part):
        said = field.metadata.get("knob")
        if said is None:
            continue
        if said.kind is None:  # not another part's
            said = _filled(said, field, part)
        filled[field.name] = said
    return filled


def _filled(said: Knob, field: dataclasses.Field, part: Any) -> Knob:
    """Return a knob of a part with its field's own name, where it is asked for, and type.

    Raises TypeError for one without help.
    """
    if not said.help:
        raise TypeError(
            f"{part.__name__}.{field.name} does not say what it is: give its knob(…) a help, in "
            f"one sentence"
        )
    elsewhere = field.name if said.elsewhere is True else said.elsewhere
    kinds = typing.get_args(field.type) or (field.type,)
    # of a part and its name the part counts
    parts = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    return dataclasses.replace(
        said,
        option=field.name if said.option is True else said.option,
        elsewhere=(elsewhere,) if isinstance(elsewhere, str) else elsewhere,
        kind=parts[0] if parts else kinds[0],
        optional=NoneType in kinds,
    )


def options(part: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Knob]]:
    """Yield each knob with a name on the command line, and the way to it, such as ("lora", "r").

    They are those of `part` and its parts.
    """
    for name, said in knobs(part).items():
        if said.option:
            yield (*path, name), said
        elif dataclasses.is_dataclass(said.kind):
            yield from options(said.kind, *path, name)


def documented(part: type[Part]) -> type[Part]:
    """Append the fields' help to the docstring of a dataclass."""
    fields: Any = part
    lines = [f"    {name}: {said.help}" for name, said in knobs(fields).items()]
    own = inspect.cleandoc(part.__doc__ or "")
    part.__doc__ = "\n".join([own, "", "Attributes:", *lines])
    return part


def check(part: Any, prefix: str = "") -> None:
    """Raise RecipeError at the first field of `part` whose value is not allowed."""
    values = vars(part)
    kind: Any = type(part)
    for name, said in knobs(kind).items():
        # most are at their default, and plans make many recipes
        if values[name] is not said.default:
            said.check(prefix + name, values[name])


def refuse(part: Any, refusals: Refusals, prefix: str = "") -> None:
    """Raise RecipeError at the first refusal of a value of `part`.

    Those after it are not evaluated.
    """
    for field, refused, allowed in refusals:
        if refused:
            raise RecipeError(prefix + field, attrgetter(field)(part), allowed)


def unchecked(part: Any, **changes: Any) -> Any:
    """Return a copy of a recipe, or of its part, with `changes` that nothing validates again."""
    changed = copy.copy(part)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def python_arguments(
    part: Any,
    usual: Any,
    always: tuple[str, ...] = (),
    literal: Callable[[Any], str] = repr,
) -> list[str]:
    """Return as Python the arguments of `part` that differ from those of `usual`.

    Those in `always` are among them; `literal` writes each value.
    """
    kind: Any = type(part)
    known = knobs(kind)
    arguments = []
    for field in dataclasses.fields(part):
        name = field.name
        if not field.init or name == "model":
            continue
        value = getattr(part, name)
        if name in always or value != getattr(usual, name):
            choices = known[name].choices if name in known else ()
            arguments.append(f"{name}={_python(value, choices, literal)}")
    return arguments


def _python(value: Any, names: tuple, literal: Callable[[Any], str]) -> str:
    """Return `value` as Python; a part with one of `names`, such as a loop, by its name."""
    if not dataclasses.is_dataclass(value):
        return literal(value)
    if hasattr(value, "to_dict"):
        own: Any = value
        return literal(own.to_dict())
    kind: Any = type(value)
    for name in names:
        if kind.named(name) == value:
            return literal(name)
    arguments = ", ".join(python_arguments(value, kind(), literal=literal))
    return f"{kind.__name__}({arguments})"


def rebuild(kind: Any, name: str, values: Mapping) -> Any:
    """Return `kind(**values)`. Raises RecipeError that names a field which `kind` lacks."""
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    for key in values:
        if key not in known:
            rest = f"no such field exists{nearest(key, known)}; known are {', '.join(known)}"
            raise RecipeError(f"{name}.{key}", values[key], rest)
    return kind(**values)
