"""The claims' data, and its expressions over the facts of an experiment.

They have arithmetic, comparisons and names only.
"""

import ast
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from vramlab.base.data import data_path
from vramlab.base.errors import VramLabError

# Only these: an expression from a file can compute and compare, and do nothing else.
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS = {
    "abs": abs,
    "ceil": math.ceil,
    "int": int,
    "max": max,
    "min": min,
    "round": round,
}
LARGEST_POWER = 256


@cache
def stored(part: str, path: Any = None) -> Any:
    """A part of the claims' file (or another, `path`).

    The parts are "claims", "sources" (key to name and title), "definitions" (expressions that
    several claims use) or "recipes" (what several start from).
    """
    return json.loads((path or data_path("claims.json")).read_text(encoding="utf-8"))[part]


class ExpressionError(VramLabError, ValueError):
    """An expression that cannot be read, or asks for more than arithmetic on known names."""


@dataclass(frozen=True)
class Facts:
    """What an experiment finds: named values, who says so, and what they depend on."""

    names: Mapping[str, Any]
    witness: str
    configuration: str


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression over nested mappings of names.

    An expression is such as "after.peak < 0.98 * before.peak".

    Dots look up keys of mappings, never attributes of objects. Raises ExpressionError.
    """
    try:
        return _value(ast.parse(text, mode="eval").body, names)
    except ExpressionError as error:
        raise ExpressionError(f"{text!r}: {error}") from None
    except (SyntaxError, TypeError, ArithmeticError, ValueError) as error:
        raise ExpressionError(f"{text!r} has no value: {error}.") from None


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    match node:
        # bool before int, since True is an int to isinstance; nothing else may stand for itself.
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.Name() | ast.Attribute():
            return _look_up(node, names)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a = _value(left, names)
            b = _value(right, names)
            # 9**9**9 would not end.
            if isinstance(op, ast.Pow) and abs(b) > LARGEST_POWER:
                raise ExpressionError(f"a power of {b} is too large.")
            return OPERATORS[type(op)](a, b)
        case ast.BoolOp(op=op, values=values):
            combine = all if isinstance(op, ast.And) else any
            return combine(_value(each, names) for each in values)
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(
            type(op) in OPERATORS for op in ops
        ):
            # a < b < c compares neighbours, as in Python.
            sides = [_value(each, names) for each in (left, *rights)]
            return _compare(sides, ops)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(each, names) for each in arguments))
    raise ExpressionError(f"{ast.unparse(node)} is not allowed: names, numbers and arithmetic are.")


def _compare(sides: list[Any], ops: list[ast.cmpop]) -> bool:
    """Whether each side and the one after it compare as the operator between them says."""
    pairs = zip(ops, pairwise(sides), strict=True)
    return all(OPERATORS[type(op)](a, b) for op, (a, b) in pairs)


def _look_up(node: ast.AST, names: Mapping[str, Any]) -> Any:
    holder: Any = None
    key = ""
    match node:
        case ast.Attribute(value=value, attr=key):
            holder = _look_up(value, names)
        case ast.Name(id=key):
            holder = names
    if not isinstance(holder, Mapping) or key not in holder:
        known = ", ".join(sorted(holder)) if isinstance(holder, Mapping) else "nothing"
        raise ExpressionError(f"there is no {ast.unparse(node)}; known are {known}.")
    return holder[key]
