"""Which names of a script move no memory of a step (`data/script_calls.json`)."""

import ast
import builtins
import json
import re
import sys

from ..base.data import data_path
from .script_tree import Tree

WORDS = json.loads(data_path("script_calls.json").read_text(encoding="utf-8"))
# What is imported from these is judged name by name; what comes from elsewhere is noted as a whole.
LIBRARIES = sys.stdlib_module_names.union(WORDS["libraries"])
HARMLESS = re.compile("|".join(WORDS["patterns"]))


class Names:
    """The names of a script."""

    def __init__(self, tree: Tree):
        self.tree = tree

    def is_of_modules(self, whole: str) -> bool:
        """Whether a dotted name is of a module that moves nothing."""
        # With the dot, so that a module whose name only begins so does not count.
        return any(whole == one or whole.startswith(f"{one}.") for one in WORDS["modules"])

    def is_harmless_name(self, whole: str, name: str) -> bool:
        """Whether a call of that name, imported as `whole` or not at all, moves nothing."""
        known = name in WORDS["calls"] or HARMLESS.fullmatch(name) is not None
        return self.is_of_modules(whole) or known or (not whole and name in WORDS["builtins"])

    def is_known_class(self, node: ast.expr) -> bool:
        """Whether a class is the script's own, Python's or of a library that is known."""
        node = node.value if isinstance(node, ast.Subscript) else node  # Generic[T]
        return not self.is_foreign(self.tree.dotted(node), ast.unparse(node))

    def is_foreign(self, whole: str, name: str = "") -> bool:
        """Whether a name, imported as `whole` or not at all, is of a module that is not known."""
        # A library that is known may still have a name that is not, which other checks look at.
        if whole:
            root = whole.partition(".")[0]
            return root not in LIBRARIES and not self.is_of_modules(whole)
        return (
            name not in self.tree.functions
            and name not in self.tree.classes
            and not hasattr(builtins, name)
        )

    def unread_callback(self, node: ast.expr) -> bool:
        """Whether a callback, an instance or a class, is of a class that is not read."""
        return any(
            # None is a source that could not be followed, so nothing is known of its class.
            one is None or not self._is_known_callback(one)
            for one in self.tree.sources(node)
        )

    def _is_known_callback(self, node: ast.expr) -> bool:
        if isinstance(node, ast.List | ast.Tuple):
            return not any(map(self.unread_callback, node.elts))
        made = node.func if isinstance(node, ast.Call) else node
        return (isinstance(node, ast.Constant) and node.value is None) or self.is_known_class(made)
