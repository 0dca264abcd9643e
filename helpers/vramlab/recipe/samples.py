"""How the samples of a micro-batch become rows: padded to the longest, packed, or joined to one row without padding."""

from operator import gt
from typing import Any

from ..report.errors import RecipeError
from .knobs import Knob, Refusals


def check_lengths(name: str, lengths: Any) -> tuple[int, ...]:
    """Return `lengths` as a tuple. Raise RecipeError, which calls them `name`, unless they are whole numbers from 1 on."""
    if not isinstance(lengths, list | tuple) or not lengths:
        raise RecipeError(name, lengths, "it must be a list of whole numbers, the tokens of each sample")
    for length in lengths:
        Knob(kind=int).check(name, length)
    return tuple(lengths)


def filled_in(recipe: Any) -> dict[str, Any]:
    """Return the fields that the samples' lengths say, where they are left out. Raises RecipeError."""
    said = {name: getattr(recipe, name) for name in ("lengths", "completion_lengths")}
    found = {name: check_lengths(name, value) for name, value in said.items() if value is not None}
    if found and not recipe.packing:
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
    for name in ("packing", "padding_free", "completion_lengths"):
        yield name, getattr(recipe, name) and recipe.trainer != "sft", "it is for TRL's SFTTrainer: say trainer='sft'"
    if not recipe.is_ragged:
        return
    lengths, batch, longest, sharding = recipe.lengths or (), recipe.batch_size, recipe.seq_len, recipe.sharding
    allowed = "it is modelled for samples of one length only"
    yield "trainer", recipe.trainer not in ("transformers", "sft"), allowed
    yield "sharding.engine", sharding and sharding.engine in ("tensor", "pipeline"), allowed
    name = "lengths" if lengths else "pad_to_multiple_of"
    yield name, recipe.shape.features, "images and sound are not padded: leave it out"
    yield "lengths", max(lengths, default=0) > longest, f"seq_len, the longest sample, is {longest}"
    most = batch * longest
    yield "lengths", recipe.packing and sum(lengths) > most, f"{batch} × {longest} tokens are a micro-batch's most"
    wrong = lengths and not recipe.packing and len(lengths) != batch
    yield "batch_size", wrong, f"lengths says {len(lengths)} samples"
    labelled, tokens = recipe.completion_lengths or (), recipe.samples
    wrong = labelled and (len(labelled) != len(tokens) or any(map(gt, labelled, tokens)))
    yield "completion_lengths", wrong, f"say one for each sample ({len(tokens)}), and no more than it has"
