"""Judges of chapter 09's pieces.

They find tensors that do not fit each other or are multiplied whole, and calls of other ranks.
"""

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
GROUP = "process group has not been initialized"  # of a collective in a process by itself


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
    found = re.search(message, _complaint(piece, *arguments))
    return (int(found[1]), int(found[2])) if found else None


def calls_ranks(piece: Callable[..., Any], *arguments: Any) -> bool:
    """Tell whether the piece runs a collective, for which a process by itself has no group."""
    return GROUP in _complaint(piece, *arguments)


def _complaint(piece: Callable[..., Any], *arguments: Any) -> str:
    """What the piece fails with, empty where it does not fail."""
    if not callable(piece):
        return ""
    try:
        piece(*arguments)
    except BrokenPiece as error:
        return str(error)
    return ""
