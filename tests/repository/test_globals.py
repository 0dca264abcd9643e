"""Nothing at a module's level changes while the packages run, but for what is said here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from settings import ROOT

HELPERS = ROOT / "helpers"
# What is one for the whole process on purpose, and why.
OF_THE_PROCESS = {
    "vramlab/measurement/records.py: _last": "a file's content that this process wrote, by version",
    "vramlab/simulation/fake_mode.py: CACHED": "results of operators, the same for every thread",
    "vramlab/simulation/fakes.py: lock": "one simulation at a time: torch has one describer",
    "vramlab/private/patched.py: _catching": "a value for each thread",
    "vramlab/private/patched.py: _shared": "what any thread has replaced, under a lock",
    "vramlab_course/session.py: SESSION": "a kernel is a session",
}
CHANGES = {
    "add",
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}
CONTAINERS = {"Counter", "defaultdict", "deque", "dict", "list", "set"}
STATEFUL = {"Lock", "RLock", "local", "_Shared", "Session"}


def assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Values of the names at a module's level."""
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values.update({each.id: node.value for each in targets if isinstance(each, ast.Name)})
    return values


def is_made_to_change(value: ast.expr) -> bool:
    """Tell whether a value is empty, has nothing but empty ones inside, or keeps a state."""
    if isinstance(value, ast.Dict):
        return all(map(is_made_to_change, value.values))
    if isinstance(value, ast.List):
        return not value.elts
    if not isinstance(value, ast.Call):
        return False
    name = getattr(value.func, "attr", getattr(value.func, "id", ""))
    return name in STATEFUL or (name in CONTAINERS and not value.args + value.keywords)


def root_of(node: ast.expr) -> str:
    """Name at the begin of `a.b[c]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def changed(tree: ast.Module) -> Iterator[str]:
    """Names that functions change or assign globally."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        local = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
        nodes = list(ast.walk(function))
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                local.add(node.id)
        for node in nodes:
            if isinstance(node, ast.Global):
                yield from node.names
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = root_of(node.func.value)
                if node.func.attr in CHANGES and name not in local:
                    yield name
            elif isinstance(node, ast.Attribute | ast.Subscript):
                name = root_of(node)
                if isinstance(node.ctx, ast.Store | ast.Del) and name not in local:
                    yield name


def changing(text: str) -> set[str]:
    """Names at a module's level that change while it is used."""
    tree = ast.parse(text)
    values = assigned(tree)
    filled = set()  # at import, before anybody reads it
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            stores = (each for each in ast.walk(node) if isinstance(each, ast.Subscript))
            filled.update(root_of(each) for each in stores if isinstance(each.ctx, ast.Store))
    made = {name for name, value in values.items() if is_made_to_change(value)}
    return (made - filled) | (set(changed(tree)) & set(values))


def test_only_what_is_the_process_s_changes():
    found = set()
    for path in HELPERS.rglob("*.py"):
        file = path.relative_to(HELPERS).as_posix()
        found |= {f"{file}: {name}" for name in changing(path.read_text(encoding="utf-8"))}
    assert found == set(OF_THE_PROCESS)


@pytest.mark.parametrize(
    "text",
    [
        "a = {}",
        "a = {'x': [], 'y': []}",
        "a = Counter()",
        "a = [1]\ndef f():\n    a.append(2)",
        "a = {1: 2}\ndef f():\n    a[1] = 3",
        "a = 1\ndef f():\n    global a\n    a = 2",
        "a = B(1)\ndef f():\n    a.b.c = 3",
    ],
)
def test_what_changes_is_seen(text):
    assert changing(text) == {"a"}


@pytest.mark.parametrize(
    "text",
    [
        "a = {1: 2}\ndef f(a):\n    a[1] = 3",
        "a = [1]\ndef f():\n    a = []\n    a.append(2)",
        "a = {'x': [], 'y': 1}",
        "a = {}\nfor x in b:\n    a[x] = 1",
        "a = ContextVar('a', default=None)\ndef f():\n    a.set(1)",
    ],
)
def test_what_stays_is_left_alone(text):
    assert changing(text) == set()


def test_each_reason_is_in_the_code_too():
    for where in OF_THE_PROCESS:
        file, name = where.split(": ")
        lines = Path(HELPERS, file).read_text(encoding="utf-8").splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith((f"{name} =", f"{name}:")))
        above = "\n".join(lines[max(0, at - 3) : at])
        assert "#" in above, where
