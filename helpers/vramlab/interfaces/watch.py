"""See where the memory of your own code goes.

`with watch(model) as w: …`, then `print(w.report())`.

Every storage made inside is followed, on the device the model is on; what is used inside and was
made before (a teacher in the loss, labels) counts from the start. A forward pass of the model
begins the phase "forward", `backward()` "backward", and its end "step", so that clipping, unscaling
and the freeing of gradients directly after the update count there. Without an update (another
micro-batch follows, or nothing) there was no step.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..base.errors import VramLabError
from ..hardware.gpu import source_of
from ..hardware.overhead import UNIT
from ..private.of_torch import address_of, next_number
from ..private.patched import plain, replaced
from ..report.report import KiB, Report, format_bytes, unit_for
from ..simulation.any_module import SCRIPTED, is_compiled, lazy_parameter
from ..tracking.history import History, to_report
from ..tracking.keepers import Name, holders, steps_in_graph, variables
from ..tracking.recorder import LineTracker
from ..tracking.tensors import plain_tensors, tensors_in
from ..tracking.tracked import claim_model, claim_states, fsdp_units_named, gradients_named
from ..tracking.tracker import Storage

LEAST = 64 * KiB  # a step: less is no growth to note
LEAST_STEPS = 3  # between the first and the last one that is followed
MOST_NAMED = 3
MOST_LINES = 1000  # of a loop
KEPT = ("activations", "temporaries", "unexplained")


class watch:
    """Follow every storage while it is entered; entered again it starts anew.

    Args:
        model: whose parameters, buffers, gradients and inputs are named, and whose forward passes
            are recognised.
        optimizer: one that has states already; others that step on the model's parameters inside
            are recognised.
        batch: tensors, also in mappings or sequences, to name as inputs; what the model is called
            with is recognised.
    Raises:
        VramLabError: `model` is no module or has lazy parameters, or the same watch is entered
            inside its own block.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        batch: Any = None,
        title: str | None = None,
    ):
        if not isinstance(model, torch.nn.Module):
            raise VramLabError(
                f"watch follows a torch.nn.Module, and this is a {type(model).__name__}"
            )
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise VramLabError(f"watch {SCRIPTED}: watch the module that was scripted or traced")
        lazy = lazy_parameter(model)
        if lazy is not None:
            raise VramLabError(
                f"watch needs every size, and {lazy!r} is lazy: call the module once before"
            )
        self.model = model
        self.batch = batch
        self.title = title or type(model).__name__
        # The device of the first parameter: on another one nothing is followed.
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self.target = "cuda" if self._device == "cuda" else "cpu"
        self.tracker: LineTracker | None = None
        self.history: History | None = None
        # Those whose states exist before the block; others are learned as they step.
        self._optimizers = [optimizer] if optimizer else []
        self._stack = contextlib.ExitStack()

    @property
    def _followed(self) -> LineTracker:
        """The tracker, once the block has begun."""
        assert self.tracker is not None
        return self.tracker

    def __enter__(self) -> "watch":
        # Without a history the block has begun and not ended.
        if self.tracker is not None and self.history is None:
            raise VramLabError(
                "this watch is running: take another one for a block inside its block"
            )
        # CUDA's allocator hands out multiples of 512 bytes, a CPU's what was asked for.
        self.tracker = LineTracker(self._device, round_to=UNIT if self.target == "cuda" else 1)
        # Storages made before the block are met when an operator first uses them.
        self._followed.meets = True
        self.history = None
        self._parameters = {id(p) for p in self.model.parameters()}
        self._backwards = 0
        self._stepped = False
        # Of each step: where it begins in the log, and autograd's number of its first operator.
        self._starts: list[int] = []
        self._numbers: list[int] = []
        self._lines: dict[str, str] = {}  # of what is kept, that made it
        self._held: dict[int, Name] = {}  # by address
        # Before anything runs: a storage is named by the first that claims it.
        claim_model(self._followed, self.model)
        claim_states(self._followed, self._optimizers, self.target)
        self._followed.claim(tensors_in(self.batch), "inputs")
        add = self._stack.callback
        add(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        add(register_optimizer_step_pre_hook(self._before_step).remove)
        add(register_optimizer_step_post_hook(self._after_step).remove)
        # Tensor.backward looks this name up at every call; hooks on the model's outputs would miss
        # the loss's backward.
        self._stack.enter_context(
            replaced(torch.autograd, "backward", self._around(plain(torch.autograd, "backward")))
        )
        named = gradients_named(self._followed, self.model), fsdp_units_named(self._followed)
        # The tracker is entered last, so that it is innermost and sees what the others let through.
        for follows in (*named, self._followed.modules(self.model), self._followed):
            self._stack.enter_context(follows)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        # States of an optimizer that stepped for the first time are known only now.
        claim_states(self._followed, self._optimizers, self.target)
        self._end_step()
        self._move_frees()
        if self._followed.phase != "between_steps":
            self._begin("between_steps")
        self._followed.finish()
        self.history = History(self._followed.log, self._followed.marks)
        # Now, for the variables that keep something are there.
        found = variables(sys._getframe(1))
        if self._followed.keeps_stacks:
            self._held = holders(found)
        self._growth = [*self._grown(self.history), *self._graphs(found)]
        # Names hold frames, and these all variables.
        self._held.clear()

    def report(self) -> Report:
        """Return a measured report of the last step.

        After an exception of what ran until then, without the allocator's and the process's own
        bytes. Raises VramLabError before the block has ended.
        """
        if self.history is None:
            raise VramLabError("watch has no report yet: ask after the with-block")
        report = to_report(
            self.history,
            source_of(self.target),
            None,
            self.target,
            title=self.title,
        )
        report.notes.append(
            "storages of the watched code; the allocator's own peak needs measure()"
        )
        report.notes += self._growth
        if is_compiled(self.model):
            report.notes.append(
                "torch.compile: a watched model runs as eager operators, and that is what is "
                "counted"
            )
        return report

    def _grown(self, history: History) -> Iterator[str]:
        """Yield what each step made and nothing freed; nothing for little or after few steps."""
        # What lives between two steps is what each of them has left.
        ends = [start for name, start, _ in history.stretches if name == "between_steps"]
        # The first step makes states, and what the last one made may still be freed.
        steps = list(pairwise(ends[:-1]))
        if len(steps) >= LEAST_STEPS:
            left = self._followed.left_by(self._made, steps, LEAST)
            for made, size, _ in left[:MOST_NAMED]:
                said = f"{format_bytes(size, unit_for(size))} of {made}{self._lines.get(made, '')}"
                yield f"memory grows with every step, which keeps {said}"

    def _graphs(self, found: list[tuple[Name, Any]]) -> Iterator[str]:
        """Yield variables whose graph has operators of several steps."""
        for name, value in found:
            if (
                isinstance(value, torch.Tensor)
                and steps_in_graph(value, self._numbers) >= LEAST_STEPS
            ):
                line = name.set_at(range(name.frame.f_lineno, name.frame.f_lineno + MOST_LINES))
                rest = f"add .item() or .detach() ({line})"
                yield f"`{name.text}` keeps autograd's graph of every step: {rest}"

    def _made(self, storage: Storage) -> str:
        """Return what made a storage and what name leads to it; "" for what has a purpose."""
        if storage.category not in KEPT:
            return ""
        where = f" in {storage.where}" if storage.where else ""
        made = f"{storage.category} by {storage.op}{where}"
        handle = storage.ref() if storage.ref else None
        if handle is not None and address_of(handle) in self._held:
            made += f": in {self._held[address_of(handle)]}"
        if id(storage) in self._followed.frames:
            self._lines[made] = f", made at {self._followed.line_of(storage)}"
        return made

    def _begin(self, phase: str) -> None:
        self._move_frees()
        self._followed.begin(phase)
        self._stepped = False

    def _before_forward(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        # What a batch is made of has no purpose before the model is called with it.
        for tensor in plain_tensors(tensors_in([*args, *kwargs.values()])):
            storage = self._followed.live.get(address_of(tensor.untyped_storage()))
            if storage is None or not storage.category:
                self._followed.claim([tensor], "inputs")
        # neither a checkpoint's recomputation nor an evaluation, and no second call before the
        # backward pass
        if not self._backwards and torch.is_grad_enabled() and self._followed.phase != "forward":
            self._end_step()
            self._starts.append(len(self._followed.log))
            self._numbers.append(next_number())
            # What the step before the last one made and is still there will stay.
            if len(self._starts) > LEAST_STEPS and not self._followed.keeps_stacks:
                left = self._followed.left_by(self._made, [self._starts[-3:-1]], LEAST)
                self._followed.keeps_stacks = bool(left)
            self._begin("forward")

    def _around(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap `torch.autograd.backward` in its phase.

        A reentrant checkpoint calls it again inside.
        """

        def backward(*args: Any, **kwargs: Any) -> None:
            if not self._backwards:
                # A second backward pass before an update is another micro-batch: no step has ended.
                self._end_step()
                if self._followed.phase != "backward":
                    self._begin("backward")
            self._backwards += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._backwards -= 1
                if not self._backwards:
                    # Clipping and unscaling come between backward and the optimizer, so the step
                    # begins here.
                    self._begin("step")

        return backward

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        # An optimizer of another model, as a GAN's, does not end this model's step.
        if self._ours(optimizer) and not self._backwards:
            if self._followed.phase != "step":
                self._begin("step")
            self._stepped = True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._ours(optimizer):
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        claim_states(self._followed, [optimizer], self.target)
        # An optimizer that steps inside backward, as one in a hook does, ends no phase.
        if not self._backwards:
            self._begin("between_steps")

    def _end_step(self) -> None:
        """End a "step" without an optimizer.

        An update by hand frees gradients, else it is backward.
        """
        if self._followed.phase != "step" or self._stepped:
            return
        # A mark is (position in the log, phase), and the last one is where this phase began.
        start = self._followed.marks[-1][0]
        if any(
            size < 0 and storage.category == "gradients"
            for size, storage, _ in self._followed.log[start:]
        ):
            self._begin("between_steps")
        else:
            # Nothing was updated, so all of it was still the backward pass.
            self._followed.marks.pop()
            self._followed.phase = "backward"

    def _move_frees(self) -> None:
        """Count what is freed directly after a phase to it.

        The loss's graph to backward, gradients to the step.
        """
        start, phase = self._followed.marks[-1] if self._followed.marks else (0, "load")
        for position, (size, storage, _) in enumerate(self._followed.log[start:], start + 1):
            category = storage.category
            # The first allocation ends what belongs to the phase before.
            if size > 0 or (phase == "step" and category in ("gradients", "optimizer_states")):
                return
            if phase == "step" or (phase == "between_steps" and category == "gradients"):
                self._followed.marks[-1] = (position, phase)

    def _ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(
            id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]
        )
