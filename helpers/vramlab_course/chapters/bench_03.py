"""The bench of chapter 03: one loop that asks every witness about a trick, which is a change of recipe fields.

Memory of a `big` recipe is predicted, simulated and looked up in the records. The Trainer trains a `small` one, the
course's base model, on this machine.
"""

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import current_device
from vramlab.measurement.records import find_record
from vramlab.recipe.recipe import Recipe
from vramlab.report.errors import RecordError
from vramlab.report.report import GiB, MiB, Report, text_table

from vramlab_course.base_model import finetuning_texts, load_base_model
from vramlab_course.finetuning import batches
from vramlab_course.live import live
from vramlab_course.pace import Pace, pace, stepper

from .chapter_03 import CARD, simulation

HEAD = ("peak, GiB", "predicted", "simulated", "peak in", "GPU record", "Trainer here", "second loss")


def texts(recipe: Recipe, steps: int) -> list[dict[str, Any]]:
    """Rows of text for `steps` updates, the same in every call."""
    rows = recipe.batch_size * recipe.gradient_accumulation_steps * steps
    ids = next(batches(finetuning_texts("train", limit=60_000), 1, rows, recipe.seq_len))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(
    recipe: Recipe, data: Any = None, steps: int = 2, watched: bool = True, **more: Any
) -> tuple[Report | None, list[float]]:
    """Train the base model with the `Trainer` as `recipe` says; returns the last step's report and the steps' losses.

    Args:
        data: the training set, `texts` if left out.
        watched: whether to make the report; a compiled model runs eagerly while it is watched.
        more: further `TrainingArguments`.
    """
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback
    from vramlab.faces.callback import WatchCallback

    seen = [WatchCallback(step=steps)] if watched else []
    model = load_base_model(attn_implementation=recipe.attn_implementation)
    options = dict(max_steps=steps, logging_steps=1, learning_rate=1e-3, disable_tqdm=True)
    options["dataloader_pin_memory"] = current_device().kind == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        arguments = recipe.training_arguments(folder, **{**options, **more})
        trainer = Trainer(model, arguments, train_dataset=data or texts(recipe, steps), callbacks=seen)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return seen[0].report if seen else None, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Bench:
    """Try tricks against the unchanged recipes.

    Args:
        big, small: see the module; `big` is predicted and simulated for the chapter's card, an A100.
    Attributes:
        measured: "section: trick" to the Trainer's peak in bytes and the time of a token relative to unchanged.
    """

    def __init__(self, big: Recipe, small: Recipe):
        self.big, self.small = big, small
        self.here = current_device()
        self.usual = stepper(small)
        self.unchanged = train(small)
        self.measured: dict[str, tuple[int, float]] = {"unchanged": (self.unchanged[0].peak.total, 1.0)}

    def try_out(self, section: str, tricks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Print a table of a section's tricks, then their times here; returns the simulated peaks in GiB.

        Raises AssertionError where formula and simulation differ by over 2 %.
        """
        import torch

        rows, times, peaks = [HEAD], [], {}
        products = torch.backends.cuda.matmul  # a recipe in tf32 switches it on for the process
        before = products.allow_tf32
        for name, changes in {"unchanged": {}, **tricks}.items():
            big, small = self.big.replace(**changes), self.small.replace(**changes)
            predicted, simulated = predict(big, gpu=CARD), simulation(big)
            assert abs(predicted.peak.total / simulated.peak.total - 1) < 0.02, f"{name}: formula and simulation differ"
            peaks[name] = simulated.peak.total / GiB
            trained = ["needs a GPU", "–"]
            if self._runs(small):
                seen, losses = train(small) if changes else self.unchanged
                trained = [f"{seen.peak.total / MiB:.1f} MiB", f"{losses[1]:.2f}"]
                if changes:
                    ratio = self.time_a_token(small)
                    self.measured[f"{section}: {name}"] = seen.peak.total, ratio.median
                    times.append(f"here, {name}: a token takes {ratio}")
            products.allow_tf32 = before
            gib = f"{predicted.peak.total / GiB:.3f}", f"{peaks[name]:.3f}"
            rows.append((name, *gib, simulated.peak_phase, record_of(big), *trained))
        (live if self.here.gpu else print)(text_table(rows))
        for line in times:
            live(line)
        return peaks

    def time_a_token(self, recipe: Recipe) -> Pace:
        """How many times as long a token of `recipe` takes here as one of the unchanged recipe."""
        return pace(stepper(recipe), self.usual, rounds=2).per(recipe.tokens / self.small.tokens)

    def _runs(self, recipe: Recipe) -> bool:
        """Whether this machine can train `recipe`: paged states and the Trainer's fp16 need a GPU, bf16 a newer one."""
        if self.here.gpu:
            return self.here.gpu.supports(recipe.precision)
        return "paged" not in recipe.optim and recipe.precision != "fp16-mixed"


def record_of(recipe: Recipe) -> str:
    """The recorded peak of `recipe` on a GPU in GiB, "none yet" without a record, or "oom"."""
    try:
        report = find_record(recipe)
    except RecordError:
        return "none yet"
    return f"{report.allocated / GiB:.3f}" if report.status == "ok" else report.status


def front(points: Sequence[tuple]) -> list[tuple]:
    """The Pareto front of points (cost, gain, …), cheapest first."""
    best, kept = float("-inf"), []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if point[1] > best:
            best = point[1]
            kept.append(point)
    return kept
