"""How reports and what they are made of are written as JSON, and read with care."""

import dataclasses
import reprlib
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from ..base.errors import ReportError

MOST = 2**63  # bytes, and any other number of a report
JSON_KINDS = {
    dict: "an object with names and values",
    list: "a list",
    str: "text",
    int: "a whole number",
}


def encode(value: Any) -> Any:
    """Return `value` as JSON has it.

    That is recipes and reports by their `to_dict`, other dataclasses by their fields.
    """
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        fields = encode(vars(value))
        return fields | {"total": _sum(value)} if _has_sum(type(value)) else fields
    if isinstance(value, dict):
        return {name: encode(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    return value


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """Return JSON's `value` as a `kind`, by the types of the dataclasses' fields.

    Raises ReportError, which names the place by `where`.
    """
    origin, inner, has_fields = _parts_of(kind)
    if kind is Any or (value is None and NoneType in inner):
        return value
    if origin is UnionType:  # a number or an object, or None
        objects = [each for each in inner if dataclasses.is_dataclass(each)]
        is_object = isinstance(value, dict) and objects
        return decode(objects[0] if is_object else inner[0], value, where)
    if has_fields:
        return _decode_fields(kind, _typed(value, dict, where), where)
    if origin is dict:
        decoded = {}
        for name, each in _typed(value, dict, where).items():
            decoded[name] = decode(inner[1], each, f"{where}.{name}")
        return decoded
    if origin in (list, tuple):
        items = []
        for index, each in enumerate(_typed(value, list, where)):
            items.append(decode(inner[0], each, f"{where}[{index}]"))
        return origin(items)
    _typed(value, kind, where)
    # What is left over of a balance may be negative, a size may not.
    least = -MOST if where.endswith("unexplained") else 0
    if kind is not str and not least <= value <= MOST:
        allowed = "at least 0, and at most 2 to the 63" if least == 0 else "within 64 bits"
        raise field_error(where, value, allowed)
    return value


def _decode_fields(
    kind: Any,
    fields: dict[str, Any],
    where: str,
) -> Any:
    """Return a dataclass of the JSON object with its `fields`; `Bytes` may say their sum."""
    types, required = _fields_of(kind)
    extra = {"total"} if _has_sum(kind) else set()
    # A field that nobody knows may be a slip in the name of one that matters.
    unknown = sorted(fields.keys() - types.keys() - extra)
    if unknown:
        name = f"{where}.{unknown[0]}".lstrip(".")
        known = ", ".join(types)
        raise ReportError(f"Report field {name!r} is unknown: known there are {known}.")
    values = {}
    for name, each in fields.items():
        values[name] = decode(
            types.get(name, Any),
            each,
            f"{where}.{name}".lstrip("."),
        )
    total = values.pop("total", None)
    missing = [name for name in required if name not in values]
    if missing:
        raise ReportError(f"{where or 'A report'} lacks {', '.join(missing)}.")
    made = kind(**values)
    # Who edits a part by hand forgets the sum.
    if total is not None and total != made.total:
        allowed = f"the sum of the categories, {made.total}"
        raise field_error(f"{where}.total", total, allowed)
    return made


@cache
def _parts_of(kind: Any) -> tuple[Any, tuple, bool]:
    """Return what a type is of, such as dict, its arguments, and whether it is a dataclass."""
    return get_origin(kind), get_args(kind), dataclasses.is_dataclass(kind)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a dataclass's fields by name, and the names of those without a default.

    A card's records are a hundred thousand objects of a few kinds.
    """
    fields = dataclasses.fields(kind)
    # Without a default both are MISSING.
    required = [field.name for field in fields if field.default is field.default_factory]
    return {field.name: field.type for field in fields}, required


def _typed(value: Any, kind: type, where: str) -> Any:
    """Return `value` if it is a `kind`; a float may be a whole number."""
    is_whole = kind is float and type(value) is int
    if type(value) is not kind and not is_whole:
        raise field_error(where, value, JSON_KINDS.get(kind, "a number"))
    return value


def field_error(where: str, value: Any, allowed: str) -> ReportError:
    """Return the error of a report's field that has an impossible value."""
    subject = f"Report field '{where}'" if where else "A report"
    return ReportError(f"{subject} is {reprlib.repr(value)}, but it must be {allowed}.")


def _sum(value: Any) -> int:
    return value.total


def _has_sum(kind: type) -> bool:
    """Tell whether it is written with its total, which is a sum of its fields and none of them."""
    return isinstance(getattr(kind, "total", None), property)
