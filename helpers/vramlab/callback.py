"""`WatchCallback` for `transformers.Trainer`: where the bytes of one real Trainer step are."""

from transformers import TrainerCallback

from .report import Report
from .watch import watch


class WatchCallback(TrainerCallback):
    """Watches one optimizer step of a `Trainer` and leaves its report in `.report`.

    Args:
        step: which optimizer step to watch, counted from 1; the second is the first steady one.

    Example:
        seen = WatchCallback()
        Trainer(model, args, train_dataset=data, callbacks=[seen]).train()
        print(seen.report)
    """

    def __init__(self, step: int = 2):
        self.step, self.report, self._watch = step, None, None
        self.report: Report | None = None

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self._watch is None and self.report is None and state.global_step + 1 >= self.step:
            optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            title = f"Trainer, step {state.global_step + 1}: {type(model).__name__}"
            self._watch = watch(model, optimizer, title=title).__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self.report, self._watch = self._watch.report(), None

    def on_train_end(self, args, state, control, **kwargs):
        if self._watch is not None:  # training stopped in the middle of the step
            self._watch.__exit__(None, None, None)
            self._watch = None
