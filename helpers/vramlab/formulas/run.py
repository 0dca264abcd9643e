"""The peak of a whole run: the samples of a data set, dealt into micro-batches as the Trainer deals them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ..hardware.gpu import Gpu
from ..recipe import samples
from ..recipe.recipe import Recipe, as_recipe
from ..report.errors import RecipeError, needing
from ..report.report import Interval, Report, format_bytes
from .predict import predict

SAMPLING = ("random", "sequential", "group_by_length")
# Reserved after 30 to 60 steps of eight lengths over the longest batch's own, in eight runs replayed through the
# allocator's model without a limit: 1.1 to 2.2. With a limit each of them ran in at most 1.03 of it.
TYPICAL, WORST = 1.6, 2.2

Samples = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """What the micro-batches of one epoch need.

    Attributes:
        largest: the prediction of the micro-batch with the highest peak, whose lengths are in `largest.recipe`.
        reserved: what the allocator grows to over batches of many lengths where the card has room for it.
        typical: bytes of the median micro-batch's peak.
        micro_batches: how many there are.
        tokens: that are trained on; `padding`: computed for nothing; `cut`: left out as samples are over seq_len.
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
        return (
            f"{self.largest}\nover the run: {self.micro_batches:,} micro-batches, the median's peak is "
            f"{format_bytes(self.typical)}; {waste:.0%} of the tokens computed are padding, {self.cut:,} are cut\n"
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
        train_sampling_strategy, seed: as in `TrainingArguments`; orders are the Trainer's, "group_by_length"'s is alike.
        gpu, granted: as for `predict`.
    Raises:
        RecipeError: no lengths, one that is no whole number from 1 on, or what `predict` does not know.
    """
    recipe, lengths = as_recipe(recipe), samples.check_lengths("lengths", list(lengths))
    if train_sampling_strategy not in SAMPLING:
        raise RecipeError("train_sampling_strategy", train_sampling_strategy, "allowed are " + ", ".join(SAMPLING))
    uncut = recipe.padding_free and not recipe.packing  # which SFTTrainer does not cut
    kept = [length if uncut else min(length, recipe.seq_len) for length in lengths]
    dealt = _dealt(recipe, kept, train_sampling_strategy, seed)

    shape = partial(samples.shape_of, joins=recipe.joins, multiple=recipe.pad_to_multiple_of)

    def report(found: Samples) -> Report:
        count = recipe.batch_size if recipe.packing else len(found)
        return predict(recipe.replace(lengths=found, batch_size=count), gpu, **granted)

    def has_mask(found: Samples) -> bool:
        count, width = shape(found)
        return len(found) > count if recipe.joins else min(found) < width

    # their sizes order the peaks of micro-batches with a mask, and of those without
    ranked = sorted(dealt, key=lambda found: (prod(shape(found)), sum(found)))
    last = {has_mask(found): found for found in ranked}
    largest = max(map(report, last.values()), key=lambda report: report.peak.total)
    tokens, grown = [prod(shape(found)) for found in dealt], largest.reserved
    if len({*tokens}) > 1:
        grown = Interval(grown.low, int(grown.value * TYPICAL), int(grown.value * WORST))
    trained, typical = sum(map(sum, dealt)), report(ranked[len(ranked) // 2]).peak.total
    return Run(largest, grown, typical, len(dealt), trained, sum(tokens) - trained, sum(lengths) - trained)


def _dealt(recipe: Recipe, lengths: list[int], strategy: str, seed: int) -> list[Samples]:
    """Return the samples of each micro-batch of an epoch, in order."""
    import torch
    from torch.utils.data import RandomSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    rows = _packed(recipe, lengths) if recipe.packing else [(length,) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    together, order = recipe.batch_size * recipe.gradient_accumulation_steps, range(len(rows))
    if strategy == "group_by_length":
        order = LengthGroupedSampler(together, lengths=[*map(sum, rows)], generator=generator)
    elif strategy == "random":
        order = RandomSampler(rows, generator=generator)  # as accelerate's SeedableRandomSampler in the first epoch
    order = [rows[i] for i in order]
    batches = [order[i : i + recipe.batch_size] for i in range(0, len(order), recipe.batch_size)]
    return [tuple(length for row in batch for length in row) for batch in batches]


def _packed(recipe: Recipe, lengths: list[int]) -> list[Samples]:
    """Return the samples in each row that TRL packs."""
    import numpy as np
    from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from trl import pack_dataset

    data = Dataset.from_dict({"input_ids": [np.zeros(length, np.int8) for length in lengths]})
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    packed = pack_dataset(data, recipe.seq_len, "bfd")
    if shown:
        enable_progress_bars()
    return [tuple(row) for row in packed["seq_lengths"]]
