"""Values as Python source.

So no value of a plan can become code of the program that it writes. What a template writes is a
literal unless it is `Code`, which only this package's own constants and the functions here are.
"""

import math
import re

PLAIN = (bool, int, float, type(None))
TRIPLE = '"""'


class Code(str):
    """Source that a template writes as it is.

    Never make one of text that a configuration or a user gave.
    """


def literal(value: object) -> Code:
    """Return `value` as a literal with double quotes where there is a choice.

    Raises TypeError for what no literal of these kinds gives back: text, numbers, None, lists,
    tuples, dictionaries.
    """
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return Code("[" + ", ".join(map(literal, value)) + "]")
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return Code("(" + ", ".join(map(literal, value)) + comma + ")")
    if isinstance(value, dict):
        pairs = [f"{literal(key)}: {literal(each)}" for key, each in value.items()]
        return Code("{" + ", ".join(pairs) + "}")
    # By exact type: a subclass may print as anything.
    if type(value) not in PLAIN or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"no literal gives {value!r} back")
    # 4.0 is written as 4, as people write it.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return Code(repr(value))


def _quoted(text: str) -> Code:
    escaped = str.__repr__(text)  # escapes whatever is not printable, surrogates among it
    if "'" in text or '"' in text:
        return Code(escaped)  # with the quotes that need fewer escapes
    return Code('"' + escaped[1:-1] + '"')


def docstring(text: str) -> Code:
    """Return `text` as a literal of several lines between three double quotes."""
    body = "".join(char if char == "\n" else _escaped(char) for char in text)
    # Only where a quote could end the literal, so that most texts stay readable.
    if TRIPLE in body or body.endswith('"'):
        body = body.replace('"', '\\"')
    return Code(TRIPLE + body + TRIPLE)


def _escaped(char: str) -> str:
    if char.isprintable() and char != "\\":
        return char
    return char.encode("unicode_escape").decode("ascii")


def identifier(text: str) -> Code:
    """Return a name, such as a class's, that is written without quotes.

    Raises ValueError for other text.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError(f"{text!r} is no name")
    return Code(text)
