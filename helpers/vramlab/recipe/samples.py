"""How the samples of a micro-batch become rows.

They are padded to the longest, packed, or joined to one row without padding.
"""

from typing import Any

from ..base.errors import RecipeError
from .knobs import Knob


def check_lengths(name: str, lengths: Any) -> tuple[int, ...]:
    """Return `lengths` as a tuple.

    Raises RecipeError, which calls them `name`, unless they are whole numbers from 1 on.
    """
    if not isinstance(lengths, list | tuple) or not lengths:
        rest = "it must be a list of whole numbers, the tokens of each sample"
        raise RecipeError(name, lengths, rest)
    for length in lengths:
        Knob(kind=int).check(name, length)
    return tuple(lengths)


def shape_of(lengths: tuple[int, ...], joins: bool, multiple: int | None = None) -> tuple[int, int]:
    """Return (rows, tokens in each) of samples of `lengths`.

    They are joined to one row or padded to the longest.
    """
    multiple = multiple or 1
    rows = 1 if joins else len(lengths)
    width = sum(lengths) if joins else max(lengths)
    return rows, -(-width // multiple) * multiple


def lengths_in_words(lengths: tuple[int, ...]) -> str:
    """Return `lengths` of samples as a recipe's words say them."""
    return f"{len(lengths)} samples of {min(lengths):,} to {max(lengths):,}"


def labels_in_words(lengths: tuple[int, ...]) -> str:
    """Return how many tokens with a label there are."""
    return f"{sum(lengths):,} tokens with a label"
