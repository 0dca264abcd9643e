"""What a script imports, accounted for as its lines are."""

import ast
import contextlib

from .script_lines import Lines
from .script_names import WORDS
from .script_values import Unread

# Both runs are measured beside `simulate` of such a command (data/stand_in/README.md).
WITHOUT_UNSLOTH = (
    "{}. By TRL and PEFT alone, of whose figures two runs of Unsloth held 85 % and 90 %: "
    "`vramlab predict {}` (on a card without bf16, as a T4, end it with --trainer transformers "
    "--precision fp16-mixed). By Unsloth"
)


def account_for_imports(lines: Lines) -> None:
    """Note modules whose names are not known.

    Raises RecipeError for those that change what others do.
    """
    for node in lines.tree.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _account_for_import(lines, node)


def _account_for_import(lines: Lines, node: ast.Import | ast.ImportFrom) -> None:
    modules = [getattr(node, "module", None) or "", *(name.name for name in node.names)]
    for module in modules:
        why = WORDS["refused_imports"].get(module.partition(".")[0])
        if why:
            if module.startswith("unsloth"):
                why = WITHOUT_UNSLOTH.format(why, _without_unsloth(lines))
            lines.refuse(node, f"is not modelled: {why}")
    # A star brings in names that no line shows.
    if modules[-1] == "*" and not lines.names.is_of_modules(modules[0]):
        lines.note(node, "whose names are not known")
        return
    roots = (
        {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.Import)
        else {modules[0]}
    )
    # Modules of the script's own folder or of unknown packages are not read.
    foreign = [root for root in roots if lines.names.is_foreign(root)]
    names = {name.asname or name.name.partition(".")[0] for name in node.names}
    # A module of which no name is used was imported for its side effects.
    if foreign and not names & lines.tree.names:
        lines.note(node, "which is run for what it changes, and not read")


def _without_unsloth(lines: Lines) -> str:
    """The options of the nearest training that is modelled, as the script's constants say them."""
    said = {"model_name": "MODEL", "load_in_4bit": True}  # its own default
    for node in lines.tree.nodes:
        if isinstance(node, ast.keyword):
            with contextlib.suppress(Unread):
                said[str(node.arg)] = lines.tree.value(node.value)
    words = []
    for name, flag in WORDS["without_unsloth"].items():
        value = said.get(name)
        if isinstance(value, list):
            value = ",".join(value)
        if value:
            words.append(flag.format(value))
    return " ".join(words)
