"""What the Trainer's evaluation is asked for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .knobs import Refusals, check, documented, knob, refuse


def argmax(logits: Any, labels: Any) -> Any:
    """Return the likeliest token of each place, as transformers' examples keep it (run_clm.py)."""
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


PREPROCESSING: dict[str, Callable] = {"argmax": argmax}  # that need no Python to be said


@documented
@dataclass(frozen=True)
class Evaluation:
    """What `Trainer.evaluate` does during training.

    Names and defaults are those of `TrainingArguments` and `Trainer`.
    """

    samples: int = knob(
        8,
        help="Samples in the evaluation set.",
        option=True,
    )
    per_device_eval_batch_size: int = knob(
        8,
        help="Samples in a batch.",
        option="eval_batch_size",
    )
    compute_metrics: bool = knob(
        False,
        help="The Trainer has a compute_metrics; without one it keeps losses only.",
        option=True,
    )
    eval_accumulation_steps: int | None = knob(
        None,
        help="Batches whose predictions stay on the device; all when left out.",
        option=True,
    )
    eval_do_concat_batches: bool = knob(
        True,
        help="Keep predictions as one tensor, which each batch copies.",
        option=True,
    )
    batch_eval_metrics: bool = knob(
        False,
        help="Compute metrics batch by batch, and keep no predictions.",
        option=True,
    )
    include_for_metrics: tuple[str, ...] = knob(
        (),
        choices=("inputs", "loss"),
        many=True,
        help="What compute_metrics is given besides predictions and labels.",
        option=True,
    )
    preprocess_logits_for_metrics: Callable | str | None = knob(
        None,
        choices=tuple(PREPROCESSING),
        help="What is kept of the logits; in Python also a function of (logits, labels).",
        option=True,
    )
    predict_with_generate: bool = knob(
        False,
        help="A Seq2SeqTrainer's: metrics are of what the model generates.",
        option=True,
    )
    generation_max_length: int | None = knob(
        None,
        help=(
            "Of predict_with_generate: tokens of an answer, the first included; the model's own "
            "when left out."
        ),
        option=True,
    )
    generation_num_beams: int | None = knob(
        None,
        help="Of predict_with_generate: beams.",
        option=True,
    )

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

    def __str__(self) -> str:
        """Return how many samples are evaluated, and how."""
        size = self.per_device_eval_batch_size
        words = [f"evaluation of {self.samples:,} samples, {size} at once"]
        if self.compute_metrics:
            words.append("metrics batch by batch" if self.batch_eval_metrics else "compute_metrics")
        asked = self.preprocess_logits_for_metrics
        if asked:
            words.append(f"{asked if isinstance(asked, str) else 'preprocessed'} kept")
        if self.eval_accumulation_steps:
            words.append(f"to the host every {self.eval_accumulation_steps} batches")
        if not self.eval_do_concat_batches:
            words.append("not concatenated")
        return " · ".join(words)

    @property
    def preprocess(self) -> Callable | None:
        """The function that `preprocess_logits_for_metrics` is, or names."""
        asked = self.preprocess_logits_for_metrics
        return PREPROCESSING[asked] if isinstance(asked, str) else asked

    @property
    def moves(self) -> Iterator[int]:
        """Samples whose predictions go to the host at a time."""
        # Without accumulation steps all predictions go at the end, and there are never more
        # batches than samples.
        batches = self.eval_accumulation_steps or self.samples
        at_once = batches * self.per_device_eval_batch_size
        for start in range(0, self.samples, at_once):
            yield min(at_once, self.samples - start)

    @property
    def batches(self) -> int:
        """Batches of the evaluation set."""
        return -(-self.samples // self.per_device_eval_batch_size)

    @property
    def sizes(self) -> list[int]:
        """Samples of each batch until predictions first go to the host; later ones repeat these."""
        size = self.per_device_eval_batch_size
        batches = self.batches
        if self.eval_accumulation_steps:
            batches = min(batches, self.eval_accumulation_steps)
        return [min(size, self.samples - i * size) for i in range(batches)]
