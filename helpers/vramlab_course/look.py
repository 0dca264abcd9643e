"""A callback that records where a Trainer spends its time and memory.

    from vramlab_course.look import Look

    look = Look(tokens=4 * 1024)
    trainer = Trainer(…, callbacks=[look])
    try:
        trainer.train()
    finally:
        look.write(trainer.args)    # a run that dies leaves its files too

This file needs nothing of the course, so it may be copied beside a script.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import TrainerCallback

ON_GPU = torch.cuda.is_available()


def top_operators(profiler: torch.profiler.profile) -> list[str]:
    """A line for each of the five operators that took most time themselves.

    That is without those they called. A GPU's kernels count for the operators that launched them.
    """
    rows = [row for row in profiler.key_averages() if row.device_type.name == "CPU"]
    rows.sort(key=lambda row: (row.self_device_time_total, row.self_cpu_time_total), reverse=True)
    lines = []
    for row in rows[:5]:
        took = row.self_device_time_total or row.self_cpu_time_total
        lines.append(f"{took / 1e3:8.1f} ms in {row.count:4} of {row.key[:40]}")
    return lines


class Look(TrainerCallback):
    """Record two steps, and every ten steps say how fast the run is and what memory it holds.

    Args:
        tokens: of one update on one card, without padding.
        after: steps before the two that are recorded.
        weights: None stands for all of the model's. With experts give those that a token uses, and
            under ZeRO-3 give all.
        say: prints a line.
    """

    def __init__(
        self,
        tokens: int,
        after: int = 11,
        weights: float | None = None,
        say: Callable[[str], None] = print,
    ):
        self.tokens = tokens
        self.after = after
        self.weights = weights
        self.say = say
        self.profiler = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Choose the two steps: in a shorter run they are its last."""
        left = state.max_steps - state.global_step  # a resumed run begins above 0
        self.start = state.global_step + max(0, min(self.after, left - 2))
        self._restart(state)
        self._begin(state)

    def on_step_end(self, args, state, control, model, **kwargs):
        """Print every ten steps, and write after the two."""
        if state.global_step % 10 == 0:
            self._print(args, model, state.global_step)
            self._restart(state)
        if state.global_step == self.start + 2:
            self.write(args)
            self._restart(state)  # the profiler has slowed these steps
        self._begin(state)

    def on_train_end(self, args, state, control, **kwargs):
        """Write, if the run has ended within the two steps."""
        self.write(args)

    def write(self, args) -> None:
        """Write trace and memory history into the Trainer's folder, if they are not there yet."""
        if not self.profiler:
            return
        self.profiler.stop()
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(folder / f"trace_{args.process_index}.json"))
        for line in top_operators(self.profiler):
            self.say(line)
        self.profiler = None
        if ON_GPU:
            torch.cuda.memory._dump_snapshot(folder / f"memory_{args.process_index}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _restart(self, state) -> None:
        self.said_at = state.global_step
        self.since = time.perf_counter()

    # A Trainer loads the batch before it calls on_step_begin, so this comes at the step before.
    def _begin(self, state) -> None:
        if state.global_step == self.start:
            if ON_GPU:
                torch.cuda.memory._record_memory_history(max_entries=1_000_000)
            self.profiler = torch.profiler.profile(acc_events=True)
            self.profiler.start()

    def _print(self, args, model, step: int) -> None:
        seconds = (time.perf_counter() - self.since) / (step - self.said_at)
        each = 4 if hasattr(model, "peft_config") else 6  # operations, by weight and token
        weights = self.weights or model.num_parameters()
        rate = each * weights * self.tokens / seconds / 1e12
        speed = f"{self.tokens / seconds:,.0f} tokens/s, {rate:.3g} TFLOP/s"
        self.say(f"rank {args.process_index}: {seconds:.2f} s a step, {speed}")
        if ON_GPU:
            held = torch.cuda.memory_stats()
            now = held["allocated_bytes.all.current"] / 2**30
            most = held["allocated_bytes.all.peak"] / 2**30
            reserved = held["reserved_bytes.all.peak"] / 2**30
            self.say(f"GiB allocated: {now:.2f} now, {most:.2f} at most")
            self.say(f"GiB reserved: {reserved:.2f}, retries: {held['num_alloc_retries']}")
