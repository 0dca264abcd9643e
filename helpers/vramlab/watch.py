"""See where the memory of your own code goes: `with watch(model, optimizer) as w: …`, then `w.report()`.

Whatever runs inside is followed storage by storage, on the device the model is on. Phases are found by themselves:
the forward pass of the watched model, autograd's backward pass, the optimizer's step.
"""

import contextlib
from typing import Any

import torch

from .cuda import ALLOCATION_UNIT
from .errors import VramLabError
from .history import History
from .report import Report
from .simulate import to_report
from .tracked import claim_model, claim_states
from .tracker import Tracker


class watch:
    """Follows every storage while it is entered.

    Args:
        model: whose parameters, buffers and gradients to name, and whose forward passes to recognise.
        optimizer: whose states to name, and whose steps to recognise.
        batch: tensors to name as inputs.
        title: the report's title.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        batch: Any = None,
        title: str | None = None,
    ):
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.title = title or type(model).__name__
        device = next((p.device for p in model.parameters()), torch.device("cpu")).type
        self.target = "cuda" if device == "cuda" else "cpu"
        self.tracker = Tracker(device, round_to=ALLOCATION_UNIT if device == "cuda" else 1)
        self.history: History | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "watch":
        claim_model(self.tracker, self.model)
        if self.optimizer:
            claim_states(self.tracker, [self.optimizer], self.target)
        values = self.batch.values() if hasattr(self.batch, "values") else self.batch or ()
        self.tracker.claim([t for t in values if isinstance(t, torch.Tensor)], "inputs")
        self._hook()
        self._stack.enter_context(self.tracker.modules(self.model))
        self._stack.enter_context(self.tracker)
        return self

    def __exit__(self, *error) -> None:
        self._name_results()
        self.tracker.begin("between_steps")
        self._stack.__exit__(*error)
        self.history = History(self.tracker)

    def _hook(self) -> None:
        """Recognise the phases: the model's own forward, the first gradient after it, the optimizer's step."""

        def phase(name: str) -> None:
            if self.tracker.phase != name:
                self.tracker.begin(name)

        def before_forward(module, args):
            if torch.is_grad_enabled() and self.tracker.phase != "backward":
                phase("forward")
            elif self.tracker.phase == "backward" and torch._C._current_autograd_node() is None:
                phase("forward")

        def after_forward(module, args, outputs):
            if self.tracker.phase == "forward":
                for tensor in _graph_tensors(outputs):
                    tensor.register_hook(lambda gradient: phase("backward"))

        def before_step(optimizer, args, kwargs):
            self._name_results()
            phase("step")

        def after_step(optimizer, args, kwargs):
            self._name_results()
            phase("between_steps")

        handles = [
            self.model.register_forward_pre_hook(before_forward),
            self.model.register_forward_hook(after_forward),
        ]
        if self.optimizer:
            handles.append(self.optimizer.register_step_pre_hook(before_step))
            handles.append(self.optimizer.register_step_post_hook(after_step))
        for handle in handles:
            self._stack.callback(handle.remove)

    def _name_results(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.tracker.claim([parameter.grad], "gradients", name)
        if self.optimizer:
            claim_states(self.tracker, [self.optimizer], self.target)

    def report(self) -> Report:
        """What was seen, as a measured report: phases, peak, largest tensors, timeline; sizes in bytes.

        Raises VramLabError while the block is still running.
        """
        if self.history is None:
            raise VramLabError("watch has no report yet: call it after the with-block")
        report = to_report(self.history, "measured", None, self.target, title=self.title)
        report.notes.append("followed by storages; the allocator's own peak needs measure()")
        return report


def _graph_tensors(outputs: Any) -> list[torch.Tensor]:
    """The differentiable tensors of a model's output, through mappings and sequences."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.requires_grad else []
    if hasattr(outputs, "values"):
        outputs = list(outputs.values())
    return [t for item in outputs for t in _graph_tensors(item)] if isinstance(outputs, list | tuple) else []
