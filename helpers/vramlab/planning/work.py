"""Says what takes longer than whoever asks may expect."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from ..recipe.recipe import Recipe

_told: ContextVar[Callable[[str], None] | None] = ContextVar("told_of_work", default=None)


@contextlib.contextmanager
def told_of_work(tell: Callable[[str], None]) -> Iterator[None]:
    """While entered, `tell` is called with what begins."""
    before = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(before)


def tell_work(recipes: list[Recipe]) -> None:
    """Say that these recipes, which sample, are simulated now."""
    tell = _told.get()
    for recipe in recipes:
        if tell:
            tell(f"simulating, as it samples, up to a minute or two: {recipe}")
