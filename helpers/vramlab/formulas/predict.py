"""Predict the bytes of a training step from the model's shape, without torch, in a millisecond.

    held       parameters + buffers + inputs + gradients + optimizer states + workspaces
               (`model_states`, `shards`)
    forward    + what a layer saves × layers + the last one's temporaries, then logits and loss
               (`account`)
    backward   + the loss's gradients, then layer by layer less saved, and more gradients
    (`account`)
    step       + the optimizer's temporaries (`step`)

The peak is the highest of these moments.
"""

from collections import Counter
from typing import Any

from ..hardware.gpu import DEFAULT_CHIP, Gpu, find_gpu
from ..hardware.overhead import expandable
from ..recipe import liger, lora_modules
from ..recipe.knobs import Refusals, refuse, unchecked
from ..recipe.optimizers import SIMULATED
from ..recipe.options import HALF, INT8
from ..recipe.process_context import context_of, room_on
from ..recipe.recipe import LATER_OF_LORA, Recipe, as_recipe
from ..report.report import Report
from . import blocks, reserved, shards
from .account import kept_account
from .engine_memory import APART
from .fsdp_memory import unit_of
from .fused_head import with_its_adapters
from .loading import loading_peak
from .phases import Phases


def predict(
    recipe: Recipe | Any,
    gpu: str | Gpu | None = None,
    *,
    other_memory: int = 0,
    expandable_segments: bool = False,
) -> Report:
    """Predict what `recipe` needs in memory on a CUDA device.

    Args:
        recipe: a recipe; or what `Recipe` takes for a model, with every other field at its default.
        gpu: a name of the GPU table, for what depends on the card; None takes an A100's kernels.
        other_memory: bytes of the card that a display or other processes hold.
        expandable_segments: the allocator has PYTORCH_ALLOC_CONF=expandable_segments:True.
    Returns:
        A report with source "predicted", of a steady step; `reserved` and `process` are intervals,
        of loading too. With a card its `verdict` says how sure it is that it fits.
    Raises:
        GpuError: no such card.
        RecipeError: what the formulas do not know and `simulate` does; FlashAttention on a card
            without.
    """
    recipe = as_recipe(recipe)
    card = find_gpu(gpu) if gpu else None
    if card and recipe.attn_implementation == "flash_attention_2":
        card.require("flash_attention_2", "attn_implementation")
    room = room_on(recipe, card, other_memory, expandable_segments)
    refuse(recipe, _refusals(recipe))

    # The report names the recipe that was asked for, not the one that is computed.
    stepped = with_its_adapters(_as_stepped(recipe))
    account = kept_account(stepped, card.chip if card else DEFAULT_CHIP)
    phases = Phases(stepped, account, shards.rank_bytes(stepped)).all()
    highest = max(phases, key=lambda name: phases[name].peak.total)
    peak = phases[highest].peak
    groups = blocks.groups(stepped, account.alive(highest), peak)
    loading = loading_peak(recipe)
    # Segments that the allocator took while loading are still reserved in the step, so the higher
    # moment of the two counts for reserved memory.
    most = max(peak.total, loading.total if loading else 0)
    sharded = bool(recipe.group.stage)
    alive = blocks.counts(groups, peak)
    by_default = reserved.reserved(alive, peak.total, sharded)
    # Nothing is known of the blocks that loading holds.
    by_default = by_default.at_least(reserved.reserved(Counter(), most, sharded))
    growing = expandable(most, reserved.EXACT)
    segments, others = (growing, by_default) if expandable_segments else (by_default, growing)
    context = context_of(recipe, card)
    return Report(
        source="predicted",
        recipe=recipe.to_dict(),
        title=str(recipe),
        target="cuda",
        phases=phases,
        peak=peak,
        peak_phase=highest,
        cause=phases[highest].cause,
        largest=blocks.largest(groups),
        reserved=segments,
        process=segments + context,
        expandable_segments=expandable_segments,
        otherwise=others + context,
        usable=room.usable if room else None,
        loading=loading,
        notes=_notes(recipe, card),
    )


def knows(recipe: Recipe) -> bool:
    """Tell whether the formulas know all that the recipe has."""
    return not any(refused for _, refused, _ in _refusals(recipe))


def _refusals(recipe: Recipe) -> Refusals:
    """Yield what the formulas do not know: (field, whether the recipe has it, what is allowed)."""
    shape = recipe.shape
    lora = recipe.lora
    sharding = recipe.group

    for name in ("cp_size", "sp_size"):
        together = getattr(sharding, name) > 1
        allowed = "the formulas give each rank samples of its own: ask simulate"
        yield f"sharding.{name}", together, allowed
    unknown = not shards.is_known(sharding)
    allowed = "the formulas know of ddp, fsdp and deepspeed the ways that plan tries: ask simulate"
    yield "sharding", unknown, allowed

    # One layer stands for all others in the account.
    unlike = lora_modules.differ_by_layer(shape, lora)
    same = "every layer has to get the same adapters"
    allowed = f"the formulas multiply one layer, so {same}: ask simulate"
    yield "lora.target_modules", unlike, allowed

    in_int8 = recipe.quantization and recipe.quantization.quant_type == INT8
    allowed = "the formulas know bases in 4 bits: ask simulate"
    yield "quantization.quant_type", in_int8, allowed

    skips = recipe.quantization and recipe.quantization.skip_modules
    allowed = "the formulas know the loader's own choice: ask simulate"
    yield "quantization.skip_modules", skips, allowed

    allowed = "the formulas know LoRA's adapters only: ask simulate"
    yield "peft", recipe.peft, allowed

    allowed = "the formulas do not know it: ask simulate"
    yield "optim", recipe.optim in SIMULATED, allowed
    yield "label_smoothing_factor", recipe.label_smoothing_factor, allowed
    yield "neftune_noise_alpha", recipe.neftune_noise_alpha, allowed

    allowed = "the formulas do not know it: ask simulate"
    yield "activation_offloading", recipe.activation_offloading, allowed
    yield "use_reentrant", recipe.use_reentrant, allowed
    yield "cut_cross_entropy", recipe.cut_cross_entropy, allowed

    allowed = "Inductor decides what a compiled step keeps: ask simulate, which lets it compile"
    yield "torch_compile", recipe.torch_compile, allowed

    experts = lora_modules.adapts_experts(shape, lora)
    names = "PEFT takes these names to mean fused experts too"
    allowed = f"{names}, whose adapters no formula knows: ask simulate"
    yield "lora.target_modules", experts, allowed

    if lora:
        allowed = "the formulas know adapters of two matrices on modules: ask simulate"
        for name in LATER_OF_LORA:
            yield f"lora.{name}", getattr(lora, name), allowed

    yield from _refusals_of_shards_and_kernels(recipe)

    # Two halves of the same width are no difference to a formula, but a cast is one.
    precision = recipe.precision.partition("-")[0]
    halves = {recipe.weights_dtype, recipe.implied_dtype, HALF.get(precision)}
    mixed = halves >= {*HALF.values()}
    cast = "which of two half-precision formats is cast to the other"
    allowed = f"the formulas know sizes, not {cast}: ask simulate"
    yield "dtype", recipe.dtype and mixed, allowed
    computed = recipe.quantization and recipe.quantization.compute_dtype
    yield "quantization.compute_dtype", computed and mixed, allowed


def _refusals_of_shards_and_kernels(recipe: Recipe) -> Refusals:
    """Yield what the formulas do not know of some engine or kernel with what else is asked for."""
    shape = recipe.shape
    lora = recipe.lora
    sharding = recipe.group

    later = sharding.engine == "deepspeed" and sharding.stage == 1
    unset = recipe.precision in ("fp16-true", "bf16-true") and not lora
    reduced = "what a later rank keeps of gradients at stage 1 in such half precision"
    allowed = f"{reduced} is not known: ask simulate"
    yield "sharding.rank", later and sharding.rank > 0 and unset, allowed

    # A gradient larger than the bucket waits for the next one, and those of all experts are one.
    waits = sharding.engine == "deepspeed" and sharding.stage >= 2
    allowed = "how long DeepSpeed keeps the gradients of all experts is not known: ask simulate"
    yield "sharding.stage", waits and shape.experts_per_token and not lora, allowed

    kernels = liger.kernels(recipe)
    untold_head = kernels and sharding.engine == "fsdp" and not recipe.adapters
    allowed = (
        "the formulas do not know what FSDP keeps of the head of Liger's kernels: ask simulate"
    )
    yield "sharding", untold_head, allowed

    # Liger has kernels for the family, of which the table says nothing.
    untold = kernels and liger.FAMILIES[shape.family] is None
    allowed = f"the formulas do not know what Liger does in a {shape.family}: ask simulate"
    yield "use_liger_kernel", untold, allowed

    # Under DDP and the lower stages each rank has whole copies.
    divided = sharding.stage == 3 or sharding.engine == "fsdp"
    unplaced = lora and lora.modules_to_save and divided
    allowed = "the formulas do not know where copies are among shards: ask simulate"
    yield "lora.modules_to_save", unplaced, allowed

    # TRL moves hidden states to where the head's weight is.
    offloads = sharding.engine == "fsdp" and sharding.offload and shape.layout
    on_host = offloads and unit_of(f"{shape.head}.weight", recipe) == APART
    allowed = "the loss is computed on the host, which the formulas do not know: ask simulate"
    yield "sharding.offload", on_host, allowed


def _as_stepped(recipe: Recipe) -> Recipe:
    """Return `recipe` with DeepSpeed's own loop.

    Its `step` frees the gradients, whatever the loop around it says.
    """
    loop = recipe.loop
    if recipe.group.engine != "deepspeed":
        return recipe
    if loop.zero_grad == "end" and loop.set_to_none is True:
        return recipe
    return unchecked(recipe, loop=unchecked(loop, zero_grad="end", set_to_none=True))


def _notes(recipe: Recipe, card: Gpu | None) -> list[str]:
    """Say what the figures leave out or take for granted."""
    sharding = recipe.group
    notes = []
    if sharding.world_size > 1:
        rank = f"rank {sharding.rank} of {sharding.world_size}"
        notes.append(f"{rank}: buffers of NCCL are in the process, not in the peak")
    if sharding.offload:
        notes.append(f"{sharding.offload} offloaded to host memory, which needs them in full")
    notes += lora_modules.notes(recipe)
    if card:
        reason = card.why_not(recipe.precision)
        if reason:
            notes.append(reason)
    return notes
