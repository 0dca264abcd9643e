"""Predict the bytes of a training step from the model's shape alone: no torch, no model, about a millisecond.

    held       parameters + buffers + inputs + gradients + optimizer states + workspaces      (`model_states`, `shards`)
    forward    + what a layer saves × layers + the last one's temporaries, then logits and loss              (`account`)
    backward   + the loss's gradients, then layer by layer less saved, and more gradients                    (`account`)
    step       + the optimizer's temporaries                                                                    (`step`)

The peak is the highest of these moments.
"""

from collections import Counter, defaultdict
from functools import lru_cache
from typing import Any

from ..hardware.gpu import DEFAULT_CHIP, Gpu, find_gpu, process
from ..hardware.overhead import cublas_workspace, frees_workspaces
from ..recipe import liger, lora_modules
from ..recipe.knobs import Refusals, refuse, unchecked
from ..recipe.options import HALF
from ..recipe.recipe import LATER_OF_LORA, Recipe, as_recipe
from ..recipe.shapes import Shape
from ..report.report import CATEGORIES, Bytes, Phase, Report, TensorGroup
from . import model_states, reserved, shards
from .account import Account, Groups, kept_account
from .fused_head import with_its_adapters
from .loading import loading_peak
from .model_states import RankBytes, Sizes

LISTED = 8  # of the largest tensors
DTYPES = {8: "int64", 4: "float32", 1: "uint8"}


def predict(recipe: Recipe | Any, gpu: str | Gpu | None = None) -> Report:
    """Predict what `recipe` needs in memory on a CUDA device.

    Args:
        recipe: a recipe; or what `Recipe` takes for a model, with every other field at its default.
        gpu: a name of the GPU table, for what depends on the card; None takes an A100's kernels.
    Returns:
        A report with source "predicted", of a steady step; `reserved` and `process` are intervals.
    Raises:
        GpuError: no such card.
        RecipeError: what the formulas do not know and `simulate` does; FlashAttention on a card without.
    """
    recipe = as_recipe(recipe)
    card = find_gpu(gpu) if gpu else None
    if card and recipe.attn_implementation == "flash_attention_2":
        card.require("flash_attention_2", "attn_implementation")
    refuse(recipe, _refusals(recipe))
    part = with_its_adapters(_as_stepped(recipe))
    account = kept_account(part, card.chip if card else DEFAULT_CHIP)
    phases = _phases(part, account, shards.rank_bytes(part))
    name = max(phases, key=lambda phase: phases[phase].peak.total)
    peak = phases[name].peak
    groups = _groups(part, account.alive(name), peak)
    largest = sorted(groups.items(), key=lambda item: -item[0][0] * item[1][0])[:LISTED]
    inside = reserved.reserved(_blocks(groups, peak), peak.total)
    return Report(
        source="predicted",
        recipe=recipe.to_dict(),
        title=str(recipe),
        target="cuda",
        phases=phases,
        peak=peak,
        peak_phase=name,
        largest=[TensorGroup(*key, where, count) for key, (count, where, _) in largest],
        reserved=inside,
        process=process(inside, card),
        loading=loading_peak(recipe),
        notes=_notes(recipe, card),
    )


def _refusals(recipe: Recipe) -> Refusals:
    """What the formulas do not know."""
    shape, lora, sharding = recipe.shape, recipe.lora, recipe.sharding
    allowed = "the formulas know of ddp, fsdp and deepspeed the ways that plan tries: ask simulate"
    yield "sharding", sharding and not shards.is_known(sharding), allowed
    allowed = "the formulas multiply one layer, so every layer has to get the same adapters: ask simulate"
    yield "lora.target_modules", lora_modules.differ_by_layer(shape, lora), allowed
    yield "activation_offloading", recipe.activation_offloading, "the formulas do not know it: ask simulate"
    allowed = "PEFT takes these names to mean fused experts too, whose adapters no formula knows: ask simulate"
    yield "lora.target_modules", lora_modules.adapts_experts(shape, lora), allowed
    for name in LATER_OF_LORA if lora else ():
        yield f"lora.{name}", getattr(lora, name), "the formulas know adapters of two matrices on modules: ask simulate"
    later = sharding and sharding.engine == "deepspeed" and sharding.stage == 1 and sharding.rank > 0
    unset = recipe.precision in ("fp16-true", "bf16-true") and shape.tied and not lora
    allowed = "what a later rank reduces of tied weights at stage 1 in such half precision is not known: ask simulate"
    yield "sharding.rank", later and unset, allowed
    allowed = "the formulas know TRL's trainers and Liger's kernels on one device only: ask simulate"
    kernels = liger.kernels(recipe)
    yield "sharding", sharding and (recipe.trainer != "transformers" or kernels), allowed
    allowed = f"the formulas do not know what Liger does in a {shape.family}: ask simulate"
    yield "use_liger_kernel", kernels and liger.FAMILIES[shape.family] is None, allowed
    unplaced = sharding and (sharding.stage == 3 or sharding.engine == "fsdp")
    allowed = "the formulas do not know where copies are among shards: ask simulate"
    yield "lora.modules_to_save", lora and lora.modules_to_save and unplaced, allowed
    halves = {recipe.weights_dtype, recipe.implied_dtype, HALF.get(recipe.precision.partition("-")[0])}
    allowed = "the formulas know sizes, not which of two half-precision formats is cast to the other: ask simulate"
    mixed = halves >= {*HALF.values()}
    yield "dtype", recipe.dtype and mixed, allowed
    yield "quantization.compute_dtype", recipe.quantization and recipe.quantization.compute_dtype and mixed, allowed


def _as_stepped(recipe: Recipe) -> Recipe:
    """Return `recipe` with DeepSpeed's own loop: its `step` frees the gradients, whatever the loop around it says."""
    sharding, loop = recipe.sharding, recipe.loop
    if not sharding or sharding.engine != "deepspeed" or (loop.zero_grad, loop.set_to_none) == ("end", True):
        return recipe
    return unchecked(recipe, loop=unchecked(loop, zero_grad="end", set_to_none=True))


def _phases(recipe: Recipe, account: Account, rank: RankBytes) -> dict[str, Phase]:
    """Return each phase of a rank's steady step, from the bytes it holds and the account of a micro-batch."""
    loop, rests, gradients = recipe.loop, rank.fragmentation, {}
    sizes = {"parameters": rank.parameters, "buffers": model_states.buffer_bytes(recipe.shape)}
    sizes |= {"inputs": model_states.input_bytes(recipe), "workspace": rests.get("parameters", 0)}
    if recipe.has_reference:
        sizes |= {name: 2 * sizes[name] for name in ("parameters", "buffers", "workspace")}
    states = {"optimizer_states": rank.optimizer_states, "workspace": rests.get("optimizer_states", 0)}
    lasting = 0 if frees_workspaces() else 2  # in forward's thread and in backward's
    handles = {"workspace": lasting * cublas_workspace(account.m.chip.capability)}
    always = vars(_bytes(rank.always, sizes, states, handles))
    if not loop.optimizer_in_backward:
        gradients = {"gradients": rank.gradients, "workspace": rests.get("gradients", 0)}
    # FSDP's are whole, in the account
    exist = account.gradients_exist and not (account.m.gathers_layers and loop.set_to_none)
    existing = gradients if rank.existing is None else {"gradients": rank.existing}
    during = existing if exist else {}
    before = existing if exist or loop.zero_grad == "before_backward" else {}

    forward, backward, forward_end, end = account.phases
    outputs = {category: n for category, n in end.items() if category != "gradients"}
    kept = outputs if loop.keep_outputs is True else {}
    in_step = outputs if loop.keep_outputs in ("step", True) else {}
    if loop.keep_outputs == "backward":
        end = {"gradients": end["gradients"]}
    peaks = [_bytes(always, during, backward, rank.backward)]
    if rank.reducing:
        peaks.append(_bytes(always, during, end, {"workspace": rank.reducing}))
    steps = recipe.gradient_accumulation_steps
    if account.m.gathers_layers and steps > 1:
        outputs_only = {category: n for category, n in end.items() if category != "gradients"}
        peaks.append(_bytes(always, outputs_only, account.m.unreduced(steps)))
    if rank.backward_end:  # gradients are divided by then
        during, end = {}, end | {"gradients": 0}
    load = _bytes(rank.always, sizes, states if recipe.optim == "adagrad" else {})  # which makes them when it is made
    rest = _bytes(always, kept, gradients if loop.zero_grad != "end" or not loop.set_to_none else {})
    return {
        "load": Phase(load, load),
        "forward": Phase(_bytes(always, before, kept, forward), _bytes(always, existing if exist else {}, forward_end)),
        "backward": Phase(max(peaks, key=lambda split: split.total), _bytes(always, during, end, rank.backward_end)),
        "step": Phase(_bytes(always, in_step, gradients, {"temporaries": rank.temporaries}), rest),
        "between_steps": Phase(rest, rest),
    }


def _bytes(first: Sizes, *others: Sizes) -> Bytes:
    split = dict.fromkeys(CATEGORIES, 0) | first
    for part in others:
        for category, n in part.items():
            if n:
                split[category] = max(split[category] + n, 0)  # rests, times layers, may be freed more often than held
    found = object.__new__(Bytes)  # whose `__init__` takes longer than all that
    vars(found).update(split)
    return found


def _groups(recipe: Recipe, alive: Groups | None, peak: Bytes) -> dict[tuple, list]:
    """Group blocks by (bytes, category, shape, dtype, operator) to [how many, where, sizes]; `alive`: those of the ledger."""
    half = "float16" if recipe.precision.startswith("fp16") else "bfloat16"
    form = model_states.table_format(recipe)
    groups = dict(_held_groups(recipe.shape, form, half, recipe.has_reference, alive is None))
    for (size, category, shape, width, op), (count, where) in (alive or {}).items():
        dtype = half if width == 2 else "bool" if op == "native_dropout" and width == 1 else DTYPES[width]
        groups[size, category, shape, dtype, op] = [count, where, (size,)]
    return _own(groups, peak) if recipe.sharding else groups


@lru_cache(maxsize=512)
def _held_groups(shape: Shape, form: tuple, half: str, copied: bool, gradients: bool) -> dict[tuple, list]:
    """Group the blocks of model states, with or without `gradients`; of weights there are two where they are `copied`."""
    groups, (_, _, _, optim, *_) = {}, form

    def add(sizes: tuple[int, ...], category: str, shape: tuple, dtype: str, op: str, where: str, count: int) -> None:
        groups.setdefault((sum(sizes), category, shape, dtype, op), [0, where, sizes])[0] += count

    for row in model_states.cached_table(shape, form):
        dtype = half if row.width == 2 else "float32"
        as_loaded = "uint8" if row.quantized else dtype
        add(row.blocks, "parameters", row.shape, as_loaded, "loaded", row.name, row.count * (1 + copied))
        if row.states:
            add(row.states, "optimizer_states", row.shape, dtype, optim, row.name, row.count)
        if row.trained and gradients:
            add((row.size,), "gradients", row.shape, dtype, "backward", row.name, row.count)
    return groups


def _own(groups: dict[tuple, list], peak: Bytes) -> dict[tuple, list]:
    """Scale the whole model's blocks down to what the rank holds of their category."""
    whole, found = Counter(), {}
    for (size, category, *_), (count, *_) in groups.items():
        whole[category] += count * size
    for (_, category, *about), (count, where, sizes) in groups.items():
        if share := whole[category] and min(1.0, getattr(peak, category) / whole[category]):
            sizes = tuple(int(n * share) for n in sizes)
            found.setdefault((sum(sizes), category, *about), [0, where, sizes])[0] += count
    return found


def _blocks(groups: dict[tuple, list], peak: Bytes) -> dict[int, int]:
    """Count the blocks alive at the peak by size."""
    blocks: defaultdict[int, int] = defaultdict(int)
    for count, _, sizes in groups.values():
        for size in sizes:
            blocks[size] += count
    rest = peak.total - sum(size * count for size, count in blocks.items())
    if rest > 0:  # the optimizer step's temporaries, cuBLAS's workspaces, gradients of layers already done
        blocks[rest] += 1
    return blocks


def _notes(recipe: Recipe, card: Gpu | None) -> list[str]:
    sharding, notes = recipe.sharding, []
    if sharding and sharding.world_size > 1:
        notes.append(f"rank {sharding.rank} of {sharding.world_size}: buffers of NCCL are not counted")
    if sharding and sharding.offload:
        notes.append(f"{sharding.offload} offloaded to host memory, which needs them in full")
    notes += lora_modules.notes(recipe)
    if recipe.torch_compile:
        notes.append("torch_compile: activations and temporaries are those of the eager step")
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    return notes
