"""Context parallel: torch's ring attention over FSDP's ranks, as the Trainer takes it."""

import contextlib
from functools import cache
from typing import Any

import pytest
import torch
from quick import params
from real_ranks import assert_learned_alike, differing
from ring_ranks import flash_on_cpu, mean_of_squares
from tiny_models import config
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from vramlab.recipe.recipe import LoRA, Recipe, Sharding
from vramlab.simulation.simulate import simulate
from vramlab.training.process_group import one_rank_of

SMALL = {"batch_size": 2, "seq_len": 32, "num_layers": 2, "attn_implementation": "sdpa"}
RING = {"stage": 3, "cp_size": 2}

TABLE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two ranks": (2, RING, {}),
    "accumulating, checkpointing": (
        2,
        {**RING, "stage": 2},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    ),
    "bf16-mixed": (2, RING, {"precision": "bf16-mixed"}),
    "SFTTrainer": (2, RING, {"trainer": "sft", "precision": "bf16-true"}),
    "adapters": (2, RING, {"lora": LoRA(r=4), "precision": "bf16-mixed"}),
    "offloaded": (2, {**RING, "offload": "parameters"}, {}),
    "two rings of two": (4, RING, {}),
    "a ring of four": (4, {**RING, "cp_size": 4}, {}),
    # accelerate divides each copy among two rings at least
    "two copies of two rings of two": (8, {**RING, "dp_replicate_size": 2}, {}),
}
QUICK = ("two ranks", "SFTTrainer")
LEARNED = (
    "two ranks",
    "accumulating, checkpointing",
    "two rings of two",
    "a ring of four",
    "two copies of two rings of two",
)


def recipe_of(name: str) -> Recipe:
    world, sharding, options = TABLE[name]
    model = config("llama", num_key_value_heads=6)
    return Recipe(model, sharding=Sharding(world_size=world, **sharding), **SMALL | options)


@pytest.fixture(scope="module")
def real(launcher):
    """A function of a name: what each real rank found."""

    @cache
    def ran(world: int, quick: bool) -> list[dict[str, Any]]:
        names = [name for name, row in TABLE.items() if row[0] == world]
        recipes = {name: recipe_of(name) for name in names if (name in QUICK) == quick}
        order = {"recipes": recipes, "learn": LEARNED}
        return launcher.run(
            "ring_ranks:work", order, world, timeout=300, preload="real_ranks:preload"
        )

    return lambda name: [rank[name] for rank in ran(TABLE[name][0], name in QUICK)]


@pytest.mark.parametrize("name", params([*TABLE], QUICK))
def test_every_rank_allocates_what_its_simulation_says(real, name):
    with flash_on_cpu():
        assert differing(recipe_of(name), real(name)) is None


@pytest.mark.parametrize("name", params(LEARNED, QUICK[:1]))
def test_ranks_learn_what_one_process_does_of_whole_samples(real, name):
    assert_learned_alike(recipe_of(name), real(name), mean_of_squares)


def test_a_simulated_rank_leaves_no_mesh_behind():
    """DTensor would give it to tensors of a mesh that is alike, of who trains in this process."""
    doubled_on_a_mesh(one_rank_of(Sharding(3, 2)))
    mesh, doubled = doubled_on_a_mesh(a_fake_group())
    assert doubled.device_mesh is mesh


@contextlib.contextmanager
def a_fake_group():
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def doubled_on_a_mesh(group):
    with group:
        mesh = init_device_mesh("cpu", (2,))
        return mesh, DTensor.from_local(torch.ones(2), mesh, [Shard(0)]) * 2


def test_a_ring_holds_its_part_of_the_tokens():
    """At a length where activations are all, a rank of four takes a quarter of what one takes whose
    samples are whole.
    """
    recipe = Recipe(
        "qwen3-0.6b",
        seq_len=32768,
        precision="bf16-mixed",
        gradient_checkpointing=True,
        sharding=Sharding(3, 4),
    )
    in_ring = recipe.replace(sharding=Sharding(3, 4, cp_size=4))
    whole, part = (simulate(each).phases["forward"].end for each in (recipe, in_ring))
    assert part.activations == pytest.approx(whole.activations / 4, rel=0.001)
    assert part.parameters == whole.parameters
