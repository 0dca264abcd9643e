"""The evaluation loop of `transformers.Trainer`, its own code, on what `training.build` makes."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..recipe.evaluation import Evaluation
from .engine import Training
from .patched import replaced
from .training import forward


class Batches(list):
    """The Trainer's data loader, a list of batches' sizes: `make` gives each batch when it is asked for."""

    make: Callable[[int], dict[str, torch.Tensor]]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self.make, super().__iter__())


def evaluate(training: Training, evaluation: Evaluation, make: Callable[[int], Any], full: bool = False) -> None:
    """Run `Trainer.evaluation_loop` up to where predictions first go to the host; `make` gives a batch of so many samples.

    Unless `full` the model runs on the first batch and the last two only: what is kept grows from batch to batch, what the
    model takes does not, so the others only make what is kept of the first.
    """
    sizes, made = Batches(evaluation.sizes), []
    sizes.make = make

    def maker(tensor: torch.Tensor | None) -> Callable[[], torch.Tensor] | None:
        """What makes a tensor like `tensor` without keeping that."""
        if tensor is not None:
            return functools.partial(torch.empty, tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)

    with _trainer(training, evaluation) as trainer:
        step = trainer.prediction_step

        def prediction_step(model: Any, inputs: dict, *args: Any, **kwargs: Any) -> tuple:
            made.append(None)
            if not full and 1 < len(made) < len(sizes) - 1:
                return *tree_map(lambda make: make and make(), made[0]), inputs["labels"] if made[0][1] else None
            loss, logits, labels = step(model, inputs, *args, **kwargs)
            made[0] = made[0] or tree_map(maker, (loss, logits))
            return loss, logits, labels

        trainer.prediction_step = prediction_step
        training.model.eval()
        for module in training.model.modules():  # 4-bit layers would pack their weights for this CPU
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        trainer.evaluation_loop(sizes, "Evaluation", None if evaluation.compute_metrics else True)
        training.model.train()


@contextlib.contextmanager
def _trainer(training: Training, evaluation: Evaluation) -> Iterator[Any]:
    """A Trainer whose model's forward pass is that of the training step; the process keeps its own accelerator."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments, trainer_pt_utils
    from transformers import trainer as trainer_module

    asked = {f.name: getattr(evaluation, f.name) for f in dataclasses.fields(evaluation)}
    others = ("samples", "compute_metrics", "preprocess_logits_for_metrics")
    samples, _, preprocess = map(asked.pop, others)
    with contextlib.ExitStack() as stack:
        for state in (PartialState, AcceleratorState, GradientState):
            stack.enter_context(replaced(state, "_shared_state", {}))
        stack.enter_context(replaced(trainer_pt_utils, "nested_numpify", lambda tensors: None))
        stack.enter_context(replaced(Trainer, "_move_model_to_device", lambda *args: None))
        stack.enter_context(replaced(trainer_module, "validate_quantization_for_training", lambda model: None))
        stack.enter_context(replaced(trainer_module, "set_seed", lambda seed: None))  # of the process's generators
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        asked |= {"use_cache": training.model.config.use_cache, "report_to": "none", "disable_tqdm": True}
        args = TrainingArguments(folder, use_cpu=training.device.type == "cpu", **asked)
        trainer = Trainer(training.model, args, preprocess_logits_for_metrics=preprocess)
        trainer.optimizer, trainer.is_in_train = training.optimizer, True
        trainer.num_examples = lambda loader: samples
        trainer._wrap_model = lambda model, **options: lambda **inputs: forward(training, inputs)
        trainer.accelerator._models.append(training.model)  # so that it is not prepared again
        yield trainer
