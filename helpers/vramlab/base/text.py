"""Text of others, made safe for where it is shown: a terminal, a comment or a page.

And ours where letters are few.
"""

import codecs
import difflib
import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

# Control characters other than the end of a line and a tab, marks that turn or hide what follows,
# and half characters.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
MARKUP = re.compile(r"([\\`*_{}\[\]<>|$~#])")
LINKS = re.compile(r"(?<=www)\.|:(?=//)")  # of an address that GitHub links by itself
ENTITIES = {"&": "&amp;", "@": "&#64;"}  # no HTML's character, and nobody is called by name
# Characters of our own output, for streams whose encoding lacks them.
PLAIN = {
    "─": "-",
    "–": "-",
    "−": "-",
    "·": "-",
    "×": "x",
    "←": "<-",
    "→": "->",
    "…": "...",
    "µ": "u",
    "≤": "<=",
    "≥": ">=",
    "²": "2",
    "✓": "+",
    "✗": "x",
}
DEGRADE = "vramlab.degrade"  # an error handler, as `sys.stdout.reconfigure(errors=…)` takes it


def printable(text: str) -> str:
    r"""Return `text` with each control character as its number, such as \x1b.

    Terminals obey those, and names have them.
    """

    def escaped(match: re.Match) -> str:
        return match[0].encode("unicode_escape", "surrogatepass").decode()

    return CONTROLS.sub(escaped, text)


def one_line(text: str) -> str:
    """Return `text` on one line and `printable`."""
    return printable(" ".join(text.split()))


def markdown(text: str) -> str:
    """Return text that means itself in Markdown and inside a table, on one line."""
    text = MARKUP.sub(r"\\\1", one_line(text))
    text = "".join(ENTITIES.get(letter, letter) for letter in text)
    return LINKS.sub(lambda found: f"&#{ord(found[0])};", text)


def text_table(rows: Sequence[Sequence[object]], form: str | Sequence[str] = ".1f") -> str:
    """Return rows as an aligned table.

    The first row is the head, the first column is left-aligned. Text stands as it is, whole
    numbers get commas, and other numbers are written by `form`: one for all, or one for each
    column behind the first.
    """
    forms = [form] * len(rows[0]) if isinstance(form, str) else ["", *form]
    table = [[_written(*cell) for cell in zip(row, forms, strict=True)] for row in rows]
    # A column is as wide as its widest cell.
    first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
    lines = []
    for title, *cells in table:
        # Numbers end in the same column, so that their digits stand under each other.
        aligned = [title.ljust(first), *map(str.rjust, cells, others)]
        lines.append("  ".join(aligned).rstrip())
    rule = "  ".join("─" * width for width in (first, *others))
    return "\n".join([lines[0], rule, *lines[1:]])


def _written(value: object, form: str) -> str:
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    return f"{value:,}" if isinstance(value, Integral) else format(value, form)


def _degrade(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter, "?") for letter in text), error.end


codecs.register_error(DEGRADE, _degrade)


def nearest(word: object, known: Iterable[object]) -> str:
    """Return " (did you mean …?)" with the name of `known` that is most like `word`; "" if none."""
    if not (isinstance(word, str) and word):
        return ""
    names = [name for name in known if isinstance(name, str)]
    # "adam" begins some, to which it is not alike by its letters.
    near = [name for name in names if name.startswith(word)]
    near = near or difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
