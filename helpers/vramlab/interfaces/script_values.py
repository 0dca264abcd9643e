"""Constants of a script: numbers, text and containers of them, computed within bounds."""

import ast
import operator
from collections.abc import Callable
from typing import Any

MOST_STEPS = 200_000  # nodes that are looked at for values, of all together
MOST_DEPTH = 40  # names of names
MOST_NUMBER = 2**63
MOST_LETTERS = 1000  # of a text that is put together
MOST_ELEMENTS = 2**16  # of a tuple
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
OPERATORS |= {ast.Div: operator.truediv}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
COMPARISONS |= {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


class Unread(ValueError):
    """A value that only running the script would tell."""


class Constants:
    """Values of constant expressions, by the expressions that a name may stand for."""

    def __init__(
        self,
        sources: Callable[[ast.expr | None, int], list[ast.expr | None]],
        is_written: Callable[[ast.expr | None], bool],
        dotted: Callable[[ast.AST], str],
    ):
        self._sources = sources
        self._is_written = is_written
        self._dotted = dotted
        self._steps = 0

    def step(self, depth: int) -> None:
        """Count a node that is looked at. Raises Unread where those are too many, or too deep."""
        self._steps += 1
        # A script of others must not be able to keep the reader busy, by loops of names or by sheer
        # size.
        if self._steps > MOST_STEPS or depth <= 0:
            raise Unread("too long a way to its value")

    def value(self, node: ast.expr | None, depth: int = MOST_DEPTH) -> Any:
        """The value of a constant expression: numbers, text and containers of them. Raises Unread.

        Sums and products are of numbers only and bounded, as is the text put together, so that no
        script makes this long.
        """
        self.step(depth)
        found = self._sources(node, depth)
        if any(map(self._is_written, found)):
            raise Unread("a container that is written to")
        values = [self._constant(one, depth - 1) for one in found]
        # True and 1 are equal in Python and mean different things in a recipe.
        if not values or any(
            type(one) is not type(values[0]) or one != values[0] for one in values
        ):
            raise Unread("several values")
        return values[0]

    def _constant(self, node: ast.expr | None, depth: int) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Call) and ast.unparse(node) == "torch.cuda.is_available()":
            return True
        if isinstance(node, ast.Attribute) and self._dotted(node).startswith("torch."):
            return node.attr  # a dtype
        # The same where the script has not imported torch itself, as in a fragment.
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
            return node.attr
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node).startswith("getattr(torch, ")
            and len(node.args) == 2
        ):
            return self.value(node.args[1], depth)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            values = [self.value(one, depth) for one in node.elts]
            return {ast.Tuple: tuple, ast.List: list, ast.Set: list}[type(node)](values)
        if isinstance(node, ast.Dict) and None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {
                _hashable(self.value(key, depth)): self.value(value, depth) for key, value in pairs
            }
        if isinstance(node, ast.JoinedStr):
            return _text("".join(str(self._part(one, depth)) for one in node.values))
        return self._computed(node, depth)

    def _part(self, node: ast.expr, depth: int) -> Any:
        if isinstance(node, ast.FormattedValue) and (node.format_spec or node.conversion != -1):
            raise Unread("a format")
        return self.value(
            # An f-string's parts are texts and expressions in braces.
            getattr(node, "value", node) if isinstance(node, ast.FormattedValue) else node,
            depth,
        )

    def _computed(self, node: ast.expr | None, depth: int) -> Any:
        """The value of an operation on constants."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(self.value(node.operand, depth))
        if (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and type(node.ops[0]) in COMPARISONS
        ):
            sides = self.value(node.left, depth), self.value(node.comparators[0], depth)
            return _tried(COMPARISONS[type(node.ops[0])], *sides)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            sides = self.value(node.left, depth), self.value(node.right, depth)
            # Texts are only joined: a text times a number could be made as long as one likes.
            if isinstance(node.op, ast.Add) and all(isinstance(side, str) for side in sides):
                return _text(sides[0] + sides[1])
            if isinstance(sides[0], tuple):
                return _repeated(node.op, *sides)
            return _number(_tried(OPERATORS[type(node.op)], *map(_number, sides)))
        if isinstance(node, ast.BoolOp):
            values = [bool(self.value(one, depth)) for one in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        raise Unread(type(node).__name__)


def _number(value: Any) -> int | float:
    if (
        # bool is a kind of int, and True + True is no number of a recipe.
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not -MOST_NUMBER < value < MOST_NUMBER
    ):
        raise Unread("no number, or too large a one")
    return value


def _repeated(sign: ast.operator, elements: tuple, more: Any) -> tuple:
    """A tuple that is repeated, or another one appended to it."""
    if isinstance(sign, ast.Add) and isinstance(more, tuple):
        return elements + more
    if not isinstance(sign, ast.Mult) or _number(more) * len(elements) > MOST_ELEMENTS:
        raise Unread("too long a tuple")
    return _tried(operator.mul, elements, more)


def _text(value: str) -> str:
    if len(value) > MOST_LETTERS:
        raise Unread("too long a text")
    return value


def _hashable(value: Any) -> Any:
    _tried(hash, value)
    return value


def _tried(function: Any, *values: Any) -> Any:
    try:
        return function(*values)
    # Division by zero and adding a text to a number are the script's own errors, found when it
    # runs.
    except (TypeError, ArithmeticError) as error:
        raise Unread(str(error)) from error
