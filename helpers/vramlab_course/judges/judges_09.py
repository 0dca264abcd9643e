"""Judges of chapter 09's pieces: tensors that do not fit each other, or are multiplied whole."""

import re
from collections.abc import Callable
from typing import Any

import torch

from ..answers import BrokenPiece
from ..made_tensors import MadeTensors

# What torch says of a product of matrices: "(3x9 and 3x12)" are numbers a token and rows.
PRODUCT = r"multiplied \(\d+x(\d+) and (\d+)x\d+\)"
# And of a number for each token that should go along the rows: numbers a token, and tokens.
ROWS = r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"


class _Sizes(MadeTensors):
    """While entered, collects the sizes of all tensors, each in ascending order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def see(self, tensor: torch.Tensor) -> None:
        self.seen.add(tuple(sorted(tensor.shape)))


def makes(piece: Callable[..., Any], size: tuple[int, int], *arguments: Any) -> bool:
    """Tell whether the piece makes a matrix of that ascending size, or its transpose."""
    with _Sizes() as sizes:
        piece(*arguments)
    return size in sizes.seen


def unfit(
    piece: Callable[..., Any],
    message: str,
    *arguments: Any,
) -> tuple[int, int] | None:
    """The two sizes that torch finds unequal inside of the piece, or None.

    `message` is the pattern of what torch then says: PRODUCT or ROWS.
    """
    if not callable(piece):
        return None
    try:
        piece(*arguments)
    except BrokenPiece as error:
        found = re.search(message, str(error))
        return (int(found[1]), int(found[2])) if found else None
    return None
