"""What transformers' Trainer adds against overfitting: smoothed labels, and noise on embeddings."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..recipe.recipe import Recipe
from .engine import Model, Training


def start(training: Training, recipe: Recipe, model: Model) -> None:
    """Give `training` what `Trainer.__init__` and `Trainer.train` make for the recipe's fields."""
    if recipe.label_smoothing_factor:
        from transformers.trainer_pt_utils import LabelSmoother

        smoother = LabelSmoother(epsilon=recipe.label_smoothing_factor)
        shifts = recipe.shape.task == "causal-lm"
        training.compute_loss = partial(_smoothed, smoother, shifts)
    if recipe.neftune_noise_alpha is not None:
        from transformers.integrations.neftune import activate_neftune

        activate_neftune(model, recipe.neftune_noise_alpha)


def _smoothed(
    smoother: Callable[..., torch.Tensor],
    shifts: bool,
    run: Callable[..., Any],
    batch: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the loss as `Trainer.compute_loss` does: the model gets no labels and makes none.

    The Trainer counts the labels of a step before it; the count is one number.
    """
    # A copy, because the batch of the loop keeps its labels for the next step.
    inputs = dict(batch)
    labels = inputs.pop("labels")
    outputs = run(**inputs)
    return smoother(outputs, labels, shift_labels=shifts, num_items_in_batch=labels.numel())
