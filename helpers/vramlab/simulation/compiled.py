"""The compiled step: torch.compile itself on fake tensors, for a card that is not there.

Dynamo, AOTAutograd and Inductor decide as they do for real what is one graph, what is saved for
backward, what is computed again and which buffer takes another's place (`inductor.py`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from ..base.errors import RecipeError
from ..hardware.gpu import DEFAULT_CHIP, Gpu
from ..private import of_compiler, of_fake_tensors, of_torch
from ..private.patched import is_replaced, put_back, replaced
from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe
from ..tracking.fake_tracker import FakeTracker
from ..training.engine import Training
from .cuda import CudaKernels
from .inductor import compiler
from .values import reason_at

TRIED = (
    "torch_compile: what compiling the first step tries out on the card (autotuning) "
    "is not counted, nor, where a graph breaks, that step's outputs until Python collects them"
)
# Held against the records by a test.
TIMED = (
    "torch_compile: no formula knows a compiled step's time; on an H100 that of gpt2 was "
    "0.49 of the eager one (8 × 1024 tokens, bf16-mixed) and 0.92 (8 × 512 tokens, fp32)"
)
UNKNOWN = (
    "the installed torch compiles in another way than this release knows: "
    "measure(recipe) runs it for real, torch_compile=False simulates the eager step"
)


def is_compiled(recipe: Recipe) -> bool:
    """Tell whether the step is compiled. Raises RecipeError where it is not simulated with that."""
    if not recipe.torch_compile:
        return False
    reasons = {
        "sharding": recipe.sharding,
        "use_liger_kernel": recipe.use_liger_kernel,
        "activation_offloading": recipe.activation_offloading,
        "rollouts": recipe.rollouts,
        f"optim={recipe.optim!r}": MODELLED[recipe.optim].compiles_updates,
    }
    for name, value in reasons.items():
        if value:
            rest = f"the compiled step is not simulated with {name}: leave it off, or simulate "
            raise RecipeError("torch_compile", True, f"{rest}the eager step with False")
    return True


class UntracedTracker(FakeTracker):
    """A tracker that dynamo does not compile where it follows what stays outside of graphs."""

    # torch reads this when a class is made, and wraps the `__torch_dispatch__` that the class
    # itself defines (`TorchDispatchMode.__init_subclass__`); so it is defined below although it
    # does nothing new.
    _should_skip_dynamo = staticmethod(lambda: True)

    def __torch_dispatch__(self, *args: Any) -> Any:
        return super().__torch_dispatch__(*args)


@contextlib.contextmanager
def compiled_step(
    training: Training, tracker: FakeTracker, card: Gpu | None, kernels: CudaKernels | None
) -> Iterator[None]:
    """While entered, `training`'s model runs as torch.compile makes it for `card`.

    `kernels` are those of CUDA; None compiles for the CPU. Raises RecipeError where the installed
    torch compiles in another way than this release knows.
    """
    eval_frame = of_compiler.dynamo("eval_frame")
    # Without this private function nothing would keep dynamo from compiling with the simulation's
    # modes and replaced functions in sight.
    if not hasattr(eval_frame, of_compiler.CALLBACK):
        raise RecipeError("torch_compile", True, UNKNOWN)
    model = training.model
    training.is_compiled = True
    # The tracker is made before anybody knows whether the step compiles, and is referred to by
    # others.
    tracker.__class__ = UntracedTracker
    codes: list[Any] = []
    errors: list[Exception] = []
    # `Module.compile` compiles in place: the model stays the object whose names and hooks the
    # tracker knows.
    model.compile(backend=compiler_for(card, kernels), options={"guard_filter_fn": _kept})
    call = of_torch.compiled_call(model)

    def call_compiled(*args: Any, **options: Any) -> Any:
        # what is compiled would be valid only inside the mode
        mode = of_fake_tensors.pop_function_mode() if kernels else None
        try:
            return call(*args, **options)
        finally:
            if mode:
                of_fake_tensors.push_function_mode(mode)
            # Raised here, outside of dynamo (see `_Callback`).
            if errors:
                raise errors[0]

    of_torch.set_compiled_call(model, call_compiled)
    try:
        with compiling(codes, errors):
            yield
    finally:
        of_torch.set_compiled_call(model, None)
        # Nobody after the simulation may run what was compiled for fake tensors.
        for code in codes:
            eval_frame.reset_code(code)


def compiler_for(card: Gpu | None, kernels: CudaKernels | None) -> Callable:
    """Return dynamo's backend that compiles for `card`, without `kernels` of CUDA for the CPU."""
    chip = None
    on_host: Callable = list
    if kernels:
        chip = card.chip if card else DEFAULT_CHIP
        on_host = kernels.on_host
    return compiler(chip, on_host)


@contextlib.contextmanager
def compiling(codes: list[Any], errors: list[Exception]) -> Iterator[None]:
    """While entered, dynamo compiles as if no simulation ran; `codes` and `errors` are filled."""
    config = of_compiler.dynamo("config")
    pgo = of_compiler.dynamo("pgo")

    def callback(own: Any) -> Any:
        return _Callback(own, codes, errors) if callable(own) else own

    with (
        replaced(of_compiler.dynamo("eval_frame"), of_compiler.CALLBACK, callback),
        # Sizes that other steps of this process had, or a cache on disk, would make another
        # graph or bring back kernels that were compiled for a real device.
        config.patch(suppress_errors=False, automatic_dynamic_local_pgo=False),
        patch.object(pgo, of_compiler.SIZES_SEEN, of_compiler.no_sizes()),
        of_compiler.functorch_config().patch(enable_autograd_cache=False),
    ):
        yield


def failed(recipe: Recipe, error: Exception, compiles: bool) -> RecipeError:
    """Return what is said where a model's step does not run, or does not compile."""
    if not compiles:
        why = f"its training step does not run on fake tensors: {reason_at(error)}"
        return RecipeError("model", recipe.name, f"{why}; measure(recipe) runs it for real")
    cause = getattr(error, "inner_exception", error)  # of torch's own, which wraps it
    why = f"torch.compile does not get through on fake tensors: {reason_at(cause)}"
    rest = "measure(recipe) runs it for real, torch_compile=False simulates the eager step"
    return RecipeError("torch_compile", True, f"{why}; {rest}")


def _kept(guards: Any) -> list[bool]:
    """Tell which of dynamo's guards stay: the simulation replaces what some of them look at."""
    return [not is_replaced(guard.value) for guard in guards]


class _Callback:
    """Dynamo's callback, which compiles a frame as if no simulation ran.

    An error goes into `errors`, and frames run as written from then on. If it were raised here,
    torch would run all Python code of the process through dynamo ever after, where a caller holds
    its arguments longer (torch 2.13).
    """

    def __init__(self, own: Callable, codes: list[Any], errors: list[Exception]) -> None:
        self._own = own
        self._codes = codes
        self._errors = errors
        of_compiler.stands_for(self, own)

    def __call__(self, frame: Any, *args: Any, **options: Any) -> Any:
        """Return what dynamo makes of `frame`, or that it runs as written after an error."""
        self._codes.append(frame.f_code)
        if not self._errors:
            try:
                with put_back(), of_torch.without_modes():
                    return self._own(frame, *args, **options)
            except Exception as error:
                self._errors.append(error)
        return of_compiler.not_compiled()
