"""What a reader meets in the lines of some packages.

    python benchmarks/readability.py FOLDER [FOLDER ...]

One row for each folder, over all Python files under it (tests are left out), so that the package
can be held against ones that people call readable:

    git clone https://github.com/karpathy/nanochat
    git clone https://github.com/pytorch/torchtitan
    pip download --no-deps httpx && unzip httpx-*.whl
    python benchmarks/readability.py helpers/vramlab nanochat/nanochat torchtitan/torchtitan httpx

A line of code has a token other than a comment, outside docstrings. A syntax node is one of
`ast.walk`, without docstrings. A packed assignment gives unrelated values to several names
(`a, b = 1, f()`); a swap (`a, b = b, a`) and the unpacking of one value (`a, b = f()`) are none. A
conditional statement is `a() if b else c()`, `n += 1 if b else 0` or `for x in xs if b else ():`.
The size of a statement is its syntax nodes without those of the statements in it; a literal table
and the head of a function or class have none.
"""

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WIDTH = 100  # columns
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SEQUENCES = (ast.Tuple, ast.List)
DISPLAYS = (*SEQUENCES, ast.Dict, ast.Set)
INNER = (ast.stmt, ast.ExceptHandler, ast.match_case)


@dataclass
class Counts:
    """Counts over the files of a folder."""

    lines: int = 0  # of code
    all_lines: int = 0  # with comments, docstrings and blank ones
    wide: int = 0  # of all lines
    comments: int = 0
    nodes: Counter = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)  # lines of code of each function
    sizes: list[int] = field(default_factory=list)  # of statements

    def add(self, text: str) -> None:
        """Count a file."""
        tree = ast.parse(text)
        docstrings = list(_docstrings(tree))
        coded, commented = _lines(text, docstrings)
        lines = text.splitlines()
        self.lines += len(coded)
        self.all_lines += len(lines)
        self.wide += sum(len(line) > WIDTH for line in lines)
        self.comments += len(commented)
        for node in ast.walk(tree):
            self.nodes["nodes"] += 1
            self.nodes["statements"] += isinstance(node, ast.stmt)
            self.nodes["packed"] += _is_packed(node)
            self.nodes["conditional"] += _is_conditional_statement(node)
            self.nodes["comprehensions"] += isinstance(node, COMPREHENSIONS)
            if _has_size(node):
                self.sizes.append(_size(node))
            if isinstance(node, FUNCTIONS):
                inside = coded.intersection(range(node.lineno, node.end_lineno + 1))
                self.lengths.append(len(inside))
        # a docstring is an expression statement and its constant
        self.nodes["nodes"] -= 2 * len(docstrings)
        self.nodes["statements"] -= len(docstrings)

    @property
    def large_statement(self) -> int:
        """The size that 99 in 100 statements do not exceed."""
        return sorted(self.sizes)[int(0.99 * len(self.sizes))]

    def row(self) -> list[str]:
        """Return the columns of `HEADER`."""
        thousand = self.nodes["statements"] / 1000
        return [
            f"{self.lines:,}",
            f"{self.nodes['nodes'] / self.lines:.1f}",
            f"{self.wide / self.all_lines:.1%}",
            f"{self.nodes['packed'] / thousand:.1f}",
            f"{self.nodes['conditional']}",
            f"{self.nodes['comprehensions'] / thousand:.0f}",
            f"{self.large_statement}",
            f"{statistics.median(self.lengths):.0f}",
            f"{max(self.lengths)}",
            f"{100 * self.comments / self.lines:.1f}",
        ]


HEADER = [
    "folder",
    "lines of code",
    "nodes a line",
    f"over {WIDTH} columns",
    "packed assignments in 1,000 statements",
    "conditional statements",
    "comprehensions in 1,000 statements",
    "nodes of 99 in 100 statements",
    "median function",
    "longest",
    "comments in 100 lines",
]


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def _lines(text: str, docstrings: list[ast.Expr]) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines with code, and of those with a comment."""
    coded = set()
    commented = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            commented.add(token.start[0])
        elif token.type not in NO_CODE:
            coded.update(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings:
        coded.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return coded, commented


def _is_packed(node: ast.AST) -> bool:
    """Tell whether a statement assigns unrelated values, one to each of its targets."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, SEQUENCES):
        return False
    values = node.value.elts
    if len(values) < 2 or any(isinstance(value, ast.Starred) for value in values):
        return False
    return any(
        isinstance(target, SEQUENCES) and not _is_swap(target, values) for target in node.targets
    )


def _has_size(node: ast.AST) -> bool:
    if not isinstance(node, ast.stmt) or isinstance(node, WITH_DOCSTRING):
        return False
    is_table = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, DISPLAYS)
    return not is_table


def _size(statement: ast.stmt) -> int:
    """Return the nodes of a statement, without those of the statements in it."""
    total = 0
    pending: list[ast.AST] = [statement]
    while pending:
        total += 1
        for child in ast.iter_child_nodes(pending.pop()):
            if not isinstance(child, INNER):
                pending.append(child)
    return total


def _is_swap(target: ast.Tuple | ast.List, values: list[ast.expr]) -> bool:
    """Tell whether a value reads a target, so that two statements would not do the same."""
    named = {ast.unparse(one) for one in target.elts}
    read = {
        ast.unparse(part)
        for value in values
        for part in ast.walk(value)
        if isinstance(part, ast.expr)
    }
    return bool(named & read)


def _is_conditional_statement(node: ast.AST) -> bool:
    """Tell whether a conditional expression stands where an `if` statement would."""
    if isinstance(node, ast.Expr | ast.AugAssign):  # `a() if b else c()`, `n += 1 if b else 0`
        return isinstance(node.value, ast.IfExp)
    return isinstance(node, ast.For) and isinstance(
        node.iter, ast.IfExp
    )  # `for x in xs if b else ():`


def counted(folder: Path) -> Counts:
    """Count all Python files under `folder` but tests."""
    counts = Counts()
    for path in sorted(folder.rglob("*.py")):
        if "tests" not in path.relative_to(folder).parts:
            counts.add(path.read_text(encoding="utf-8"))
    return counts


def main(folders: list[str]) -> None:
    """Print the table."""
    print("| " + " | ".join(HEADER) + " |")
    print("|---" * len(HEADER) + "|")
    for folder in folders:
        print("| " + " | ".join([folder, *counted(Path(folder)).row()]) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
