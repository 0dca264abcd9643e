"""`WatchCallback` for `transformers.Trainer`: where the bytes of one real Trainer step are."""

import sys
import warnings
from typing import Any

from transformers import TrainerCallback

from ..report.errors import VramLabError
from ..report.report import Report
from .watch import watch


class WatchCallback(TrainerCallback):
    """Watch one optimizer step of a `Trainer`, all its micro-batches, and leave the report in `.report`.

        seen = WatchCallback()
        Trainer(model, args, train_dataset=data, callbacks=[seen]).train()
        print(seen.report)

    Args:
        step: which optimizer step to watch, from 1; the second is the first in which all states exist.
    Attributes:
        report: None until that step has ended. A run that ends before warns of it.

    Where training breaks off, the end of a notebook's cell ends the watch; a script that goes on calls `close()`.
    """

    def __init__(self, step: int = 2):
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise VramLabError(f"WatchCallback counts optimizer steps from 1, and this step is {step!r}")
        self.step = step
        self.report: Report | None = None
        self._watch: watch | None = None
        self._steps = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.close()
        self.report, self._steps = None, 0

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self._steps += 1
        if self._steps == self.step:
            optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            title = f"Trainer, step {state.global_step + 1}: {type(model).__name__}"
            self._watch = watch(model, optimizer, title=title).__enter__()
            if shell := _shell():
                shell.events.register("post_run_cell", self._after_cell)

    def on_step_end(self, args, state, control, **kwargs):
        if watched := self._watch:
            self.close()
            self.report = watched.report()

    def on_train_end(self, args, state, control, **kwargs):
        self.close()  # a callback may have stopped training between two micro-batches
        if self.report is None:
            why = f"it waits for step {self.step}, and training ended in step {self._steps}"
            warnings.warn(f"WatchCallback has no report: {why}", stacklevel=2)

    def close(self) -> None:
        """End the watch that runs, without a report."""
        if watched := self._watch:
            self._watch = None
            watched.__exit__(None, None, None)
            if shell := _shell():
                shell.events.unregister("post_run_cell", self._after_cell)

    def _after_cell(self, result: Any) -> None:
        self.close()


def _shell() -> Any:
    """Return the IPython shell this runs in, None outside of one."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
