"""The compiled step: torch.compile itself on fake tensors, for a card that is not there.

Dynamo, AOTAutograd and Inductor decide as they do for real what is one graph, what is saved for
backward, what is computed again and which buffer takes another's place (`inductor.py`).
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from ..base.errors import RecipeError
from ..hardware.gpu import DEFAULT_CHIP, Gpu
from ..recipe.recipe import Recipe
from ..tracking.fake_tracker import FakeTracker
from ..training.engine import Training
from ..training.patched import is_replaced, put_back, replaced
from .cuda import CudaKernels
from .inductor import compiler
from .values import reason_at

TRIED = "torch_compile: what compiling the first step tries out on the card (autotuning) "
TRIED += "is not counted"
UNKNOWN = "the installed torch compiles in another way than this release knows: "
UNKNOWN += "measure(recipe) runs it for real, torch_compile=False simulates the eager step"


def is_compiled(recipe: Recipe) -> bool:
    """Tell whether the step is compiled. Raises RecipeError where it is not simulated with that."""
    if not recipe.torch_compile:
        return False
    reasons = {
        "sharding": recipe.sharding,
        "use_liger_kernel": recipe.use_liger_kernel,
        "activation_offloading": recipe.activation_offloading,
        "rollouts": recipe.rollouts,
    }
    for name, value in reasons.items():
        if value:
            rest = f"the compiled step is not simulated with {name}: leave it off, or simulate "
            raise RecipeError("torch_compile", True, f"{rest}the eager step with False")
    return True


class _UntracedTracker(FakeTracker):
    """A tracker that dynamo does not compile where it follows what stays outside of graphs."""

    _should_skip_dynamo = staticmethod(lambda: True)

    def __torch_dispatch__(self, *args: Any) -> Any:
        return super().__torch_dispatch__(*args)


@contextlib.contextmanager
def compiled_step(
    training: Training, tracker: FakeTracker, card: Gpu | None, kernels: CudaKernels | None
) -> Iterator[None]:
    """While entered, `training`'s model runs as torch.compile makes it for `card`.

    `kernels` are those of CUDA; None compiles for the CPU.
    """
    from torch._dynamo import config, eval_frame, pgo
    from torch._functorch import config as functorch

    if not hasattr(eval_frame, "_callback_from_stance"):
        raise RecipeError("torch_compile", True, UNKNOWN)
    chip = None
    on_host: Callable = list
    if kernels:
        chip = card.chip if card else DEFAULT_CHIP
        on_host = kernels.on_host
    model = training.model
    training.is_compiled = True
    tracker.__class__ = _UntracedTracker
    codes: list[Any] = []
    model.compile(backend=compiler(chip, on_host), options={"guard_filter_fn": _kept})
    call = model._compiled_call_impl

    def call_compiled(*args: Any, **options: Any) -> Any:
        # what is compiled would be valid only inside the mode
        mode = _pop_mode() if kernels else None
        try:
            return call(*args, **options)
        finally:
            if mode:
                _push_mode(mode)

    def callback(own: Any) -> Any:
        return _Callback(own, codes) if callable(own) else own

    model._compiled_call_impl = call_compiled
    try:
        with (
            replaced(eval_frame, "_callback_from_stance", callback),
            config.patch(suppress_errors=False, automatic_dynamic_local_pgo=False),
            # sizes that other steps had, which would make this one's dynamic
            patch.object(pgo, "_CODE_STATE", defaultdict(pgo.CodeState)),
            functorch.patch(enable_autograd_cache=False),
        ):
            yield
    finally:
        model._compiled_call_impl = None
        for code in codes:
            eval_frame.reset_code(code)


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
    """Dynamo's callback, which compiles a frame as if no simulation ran."""

    def __init__(self, own: Callable, codes: list[Any]) -> None:
        self._own = own
        self._codes = codes
        # by which torch tells whose compiled code is whose
        self._torchdynamo_orig_backend = own

    def __call__(self, frame: Any, *args: Any, **options: Any) -> Any:
        """Compile `frame`."""
        self._codes.append(frame.f_code)
        with put_back(), _disable_current_modes():
            return self._own(frame, *args, **options)
