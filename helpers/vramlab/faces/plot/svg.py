"""One stacked bar as SVG text, for pages that follow a slider: drawn in a fraction of a millisecond, by no library."""

import math
from collections.abc import Iterator
from html import escape
from itertools import count

from ...report.compare import check_unit
from ...report.report import Interval
from . import style
from .splits import Split, amount, layers, limit_of, size_of

WIDTH, HEIGHT, LEFT, TOP, THICK = 700, 156, 14, 44, 52
TILE = 8  # pixels of a hatch's tile
# matplotlib's hatches of `style.LOOK` as strokes in one tile.
HATCHES = {
    "//": "M0 8L8 0M-1 1L1 -1M7 9L9 7",
    "\\\\": "M0 0L8 8M7 -1L9 1M-1 7L1 9",
    "..": "M1.5 2h1.4M5.5 6h1.4",
    "xx": "M0 0L8 8M0 8L8 0",
    "||": "M4 0V8",
    "--": "M0 4H8",
    "++": "M4 0V8M0 4H8",
    "////": "M0 4L4 0M0 8L8 0M4 8L8 4",
}
_serial = count()


def bar(split: Split, alt: str, limit=None, process: Interval | None = None, unit: str = "GiB") -> str:
    """One lying bar of `split` by category, with the line of `limit` and the span of `process` below it; SVG text.

    Args:
        alt: the bar in words, for readers who do not see it.
        limit: bytes, a `Gpu` or the name of one.
        process: what the whole process is likely to take.
    Raises:
        ValueError: an unknown unit, or a limit that is none.
    """
    size, has, called = check_unit(unit), *limit_of(limit)
    furthest = [size_of(split), *([has] if limit is not None else []), *([process.high] if process else [])]
    across = (WIDTH - 2 * LEFT) / (1.2 * max(*furthest, 1) / size)  # pixels for one unit

    def x(n: float) -> float:
        return round(LEFT + n / size * across, 2)

    parts = list(_axis(across, unit))
    for (base,), (width,), look in layers([split], unit):
        about = f"{look['label']}: {amount(width * size, unit)} {unit}"
        fill, strokes = look["facecolor"], HATCHES.get(look["hatch"])
        if strokes:
            name = f"vramlab-hatch-{next(_serial)}"
            parts.append(_pattern(name, fill, strokes))
            fill = f"url(#{name})"
        at = f'x="{x(base * size)}" y="{TOP}" width="{round(width * across, 2)}" height="{THICK}"'
        parts.append(f'<rect {at} fill="{fill}" stroke="{style.INK}" stroke-width="0.7"><title>{about}</title></rect>')
    total = size_of(split)
    parts.append(_text(x(total) + 5, TOP + THICK / 2 + 5, f"{amount(total, unit)} {unit}", weight="bold"))
    if process:
        low, likely, high = x(process.low), x(process.value), x(process.high)
        y = TOP + THICK + 9
        line = f"M{low} {y}H{high}M{low} {y - 4}v8M{high} {y - 4}v8M{likely - 4} {y}l4 -4l4 4l-4 4z"
        title = f"<title>whole process: {escape(str(process))}</title>"
        parts.append(f'<path d="{line}" fill="{style.INK}" stroke="{style.INK}" stroke-width="1.4">{title}</path>')
        parts.append(_text(high + 6, y + 4, "whole process"))
    if limit is not None:
        line = f'd="M{x(has)} {TOP - 12}V{TOP + THICK + 18}" stroke="{style.ALARM}" stroke-dasharray="7 4"'
        parts.append(f'<path {line} stroke-width="2.2" fill="none"/>')
        label = f"{called}: {amount(has, unit)} {unit}"
        anchor = "start" if x(has) < WIDTH / 2 else "end"
        parts.append(_text(x(has), TOP - 18, label, anchor=anchor, colour=style.ALARM, weight="bold"))
    head = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}"'
    look = f"width: 100%; max-width: {WIDTH}px; background: white; font: 13px sans-serif"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head} style="{look}">{"".join(parts)}</svg>'


def swatch(colour: str, hatch: str) -> str:
    """A small square in a category's colour and hatch, as SVG text; decoration, so screen readers pass it over."""
    name = f"vramlab-hatch-{next(_serial)}"
    pattern = _pattern(name, colour, HATCHES.get(hatch, ""))
    square = f'<rect width="16" height="16" fill="url(#{name})" stroke="{style.INK}"/>'
    return f'<svg width="16" height="16" aria-hidden="true">{pattern}{square}</svg>'


def _axis(across: float, unit: str) -> Iterator[str]:
    """Grid lines at round numbers, each with its number, and the unit."""
    top = (WIDTH - 2 * LEFT) / across
    power = 10 ** math.floor(math.log10(top / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if top / (factor * power) <= 8)
    y = TOP + THICK + 20
    for i in range(int(top / step) + 1):
        x = round(LEFT + i * step * across, 2)
        yield f'<path d="M{x} {TOP - 6}V{y}" stroke="#DDDDDD" stroke-width="0.8"/>'
        yield _text(x, y + 15, f"{i * step:g}", anchor="middle")
    yield _text(WIDTH - LEFT, y + 32, f"peak of allocated memory, {unit}", anchor="end")


def _pattern(name: str, colour: str, strokes: str) -> str:
    ground = f'<rect width="{TILE}" height="{TILE}" fill="{colour}"/>'
    lines = f'<path d="{strokes}" stroke="{style.INK}" stroke-width="0.8"/>' if strokes else ""
    at = f'patternUnits="userSpaceOnUse" width="{TILE}" height="{TILE}"'
    return f'<defs><pattern id="{name}" {at}>{ground}{lines}</pattern></defs>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = style.INK, weight: str = "normal") -> str:
    look = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    halo = 'stroke="white" stroke-width="3" paint-order="stroke"'  # legible where a line runs through it
    return f'<text x="{round(x, 2)}" y="{round(y, 2)}" {look} {halo}>{escape(text)}</text>'
