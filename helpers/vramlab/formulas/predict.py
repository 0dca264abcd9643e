"""Predict the bytes of a training step from the model's shape alone: no torch, no model, about a millisecond.

    held       parameters + buffers + inputs + gradients + optimizer states + workspaces      (`model_states`, `shards`)
    forward    + what a layer saves × layers + the last one's temporaries, then logits and loss              (`account`)
    backward   + the loss's gradients, then layer by layer less saved, and more gradients                    (`account`)
    step       + the optimizer's temporaries                                                                    (`step`)

The peak is the highest of these moments.
"""

import bisect
from collections import Counter
from typing import Any

from ..hardware import reserved
from ..hardware.gpu import DEFAULT_CHIP, Gpu, find_gpu
from ..hardware.overhead import cublas_workspace
from ..recipe import lora_modules
from ..recipe.options import HALF, Sharding
from ..recipe.recipe import LATER_OF_LORA, Recipe, as_recipe
from ..recipe.weights import unquantized
from ..report.errors import RecipeError
from ..report.report import CATEGORIES, Bytes, Phase, Report, TensorGroup, format_bytes
from . import model_parallel, model_states, shards
from .account import Account, kept_account
from .fused_head import with_its_adapters
from .ledger import Entry
from .loading import loading_peak
from .model_states import RankBytes, Sizes, is_sharded_by, is_trained_whole

LISTED = 8  # of the largest tensors
MOST_SAMPLES = 1 << 20  # that `largest_batch` tries
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
    if card:
        card.require_attention(recipe.attn_implementation)
    if lora_modules.differ_by_layer(recipe.shape, recipe.lora):
        allowed = "the formulas multiply one layer, so every layer has to get the same adapters: ask simulate"
        raise RecipeError("lora.target_modules", recipe.lora.target_modules, allowed)
    if recipe.activation_offloading:
        raise RecipeError("activation_offloading", True, "the formulas do not know what is copied when: ask simulate")
    if lora_modules.adapts_experts(recipe.shape, recipe.lora):
        allowed = "PEFT takes these names to mean fused experts too, whose adapters no formula knows: ask simulate"
        raise RecipeError("lora.target_modules", recipe.lora.target_modules, allowed)
    if name := next((name for name in LATER_OF_LORA if getattr(recipe.lora, name, None)), None):
        allowed = "the formulas know adapters of two matrices on modules: ask simulate"
        raise RecipeError(f"lora.{name}", getattr(recipe.lora, name), allowed)
    if recipe.trainer == "sft" and recipe.sharding:
        allowed = "the formulas know trainer='sft' on one device only: ask simulate"
        raise RecipeError("sharding", recipe.sharding.engine, allowed)
    if recipe.lora and recipe.lora.modules_to_save:
        _check_copies(recipe)
    if recipe.is_ragged and recipe.shape.num_decoder_layers:
        raise RecipeError("lengths", recipe.lengths, "the formulas do not know T5's masks for padding: ask simulate")
    halves = {recipe.weights_dtype, recipe.implied_dtype, HALF.get(recipe.precision.partition("-")[0])}
    if recipe.dtype and len(halves & set(HALF.values())) > 1:
        allowed = "the formulas know sizes, not which of two half-precision formats is cast to the other: ask simulate"
        raise RecipeError("dtype", recipe.dtype, allowed)
    exist = recipe.gradient_accumulation_steps > 1 or not recipe.loop.set_to_none  # gradients, when backward begins
    part, chip = model_parallel.rank_recipe(with_its_adapters(recipe)), card.chip if card else DEFAULT_CHIP
    account = kept_account(part, chip, exist)
    rank = shards.rank_bytes(part)
    phases = _Step(part, account, rank, card, exist).phases()
    if model_parallel.is_model_parallel(recipe) and recipe.sharding.engine == "pipeline":
        later = _Step(part, kept_account(part, chip, True), rank, card, True).phases()
        phases = model_parallel.pipelined(recipe, phases, later, account.phases[2]["activations"])
    name = max(phases, key=lambda phase: phases[phase].peak.total)
    peak = phases[name].peak
    groups = _groups(part, account.alive_at_peak(name), peak)
    inside = reserved.reserved(_blocks(groups, peak), peak.total, account.approximate)
    return Report(
        source="predicted",
        recipe=recipe.to_dict(),
        title=str(recipe),
        target="cuda",
        phases=phases,
        peak=peak,
        peak_phase=name,
        largest=_largest(groups),
        reserved=inside,
        process=reserved.process(inside, card),
        loading=loading_peak(recipe),
        notes=_notes(recipe, account, card, peak.total),
    )


def _check_copies(recipe: Recipe) -> None:
    """Raise RecipeError for trained copies (`modules_to_save`) whose place in the step is not written down."""
    shape, saved, sharding = recipe.shape, recipe.lora.modules_to_save, recipe.sharding
    words = shape.num_decoder_layers and any(
        weight.kind == "embedding" and is_trained_whole(weight.name, saved) for weight in shape.weights()
    )
    if words or (sharding and (sharding.engine, sharding.stage) == ("deepspeed", 3)):
        where = "an embedding that encoder and decoder share" if words else "DeepSpeed's stage 3"
        allowed = f"the formulas do not know where copies are in {where}: ask simulate"
        raise RecipeError("lora.modules_to_save", saved, allowed)


def largest_batch(recipe: Recipe, budget_bytes: int, gpu: str | Gpu | None = None) -> int:
    """Return the most samples in a micro-batch whose predicted allocated peak is within `budget_bytes`; 0 if none is.

    Leave room for the rest: `predict(…).process.high` less `peak.total` says how much.
    """

    def fits(size: int) -> bool:
        return predict(recipe.replace(batch_size=size), gpu).peak.total <= budget_bytes

    high = 1
    while high <= MOST_SAMPLES and fits(high):
        high *= 2
    return bisect.bisect_left(range(high // 2 + 1, high), True, key=lambda size: not fits(size)) + high // 2


class _Step:
    """The phases of a rank's steady step, from the bytes it holds and the account of a micro-batch.

    Attributes:
        loaded: bytes by category after loading; `always`: from the first step on.
        gradients: those in the optimizer step; `existing`: those that exist when backward begins, if `exist`.
        outputs: bytes of the forward pass that the loop may keep.
    """

    def __init__(self, recipe: Recipe, account: Account, rank: RankBytes, card: Gpu | None, exist: bool):
        self.recipe, self.loop, self.account, self.rank = recipe, recipe.loop, account, rank
        rests = rank.fragmentation
        sizes = {"parameters": rank.parameters, "buffers": model_states.buffer_bytes(recipe.shape)}
        sizes |= {"inputs": model_states.input_bytes(recipe), "workspace": rests.get("parameters", 0)}
        if recipe.has_reference:
            sizes |= {name: 2 * sizes[name] for name in ("parameters", "buffers", "workspace")}
        self.states = {"optimizer_states": rank.optimizer_states, "workspace": rests.get("optimizer_states", 0)}
        handle = card.cublas_workspace if card else cublas_workspace(DEFAULT_CHIP.capability)
        self.loaded = _sum(rank.always, sizes)
        self.always = _sum(self.loaded, self.states, {"workspace": 2 * handle})  # in forward's thread and in backward's
        beyond = model_parallel.beyond_the_slice(recipe)
        self.gradients = {"gradients": rank.gradients + beyond, "workspace": rests.get("gradients", 0)}
        if self.loop.optimizer_in_backward:
            self.gradients = {}
        self.exist = exist and not (is_sharded_by(recipe, "fsdp") and self.loop.set_to_none)  # whole, in the account
        self.existing = self.gradients if rank.existing is None else {"gradients": rank.existing}
        self.outputs = {category: n for category, n in account.phases[3].items() if category != "gradients"}

    def phases(self) -> dict[str, Phase]:
        """Return each phase's split at its peak and at its end."""
        loop, start = self.loop, self.loaded
        if self.recipe.optim == "adagrad":  # makes its states when it is made
            start = _sum(start, self.states)
        kept = self.outputs if loop.keep_outputs is True else {}
        gradients = self.gradients if loop.zero_grad != "end" or not loop.set_to_none else {}
        load, rest = Bytes(**start), Bytes(**_sum(self.always, kept, gradients))
        return {
            "load": Phase(load, load),
            "forward": self._forward(kept),
            "backward": self._backward(),
            "step": Phase(self._step_peak(), rest),
            "between_steps": Phase(rest, rest),
        }

    def _forward(self, kept: Sizes) -> Phase:
        before = self.existing if self.exist or self.loop.zero_grad == "before_backward" else {}
        base = _sum(self.always, before, kept)
        during = self.existing if self.exist else {}
        peak, end = _sum(base, self.account.phases[0]), _sum(self.always, during, self.account.phases[2])
        return Phase(Bytes(**peak), Bytes(**end))

    def _backward(self) -> Phase:
        rank, end = self.rank, self.account.phases[3]
        if self.loop.keep_outputs == "backward":
            end = {"gradients": end["gradients"]}
        base = _sum(self.always, self.existing if self.exist else {})
        peak = Bytes(**_sum(base, self.account.phases[1], rank.backward))
        if rank.reducing:
            peak = max(peak, Bytes(**_sum(base, end, {"workspace": rank.reducing})), key=_total)
        if rank.backward_end:  # gradients are divided by then
            base, end = self.always, end | {"gradients": 0}
        return Phase(peak, Bytes(**_sum(base, end, rank.backward_end)))

    def _step_peak(self) -> Bytes:
        kept = self.outputs if self.loop.keep_outputs in ("step", True) else {}
        return Bytes(**_sum(self.always, kept, self.gradients, {"temporaries": self.rank.temporaries}))


def _sum(*splits: Sizes) -> Sizes:
    split = dict.fromkeys(CATEGORIES, 0)
    for part in splits:
        for category, n in part.items():
            if n:
                split[category] = max(split[category] + n, 0)  # rests, times layers, may be freed more often than held
    return split


def _total(split: Bytes) -> int:
    return split.total


def _groups(recipe: Recipe, alive: list[tuple[int, Entry]] | None, peak: Bytes) -> dict[tuple, list]:
    """Group blocks by (bytes, category, shape, dtype, operator) to [how many, where, sizes]; `alive`: those of the ledger."""
    half = "float16" if recipe.precision.startswith("fp16") else "bfloat16"
    groups: dict[tuple, list] = {}
    found = []
    for row in model_states.parameter_table(recipe):
        dtype = half if row.width == 2 else "float32"
        as_loaded = "uint8" if row.quantized else dtype
        count = row.count * (1 + recipe.has_reference)
        found.append((count, row.blocks, "parameters", row.shape, as_loaded, "loaded", row.name))
        if row.states and peak.optimizer_states:
            found.append((row.count, row.states, "optimizer_states", row.shape, dtype, recipe.optim, row.name))
        if row.trained and peak.gradients and alive is None:
            found.append((row.count, (row.size,), "gradients", row.shape, dtype, "backward", row.name))
    for times, e in alive or ():
        dtype = half if e.width == 2 else "bool" if e.op == "native_dropout" and e.width == 1 else DTYPES[e.width]
        found.append((times, (e.size,), e.category, e.shape, dtype, e.op, e.where))
    if recipe.sharding:
        found = _own(found, peak)
    for count, sizes, category, shape, dtype, op, where in found:
        groups.setdefault((sum(sizes), category, shape, dtype, op), [0, where, sizes])[0] += count
    return groups


def _own(found: list[tuple], peak: Bytes) -> list[tuple]:
    """Scale the whole model's blocks down to what the rank holds of their category."""
    whole: Counter = Counter()
    for count, sizes, category, *_ in found:
        whole[category] += count * sum(sizes)
    share = {category: min(1.0, getattr(peak, category) / size) for category, size in whole.items() if size}
    scaled = (
        (c, tuple(int(n * share.get(category, 0)) for n in sizes), category, *x) for c, sizes, category, *x in found
    )
    return [row for row in scaled if sum(row[1])]


def _blocks(groups: dict[tuple, list], peak: Bytes) -> Counter:
    """Count the blocks alive at the peak by size."""
    blocks: Counter = Counter()
    for count, _, sizes in groups.values():
        for size in sizes:
            blocks[size] += count
    rest = peak.total - sum(size * count for size, count in blocks.items())
    if rest > 0:  # the optimizer step's temporaries, cuBLAS's workspaces, gradients of layers already done
        blocks[rest] += 1
    return blocks


def _largest(groups: dict[tuple, list]) -> list[TensorGroup]:
    """Return the largest groups of equal tensors."""
    found = [(-key[0] * count, i, (*key, where, count)) for i, (key, (count, where, _)) in enumerate(groups.items())]
    return [TensorGroup(*row) for *_, row in sorted(found)[:LISTED]]


def _notes(recipe: Recipe, account: Account, card: Gpu | None, peak: int) -> list[str]:
    notes = _sharding_notes(recipe.sharding) + unquantized(recipe) + lora_modules.notes(recipe.shape, recipe.lora)
    if account.approximate:
        low, high = (format_bytes(peak * n) for n in (reserved.UNKNOWN, 1 / reserved.UNKNOWN))
        notes.append(
            f"{recipe.shape.family} is not written down: weights are exact, activations are those of a decoder of its "
            f"matrices, so take the peak as {low} to {high}; simulate(recipe) runs the real one"
        )
    if recipe.torch_compile:
        notes.append("torch_compile: activations and temporaries are those of the eager step")
    if card and (why := card.why_not(recipe.precision)):
        notes.append(why)
    return notes


def _sharding_notes(sharding: Sharding | None) -> list[str]:
    notes = []
    if sharding and sharding.world_size > 1:
        notes.append(f"rank {sharding.rank} of {sharding.world_size}: buffers of NCCL are not counted")
    if sharding and sharding.offload:
        notes.append(f"{sharding.offload} offloaded to host memory, which needs them in full")
    return notes
