"""The page of private parts in CONTRIBUTING.md names each file that leans on some, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from settings import ROOT

PACKAGE = ROOT / "helpers" / "vramlab"
# Functions of ours, and Python's own, that take an attribute's name as text.
BY_NAME = {"replaced", "afterwards", "plain", "_healthy", "getattr", "hasattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the package gives to functions, classes, variables and attributes of self."""
    names = {"_replace", "_fields", "_asdict"}  # of named tuples, which document them
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_self(node.value)
        ):
            names.add(node.attr)
    return names


def names_of_others(tree: ast.Module) -> Iterator[str]:
    """Attributes, imported names, and text that names an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
            yield from (
                each.value for each in node.args if isinstance(getattr(each, "value", None), str)
            )


def leaning_files() -> set[str]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    own = own_names(list(trees.values()))
    return {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in trees.items()
        if any(is_private(name) and name not in own for name in names_of_others(tree))
    }


def page() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("## Private parts of libraries")[2].partition("\n## ")[0]


def test_the_page_names_the_files_that_lean_on_private_parts():
    rows = [row.split("|")[1] for row in page().splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`([^`]+\.py)`", " ".join(rows))) == leaning_files()


def test_what_the_page_says_guards_them_is_there():
    guards = [row.split("|")[4] for row in page().splitlines() if row.startswith("| `")]
    named = set(re.findall(r"`(test_\w+\.py)`", " ".join(guards)))
    assert named and named <= {Path(path).name for path in (ROOT / "tests").rglob("test_*.py")}
