"""Judge of chapter 09's pieces: matrices that do not fit each other."""

import re
from collections.abc import Callable
from typing import Any

from ..answers import BrokenPiece


def unfit(piece: Callable[..., Any], *arguments: Any) -> tuple[int, int] | None:
    """The two sizes that a matrix product inside of the piece finds unequal, or None.

    They are how many numbers a token has, and how many rows the matrix has.
    """
    if not callable(piece):
        return None
    try:
        piece(*arguments)
    except BrokenPiece as error:
        # torch: "mat1 and mat2 shapes cannot be multiplied (3x9 and 3x12)"
        found = re.search(r"multiplied \(\d+x(\d+) and (\d+)x\d+\)", str(error))
        return (int(found[1]), int(found[2])) if found else None
    return None
