"""Notes on lines of a script that are not in its recipe."""

import ast
import shlex
import textwrap
from typing import NoReturn

from ..base.errors import RecipeError
from ..base.text import one_line
from .script_tree import SCOPES, Tree, line_of, start_of

MOST_NOTES = 3


class Notes:
    """What is noted of a script's statements."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.notes: dict[ast.AST, dict[str, int]] = {}  # by statement: texts and their lines

    def text(self, node: ast.AST) -> str:
        """The source of a node in one short line that every terminal can show."""
        lines = ast.unparse(node).splitlines()
        # Of a compound statement, such as an if, the head alone: its body has lines of its own.
        whole = one_line(" ".join(lines[:1] if isinstance(node, ast.stmt) else lines))
        return textwrap.shorten(whole, 100, placeholder=" …")

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that a node is in."""
        while not isinstance(node, ast.stmt) and node in self.tree.parents:
            node = self.tree.parents[node]
        return node

    def note(self, node: ast.AST, why: str = "", text: str = "") -> None:
        """List what is not in the recipe.

        `text`, or the node itself where it stands in a longer statement.
        """
        statement = self.statement(node)
        # A note on the head of a loop must not quote the whole loop.
        compound = isinstance(statement, (*SCOPES, ast.If, ast.For, ast.While, ast.With, ast.Try))
        source = text or self.text(node if compound else statement)
        # One statement may be noted for several reasons; each of them is said once.
        listed = self.notes.setdefault(statement, {})
        listed.setdefault(f"`{source}`{why and ', '}{why}", line_of(node))

    def refuse(self, node: ast.AST | None, why: str) -> NoReturn:
        """Raise RecipeError, which names the line and the command that runs the script."""
        where = f"line {line_of(node)} (`{self.text(node)}`) " if node is not None else ""
        path = self.tree.path
        runs = f"vramlab run --gpu NAME -- python {shlex.quote(str(path))}"
        raise RecipeError(
            "script",
            path.name,
            f"{where}{why}: {runs} runs it and says what it holds",
        )

    def listed(self) -> list[str]:
        """The notes, in the script's order.

        Raises RecipeError where they are too many for an answer.
        """
        notes = sorted(self.notes.items(), key=lambda pair: start_of(pair[0]))
        # Three lines that are left out make a figure doubtful, more make it another program's.
        if len(notes) > MOST_NOTES:
            first, _ = notes[0]
            others = ", ".join(str(line_of(statement)) for statement, _ in notes[1:12])
            self.refuse(
                first,
                f"is one of {len(notes)} lines that no recipe says, as are lines {others}",
            )
        # A statement over several lines is named by the first of them.
        return [f"without line {min(texts.values())}: {'; '.join(texts)}" for _, texts in notes]
