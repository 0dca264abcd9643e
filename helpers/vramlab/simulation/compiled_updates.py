"""torchao's optimizers, which compile their update of each parameter."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..hardware.gpu import Gpu
from ..private import of_compiler, of_fake_tensors
from ..private.patched import replaced
from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe
from ..tracking.fake_tracker import FakeTracker
from ..training.make_optimizer import torchao_optimizers
from .compiled import UntracedTracker, compiler_for, compiling
from .cuda import CudaKernels

TRIED_UPDATES = (
    "torchao: what compiling its updates tries out on the card in the first step "
    "(autotuning, with copies of the states) is not counted"
)


def fill_code_tables() -> None:
    """Let torchao compute the tables of its states' codes, which take values, if it is loaded."""
    optimizers = sys.modules.get("torchao.optim.adam")
    if optimizers is None:
        return
    for name in ("OptimState8bit", "OptimState4bit"):
        for is_signed in (True, False):
            getattr(optimizers, name).zeros((256,), is_signed)


def load_torchao(recipe: Recipe) -> None:
    """Import torchao, with its tables, if the recipe's optimizer is from there.

    Raises MissingExtra where it is not installed.
    """
    if MODELLED[recipe.optim].compiles_updates:
        torchao_optimizers(recipe.optim)
        fill_code_tables()


def updates_of(
    recipe: Recipe,
    tracker: FakeTracker,
    card: Gpu | None,
    kernels: CudaKernels | None,
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which the recipe's optimizer updates."""
    if not MODELLED[recipe.optim].compiles_updates:
        return contextlib.nullcontext()
    return compiled_updates(tracker, card, kernels)


@contextlib.contextmanager
def compiled_updates(
    tracker: FakeTracker, card: Gpu | None, kernels: CudaKernels | None
) -> Iterator[None]:
    """While entered, torchao's optimizers compile each parameter's update as for `card`.

    `kernels` are those of CUDA; None compiles for the CPU.
    """
    optimizers = sys.modules.get("torchao.optim.adam")
    frames = of_compiler.loaded_frames()
    if optimizers is None or not hasattr(frames, of_compiler.CALLBACK):
        yield
        return
    tracker.__class__ = UntracedTracker
    compile_one = torch.compile
    updates = _Updates(optimizers.single_param_adam, card, kernels)

    def compile_update(function: Callable, **options: Any) -> Callable:
        if function is not updates.function:
            return compile_one(function, **options)
        if updates.compiled is None:
            updates.compiled = compile_one(function, backend=updates.backend, **options)
        return updates

    try:
        with replaced(torch, "compile", compile_update):
            yield
    finally:
        if updates.compiled and kernels:
            tracker.notes.append(TRIED_UPDATES)
        for code in updates.codes:
            of_compiler.dynamo("eval_frame").reset_code(code)


class _Updates:
    """torchao's update of one parameter, compiled for each of their kinds."""

    def __init__(self, function: Callable, card: Gpu | None, kernels: CudaKernels | None) -> None:
        self.function = function
        self.compiled: Callable | None = None
        self.codes: list[Any] = []
        self._errors: list[Exception] = []
        self.backend = compiler_for(card, kernels)

    def __call__(self, *args: Any) -> Any:
        """Run the update, which compiles it at first."""
        assert self.compiled is not None  # who asked for it has set it
        count = of_fake_tensors.count_function_modes()
        modes = [of_fake_tensors.pop_function_mode() for _ in range(count)]
        try:
            with compiling(self.codes, self._errors):
                return self.compiled(*args)
        finally:
            for mode in reversed(modes):
                of_fake_tensors.push_function_mode(mode)
            # Raised here, outside of dynamo (see `compiled.py`).
            if self._errors:
                raise self._errors[0]
