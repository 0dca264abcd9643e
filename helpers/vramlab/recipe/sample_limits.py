"""Which samples no collator makes a batch of, and what their lengths say of a recipe."""

from collections.abc import Sequence
from typing import Any

from .fields import RecipeFields
from .knobs import Refusals
from .samples import check_lengths

OF_SFT = ("packing", "padding_free", "completion_lengths")  # fields that only SFTTrainer knows


def filled_in(recipe: RecipeFields) -> dict[str, Any]:
    """Return the fields that the samples' lengths say, where they are left out.

    Raises RecipeError.
    """
    fields: dict[str, Any] = {}
    for name in ("lengths", "completion_lengths"):
        value = getattr(recipe, name)
        if value is not None:
            fields[name] = check_lengths(name, value)
    # Packed samples fill rows, so their number is not that of the rows.
    if fields and not recipe.packing:
        first = next(iter(fields.values()))
        # 1 is the default: the lengths say how many samples there are
        fields["batch_size"] = len(first) if recipe.batch_size == 1 else recipe.batch_size
        if "lengths" in fields:
            fields["seq_len"] = recipe.seq_len or max(fields["lengths"])
    return fields


def refusals(recipe: RecipeFields) -> Refusals:
    """Return samples that no collator makes a batch of."""
    for name in OF_SFT:
        is_other = recipe.trainer != "sft"
        allowed = "it is for TRL's SFTTrainer: say trainer='sft'"
        yield name, getattr(recipe, name) and is_other, allowed
    if not recipe.is_ragged:
        return
    allowed = "it is modelled for samples of one length only"
    yield "trainer", recipe.trainer not in ("transformers", "sft"), allowed
    is_divided = recipe.group.engine in ("tensor", "pipeline")
    yield "sharding.engine", is_divided, allowed
    lengths = recipe.lengths or ()
    name = "lengths" if lengths else "pad_to_multiple_of"
    yield name, recipe.shape.features, "images and sound are not padded: leave it out"
    yield from _length_refusals(recipe, lengths)
    labelled = recipe.completion_lengths or ()
    samples = recipe.samples
    allowed = f"say one for each sample ({len(samples)}), and no more than it has"
    yield "completion_lengths", labelled and not _fits(labelled, samples), allowed


def _length_refusals(recipe: RecipeFields, lengths: Sequence[int]) -> Refusals:
    longest = recipe.seq_len
    allowed = f"seq_len, the longest sample, is {longest}"
    yield "lengths", max(lengths, default=0) > longest, allowed
    most = recipe.batch_size * longest
    allowed = f"{recipe.batch_size} × {longest} tokens are a micro-batch's most"
    yield "lengths", recipe.packing and sum(lengths) > most, allowed
    is_other_number = lengths and not recipe.packing and len(lengths) != recipe.batch_size
    yield "batch_size", is_other_number, f"lengths says {len(lengths)} samples"


def _fits(labelled: Sequence[int], samples: Sequence[int]) -> bool:
    """Tell whether each sample has at least so many tokens."""
    if len(labelled) != len(samples):
        return False
    return all(count <= length for count, length in zip(labelled, samples, strict=True))
