"""Runs the training step under a tracker and claims the storages whose purpose is known."""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..private import of_distributed, of_torch
from ..private.patched import afterwards, replaced
from ..training.engine import Training, makes_fakes
from ..training.fixed_generation import Started, layers_of
from ..training.quiet import no_collection
from ..training.training import train_step
from .tensors import plain_tensors, tensors_in
from .tracker import ON_HOST, REFERENCE, Tracker

Followed = TypeVar("Followed", bound=Tracker)
LEAST_PAGED = 100_000  # elements of a state that bitsandbytes puts into unified memory


def run_tracked(
    training: Training,
    tracker: Followed,
    steps: int,
    target: str,
    at_phase: Callable[[], None] | None = None,
    then: Callable[[], None] | None = None,
) -> Followed:
    """Run `steps` optimizer steps of `training`, or cycles of such, under `tracker`; return it.

    `at_phase` is called before a phase's first event, `then` after the steps, as one more forward
    phase.
    """
    claim_model(tracker, training.model)
    if training.reference is not None:
        claim_model(tracker, training.reference, REFERENCE)
    for batch in (training.batch, *training.further):
        tracker.claim(tensors_in(batch), "inputs")
    # Adagrad makes its states before the first step
    claim_states(tracker, training.optimizers, target)

    def on_phase(name: str) -> None:
        if name == "between_steps":
            claim_states(tracker, training.optimizers, target)
        if name == "forward":
            tracker.claim(tensors_in(training.sampled), "inputs")
        if at_phase:
            at_phase()
        tracker.begin(name)

    grow = training.on_token

    def on_token(made: int, cache: Any) -> None:
        claim_cache(tracker, cache)
        grow(made, cache)

    training.on_token = on_token
    named = tracker.modules(training.model, training.reference)
    with (
        no_collection(before=not makes_fakes()),
        gradients_named(tracker, training.model),
        fsdp_units_named(tracker),
        training.engine.follow(training, tracker),
        contextlib.nullcontext() if training.is_compiled else named,
        tracker,
    ):
        _train(training, steps * training.cycle, on_phase)
        if then:
            on_phase("forward")
            then()
            on_phase("between_steps")
    return tracker.finish()


def _train(training: Training, steps: int, on_phase: Callable[[str], None]) -> None:
    """Run so many steps of `training`."""
    for step in range(steps):
        # Where a graph breaks, what dynamo noted of the first step's outputs holds them in a cycle.
        # Compiling for real is long enough for Python to collect it.
        if step == 1 and training.is_compiled:
            gc.collect()
        train_step(training, on_phase)


def run_tracked_generation(
    started: Started,
    tracker: Followed,
    made: int,
    at_phase: Callable[[], None] | None = None,
) -> Followed:
    """Let `generate` make `made` tokens under `tracker`, and return it.

    The phases are "prefill", a "decode" for each further token, and "between_steps" as it ends.
    `at_phase` is called before a phase's first event.
    """

    def begin(phase: str) -> None:
        if at_phase:
            at_phase()
        tracker.begin(phase)

    def on_step(step: int, cache: Any) -> None:
        claim_cache(tracker, cache)
        if step == made:
            begin("between_steps")
        elif step:
            begin("decode")

    claim_model(tracker, started.model)
    tracker.claim(started.inputs.values(), "inputs")
    tracker.claim(started.longer.values(), ON_HOST)
    with (
        no_collection(before=not makes_fakes()),
        tracker.modules(started.model),
        tracker,
    ):
        begin("prefill")
        started.run(made, on_step)
    return tracker.finish()


@contextlib.contextmanager
def gradients_named(tracker: Tracker, model: torch.nn.Module) -> Iterator[None]:
    """While entered, claim each gradient as soon as it is complete, and existing ones now."""

    def claim(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            tracker.claim([parameter.grad], "gradients", name)

    with contextlib.ExitStack() as hooks:
        for name, parameter in model.named_parameters():
            claim(name, parameter)
            if parameter.requires_grad:
                hooks.enter_context(_first_hook(parameter, functools.partial(claim, name)))
        yield


def _first_hook(
    parameter: torch.nn.Parameter,
    hook: Callable[[torch.Tensor], None],
) -> contextlib.AbstractContextManager:
    """Register `hook` before those that the parameter has, and return its handle.

    The loop's own hooks have to come last: they may step on the gradient and free it.
    """
    hooks = of_torch.accumulation_hooks(parameter) or {}
    earlier = list(hooks)
    handle = parameter.register_post_accumulate_grad_hook(hook)
    # Taken out and put in again, each goes behind the new one: dictionaries keep their order.
    for key in earlier:
        hooks[key] = hooks.pop(key)
    return handle


@contextlib.contextmanager
def fsdp_units_named(tracker: Tracker) -> Iterator[None]:
    """While entered, claim what FSDP gathers as workspace, and full gradients before the division.

    FSDP divides a gradient among the ranks as soon as the unit's backward pass has ended.
    """
    # a run that has not imported FSDP has no units, and the import takes a second
    if "torch.distributed.fsdp" not in sys.modules:
        yield
        return
    of_parameter, of_unit = of_distributed.fsdp_classes()
    divide = of_unit.post_backward

    def gathered(result: None, part: Any) -> None:
        tracker.claim(part.all_gather_outputs, "workspace", of_distributed.name_of(part))

    def claim_gradients(part: Any) -> None:
        whole = of_distributed.gathered_parameter(part)
        accumulated = part.unsharded_accumulated_grad
        last = None if whole is None else whole.grad
        gradients = [gradient for gradient in (accumulated, last) if gradient is not None]
        tracker.claim(gradients, "gradients", of_distributed.name_of(part))

    def post_backward(group: Any, *unused: Any) -> None:
        for part in group.fsdp_params:
            claim_gradients(part)  # which keeps none of them
        divide(group, *unused)

    with (
        afterwards(of_parameter, "init_unsharded_param", gathered),
        replaced(of_unit, "post_backward", post_backward),
    ):
        yield


def claim_model(tracker: Tracker, model: torch.nn.Module, prefix: str = "") -> None:
    """Claim the model's parameters, with the statistics of quantized ones, and its buffers.

    Their names begin with `prefix`.
    """
    for name, parameter in model.named_parameters(prefix):
        tracker.claim([parameter, *quantization_statistics(parameter)], "parameters", name)
    # of 4-bit weights that FSDP has divided the layer has the statistics: its shards have none
    for name, module in model.named_modules():
        tracker.claim(quantization_statistics(module), "parameters", f"{name}.weight")
    for name, buffer in model.named_buffers(prefix):
        tracker.claim([buffer], "buffers", name)


def quantization_statistics(owner: torch.nn.Parameter | torch.nn.Module) -> list[torch.Tensor]:
    """Return what a bitsandbytes weight or its layer keeps besides the codes.

    These are the scales, the scales' own codes and scales, and an offset.
    """
    state = getattr(owner, "quant_state", None)
    if state is None:
        # which an int8 layer takes over from its weight in its first pass
        keeper = getattr(owner, "state", owner)
        return tensors_in([getattr(keeper, "SCB", None)])
    statistics = [state.absmax, state.code, state.offset]
    if state.state2 is not None:  # double quantization
        statistics += [state.state2.absmax, state.state2.code]
    return tensors_in(statistics)


def claim_cache(tracker: Tracker, cache: Any) -> None:
    """Claim what a cache of `generate` holds; what moved out of it before keeps its category."""
    for layer in layers_of(cache):
        tracker.claim(tensors_in(vars(layer)), "kv_cache")


def claim_states(tracker: Tracker, optimizers: list[Any], target: str) -> None:
    """Claim the optimizers' states.

    On CUDA, paged ones of `LEAST_PAGED` elements or more are in unified memory
    (`bitsandbytes.optim.Optimizer8bit.get_state_buffer`).
    """
    for optimizer in optimizers:
        # DeepSpeed's and accelerate's wrappers lead to the one that pages
        own = getattr(optimizer, "optimizer", optimizer)
        is_paged = target == "cuda" and getattr(own, "is_paged", False)
        for parameter, state in optimizer.state.items():
            # FSDP's parameters are wrappers
            owners = map(tracker.owner, plain_tensors([parameter]))
            where = next(filter(None, owners), "")
            is_large = parameter.numel() >= LEAST_PAGED
            for name, value in state.items():
                if is_paged and is_large and name in ("state1", "state2"):
                    tracker.claim(tensors_in(value), ON_HOST)
                else:
                    tracker.claim(tensors_in(value), "optimizer_states", where)
