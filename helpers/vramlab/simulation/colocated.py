"""vLLM on the card of the trainer that it samples for: what it holds, and when.

vLLM takes `gpu_memory_utilization` of the whole card: its weights, what a forward pass and the
libraries took while it profiled itself, and a KV cache of all the rest (`request_memory` and
`determine_available_memory` of vllm/v1/worker). GRPOTrainer lets it sleep at level 2 after each
generation: weights and cache go back to the driver, and come again before the next (trl 1.16,
`trl/generation/vllm_generation.py`). What stays then, and what its CUDA graphs take, is not known
for every model and release; the figures here are from vLLM's own logs.
"""

import dataclasses
import math
from dataclasses import dataclass

from ..base.errors import RecipeError
from ..hardware.gpu import Gpu, usable_memory
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.report import Bytes, GiB, Interval, Moment, Report, format_bytes

# Of a 72B model on an A100: 0.25 GiB for activations and 0.15 GiB beside torch; 19.51 of 19.78 GiB
# given back (vllm-project/vllm issue 17117).
PROFILED = int(0.40 * GiB)
LEFT_ASLEEP = int((19.78 - 19.51) * GiB)
# CUDA graphs, which stay asleep too, and which older releases take on top of the share
# (vllm-project/vllm issue 47654).
GRAPHS = 1_503_657_984
WIDTH = 2  # bytes: vLLM loads fp32 weights as half precision (`dtype="auto"`)


@dataclass(frozen=True)
class Colocated:
    """What vLLM holds of a card, in bytes."""

    weights: int
    cache: int
    rest: int  # activations and libraries, while it profiled itself
    sleeps: bool

    @property
    def awake(self) -> Interval:
        """What it holds while it samples."""
        share = self.weights + self.cache + self.rest
        return Interval(share - self.rest, share, share + GRAPHS)

    @property
    def training(self) -> Interval:
        """What it holds while the model trains."""
        if self.sleeps:
            return Interval(0, LEFT_ASLEEP, LEFT_ASLEEP + GRAPHS)
        return self.awake

    @property
    def kept(self) -> int:
        """Bytes that the trainer's allocator never has."""
        return 0 if self.sleeps else self.awake.value

    def added(self, phase: str, split: Bytes) -> Bytes:
        """Return `split` of a phase's peak with what vLLM holds then."""
        if self.sleeps and phase != "generate":
            return dataclasses.replace(split, workspace=split.workspace + LEFT_ASLEEP)
        return dataclasses.replace(
            split,
            parameters=split.parameters + self.weights,
            kv_cache=split.kv_cache + self.cache,
            workspace=split.workspace + self.rest,
        )


def colocated(recipe: Recipe, card: Gpu | None) -> Colocated | None:
    """Return what vLLM holds beside the trainer of `recipe`; None: nothing on this card.

    Raises RecipeError without a card, and where the share has no room for a cache.
    """
    rollouts = recipe.rollouts
    if not (rollouts and rollouts.is_colocated):
        return None
    if card is None:
        raise RecipeError("gpu", None, "vLLM takes a share of a card: name one")
    share = math.ceil(usable_memory(card) * rollouts.vllm_gpu_memory_utilization)
    weights = WIDTH * recipe.shape.num_parameters
    cache = share - weights - PROFILED
    if cache <= 0:
        least = (weights + PROFILED) / usable_memory(card)
        rest = (
            f"vLLM's weights take {format_bytes(weights)}, and a cache has to follow: "
            f"take more than {least:.2f}"
        )
        value = rollouts.vllm_gpu_memory_utilization
        raise RecipeError("rollouts.vllm_gpu_memory_utilization", value, rest)
    return Colocated(weights, cache, PROFILED, rollouts.vllm_enable_sleep_mode)


def completions_at_once(recipe: Recipe) -> int:
    """Return how many completions vLLM is asked for in one call."""
    rollouts = recipe.rollouts
    assert rollouts  # who samples
    steps = rollouts.steps_per_generation or recipe.gradient_accumulation_steps
    return max(recipe.batch_size * steps, rollouts.num_generations)


def bytes_of_token(shape: Shape) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * WIDTH


def cache_of_one(recipe: Recipe) -> int:
    """Return the bytes of keys and values of every token of one completion and its prompt."""
    rollouts = recipe.rollouts
    assert rollouts  # who samples
    tokens = rollouts.prompt_length + rollouts.max_completion_length
    return tokens * bytes_of_token(recipe.shape)


def least_share(recipe: Recipe, card: Gpu, completions: int | None = None) -> float:
    """Return the share of the card with which vLLM holds its weights and the KV of `completions`.

    By itself those are as many as it is asked for at once.
    """
    rows = completions or completions_at_once(recipe)
    needed = WIDTH * recipe.shape.num_parameters + PROFILED + rows * cache_of_one(recipe)
    return needed / usable_memory(card)


def with_vllm(report: Report, vllm: Colocated) -> Report:
    """Return `report` of the trainer with vLLM's bytes in it."""
    phases = {}
    for name, phase in report.phases.items():
        after = "score" if name == "generate" else name  # it falls asleep as that ends
        peak = vllm.added(name, phase.peak)
        phases[name] = dataclasses.replace(phase, peak=peak, end=vllm.added(after, phase.end))
    highest = max(phases, key=lambda name: phases[name].peak.total)
    timeline = []
    for moment in report.timeline:
        split = vllm.added(moment.phase, moment.bytes)
        timeline.append(Moment(moment.index, moment.phase, split))
    sampling = report.phases["generate"].peak.total
    reserved = Interval.of(report.reserved or 0)
    process = Interval.of(report.process or 0)
    context = process.value - reserved.value
    return dataclasses.replace(
        report,
        phases=phases,
        timeline=timeline,
        peak=phases[highest].peak,
        peak_phase=highest,
        cause=phases[highest].cause,
        largest=report.largest if highest == report.peak_phase else [],
        allocated=phases[highest].peak.total,
        usable=(report.usable or 0) + vllm.kept,
        reserved=_raised(reserved, sampling, vllm),
        process=_raised(process, sampling + context, vllm),
        # No grade with expandable segments: a vLLM that sleeps can't have them in its pool
        # (vllm/device_allocator/cumem.py; `Question` says more).
        otherwise=None,
        notes=[*report.notes, _note(vllm)],
    )


def _raised(trainer: Interval, sampling: int, vllm: Colocated) -> Interval:
    """Return what the trainer takes together with vLLM; while that samples it takes `sampling`.

    TRL empties the cache of torch's allocator before a vLLM that slept wakes up.
    """
    training = trainer + vllm.training
    if not vllm.sleeps:
        return training
    emptied = Interval(sampling, sampling, max(sampling, trainer.value))
    return training.at_least(emptied + vllm.awake)


def _note(vllm: Colocated) -> str:
    held = vllm.training
    parts = f"weights of {format_bytes(vllm.weights)} and a KV cache of about "
    parts += format_bytes(vllm.cache)
    while_training = f"{format_bytes(held.low)} to {format_bytes(held.high)}"
    awake = vllm.awake
    share = f"{format_bytes(awake.low)} to {format_bytes(awake.high)}"
    return f"vLLM holds {share} while it samples ({parts}), and {while_training} while training"
