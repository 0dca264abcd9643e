"""GRPOTrainer and RLOOTrainer on several ranks: the phases of real ones over gloo, to the byte."""

import pytest
from quick import params
from real_ranks import allocated, run
from tiny_models import config
from vramlab.measurement.worker import on_rank
from vramlab.recipe.options import Rollouts
from vramlab.recipe.recipe import LoRA, Recipe, Sharding
from vramlab.simulation.completions import left_out
from vramlab.simulation.simulate import simulate, trace

SHORT = {"num_generations": 4, "prompt_length": 8, "max_completion_length": 6}
ADAPTED = {"lora": LoRA(r=4), "precision": "bf16-mixed", "gradient_checkpointing": True}
CASES = {
    "GRPO, DDP": ({"stage": 0, "engine": "ddp"}, {}),
    "GRPO, DDP, beta": (
        {"stage": 0, "engine": "ddp"},
        {"rollouts": Rollouts(**SHORT, beta=0.1), "gradient_accumulation_steps": 2},
    ),
    "GRPO, stage 3": ({}, {}),
    "GRPO, stage 3, LoRA": ({}, ADAPTED),
    "RLOO, stage 2": ({"stage": 2}, {"trainer": "rloo"}),
    "GRPO, DeepSpeed": ({"stage": 2, "engine": "deepspeed"}, {"precision": "bf16-mixed"}),
}
QUICK = ()  # `make test` holds one process that samples, and ranks that train


def recipe_of(name: str) -> Recipe:
    sharding, fields = CASES[name]
    usual = {"trainer": "grpo", "batch_size": 2, "num_layers": 2, "rollouts": Rollouts(**SHORT)}
    return Recipe(config("qwen3"), sharding=Sharding(world_size=2, **sharding), **usual | fields)


@pytest.mark.parametrize("name", params([*CASES], QUICK))
def test_every_rank_allocates_what_its_simulation_says(launcher, name):
    for rank, real in enumerate(run(launcher, {name: recipe_of(name)})):
        simulated = allocated(trace(on_rank(recipe_of(name), rank), "cpu", full=True))
        assert real[name]["phases"].keys() >= {"generate", "score", "backward", "step"}
        for phase, found in real[name]["phases"].items():
            expected = simulated["phases"][phase]
            # what samples is by other operators than what is known to sample
            assert (found["peak"], found["end"]) == (expected["peak"], expected["end"]), phase


@pytest.mark.slow  # `make test` holds it for one process
@pytest.mark.parametrize("sharding", [{"stage": 3}, {"stage": 0, "engine": "ddp"}])
def test_tokens_that_are_skipped_change_no_peak_of_a_rank(sharding):
    recipe = Recipe(
        config("qwen3"),
        trainer="grpo",
        rollouts=Rollouts(**SHORT | {"max_completion_length": 12}),
        num_layers=5,
        batch_size=2,
        gradient_accumulation_steps=4,
        sharding=Sharding(world_size=2, **sharding),
    )
    # the last exchanges gradients
    assert left_out(recipe) == range(2, 3)
    short, full = (simulate(recipe, "cpu", full=full) for full in (False, True))
    for name in ("forward", "backward", "step", "between_steps"):
        assert short.phases[name].peak.total == full.phases[name].peak.total
