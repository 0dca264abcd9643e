"""Reads calls of a script: what they are given by name, and the constants of that."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .script_lines import Lines
from .script_tree import Tree
from .script_values import Unread

UNTOLD = "whose value only running it would tell"


class CallReader:
    """A script's tree and lines, and what its calls say."""

    def __init__(self, path: Path):
        self.tree = Tree(path)
        self.lines = Lines(self.tree)

    def _words(self, call: ast.Call, positions: Sequence[str] = ()) -> dict[str, ast.expr]:
        """Return what a call is given, by name.

        Raises RecipeError where only running it would tell.
        """
        # Whoever asks for a call's words accounts for each of them.
        self.lines.understood.add(call)
        self._account_for_library(call)
        if len(call.args) > len(positions) or any(
            isinstance(arg, ast.Starred) for arg in call.args
        ):
            self.lines.refuse(call, "has arguments without a name, which are not read")
        # What is passed by position, under the parameter's name.
        nodes = dict(zip(positions, call.args, strict=False))
        for word in call.keywords:
            if word.arg:
                nodes[word.arg] = word.value
                continue
            held = self.tree.sources(word.value)
            # A dictionary that the script changes later does not say what the call is given.
            whole = held[0] if len(held) == 1 and not self.tree.is_written(held[0]) else None
            if isinstance(whole, ast.Dict) and all(
                isinstance(key, ast.Constant) for key in whole.keys
            ):
                keys: list[Any] = [getattr(key, "value", None) for key in whole.keys]
                nodes |= dict(zip(keys, whole.values, strict=True))
            elif isinstance(whole, ast.Call) and self.tree.name(whole) == "dict" and not whole.args:
                nodes |= self._words(whole)
            else:
                self.lines.refuse(
                    call,
                    f"has {self.lines.text(word.value)} among its arguments, {UNTOLD}",
                )
        return nodes

    def _account_for_library(self, call: ast.Call) -> None:
        """Note a class of a name that is known which another library has.

        Raises RecipeError for one of the script's own.
        """
        # Of Config.from_pretrained(…) the class before the dot.
        owner = (
            call.func.value
            if isinstance(call.func, ast.Attribute) and not self.tree.dotted(call.func)
            else call.func
        )
        # A class of the script may have the name of a library's and do something else.
        if getattr(owner, "id", "") in self.tree.classes and call is not self.lines.trainer:
            self.lines.refuse(call, "is of a class of its own, which no recipe says")
        whole = (
            self.tree.dotted(owner).removesuffix(".from_pretrained").removesuffix(".from_config")
        )
        if whole and self.lines.names.is_foreign(whole):
            self.lines.note(call, f"of {whole}, which is not read")

    def _only(self, node: ast.expr | None, what: str) -> ast.expr | None:
        """Return what an expression stands for.

        Raises RecipeError where that may be several things.
        """
        found = self.tree.sources(node)
        if len(found) != 1 or (found[0] is None and node is not None):
            self.lines.refuse(node, f"does not say {what}: only running it would tell")
        return found[0]

    def _value(self, name: str, node: ast.expr, quiet: bool = False) -> Any:
        """Return a constant, or None with a note, unless `quiet`, where only running would tell."""
        try:
            return self.tree.value(node)
        except Unread:
            if not quiet:
                self._note(name, node, UNTOLD)
            return None

    def _note(self, name: str, node: ast.expr, why: str = "") -> None:
        # Its parts are inside this note and need none of their own.
        self.lines.understood.update(ast.walk(node))
        self.lines.note(node, why, f"{name}={self.lines.text(node)}")

    def _values(
        self,
        call: ast.Call,
        known: Any,
        quiet: Any = (),
        positions: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the constants that a configuration's call is given, with notes on the others."""
        constants = {}
        for name, node in self._words(call, positions).items():
            # A value that moves no memory need not be known.
            if name in quiet:
                self.lines.understood.update(ast.walk(node))
                continue
            if name not in known:
                self._note(name, node, f"which {self.tree.name(call)} does not have")
                continue
            try:
                constants[name] = self.tree.value(node)
            except Unread:
                self._note(name, node, UNTOLD)
        return constants
