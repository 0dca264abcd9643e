"""Says what takes longer than whoever asks may expect."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from ..recipe.recipe import Recipe

COMPILES = (
    "note: Inductor compiles each of {} layers for the card, as it would there: about {} s "
    "on a free core; without --torch-compile the eager step takes seconds"
)
# CPU seconds of qwen3-0.6b at torch 2.13: 12.6 with one layer, 18.6 with four.
COMPILES_IN = (11, 2)  # at all, and for each layer

_told: ContextVar[Callable[[str], None] | None] = ContextVar("told_of_work", default=None)


@contextlib.contextmanager
def told_of_work(tell: Callable[[str], None]) -> Iterator[None]:
    """While entered, `tell` is called with what begins."""
    before = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(before)


def tell(text: str) -> None:
    """Say what begins now."""
    tell_it = _told.get()
    if tell_it:
        tell_it(text)


def tell_work(recipes: list[Recipe]) -> None:
    """Say that these recipes, which sample, are simulated now."""
    for recipe in recipes:
        tell(f"simulating, as it samples, up to a minute or two: {recipe}")


def tell_compiling(recipe: Recipe) -> None:
    """Say that a recipe is simulated whose layers are compiled, and how long that takes."""
    if recipe.torch_compile:
        layers = recipe.shape.num_layers
        tell(COMPILES.format(layers, COMPILES_IN[0] + COMPILES_IN[1] * layers))
