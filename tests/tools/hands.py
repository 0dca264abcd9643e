"""What the gate asks of a chapter's blanks and guesses.

They are left to the reader, and no number is given away.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

# The line that vramlab_course.guesses prints: "found 11.2 % · your guess: none".
FOUND = re.compile(
    r"^(?:live: )?found (?P<number>-?[\d.,]*\d)(?: (?P<unit>.+?))? · your guess: (?P<mine>.*)$",
    re.MULTILINE,
)


def problems(nb: NotebookNode) -> Iterator[str]:
    """What is wrong with the blanks and guesses of a chapter, a sentence each."""
    guessed: dict[str, int] = {}
    above: list[str] = []
    for number, cell in enumerate(nb.cells, 1):
        tree = _tree(cell)
        for problem in [
            *_filled(tree),
            *_early(tree, guessed, number),
            *_given_away(cell, above),
        ]:
            yield f"cell {number}: {problem}"
        above += [cell.source, *output_texts(cell)]
    for name, number in guessed.items():
        yield f"cell {number}: the guess {name!r} is compared with nothing"


def output_texts(cell: NotebookNode) -> Iterator[str]:
    """Whatever a reader sees, or hears read out, of a cell's outputs."""
    yield from _texts(cell.get("outputs", []))


def _texts(outputs: Iterable[NotebookNode]) -> Iterator[str]:
    for output in outputs:
        yield output.get("text", "")
        for mime, data in output.get("data", {}).items():
            if mime.startswith("text/"):
                yield str(data)
        for about in output.get("metadata", {}).values():
            yield about.get("alt", "") if isinstance(about, Mapping) else ""


def _tree(cell: NotebookNode) -> ast.Module:
    """The syntax of a code cell; empty for text, and for code that is none."""
    if cell.cell_type == "code":
        try:
            return ast.parse(TransformerManager().transform_cell(cell.source))
        except SyntaxError:
            pass
    return ast.Module([], [])


def _calls(tree: ast.Module, function: str) -> Iterator[ast.Call]:
    """Calls such as `blank.check(…)` or `guess(…)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            yield node


def _filled(tree: ast.Module) -> Iterator[str]:
    """Blanks that a cell does not define itself, or in which somebody has written."""
    written = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for call in _calls(tree, "blank.check"):
        # The name of the blank and the function or class that fills it.
        name, answer = map(ast.unparse, call.args)
        if answer not in written:
            yield f"the blank {name} is not defined in the cell that checks it"
        # A blank is open as long as an Ellipsis stands anywhere in it.
        elif not any(
            isinstance(node, ast.Constant) and node.value is ...
            for node in ast.walk(written[answer])
        ):
            yield f"the blank {name} is filled in"


def _early(tree: ast.Module, guessed: dict[str, int], number: int) -> Iterator[str]:
    """Guesses that are made already, or compared before the reader can make them.

    Those not compared yet are kept in `guessed`.
    """
    for statement in tree.body:
        for call in _calls(ast.Module([statement], []), "guess"):
            mine = next((given.value for given in call.keywords if given.arg == "mine"), None)
            if mine is None or ast.unparse(mine) != "None":
                yield "a guess without 'mine=None', which the reader edits"
            if isinstance(statement, ast.Assign):
                guessed[ast.unparse(statement.targets[0])] = number
    # A copy of the names, since compared ones are taken out of the dictionary.
    for name in [name for name in guessed if any(_calls(tree, f"{name}.compare"))]:
        if guessed.pop(name) == number:
            yield f"the guess {name!r} is compared in its own cell, so nobody can make it first"


def _given_away(cell: NotebookNode, above: list[str]) -> Iterator[str]:
    """Numbers that a cell compares with a guess, and that a reader has seen before.

    They stand in the cells above it, or beside the fold.
    """
    outputs = cell.get("outputs", [])
    folds = [output for output in outputs if "text/html" in output.get("data", {})]
    beside = list(_texts(output for output in outputs if output not in folds)) if folds else []
    # A fold says the same as text and as HTML.
    said = dict.fromkeys(
        found.group(0, "number", "unit", "mine")
        for found in FOUND.finditer("\n".join(output_texts(cell)))
    )
    for _, number, unit, mine in said:
        # 11.2 must not be found in 311.2, nor, without a unit, 11 in 11.2.
        pattern = rf"(?<![\d.,]){re.escape(number)}"
        if unit:
            pattern += rf"[\s-]*{re.escape(unit)}"
        else:
            pattern += r"(?![.,]?\d)"
        shown = " ".join(filter(None, (number, unit)))
        if re.search(pattern, "\n".join(above)):
            yield f"{shown} is to be guessed, and stands in a cell above already"
        if re.search(pattern, "\n".join(beside)):
            yield f"{shown} is to be guessed, and stands beside the fold"
        if mine != "none":
            yield f"a guess is stored with the notebook: {mine}"
