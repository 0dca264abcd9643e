"""The evaluation loop of `transformers.Trainer`, its own code, on what `training.build` makes."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..private.of_torch import tree_leaves, tree_map
from ..private.of_transformers import MOVE_MODEL, SHARED_STATE, prepare_evaluation
from ..private.patched import replaced
from ..recipe.evaluation import Evaluation
from .engine import AUTOCAST, Training, autocast_inside
from .evaluation_host import Kept, host_peak, kept
from .fixed_generation import fixed_length
from .training import forward

# Fields of `Evaluation` that are no arguments of `TrainingArguments`.
NO_ARGUMENTS = ("samples", "compute_metrics", "preprocess_logits_for_metrics")


class Batches(list):
    """The Trainer's data loader, a list of batches' sizes.

    `make` gives each batch when it is asked for.
    """

    make: Callable[[int], dict[str, torch.Tensor]]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self.make, super().__iter__())


def evaluate(
    training: Training,
    evaluation: Evaluation,
    make: Callable[[int], Any],
    full: bool = False,
) -> int:
    """Run `Trainer.evaluation_loop` up to where predictions first go to the host.

    Return the most bytes that the host then holds of them, if it is not the device itself.

    `make` gives a batch of so many samples. Unless `full` the model runs on the first batch and the
    last two only: what is kept grows from batch to batch, what the model takes does not, so the
    others only make what is kept of the first.
    """
    batches = Batches(evaluation.sizes)
    batches.make = make
    moved: list[list[Kept]] = []
    with _trainer(training, evaluation, moved) as trainer, _generating(training):
        trainer.prediction_step = _Predictions(trainer.prediction_step, len(batches), full)
        training.model.eval()
        for module in training.model.modules():
            # 4-bit layers would pack their weights for this CPU
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        prediction_loss_only = None if evaluation.compute_metrics else True
        trainer.evaluation_loop(batches, "Evaluation", prediction_loss_only)
        training.model.train()
    return host_peak(moved, evaluation.moves, evaluation.eval_do_concat_batches)


class _Predictions:
    """The Trainer's `prediction_step`, which skips the model where its peak has been seen."""

    def __init__(self, step: Callable, batches: int, full: bool) -> None:
        self.step = step
        self.batches = batches
        self.full = full
        self.asked = 0  # how many batches
        # what makes the loss and the logits of the first batch again, without the model
        self.again: tuple | None = None

    def __call__(self, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> tuple:
        """Return loss, logits and labels of a batch."""
        self.asked += 1
        # The last two run too: the last may be smaller, and before it all predictions but one are
        # kept.
        if self.again is not None and not self.full and 1 < self.asked < self.batches - 1:
            return self._as_the_first(inputs, self.again)
        loss, logits, labels = self.step(model, inputs, *args, **kwargs)
        if self.again is None:
            # Shapes and dtypes only, so that no tensor of the first batch is kept alive by this.
            self.again = tree_map(_maker, (loss, logits))
        return loss, logits, labels

    def _as_the_first(self, inputs: dict, makers: tuple) -> tuple:
        loss, logits = tree_map(_call_if_any, makers)
        has_logits = bool(makers[1])
        # Without logits the Trainer keeps no labels either.
        return loss, logits, inputs["labels"] if has_logits else None


def _maker(tensor: torch.Tensor | None) -> Callable[[], torch.Tensor] | None:
    """Return what makes a tensor like `tensor` without keeping that."""
    if tensor is None:
        return None
    shape = tuple(tensor.shape)
    return functools.partial(torch.empty, shape, dtype=tensor.dtype, device=tensor.device)


def _call_if_any(make: Callable[[], torch.Tensor] | None) -> torch.Tensor | None:
    return make and make()


@contextlib.contextmanager
def _trainer(
    training: Training,
    evaluation: Evaluation,
    moved: list[list[Kept]],
) -> Iterator[Any]:
    """Yield a Trainer whose model's forward pass is that of the training step.

    What it takes to the host is appended to `moved`. The process keeps its own accelerator.
    """
    arguments: dict[str, Any] = {
        # The Trainer sets the model's `use_cache` by it, which the recipe has decided.
        "use_cache": training.model.config.use_cache,
        "report_to": "none",
        "disable_tqdm": True,
    }
    make, take = _classes(evaluation)
    known = [field.name for field in dataclasses.fields(take)]
    for field in dataclasses.fields(evaluation):
        if field.name not in NO_ARGUMENTS and field.name in known:
            arguments[field.name] = getattr(evaluation, field.name)
    with contextlib.ExitStack() as stack:
        for patch in _patches(moved):
            stack.enter_context(patch)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        use_cpu = training.device.type == "cpu"
        trainer: Any = make(
            training.model,
            take(folder, use_cpu=use_cpu, **arguments),
            preprocess_logits_for_metrics=evaluation.preprocess,
        )
        # The states of training are on the device while it is evaluated.
        trainer.optimizer = training.optimizer
        trainer.is_in_train = True
        trainer.num_examples = lambda loader: evaluation.samples
        generation = {}
        for name in ("max_length", "num_beams"):
            if getattr(evaluation, f"generation_{name}"):
                generation[name] = getattr(evaluation, f"generation_{name}")

        def wrapped(model: Any, **options: Any) -> Callable:
            return lambda **inputs: forward(training, inputs)

        prepare_evaluation(trainer, training.model, wrapped, generation)
        yield trainer


def _classes(evaluation: Evaluation) -> tuple[Any, Any]:
    """Return the classes of the Trainer and of its arguments."""
    import transformers

    if evaluation.predict_with_generate:
        return transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
    return transformers.Trainer, transformers.TrainingArguments


@contextlib.contextmanager
def _generating(training: Training) -> Iterator[None]:
    """While entered, the model generates answers of full length, under autocast as accelerate does.

    That autocasts `model.forward` itself, which `training.forward` does around it.
    """
    model = training.model
    if not hasattr(model, "generate"):
        yield
        return
    own = model.generate

    def generate(*args: Any, **options: Any) -> Any:
        forward_before = vars(model).get("forward")
        if training.precision in AUTOCAST:
            autocast_inside(model, training.device.type, training.precision)
        try:
            with fixed_length(None, training.on_token):
                return own(*args, **options)
        finally:
            model.__dict__.pop("forward", None)
            if forward_before is not None:
                model.forward = forward_before

    with replaced(model, "generate", generate):
        yield


def _patches(moved: list[list[Kept]]) -> Iterator[contextlib.AbstractContextManager]:
    """Return what a Trainer would change of the process, or do to fake tensors, replaced."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, trainer_pt_utils
    from transformers import trainer as trainer_module

    for state in (PartialState, AcceleratorState, GradientState):
        yield replaced(state, SHARED_STATE, {})

    def numpify(tensors: Any) -> None:
        # fake tensors have no values to give
        moved.append(kept(tree_leaves(tensors)))

    yield replaced(trainer_pt_utils, "nested_numpify", numpify)
    # the model is where it belongs, and trained as it is
    yield replaced(Trainer, MOVE_MODEL, lambda *args: None)
    yield replaced(trainer_module, "validate_quantization_for_training", lambda model: None)
    # it would seed the process's generators
    yield replaced(trainer_module, "set_seed", lambda seed: None)
