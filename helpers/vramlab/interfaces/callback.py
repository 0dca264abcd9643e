"""`WatchCallback` for `transformers.Trainer`.

Where the bytes of one real step are, and what is held over the whole run.
"""

import contextlib
import sys
import warnings
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ..hardware.snapshot import Groups
from ..measurement.host_memory import peak_rss, rss
from ..report.report import GiB, KiB, Report
from ..tracking.keepers import holders, variables
from ..tracking.recorder import Recorder
from .watch import watch

# steps; all of them hold more than all of as many before: then it is looked which lines leave
# storages
WINDOW = 5
FOLLOWED = 3  # steps that are followed then
LOOKS = 3  # how often in a run
LEAST = 64 * KiB  # a step: less is no leak to warn of


def held_bytes() -> tuple[int, int]:
    """Return the bytes held now and at most so far.

    Allocated by torch on CUDA, else the process's resident set.
    """
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return rss(), peak_rss()


class WatchCallback(TrainerCallback):
    """Watch one optimizer step of a `Trainer`, and leave the report in `.report`.

    It is of all its micro-batches; over the whole run log what is held as `memory_gib` and
    `memory_peak_gib`, and warn of a leak with the line that makes it.

    Args:
        step: which optimizer step to watch, from 1; the second is the first in which all states
            exist.
    Attributes:
        report: None until that step has ended. A run that ends before warns of it.
        held: (step, "step", "evaluation" or "checkpoint", bytes held after it, bytes held at most
            so far).
        searched: "" where there were steps enough to look for a leak, else how many that takes.
        leaks: the lines of which every step leaves storages, and how much; empty until memory was
            seen to grow.

    Where training breaks off, the end of a notebook's cell ends the watch; a script that goes on
    calls `close()`.
    """

    def __init__(self, step: int = 2):
        self.step = step
        self._entered: watch | Recorder | None = None
        self._stack = contextlib.ExitStack()
        self._begin()

    def _begin(self) -> None:
        self.report: Report | None = None
        self.held: list[tuple[int, str, int, int]] = []
        # Empty groups and no None, so that `if callback.leaks` and `print(callback.leaks)` both
        # work.
        self.leaks = Groups()
        self.searched = ""
        # Steps seen in this training; looks made so far; the entry of `held` after the last look.
        self._steps = self._looks = self._since = 0
        self._ends: list[int] = []  # of the steps that are followed, in the recorder's log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start anew, and come before the reporters, which log what is added."""
        # `train()` may be called again on one Trainer: what a run before left open or found is no
        # part of this one.
        self.close()
        self._begin()
        if args.n_gpu > 1:
            # torch.nn.DataParallel replicates the model onto each card in every forward pass, which
            # no recipe has.
            why = "which is not modelled: CUDA_VISIBLE_DEVICES=0 lets it see one"
            warnings.warn(
                f"the Trainer splits each batch over {args.n_gpu} GPUs (DataParallel), {why}",
                stacklevel=2,
            )
        # The Trainer hands its callbacks everything but their list; `CallbackHandler.call_event` is
        # the caller's frame.
        handler = sys._getframe(1).f_locals.get("self")
        if isinstance(
            handler,
            CallbackHandler,
        ):  # to add to what reporters log, this one comes before them
            handler.callbacks.sort(key=lambda each: each is not self)

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Begin the watch at the optimizer step that was asked for."""
        # Counted here and not from `state.global_step`, which does not start at 0 when training
        # resumes.
        self._steps += 1
        if self._steps == self.step:
            self.close()
            optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            title = f"Trainer, step {state.global_step + 1}: {type(model).__name__}"
            self._enter(watch(model, optimizer, title=title))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the report of the step watched, and look for a leak where memory has grown."""
        if isinstance(watched := self._entered, watch):
            self.close()
            self.report = watched.report()
            looks = (
                f"a leak is looked for over {2 * WINDOW + FOLLOWED + 1} steps: .leaks has "
                # Two windows are compared, a few more steps are followed, and one is the step
                # watched.
                f"its line then"
            )
            self.report.notes.append(looks)
        self.held.append((state.global_step, "step", *held_bytes()))
        if isinstance(recorder := self._entered, Recorder):
            # The recorder's log only grows: its length at a step's end says which events are the
            # step's.
            self._ends.append(len(recorder.log))
            if len(self._ends) > FOLLOWED:
                self._end_look(recorder)
        elif self._grows() and self._looks < LOOKS:
            # The first step that is followed begins at event 0.
            self._looks, self._ends = self._looks + 1, [0]
            self._enter(Recorder("cuda" if torch.cuda.is_available() else "cpu"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what is held after an evaluation."""
        self.held.append((state.global_step, "evaluation", *held_bytes()))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what is held after a checkpoint was saved."""
        self.held.append((state.global_step, "checkpoint", *held_bytes()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add what is held, in GiB, to what the Trainer logs."""
        # Reporters show plain numbers, so they get GiB with three digits and no text.
        now, most = (round(n / GiB, 3) for n in held_bytes())
        # `Trainer.log` has put a copy of `logs` into the history before it calls us, so both are
        # extended.
        for entry in (logs, *state.log_history[-1:]):
            entry.update(memory_gib=now, memory_peak_gib=most)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what the run was too short for."""
        self.close()  # a callback may have stopped training between two micro-batches
        needed = 2 * WINDOW + FOLLOWED + 1
        # Said in an attribute and not in a warning: most short runs are no search for leaks.
        if not self.leaks and 0 < self._steps < needed:
            self.searched = (
                f"no leak was looked for: that takes {needed} steps, and there were {self._steps}"
            )
        if self.report is None:
            why = f"it waits for step {self.step}, and training ended in step {self._steps}"
            warnings.warn(f"WatchCallback has no report: {why}", stacklevel=2)

    def close(self, *cell: Any) -> None:
        """End the watch that runs, without a report; after a notebook's `cell` too."""
        self._entered = None
        self._stack.close()

    def _enter(self, watched: watch | Recorder) -> None:
        self._entered = watched
        self._stack.enter_context(watched)
        # A cell that fails leaves the Trainer's loop without `on_train_end`, and the hooks would
        # stay for all later cells.
        if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
            shell.events.register("post_run_cell", self.close)
            self._stack.callback(shell.events.unregister, "post_run_cell", self.close)

    def _grows(self) -> bool:
        # Only figures after a step compare: an evaluation or a checkpoint ends with other tensors
        # alive.
        steps = [now for _, after, now, _ in self.held[self._since :] if after == "step"]
        return (
            len(steps) >= 2 * WINDOW
            # The least of the later steps against the most of those before: what swings with the
            # samples' lengths is no leak.
            and min(steps[-WINDOW:]) - max(steps[-2 * WINDOW : -WINDOW]) >= LEAST
        )

    def _end_look(self, recorder: Recorder) -> None:
        """Warn of the lines of which each step followed has left storages."""
        self.close()
        # The next comparison starts afresh: on a CPU the recorder's own records are in the resident
        # set.
        self._since = len(self.held)
        found = recorder.leaks(self._ends, LEAST)
        if found:
            self.leaks = found
            lines = {group.line for group in found}
            held = holders(variables(sys._getframe(1)))
            left = [at for at, one in recorder.live.items() if recorder.line_of(one) in lines]
            names = ", ".join(sorted({str(held[at]) for at in left if at in held}))
            kept = f" in {names}" if names else ""
            why = (
                f"memory grows with every step{kept}; what one step leaves, by the line that "
                "made it:"
            )
            warnings.warn(f"{why}\n{found}", stacklevel=2)
