"""Private parts of other libraries are reached in `vramlab.private` alone, and listed on a page."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from settings import ROOT

PACKAGE = ROOT / "helpers" / "vramlab"
PRIVATE = PACKAGE / "private"
OF_LIBRARIES = {*PRIVATE.glob("of_*.py")}
# Functions of ours, and Python's own, that take an attribute's name as text.
BY_NAME = {"replaced", "afterwards", "plain", "_healthy", "getattr", "hasattr", "setattr"}
# Of Python: its documentation describes them.
DOCUMENTED = {"_replace", "_fields", "_asdict", "_exit", "_getframe"}
# A method of these begins with an underscore because a class of ours overrides a library's.
OVERRIDES = {
    ("simulation/compiled.py", "_should_skip_dynamo"),
    ("simulation/fake_mode.py", "_should_skip_dynamo"),
    ("simulation/fake_mode.py", "_validate_cache_key"),
    ("simulation/inductor.py", "_boxed_call"),
    ("tracking/fake_tracker.py", "_should_skip_dynamo"),
    ("training/engines/ddp.py", "_rebuild_buckets"),
    ("training/engines/pipeline.py", "_inference_mode"),
    ("training/engines/pipeline.py", "_validate_fwd_outputs"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_operator(node: ast.Attribute) -> bool:
    """Tell whether an attribute is an operator of torch: its name is what a dispatch mode meets."""
    return ast.unparse(node.value) in ("aten", "torch.ops.aten", "torch.ops")


def is_set_on_self(node: ast.AST) -> bool:
    """Tell whether a node is an attribute that an object of ours gives itself."""
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and ast.unparse(node.value) in ("self", "cls")


def own_names(tree: ast.Module) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes of self."""
    names = set(DOCUMENTED)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif is_set_on_self(node):
            names.add(node.attr)
    return names


def names_of_others(tree: ast.Module) -> Iterator[str]:
    """Attributes, imported names, and text that names an attribute.

    What `self` has may be of a class in another file.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_operator(node) and ast.unparse(node.value) not in ("self", "super()"):
                yield node.attr
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from alias.name.split(".")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
            yield from (
                each.value for each in node.args if isinstance(getattr(each, "value", None), str)
            )


def reached(text: str) -> set[str]:
    """Private names of others that a file's text reaches."""
    tree = ast.parse(text)
    return {name for name in names_of_others(tree) if is_private(name)} - own_names(tree)


def page() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("## Private parts of libraries")[2].partition("\n## ")[0]


def rows() -> list[list[str]]:
    return [row.split("|")[1:-1] for row in page().splitlines() if row.startswith("| `")]


def test_private_parts_are_reached_in_one_place():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = reached(path.read_text(encoding="utf-8"))
        if names and path not in OF_LIBRARIES:
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nkey = torch.nn.Module()._parameters",
        "import torch._inductor",
        "from torch._C import _get_seq",
        "from x import f\nf._handle",
        "replaced(owner, '_handle', None)",
        "getattr(owner, '_handle', None)",
    ],
)
def test_a_private_part_is_seen(text):
    assert reached(text)


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self):\n        self._a = 1\n        return self._a",
        "aten._unsafe_view.default",
        "row._replace(a=1)",
        "from ..private.of_torch import address_of",
        "x.__dict__",
    ],
)
def test_a_name_of_ours_is_no_private_part(text):
    assert not reached(text)


def test_what_overrides_a_library_is_said_on_the_page():
    for file, name in OVERRIDES:
        assert name in own_names(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        assert f"`{name}`" in page()


def handed_out(text: str) -> set[str]:
    """Names that a module of private parts gives to others."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_list = ast.unparse(target) == "__all__"
            names.update(ast.literal_eval(node.value) if is_list else [ast.unparse(target)])
    return names


def test_the_page_lists_what_each_module_hands_out():
    said = {path.name: set() for path in OF_LIBRARIES}
    for module, names, *_ in rows():
        said[module.strip(" `")].update(re.findall(r"`([^`]+)`", names))
    for module, names in said.items():
        assert names == handed_out((PRIVATE / module).read_text(encoding="utf-8")), module


def test_each_name_is_used():
    words = set()
    for path in PACKAGE.rglob("*.py"):
        if path not in OF_LIBRARIES:
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    for module in OF_LIBRARIES:
        assert handed_out(module.read_text(encoding="utf-8")) <= words, module


def test_what_the_page_says_guards_them_is_there():
    guards = " ".join(row[-1] for row in rows())
    named = set(re.findall(r"`(test_\w+\.py)`", guards))
    assert named and named <= {Path(path).name for path in (ROOT / "tests").rglob("test_*.py")}
    assert all("`test_" in row[-1] for row in rows())
