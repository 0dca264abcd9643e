"""The real training step on fake tensors: no GPU, no memory, seconds.

`simulate(recipe)` builds the recipe's model from storages that have a size and no content, runs `training.train_step`
on it twice (the second step is the steady one) and replays what `tracker.Tracker` saw.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from . import training as tr
from .cuda import ALLOCATION_UNIT, CudaKernels, kernel_scratch
from .recipe import Recipe
from .report import Report, environment
from .tracker import History, Tracker

STEPS = 2
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@contextlib.contextmanager
def fake_world(target: str) -> Iterator[None]:
    """Fake tensors that transformers treats as real ones, with the kernels of `target` in place.

    transformers takes a fake tensor for a sign of tracing and then builds causal masks that it skips otherwise
    (`masking_utils._ignore_causal_mask_sdpa`), which changes the attention kernel too; here it must take the real branch.
    """
    from transformers.utils import generic, import_utils

    saved = {module: module.is_fake_tensor for module in (generic, import_utils) if hasattr(module, "is_fake_tensor")}
    kernels = CudaKernels() if target == "cuda" else contextlib.nullcontext()
    try:
        for module in saved:
            module.is_fake_tensor = lambda tensor: False
        with FakeTensorMode(allow_non_fake_inputs=True), kernels, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*scheduler.step\\(\\).*")
            yield
    finally:
        for module, function in saved.items():
            module.is_fake_tensor = function


def trace(recipe: Recipe, target: str = "cuda", steps: int = STEPS) -> History:
    """Run `steps` optimizer steps of `recipe` on fake tensors and return the history of every storage."""
    with fake_world(target):
        training = tr.build(recipe, "cpu", target=target)
        tracker = Tracker("cpu", **({"round_to": ALLOCATION_UNIT, "scratch": kernel_scratch} if target == "cuda" else {}))
        # A fake tensor has no values to read: every mask is full, every count is one, and no gradient overflowed.
        tracker.constant = {torch.bool: True, **dict.fromkeys(FLOATS, 1.0), torch.int64: 1}
        if training.scaler:
            training.scaler._maybe_opt_step = lambda optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)
        return run_tracked(training, tracker, steps, target)


def run_tracked(training: tr.Training, tracker: Tracker, steps: int, target: str) -> History:
    """Run `steps` optimizer steps under `tracker`, telling it what each storage is for. Fake or real alike."""
    claim_model(tracker, training.model)
    tracker.claim((t for t in training.batch.values()), "inputs")

    def on_phase(name: str) -> None:
        if name == "step":
            tracker.claim((p.grad for p in training.model.parameters() if p.grad is not None), "gradients")
        if name == "between_steps":
            claim_states(tracker, training.optimizers, target)
        tracker.begin(name)

    with tracker.modules(training.model), tracker:
        for _ in range(steps):
            tr.train_step(training, on_phase)
    return History(tracker.log, tracker.marks)


def claim_model(tracker: Tracker, model: torch.nn.Module) -> None:
    """Tell `tracker` about the model's storages: parameters (with the statistics of quantized ones) and buffers."""
    for parameter in model.parameters():
        tracker.claim([parameter], "parameters")
        tracker.claim(quantization_statistics(parameter), "parameters")
    tracker.claim(model.buffers(), "buffers")


def quantization_statistics(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """The tensors that a bitsandbytes weight keeps beside its codes: block maxima, their own code and maxima, offset."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        tensors = [state.absmax, state.code, state.offset]
        if state.state2 is not None:
            tensors += [state.state2.absmax, state.state2.code]
        return [t for t in tensors if t is not None]
    return [t for t in (getattr(parameter, "SCB", None),) if t is not None]


def claim_states(tracker: Tracker, optimizers: list[Any], target: str) -> None:
    """Tell `tracker` what the optimizers keep.

    On CUDA, PyTorch's step counters stay on the host unless the kernel is fused, and paged states of 100,000 elements
    or more are in unified memory, outside the caching allocator (`bitsandbytes.optim.Optimizer8bit.get_state_buffer`).
    """
    for optimizer in optimizers:
        paged = target == "cuda" and getattr(optimizer, "is_paged", False)
        on_host = target == "cuda" and not optimizer.defaults.get("fused") and not optimizer.defaults.get("capturable")
        for state in optimizer.state.values():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if (name == "step" and on_host and value.dim() == 0) or (
                    paged and name in ("state1", "state2") and value.numel() >= 1e5
                ):
                    tracker.forget([value])
                else:
                    tracker.claim([value], "optimizer_states")


def simulate(recipe: Recipe, target: str = "cuda", steps: int = STEPS) -> Report:
    history = trace(recipe, target, steps)
    return to_report(history, "simulated", recipe, target)


def to_report(history: History, source: str, recipe: Recipe | None, target: str, **more: Any) -> Report:
    """The report of a replayed run."""
    at = history.peak_position(0, len(history.log))
    phase = next(name for name, start, end in history.stretches() if start <= at <= end and at > 0)
    return Report(
        source=source,
        recipe=recipe.to_dict() if recipe else None,
        title=str(recipe) if recipe else "",
        target=target,
        phases=history.phases(),
        peak=history.split(at),
        peak_phase=phase,
        largest=history.largest(at),
        timeline=history.timeline(),
        environment=environment(),
        **more,
    )
