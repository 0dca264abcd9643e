"""What GRPO's and RLOO's trainers sample, and how often they train on it (trl 1.16)."""

from dataclasses import dataclass
from typing import Any

from ..base.errors import RecipeError
from .fields import RecipeFields
from .knobs import Refusals, knobs
from .options import GENERATING, TRL, Rollouts, Sharding


def filled_in(recipe: RecipeFields) -> dict[str, Any]:
    """Return the fields that the trainer and its rollouts say, where they are left out.

    Raises RecipeError where seq_len contradicts them.
    """
    if recipe.trainer not in GENERATING:
        return {}
    rollouts = recipe.rollouts or Rollouts()
    length = rollouts.prompt_length + rollouts.max_completion_length
    if recipe.seq_len not in (None, length):
        rest = (
            f"a prompt of {rollouts.prompt_length} tokens and a completion of "
            f"{rollouts.max_completion_length} are {length}: leave seq_len out"
        )
        raise RecipeError("seq_len", recipe.seq_len, rest)
    fields: dict[str, Any] = {"rollouts": rollouts, "seq_len": length}
    # 1 is the default, and no group has one completion
    if recipe.batch_size * _steps(recipe, rollouts) == 1:
        fields["batch_size"] = rollouts.num_generations
    return fields


def _steps(recipe: RecipeFields, rollouts: Rollouts) -> int:
    return rollouts.steps_per_generation or recipe.gradient_accumulation_steps


@dataclass(frozen=True)
class Plan:
    """How often completions are sampled."""

    completions: int  # sampled at once
    micro_batches: int  # trained on before the next are sampled
    steps: int  # optimizer steps after which all begins anew
    keeps_old: bool  # whether what the model said when it sampled them is computed


def plan_of(recipe: RecipeFields) -> Plan:
    """Return how the trainer of `recipe` samples.

    Source: `GRPOTrainer._prepare_inputs` and `_generate_and_score_completions`.
    """
    rollouts = recipe.rollouts
    assert rollouts is not None  # filled in
    accumulation = recipe.gradient_accumulation_steps
    steps_per_generation = _steps(recipe, rollouts)
    # `generate_every` of the trainer, in micro-batches. Where it divides the accumulation, no
    # weight has moved since the completions were sampled, and the old probabilities are those of
    # the step itself.
    every = steps_per_generation * rollouts.num_iterations
    return Plan(
        completions=recipe.batch_size * steps_per_generation,
        micro_batches=every,
        steps=max(1, -(-every // accumulation)),
        keeps_old=recipe.trainer == "rloo" or rollouts.use_vllm or accumulation % every != 0,
    )


def _on_ranks(sharding: Sharding, rollouts: Rollouts, name: str) -> Refusals:
    """Return what is not sampled on several ranks, or not modelled."""
    is_third = sharding.engine == "deepspeed" and sharding.stage == 3
    allowed = f"how {name} gathers weights to sample with them is not modelled there: take stage 2 "
    yield "sharding.stage", is_third, allowed + "or engine 'fsdp'"
    allowed = "what vLLM is given of divided weights is not modelled: take engine 'ddp'"
    yield "rollouts.use_vllm", rollouts.use_vllm and sharding.engine != "ddp", allowed


def notes(rollouts: Rollouts | None) -> list[str]:
    """Return what is said of vLLM's arguments where transformers samples."""
    if rollouts is None or rollouts.use_vllm:
        return []
    idle = []
    for name, said in knobs(Rollouts).items():
        if name.startswith("vllm_") and getattr(rollouts, name) != said.default:
            idle.append(name)
    return [f"{' and '.join(idle)}: vLLM samples only with use_vllm"] if idle else []


def refusals(recipe: RecipeFields) -> Refusals:
    """Return what the trainers do not sample, or not so."""
    rollouts = recipe.rollouts
    known = " and ".join(map(repr, GENERATING))
    allowed = f"only trainer {known} sample completions: leave it out"
    yield "rollouts", rollouts and recipe.trainer not in GENERATING, allowed
    if rollouts is None or recipe.trainer not in GENERATING:
        return
    name = TRL[recipe.trainer]
    in_bits = recipe.quantization and rollouts.use_vllm
    allowed = "what vLLM makes of a 4-bit base is not modelled: sample with transformers"
    yield "rollouts.use_vllm", in_bits, allowed
    at_once = plan_of(recipe).completions
    sharding = recipe.sharding
    on_ranks = ""
    if sharding:
        at_once *= sharding.world_size
        on_ranks = " × world_size"
        yield from _on_ranks(sharding, rollouts, name)
    allowed = (
        f"{at_once} completions are sampled at once (batch_size × steps_per_generation"
        f"{on_ranks}), which has to be a multiple of it"
    )
    yield "rollouts.num_generations", at_once % rollouts.num_generations, allowed
    allowed = f"{name} samples by itself what it trains on: leave it out"
    for field in ("lengths", "pad_to_multiple_of"):
        yield field, getattr(recipe, field), allowed
