"""What the Trainer's evaluation is asked for."""

from collections.abc import Callable
from dataclasses import dataclass

from .knobs import Refusals, check, documented, knob, refuse


@documented
@dataclass(frozen=True)
class Evaluation:
    """What `Trainer.evaluate` does during training.

    Names and defaults are those of `TrainingArguments` and `Trainer`.
    """

    samples: int = knob(8)
    per_device_eval_batch_size: int = knob(8)
    compute_metrics: bool = knob(False)
    eval_accumulation_steps: int | None = knob(None)
    eval_do_concat_batches: bool = knob(True)
    batch_eval_metrics: bool = knob(False)
    include_for_metrics: tuple[str, ...] = knob((), choices=("inputs", "loss"), many=True)
    preprocess_logits_for_metrics: Callable | None = knob(None)
    predict_with_generate: bool = knob(False)
    generation_max_length: int | None = knob(None)
    generation_num_beams: int | None = knob(None)

    def __post_init__(self) -> None:
        check(self, "evaluation.")
        refuse(self, self._refusals(), "evaluation.")

    def _refusals(self) -> Refusals:
        needless = self.predict_with_generate and not self.compute_metrics
        allowed = "the Trainer generates for compute_metrics only: say that too"
        yield "predict_with_generate", needless, allowed
        allowed = "it belongs to predict_with_generate: say that too"
        for name in ("generation_max_length", "generation_num_beams"):
            yield name, getattr(self, name) and not self.predict_with_generate, allowed

    @property
    def sizes(self) -> list[int]:
        """Samples of each batch until predictions first go to the host; later ones repeat these."""
        size = self.per_device_eval_batch_size
        batches = -(-self.samples // size)
        if self.eval_accumulation_steps:
            batches = min(batches, self.eval_accumulation_steps)
        return [min(size, self.samples - i * size) for i in range(batches)]
