"""Says what takes longer than whoever asks may expect."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from ..base.errors import RecipeError
from ..formulas.predict import predict
from ..recipe.recipe import Recipe
from ..report.report import format_bytes

COMPILES = (
    "note: Inductor compiles each of {} layers for the card, as it would there: about {} s "
    "on a free core; without --torch-compile the eager step takes seconds"
)
EAGER = ", and by formula {} of memory"
# Seconds of qwen3-0.6b at torch 2.13 on a free core: 9.5 with one layer, 24 with 12, 45.3 with 28.
# No fewer layers can stand for them: from 4 to 12 layers forward's peak grows by 239,190,016 bytes
# a layer, from 12 to 28 by 239,194,112.
COMPILES_IN = (8, 1.33)  # at all, and for each layer

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
        text = COMPILES.format(layers, round(COMPILES_IN[0] + COMPILES_IN[1] * layers))
        eager = recipe.replace(torch_compile=False)
        with contextlib.suppress(RecipeError):  # of what formulas do not know
            text += EAGER.format(format_bytes(predict(eager).peak.total, digits=2))
        tell(text)
