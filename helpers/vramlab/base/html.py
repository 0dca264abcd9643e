"""Answers as small tables of HTML, for notebooks.

Jupyter, Colab, and GitHub, which keeps tables and drops styles.

Colours are the page's own in light and dark: nothing here sets a colour of text or ground, and a
bar is drawn in letters.
"""

from collections.abc import Iterable, Sequence
from html import escape

from .text import printable

BAR = 24  # letters of the longest bar
FULL = "█"
EMPTY = "░"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    notes: Iterable[str] = (),
) -> str:
    """Return a table; the first column is left-aligned, and all texts are escaped."""
    lines = ["<table>"]
    if caption:
        lines.append(f"<caption>{_text(caption)}</caption>")
    if head:
        cells = "".join(f"<th>{_text(cell)}</th>" for cell in head)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    # Attributes and not styles, which GitHub removes.
    for first, *others in rows:
        cells = f'<td align="left">{_text(first)}</td>'
        cells += "".join(f'<td align="right">{_text(other)}</td>' for other in others)
        lines.append(f"<tr>{cells}</tr>")
    lines.append("</tbody></table>")
    lines += [f"<p><small>{_text(note)}</small></p>" for note in notes]
    return "".join(lines)


def bar(part: float, whole: float) -> str:
    """Return a bar of letters that is as long as the share of `part` in `whole`."""
    # A part may be more than the whole, where an answer does not fit.
    filled = round(BAR * min(max(part / whole, 0.0), 1.0)) if whole else 0
    return FULL * filled + EMPTY * (BAR - filled)


def _text(value: object) -> str:
    return escape(printable(str(value)))
