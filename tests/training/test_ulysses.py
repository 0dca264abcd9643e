"""Ulysses: DeepSpeed's sequence parallel, as accelerate and the Trainer take it."""

from functools import cache
from typing import Any

import pytest
from quick import params
from real_ranks import assert_learned_alike, differing, run
from tiny_models import config
from vramlab.recipe import parallel_limits
from vramlab.recipe.recipe import LoRA, Recipe, Sharding
from vramlab.simulation.simulate import simulate

pytest.importorskip("deepspeed")

SMALL = {"batch_size": 2, "seq_len": 32, "num_layers": 2, "attn_implementation": "sdpa"}
ONE = {"num_key_value_heads": 1}  # head of keys, which ranks repeat
TABLE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "stage 1": (2, 1, {}, {}),
    "stage 2, accumulating, checkpointing": (
        2,
        2,
        {},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    ),
    "stage 3": (2, 3, ONE, {}),
    "bf16-mixed": (2, 2, {}, {"precision": "bf16-mixed"}),
    "adapters": (2, 2, {}, {"lora": LoRA(r=4), "precision": "bf16-mixed"}),
    "SFTTrainer": (2, 3, {}, {"trainer": "sft", "precision": "bf16-mixed"}),
    "offloaded": (2, 3, {"offload": "parameters"}, {}),
    "two groups of two": (4, 2, {}, {}),
}
QUICK = ()  # ranks of DeepSpeed and of context parallelism stand in `make test` already
LEARNED = ("stage 1", "stage 2, accumulating, checkpointing", "stage 3", "two groups of two")


def recipe_of(name: str) -> Recipe:
    world, stage, more, options = TABLE[name]
    keys = {"num_key_value_heads": 2} | {n: v for n, v in more.items() if n in ONE}
    fields = {n: v for n, v in more.items() if n not in ONE}
    sharding = Sharding(stage, world, "deepspeed", sp_size=2, **fields)
    return Recipe(config("llama", **keys), sharding=sharding, **SMALL | options)


@pytest.fixture(scope="module")
def real(launcher):
    """A function of a name: what each real rank found."""

    @cache
    def ran(world: int, quick: bool) -> list[dict[str, Any]]:
        names = [name for name, row in TABLE.items() if row[0] == world]
        recipes = {name: recipe_of(name) for name in names if (name in QUICK) == quick}
        learn = [name for name in LEARNED if name in recipes]
        return run(launcher, recipes, learn, timeout=400)

    return lambda name: [rank[name] for rank in ran(TABLE[name][0], name in QUICK)]


@pytest.mark.parametrize("name", params([*TABLE], QUICK))
def test_every_rank_allocates_what_its_simulation_says(real, name):
    assert differing(recipe_of(name), real(name)) is None


@pytest.mark.parametrize("name", params(LEARNED, QUICK))
def test_ranks_learn_what_one_process_does_of_whole_samples(real, name):
    """The loss of each rank is that of all, whose gradients its ranks sum: DeepSpeed's stages 1 and
    2 divide them by the groups (stage_1_and_2.py, `dp_world_size / sequence_parallel_size`), so
    they are as often too large, and stage 3 by all ranks.
    """
    recipe = recipe_of(name)
    times = recipe.sharding.sp_size if recipe.sharding.stage < 3 else 1
    found = real(name)
    for rank in found:
        for key, tensor in rank["tensors"].items():
            if key.startswith("gradient"):
                rank["tensors"][key] = tensor / times
    assert_learned_alike(recipe, found)
    said = parallel_limits.notes(recipe.sharding)
    assert [f"gradients {times} times" in note for note in said] == [True] * (times > 1)


@pytest.mark.slow
def test_ranks_hold_their_part_of_the_tokens():
    """At a length where activations are all, a rank of four takes a quarter of what one takes whose
    samples are whole.
    """
    recipe = Recipe(
        "qwen3-0.6b",
        seq_len=32768,
        precision="bf16-mixed",
        gradient_checkpointing=True,
        sharding=Sharding(3, 4, "deepspeed"),
    )
    together = recipe.replace(sharding=Sharding(3, 4, "deepspeed", sp_size=4))
    whole, part = (simulate(each).phases["forward"].end for each in (recipe, together))
    assert part.activations == pytest.approx(whole.activations / 4, rel=0.001)
    assert part.parameters == whole.parameters
