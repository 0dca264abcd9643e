"""Ulysses: DeepSpeed's sequence parallel, as accelerate's `ParallelismConfig` and Trainer take it.

Neighbouring ranks have the same samples, and each an equal part of their tokens. For attention they
exchange: each then has all tokens of a part of the heads (Jacobs et al. 2023; Arctic's ALST, 2025).
DeepSpeed's `UlyssesSPAttentionHF` takes the place of transformers' attention, and the Trainer's
`deepspeed_sp_compute_loss` weighs the ranks' losses.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ...private import of_transformers
from ...private.patched import replaced
from ...recipe.recipe import Recipe
from ..engine import Model, Training
from ..process_group import is_fake_group
from ..quiet import unheard
from ..trl_trainers import parallelism_of

WITHOUT_LABEL = -100


def attach(training: Training, recipe: Recipe) -> tuple[Any, Callable]:
    """Return DeepSpeed's groups of ranks, and what is entered for each micro-batch.

    `training` gets the Trainer's loss. As in `Accelerator._prepare_deepspeed`, with DeepSpeed's own
    attention for this thread's micro-batches alone.
    """
    from deepspeed import comm

    comm.init_distributed(dist_init_required=False)
    name = recipe.attn_implementation
    groups = _library().UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=training.model,
        sequence_parallel_size=recipe.group.sp_size,
        seq_length_is_variable=True,
        core_attn_implementation=name,
        micro_batch_size=recipe.batch_size,
        disable_in_eval=True,
    )
    # the process's own table keeps what it has
    attention = of_transformers.take_attention(name)
    # TRL's trainers have brought a loss of their own.
    if training.compute_loss is None:
        _give_loss(training, parallelism_of(recipe))

    @contextlib.contextmanager
    def exchanging(model: Model, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sent = _answers() if is_fake_group() else contextlib.nullcontext()
        quiet = unheard("torch.distributed.nn.functional.all_gather is deprecated")
        with replaced(of_transformers.all_attention(), name, attention), sent, quiet:
            yield dict(batch)

    return groups, exchanging


def _library() -> Any:
    return importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")


def _give_loss(training: Training, parallelism: Any) -> None:
    """Let the Trainer's own function compute the loss."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    def loss_of(run: Callable, batch: dict[str, Any]) -> torch.Tensor:
        return deepspeed_sp_compute_loss(None, run, batch, False, parallelism)

    training.compute_loss = loss_of


def part_of_rows(batch: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return a rank's part of whole rows, as `UlyssesSPDataLoaderAdapter.refill` makes it."""
    sharding = recipe.group
    rows, width = batch["input_ids"].shape
    # Shifted over the whole row: the last token of a part is labelled by the next part's first.
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=WITHOUT_LABEL)
    whole = {name: value for name, value in batch.items() if name != "labels"}
    whole["shift_labels"] = labels[:, 1:]
    whole.setdefault("position_ids", torch.arange(width).expand(rows, -1))
    length = width // sharding.sp_size
    # Neighbouring ranks have one row's parts in order.
    start = sharding.rank % sharding.sp_size * length
    # Copies, or each rank's view would hold the whole row.
    return {name: value[:, start : start + length].clone() for name, value in whole.items()}


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    """Answer for the other ranks: their positions go on from this rank's."""
    library = _library()
    exchange = library.dist.all_gather

    def gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        exchange(parts, own, group=group)
        # A fake group leaves in all parts what this rank gave.
        rank = torch.distributed.get_rank(group)
        for other, part in enumerate(parts):
            torch.add(own, (other - rank) * own.shape[1], out=part)

    own_dist = SimpleNamespace(**vars(library.dist) | {"all_gather": gather})
    with replaced(library, "dist", own_dist):
        yield
