"""Judges of chapter 09's pieces: matrices that do not fit each other, or are multiplied whole."""

import re
from collections.abc import Callable
from typing import Any

import torch

from ..answers import BrokenPiece
from ..made_tensors import MadeTensors


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
