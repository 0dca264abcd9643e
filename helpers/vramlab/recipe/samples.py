"""How the samples of a micro-batch become rows: padded to the longest, packed, or joined to one row without padding."""

from operator import gt
from typing import Any

from ..report.errors import RecipeError
from .knobs import Refusals

MOST = 2**24  # tokens of a sample


def check_lengths(name: str, lengths: Any) -> tuple[int, ...]:
    """Return `lengths` as a tuple. Raise RecipeError, which calls them `name`, unless they are whole numbers from 1 on."""
    if not isinstance(lengths, list | tuple) or not lengths:
        raise RecipeError(name, lengths, "it must be a list of whole numbers, the tokens of each sample")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MOST:
            raise RecipeError(name, length, f"a sample has 1 to {MOST:,} tokens")
    return tuple(lengths)


def packs(recipe: Any) -> bool:
    """Return whether rows are packed of whole samples."""
    return recipe.packing and recipe.packing_strategy != "wrapped"


def filled_in(recipe: Any) -> dict[str, Any]:
    """Return the fields that the samples' lengths say, where they are left out. Raises RecipeError."""
    said = {name: getattr(recipe, name) for name in ("lengths", "completion_lengths")}
    found = {name: check_lengths(name, value) for name, value in said.items() if value is not None}
    if found and not packs(recipe):
        first, *_ = found.values()
        found["batch_size"] = len(first) if recipe.batch_size == 1 else recipe.batch_size
        if "lengths" in found:
            found["seq_len"] = recipe.seq_len or max(found["lengths"])
    return found


def shape_of(lengths: tuple[int, ...], joins: bool, multiple: int | None = None) -> tuple[int, int]:
    """Return (rows, tokens in each) of samples of `lengths`, joined to one row or padded to the longest."""
    width, multiple = (sum if joins else max)(lengths), multiple or 1
    return (1 if joins else len(lengths)), -(-width // multiple) * multiple


def refusals(recipe: Any) -> Refusals:
    """Samples that no collator makes a batch of."""
    lengths, batch, longest, sharding = recipe.lengths or (), recipe.batch_size, recipe.seq_len, recipe.sharding
    allowed = "it is for TRL's SFTTrainer only: say trainer='sft' or leave it out"
    for name in ("packing", "padding_free", "completion_lengths"):
        yield name, getattr(recipe, name) and recipe.trainer != "sft", allowed
    if not recipe.is_ragged:
        return
    allowed = "it is modelled for samples of one length only"
    yield "trainer", recipe.trainer not in ("transformers", "sft"), allowed
    yield "sharding.engine", sharding and sharding.engine in ("tensor", "pipeline"), allowed
    name = "lengths" if lengths else "pad_to_multiple_of"
    yield name, recipe.shape.features, "images and sound are not padded: leave it out"
    if lengths and max(lengths) > longest:
        raise RecipeError("lengths", max(lengths), f"seq_len, the longest sample, is {longest}")
    if lengths and packs(recipe) and sum(lengths) > batch * longest:
        raise RecipeError("lengths", sum(lengths), f"{batch} × {longest} tokens are a micro-batch's most")
    wrong = lengths and not packs(recipe) and len(lengths) != batch
    yield "batch_size", wrong, f"lengths says {len(lengths)} samples"
    labelled, tokens = recipe.completion_lengths or (), recipe.samples
    wrong = labelled and (len(labelled) != len(tokens) or any(map(gt, labelled, tokens)))
    yield "completion_lengths", wrong, f"say one for each sample ({len(tokens)}), and no more than it has"
