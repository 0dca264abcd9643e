"""Sizes of memory as people say them, and the card that has so much."""

import re

from ..base.errors import RecipeError
from ..hardware.gpu import Gpu, cards_of, find_gpu, gpu_names
from ..report.report import GiB

UNITS = {
    "": 1,
    "mb": 10**6,
    "gb": 10**9,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def card_with(memory: int) -> Gpu:
    """Return the least of the cards that report `memory` bytes, or the least of at least as many.

    Raises RecipeError where there is none.
    """
    exactly = cards_of(memory)
    # A whole number of GiB is what a box says.
    if exactly and memory % GiB:
        return min(exactly, key=lambda card: (abs(card.total - memory), card.name))
    cards = map(find_gpu, gpu_names())
    large_enough = [card for card in cards if card.memory_gb << 30 >= memory]
    if not large_enough:
        rest = "no card of the table has so much: name the GPU"
        raise RecipeError("memory", memory, rest)
    return min(large_enough, key=lambda card: (card.memory_gb, card.total, card.name))


def size_of(
    name: str,
    value: str | int | None,
) -> int | None:
    """Return the bytes of "24GiB", "64 GB" or a number of bytes; None of None.

    Raises RecipeError, which calls it `name`.
    """
    if value is None:
        return None
    parts = re.fullmatch(r"(\d+\.?\d*) *([a-z]*)", str(value).strip().lower())
    size = -1
    if parts:
        number, unit = parts.groups()
        size = int(float(number) * UNITS.get(unit, 0))
    least = 0 if name == "other_memory" else UNITS["mib"]
    if size < least:
        rest = "it must be a size such as '24GiB', or bytes, a MiB at least"
        raise RecipeError(name, value, rest)
    return size
