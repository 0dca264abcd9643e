"""What one micro-batch writes, keeps and issues, by `predict`'s ledger.

DoRA computes the norm of each adapted weight, W + s · B A, in every forward pass (peft,
lora/dora.py), which no account of its memory has yet.
"""

from functools import lru_cache
from typing import NamedTuple

from ..formulas.account import Account
from ..formulas.calls import DORA
from ..formulas.fused_head import with_its_adapters
from ..formulas.model_states import Settings
from ..formulas.tensor_sizes import FP32, HALF
from ..hardware.gpu import Chip
from ..recipe import liger
from ..recipe.knobs import unchecked
from ..recipe.options import LOOPS
from ..recipe.recipe import LEAST_BATCH, Recipe


class Walk(NamedTuple):
    """One micro-batch in `predict`'s ledger."""

    written: int  # bytes that its operators write
    kept: int  # bytes of activations at the end of forward
    calls: int  # that the host makes (`formulas/calls.py`)
    fused: bool  # attention is one kernel
    masked: bool  # it is given a mask


def walk(recipe: Recipe, chip: Chip) -> Walk:
    """Return the walk of `recipe`, which depends on no optimizer, accumulation or sharding.

    Everything else that the account reads is read here too. Rows of one length are affine in the
    micro-batch (but for the rounding of blocks), so two walks give all sizes. Samples of several
    lengths are not, nor are Liger's chunks, of which there are about as many for a large
    micro-batch as for a small one: those are walked as they are. Ranks that have one sample's
    tokens together have rows of a part of them; what merges parts of attention is not counted.
    """
    if recipe.ranks_of_sample > 1:
        _, width = recipe.rows
        recipe = unchecked(
            recipe,
            seq_len=width // recipe.ranks_of_sample,
            lengths=None,
            completion_lengths=None,
            pad_to_multiple_of=None,
            sharding=None,
        )
    if recipe.is_ragged or liger.kernels(recipe):
        return _walk(_walked(recipe, recipe.batch_size), chip)
    least = LEAST_BATCH.get(recipe.trainer, 1)
    one = _walk(_walked(recipe, least), chip)
    two = _walk(_walked(recipe, least + 1), chip)
    # Sizes grow by the same for each further sample.
    more = recipe.batch_size - least
    return Walk(
        written=one.written + (two.written - one.written) * more,
        kept=one.kept + (two.kept - one.kept) * more,
        # More samples make larger kernels, no more of them.
        calls=one.calls,
        fused=one.fused,
        masked=one.masked,
    )


def _walked(recipe: Recipe, batch_size: int) -> Settings:
    """Return `recipe` without what no walk depends on, as the key of a cache.

    Its micro-batches have `batch_size` samples.
    """
    return Settings(
        recipe,
        batch_size=batch_size,
        loop=LOOPS["trainer"],
        optim="sgd",
        optim_args=None,
        gradient_accumulation_steps=1,
        sharding=None,
        activation_offloading=False,
    )


@lru_cache(maxsize=4096)
def _walk(settings: Settings, chip: Chip) -> Walk:
    """Return the ledger's walk of one micro-batch.

    Each layer that it writes out is counted as often as there are such layers.
    """
    recipe = with_its_adapters(settings.recipe)
    account = Account(recipe, chip)
    norms, calls = _dora(recipe)
    written = account.ledger.rewritten + norms
    is_fused = False
    is_masked = False
    for times, block in account.births():
        if block.op == "sum" and block.category == "workspace":
            continue  # far too large
        written += times * block.size
        is_fused = is_fused or block.op.endswith("_attention")
        is_masked = is_masked or block.op == "mask"
    return Walk(
        written,
        account.phases[2]["activations"],
        account.calls() + calls,
        is_fused,
        is_masked,
    )


def _dora(recipe: Recipe) -> tuple[int, int]:
    """Return (bytes written, calls) that DoRA has over LoRA in a micro-batch; (0, 0) without."""
    lora = recipe.lora
    if lora is None or not lora.use_dora:
        return 0, 0
    passes = 1 + int(recipe.gradient_checkpointing)
    is_mixed = recipe.precision.endswith("-mixed")
    # Bytes of a number of the adapters, and of one that autocast casts to.
    wide = FP32 if lora.autocast_adapter_dtype or is_mixed else HALF
    copied = HALF if is_mixed else 0
    forward, backward = DORA
    written = 0
    calls = 0
    for _, inside, outside in recipe.shape.lora_targets(lora.target_modules):
        # A matrix of ones on its diagonal, and B A by it; W and B A in the input's dtype, s · B A
        # and the sum.
        weight = inside * outside
        written += passes * (inside**2 * (wide + copied) + weight * (4 * wide + copied))
        # The result times the magnitudes less one, the update times them, and times s; backward
        # the gradients of these.
        written += 2 * (passes + 1) * recipe.tokens * outside * wide
        calls += passes * forward + backward
    return written, calls
