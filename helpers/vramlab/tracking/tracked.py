"""Runs the training step under a tracker and claims the storages whose purpose is known."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..training.engine import Training, makes_fakes
from ..training.patched import afterwards, replaced
from ..training.quiet import no_collection
from ..training.training import train_step
from .tensors import tensors_in
from .tracker import ON_HOST, REFERENCE, Tracker


def run_tracked(
    training: Training,
    tracker: Tracker,
    steps: int,
    target: str,
    at_phase: Callable[[], None] | None = None,
    then: Callable[[], None] | None = None,
) -> Tracker:
    """Run `steps` optimizer steps of `training` under `tracker`, and return it.

    `at_phase` is called before a phase's first event, `then` after the steps, as one more forward phase.
    """
    claim_model(tracker, training.model)
    if training.reference is not None:
        claim_model(tracker, training.reference, REFERENCE)
    for batch in (training.batch, *training.further):
        tracker.claim(tensors_in(batch), "inputs")
    claim_states(tracker, training.optimizers, target)  # Adagrad makes its own before the first step

    def on_phase(name: str) -> None:
        if name == "between_steps":
            claim_states(tracker, training.optimizers, target)
        if at_phase:
            at_phase()
        tracker.begin(name)

    with (
        no_collection(before=not makes_fakes()),
        gradients_named(tracker, training.model),
        fsdp_units_named(tracker),
        training.engine.follow(training, tracker),
        tracker.modules(training.model, training.reference),
        tracker,
    ):
        for _ in range(steps):
            train_step(training, on_phase)
        if then:
            on_phase("forward")
            then()
            on_phase("between_steps")
    return tracker.finish()


@contextlib.contextmanager
def gradients_named(tracker: Tracker, model: torch.nn.Module):
    """While entered, claim each gradient as soon as it is complete, and existing ones now."""

    def claim(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            tracker.claim([parameter.grad], "gradients", name)

    with contextlib.ExitStack() as handles:
        for name, parameter in model.named_parameters():
            claim(name, parameter)
            if parameter.requires_grad:
                hooks = parameter._post_accumulate_grad_hooks or {}
                others = list(hooks)
                own = parameter.register_post_accumulate_grad_hook(functools.partial(claim, name))
                handles.enter_context(own)
                for other in others:  # the loop's own go last: they may step on the gradient and free it
                    hooks[other] = hooks.pop(other)
        yield


@contextlib.contextmanager
def fsdp_units_named(tracker: Tracker):
    """While entered, claim what FSDP gathers as workspace, and the full gradients before it divides them."""
    if "torch.distributed.fsdp" not in sys.modules:
        yield
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    divide = FSDPParamGroup.post_backward

    def gathered(result: None, part: FSDPParam) -> None:
        tracker.claim(part.all_gather_outputs, "workspace", part._param_fqn or "")

    def post_backward(group: FSDPParamGroup, *unused: Any) -> None:
        for part in group.fsdp_params:
            whole = getattr(part, "_unsharded_param", None)
            gradients = (part.unsharded_accumulated_grad, None if whole is None else whole.grad)
            tracker.claim((g for g in gradients if g is not None), "gradients", part._param_fqn or "")
        divide(group, *unused)

    with (
        afterwards(FSDPParam, "init_unsharded_param", gathered),
        replaced(FSDPParamGroup, "post_backward", post_backward),
    ):
        yield


def claim_model(tracker: Tracker, model: torch.nn.Module, prefix: str = "") -> None:
    """Claim the model's parameters (with the statistics of quantized ones) and buffers; names begin with `prefix`."""
    for name, parameter in model.named_parameters(prefix):
        tracker.claim([parameter, *quantization_statistics(parameter)], "parameters", name)
    for name, module in model.named_modules():  # FSDP's shards have none of their own
        tracker.claim(quantization_statistics(module), "parameters", f"{name}.weight")
    for name, buffer in model.named_buffers(prefix):
        tracker.claim([buffer], "buffers", name)


def quantization_statistics(owner: torch.nn.Parameter | torch.nn.Module) -> list[torch.Tensor]:
    """What a bitsandbytes weight or its layer keeps besides the codes: scales, their own codes and scales, offset."""
    state = getattr(owner, "quant_state", None)
    if state is None:
        return tensors_in([getattr(owner, "SCB", None)])
    nested = [state.state2.absmax, state.state2.code] if state.state2 is not None else []
    return tensors_in([state.absmax, state.code, state.offset, *nested])


def claim_states(tracker: Tracker, optimizers: list[Any], target: str) -> None:
    """Claim the optimizers' states. On CUDA, paged ones of 100,000 elements or more are in unified memory
    (`bitsandbytes.optim.Optimizer8bit.get_state_buffer`)."""
    for optimizer in optimizers:
        own = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed's and accelerate's wrappers lead to its states
        paged = target == "cuda" and getattr(own, "is_paged", False)
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if paged and name in ("state1", "state2") and parameter.numel() >= 1e5:
                    tracker.claim(tensors_in(value), ON_HOST)
                else:
                    tracker.claim(tensors_in(value), "optimizer_states", tracker.owner(parameter))
