"""Micro-batches of samples of their own lengths, as collators make them: padded, or joined to one row."""

import torch

from ..recipe.recipe import Recipe
from ..recipe.samples import packs
from ..report.errors import needing
from .models import makes_fakes, real_tensors


def collated(recipe: Recipe, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One micro-batch of random samples with the recipe's lengths: real tensors, on the CPU where others are fake."""
    device = "cpu" if makes_fakes() else device
    with real_tensors():
        ids = [torch.randint(recipe.shape.vocab_size, (length,)) for length in recipe.samples]
        batch = _by_trl(recipe, ids) if recipe.trainer == "sft" else _padded(recipe, ids)
        return {name: t.to(device) if hasattr(t, "to") else t for name, t in batch.items()}


@needing("trainer='sft'")
def _by_trl(recipe: Recipe, ids: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `SFTTrainer.__init__` makes for its arguments (trl 1.16), on packed rows joined to one."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    multiple = recipe.pad_to_multiple_of
    collator = DataCollatorForLanguageModeling(0, padding_free=recipe.joins, pad_to_multiple_of=multiple)
    labels = [sample.clone() for sample in ids]
    for sample, count in zip(labels, recipe.completion_lengths or recipe.samples, strict=True):
        sample[: len(sample) - count] = -100
    if packs(recipe):
        row = {"input_ids": torch.cat(ids).tolist(), "labels": torch.cat(labels).tolist()}
        return collator([row | {"seq_lengths": list(recipe.samples)}])
    return collator([{"input_ids": i.tolist(), "labels": label.tolist()} for i, label in zip(ids, labels, strict=True)])


def _padded(recipe: Recipe, ids: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ids, mask and labels as `transformers.DataCollatorForLanguageModeling` pads them; or a label for each sample."""
    size, shape = recipe.rows, recipe.shape
    inputs, labels = torch.zeros(size, dtype=torch.int64), torch.full(size, -100)
    for row, sample in enumerate(ids):
        inputs[row, : len(sample)] = labels[row, : len(sample)] = sample
    if shape.task == "sequence-classification":
        labels = torch.randint(shape.num_labels, (len(ids),))
    lengths = torch.tensor(recipe.samples)
    return {"input_ids": inputs, "attention_mask": (torch.arange(size[1]) < lengths[:, None]).long(), "labels": labels}
