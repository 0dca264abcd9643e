"""The peak of a whole run: samples of a data set, dealt into micro-batches as the Trainer does."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any

from ..base.errors import RecipeError, needing
from ..hardware.gpu import Gpu
from ..recipe import samples
from ..recipe.recipe import Recipe, as_recipe
from ..report.report import Interval, Report, format_bytes
from .predict import predict

SAMPLING = ("random", "sequential", "group_by_length")
# Reserved after 30 to 60 steps of eight lengths over the longest batch's own, in eight runs
# replayed through the allocator's model without a limit: 1.1 to 2.2. With a limit each of them ran
# in at most 1.03 of it.
TYPICAL = 1.6
WORST = 2.2

Samples = tuple[int, ...]  # tokens of each sample of a micro-batch


@dataclass(frozen=True)
class Run:
    """What the micro-batches of one epoch need.

    Attributes:
        largest: the prediction of the micro-batch with the highest peak; `largest.recipe` has its
            lengths.
        reserved: what the allocator grows to over batches of many lengths where the card has room
            for it.
        typical: bytes of the median micro-batch's peak.
        micro_batches: how many there are.
        tokens: that are trained on; `padding`: computed for nothing.
        cut: tokens left out, as samples are over seq_len.
    """

    largest: Report
    reserved: Interval
    typical: int
    micro_batches: int
    tokens: int
    padding: int
    cut: int

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; sizes are bytes."""
        return {**vars(self), "largest": self.largest.to_dict(), "reserved": vars(self.reserved)}

    def __str__(self) -> str:
        waste = self.padding / (self.tokens + self.padding)
        median = f"the median's peak is {format_bytes(self.typical)}"
        tokens = f"{waste:.0%} of the tokens computed are padding, {self.cut:,} are cut"
        return (
            f"{self.largest}\n"
            f"over the run: {self.micro_batches:,} micro-batches, {median}; {tokens}\n"
            f"reserved over the run, where the card has room: {self.reserved}"
        )


@needing("predict_run")
def predict_run(
    recipe: Recipe | Any,
    lengths: Iterable[int],
    train_sampling_strategy: str = "random",
    seed: int = 42,
    gpu: str | Gpu | None = None,
    **granted: Any,
) -> Run:
    """Predict the highest peak of an epoch over samples of `lengths` tokens, and the median's.

    Args:
        recipe: makes the micro-batches; seq_len is the longest sample kept whole.
        train_sampling_strategy, seed: as in `TrainingArguments`; orders are the Trainer's.
        gpu, granted: as for `predict`.
    Raises:
        RecipeError: no lengths, one that is no whole number from 1 on, or what `predict` does not
            know.
    """
    recipe = as_recipe(recipe)
    checked = samples.check_lengths("lengths", list(lengths))
    if train_sampling_strategy not in SAMPLING:
        allowed = "allowed are " + ", ".join(SAMPLING)
        raise RecipeError("train_sampling_strategy", train_sampling_strategy, allowed)
    kept = list(checked)
    if recipe.packing or not recipe.padding_free:  # SFTTrainer does not cut what it only joins
        kept = [min(length, recipe.seq_len) for length in checked]
    dealt = _dealt(recipe, kept, train_sampling_strategy, seed)

    shape = partial(
        samples.shape_of,
        joins=recipe.joins,
        multiple=recipe.pad_to_multiple_of,
    )

    def report(batch: Samples) -> Report:
        count = recipe.batch_size if recipe.packing else len(batch)
        return predict(recipe.replace(lengths=batch, batch_size=count), gpu, **granted)

    def has_mask(batch: Samples) -> bool:
        rows, width = shape(batch)
        if recipe.joins:
            return len(batch) > rows
        return min(batch) < width

    # Sizes order the peaks of micro-batches with a mask, and of those without.
    ranked = sorted(dealt, key=lambda batch: (prod(shape(batch)), sum(batch)))
    # A later batch takes an earlier one's place under the same key, so the largest of each kind is
    # left and only two predictions are needed.
    last = {has_mask(batch): batch for batch in ranked}
    reports = [report(batch) for batch in last.values()]
    largest = max(reports, key=lambda report: report.peak.total)
    median = report(ranked[len(ranked) // 2])
    computed = [prod(shape(batch)) for batch in dealt]
    trained = sum(sum(batch) for batch in dealt)
    return Run(
        largest=largest,
        reserved=_reserved(largest, computed),
        typical=median.peak.total,
        micro_batches=len(dealt),
        tokens=trained,
        padding=sum(computed) - trained,
        cut=sum(checked) - trained,
    )


def _reserved(largest: Report, computed: list[int]) -> Interval:
    """Return what the allocator grows to over micro-batches of `computed` tokens each."""
    reserved = largest.reserved
    assert isinstance(reserved, Interval)  # as predict gives it
    # Batches of one size ask for the same blocks in every step, so nothing fragments from step to
    # step.
    if len(set(computed)) == 1:
        return reserved
    likely = int(reserved.value * TYPICAL)
    return Interval(reserved.low, likely, int(reserved.value * WORST))


def _dealt(
    recipe: Recipe,
    lengths: list[int],
    strategy: str,
    seed: int,
) -> list[Samples]:
    """Return the samples of each micro-batch of an epoch, in order."""
    import torch
    from torch.utils.data import RandomSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    rows: list[Samples] = [(length,) for length in lengths]
    if recipe.packing:
        rows = _packed(recipe, lengths)
    generator = torch.Generator().manual_seed(seed)
    order: Iterable[int] = range(len(rows))
    if strategy == "group_by_length":
        # As the Trainer calls it (`_get_train_sampler`): samples are sorted by length within up to
        # 50 times so many, and the longest one comes first.
        together = recipe.batch_size * recipe.gradient_accumulation_steps
        tokens = [sum(row) for row in rows]
        order = LengthGroupedSampler(together, lengths=tokens, generator=generator)
    elif strategy == "random":
        # As accelerate's SeedableRandomSampler in the first epoch.
        order = RandomSampler(rows, generator=generator)
    ordered = [rows[number] for number in order]
    batches = []
    for first in range(0, len(ordered), recipe.batch_size):
        batch = ordered[first : first + recipe.batch_size]
        batches.append(tuple(chain.from_iterable(batch)))
    return batches


def _packed(recipe: Recipe, lengths: list[int]) -> list[Samples]:
    """Return the samples in each row that TRL packs."""
    import numpy as np
    from datasets import (
        Dataset,
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from trl import pack_dataset

    # TRL packs a data set; what the tokens are does not matter.
    data = Dataset.from_dict({"input_ids": [np.zeros(length, np.int8) for length in lengths]})
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    packed = pack_dataset(data, recipe.seq_len, "bfd")
    if shown:
        enable_progress_bars()
    return [tuple(row) for row in packed["seq_lengths"]]
