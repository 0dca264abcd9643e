"""What the Trainer's evaluation is asked for."""

from collections.abc import Callable
from dataclasses import dataclass

from .knobs import check, documented, knob

MOST = 2**40


@documented
@dataclass(frozen=True)
class Evaluation:
    """What `Trainer.evaluate` does during training; names and defaults are those of `TrainingArguments` and `Trainer`."""

    samples: int = knob(8, "Samples in the evaluation set.", most=MOST, option=True)
    per_device_eval_batch_size: int = knob(8, "Samples in a batch.", most=2**24, option="eval_batch_size")
    compute_metrics: bool = knob(
        False, "The Trainer has a compute_metrics; without one it keeps losses only.", option=True
    )
    eval_accumulation_steps: int | None = knob(
        None, "Batches whose predictions stay on the device; all when left out.", most=MOST, option=True
    )
    eval_do_concat_batches: bool = knob(True, "Keep predictions as one tensor, which each batch copies.")
    batch_eval_metrics: bool = knob(False, "Compute metrics batch by batch, and keep no predictions.")
    preprocess_logits_for_metrics: Callable | None = knob(
        None, "A function of (logits, labels) to what is kept of them, such as their argmax."
    )

    def __post_init__(self):
        check(self, "evaluation.")

    @property
    def sizes(self) -> list[int]:
        """Samples of each batch until predictions first go to the host; later ones repeat these."""
        size = self.per_device_eval_batch_size
        batches = min(-(-self.samples // size), self.eval_accumulation_steps or self.samples)
        return [min(size, self.samples - i * size) for i in range(batches)]
