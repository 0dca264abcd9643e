"""DeepSpeed's stages: real ranks against one process, and against simulated ones, to the byte."""

import sys
from math import ceil
from typing import Any

import pytest
import torch
from quick import params
from real_ranks import assert_learned_alike, cases, differing, learned, when_asked
from tiny_models import config
from vramlab.base.errors import MissingExtra, RecipeError
from vramlab.formulas.predict import predict
from vramlab.planning.counted import host_bytes
from vramlab.recipe.deepspeed_config import deepspeed_config, filled_in
from vramlab.recipe.recipe import Loop, LoRA, Quantization, Recipe, Sharding
from vramlab.simulation.simulate import simulate
from vramlab.training.engines import engine_of
from vramlab.training.models import build_model
from vramlab_course.training_on_rank import alone

ODD = {"n_embd": 66, "vocab_size": 1001, "n_positions": 37}  # nothing divides it
ACCUMULATING, HALF = {"gradient_accumulation_steps": 2}, {"precision": "bf16-mixed"}
EVERYWHERE = LoRA(r=4, target_modules="all-linear")
# name to (model, what is changed of it, stage, what is offloaded, what else the recipe says)
TABLE: dict[str, tuple[str, dict[str, Any], int, str | None, dict[str, Any]]] = {
    "stage 0": ("llama", {}, 0, None, {}),
    "stage 0, bf16-mixed": ("llama", {}, 0, None, HALF),
    "stage 1, accumulating": ("gpt2", {}, 1, None, ACCUMULATING),
    "stage 1, odd sizes, plain loop": ("gpt2", ODD, 1, None, {"loop": "plain"}),
    "stage 1, bf16-mixed, offloaded": ("llama", {}, 1, "optimizer", HALF),
    "stage 2": ("llama", {}, 2, None, {}),
    "stage 2, odd sizes, bf16-mixed": ("gpt2", ODD, 2, None, HALF),
    "stage 2, LoRA, checkpointing": (
        "llama",
        {},
        2,
        None,
        {"lora": EVERYWHERE, "gradient_checkpointing": True, **HALF},
    ),
    "stage 3": ("llama", {}, 3, None, {}),
    "stage 3, odd sizes, bf16-mixed": ("gpt2", ODD, 3, None, HALF),
    "stage 3, accumulating, offloaded": ("llama", {}, 3, "optimizer", ACCUMULATING),
    "stage 3, offloaded parameters, checkpointing": (
        "llama",
        {},
        3,
        "parameters",
        {"gradient_checkpointing": True},
    ),
    "stage 1, SFTTrainer": ("llama", {}, 1, None, {"trainer": "sft"}),
    "stage 2, SFTTrainer, LoRA": (
        "llama",
        {},
        2,
        None,
        {"trainer": "sft", "lora": EVERYWHERE, **HALF},
    ),
    "stage 2, DPOTrainer, LoRA": (
        "llama",
        {},
        2,
        None,
        {"trainer": "dpo", "lora": EVERYWHERE, **HALF},
    ),
    "stage 3, SFTTrainer": ("llama", {}, 3, None, {"trainer": "sft"}),
    "stage 3, SFTTrainer, checkpointing": (
        "llama",
        {},
        3,
        None,
        {"trainer": "sft", "gradient_checkpointing": True, **HALF},
    ),
    "stage 3, RewardTrainer": ("llama", {"pad_token_id": 0}, 3, None, {"trainer": "reward"}),
    "stage 3, bf16-true": ("llama", {}, 3, None, {"precision": "bf16-true"}),
    "stage 3, plain linear layers": ("llama", {}, 3, None, {}),
    "stage 3, plain linear layers, checkpointing, bf16-mixed": (
        "llama",
        {},
        3,
        None,
        {"gradient_checkpointing": True, **HALF},
    ),
}
LEARNED = [
    name for name, row in TABLE.items() if "precision" not in row[4] and "Reward" not in name
]
HALVED = "stage 1, bf16-mixed, offloaded"
OF_FOUR = (
    "stage 1, odd sizes, plain loop",
    "stage 2, odd sizes, bf16-mixed",
    "stage 3, odd sizes, bf16-mixed",
)
WORLDS = {2: tuple(TABLE), 4: OF_FOUR}
QUICK = {  # what `make test` runs: each stage, each knob
    2: (
        "stage 0",
        "stage 1, odd sizes, plain loop",
        "stage 1, bf16-mixed, offloaded",
        "stage 2",
        "stage 3",
        "stage 3, accumulating, offloaded",
    ),
    4: (),
}
installed = pytest.mark.skipif(
    "not __import__('importlib.util').util.find_spec('deepspeed')", reason="no deepspeed"
)


def recipe_of(name: str, world_size: int = 2) -> Recipe:
    family, changes, stage, offload, options = TABLE[name]
    efficient = "plain linear" not in name
    sharding = Sharding(
        stage, world_size, "deepspeed", offload=offload, memory_efficient_linear=efficient
    )
    return Recipe(config(family, **changes), 2, 24, num_layers=2, sharding=sharding, **options)


@pytest.fixture(scope="module")
def real(launcher):
    return when_asked(launcher, WORLDS, QUICK, recipe_of, learn={2: [*LEARNED, HALVED]})


@installed
@pytest.mark.parametrize(("world", "name"), cases(WORLDS, QUICK))
def test_every_rank_allocates_what_its_simulation_says(real, world, name):
    assert differing(recipe_of(name, world), real(world, name)) is None


@installed
def test_ranks_and_stages_are_told_apart(real):
    first, second = (left["births"] for left in real(2, "stage 1, odd sizes, plain loop"))
    assert first != second
    assert real(2, "stage 2")[0]["births"] != real(2, "stage 3")[0]["births"]


@installed
@pytest.mark.parametrize(("world", "name"), cases({2: LEARNED}, QUICK))
def test_two_ranks_learn_what_one_process_does(real, world, name):
    """Equal losses, gradients and weights over three steps, up to the order in which fp32 is
    summed.
    """
    assert_learned_alike(recipe_of(name), real(world, name))


@installed
def test_stages_of_half_precision_learn_the_same(real):
    """DeepSpeed casts the weights where one process autocasts: three digits, and the same for every
    stage that divides.

    Stage 0 is left out: DeepSpeed's wrapper takes a step with empty gradients when it is made,
    which Adam counts.
    """
    for (expected,), *losses in zip(
        learned(alone(recipe_of(HALVED)), 3)["losses"],
        *(left["losses"] for left in real(2, HALVED)),
        strict=True,
    ):
        loss = sum(loss for (loss,) in losses) / 2
        assert loss == pytest.approx(expected, rel=2e-2) and loss != expected


@installed
def test_collectives_of_a_step(real):
    """Stages 1 and 2 all-reduce and gather; stage 3 gathers once what stays so, and scatters."""
    weights = 4 * sum(p.numel() for p in build_model(recipe_of("stage 2"), "meta").parameters())
    for name, expected in (
        ("stage 0", ["all_reduce"]),
        ("stage 2", ["all_reduce", "all_gather"]),
        ("stage 3", ["all_gather", "reduce_scatter"]),
    ):
        sent = {kind: sum(sizes) for kind, sizes in real(2, name)[0]["sizes"].items()}
        for kind in expected:
            assert weights <= sent.pop(kind) <= weights + 1024, (
                name,
                kind,
            )  # and norms, flags and paddings
        assert sum(sent.values()) < 1024, name


@installed
@pytest.mark.parametrize("stage", params([1, 2, 3], [2, 3]))
def test_many_ranks(stage):
    """What is divided is divided; what is gathered, and what the loop holds, is not.

    The stored grid has a thousand.
    """
    sharding = Sharding(stage, 128, "deepspeed", rank=127)
    report = simulate(
        Recipe(config("llama"), 2, 24, num_layers=1, precision="bf16-mixed", sharding=sharding),
        "cpu",
    )
    parameters = [1000 * 96] * 2 + [96 * 96] * 2 + [32 * 96] * 2 + [256 * 96] * 3 + [96] * 3
    groups = [sum(parameters[:-3]), sum(parameters[-3:])]
    padded = [256 * ceil(size / 256) for size in groups]
    part = sum(padded) // 128 if stage < 3 else sum(ceil(p / 128) for p in parameters)
    end = report.phases["between_steps"].end
    assert (
        end.optimizer_states == 12 * part + 2 * 4
    )  # fp32 weights, two moments; and a counter for each group
    assert end.parameters == 2 * (sum(padded) if stage < 3 else part)
    assert report.phases["forward"].end.workspace >= (2 * groups[0] if stage == 3 else 0)


@installed
@pytest.mark.parametrize(
    ("stage", "offload", "precision"),
    params(
        [
            (3, "parameters", "bf16-mixed"),
            (3, "parameters", "fp32"),
            (2, "optimizer", "bf16-mixed"),
        ],
        [(3, "parameters", "bf16-mixed"), (2, "optimizer", "bf16-mixed")],
    ),
)
def test_a_plan_counts_what_lies_on_the_host(stage, offload, precision):
    sharding = Sharding(stage, 1, "deepspeed", offload)
    recipe = Recipe(config("llama"), 2, 24, num_layers=2, precision=precision, sharding=sharding)
    end = simulate(recipe, "cpu").phases["between_steps"].end
    # below stage 3 the device keeps the weights, and the host a buffer as large
    held = end.optimizer_states + end.gradients + end.parameters
    assert host_bytes(recipe) == pytest.approx(held, rel=0.01)


@installed
def test_what_the_trainer_would_be_given():
    """The configuration that the step runs with is the one that TrainingArguments and model come
    to.
    """
    for stage, offload in ((0, None), (1, None), (2, "optimizer"), (3, None), (3, "parameters")):
        for precision in ("fp32", "bf16-mixed"):
            sharding = Sharding(stage, 2, "deepspeed", offload)
            recipe = Recipe(config("llama"), 2, 24, precision=precision, sharding=sharding)
            arguments = recipe.training_arguments("unused")
            theirs = arguments.hf_deepspeed_config
            model = type("Model", (), {"config": type("Config", (), {"hidden_size": 96})})
            theirs.trainer_config_finalize(arguments, model, 10)
            # create_optimizer_and_scheduler sets that one when training begins
            assert theirs.config | {"zero_allow_untested_optimizer": True} == filled_in(recipe)


def test_bucket_sizes_follow_the_hidden_size():
    zero = filled_in(Recipe("gpt2", sharding=Sharding(3, 2, "deepspeed")))["zero_optimization"]
    assert zero["reduce_bucket_size"] == 768**2 and zero["stage3_prefetch_bucket_size"] == int(
        0.9 * 768**2
    )
    assert zero["stage3_param_persistence_threshold"] == 7680
    assert (
        "reduce_bucket_size"
        not in deepspeed_config(Sharding(0, 2, "deepspeed"))["zero_optimization"]
    )


def test_without_the_library_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        MissingExtra,
        match=r"engine='deepspeed' needs deepspeed: pip install 'vramlab\[deepspeed\]'",
    ):
        simulate(
            Recipe(config("gpt2"), 1, 8, num_layers=1, sharding=Sharding(2, 2, "deepspeed")), "cpu"
        )


@pytest.mark.parametrize(
    ("stage", "changes", "field"),
    [
        (2, {"loop": Loop.named("plain", set_to_none=False)}, "loop.set_to_none"),
        (3, {"lora": LoRA(), "quantization": Quantization("nf4")}, "sharding.stage"),
        (3, {"lora": LoRA(), "trainer": "sft"}, "sharding.stage"),
        (2, {"trainer": "dpo"}, "sharding.engine"),
        (
            2,
            {"trainer": "kto", "batch_size": 2, "precompute_ref_log_probs": True},
            "sharding.engine",
        ),
    ],
)
def test_what_it_does_not_do(stage, changes, field):
    with pytest.raises(RecipeError) as caught:
        engine_of(Recipe("gpt2", sharding=Sharding(stage, 2, "deepspeed"), **changes))
    assert caught.value.field == field


@installed
@pytest.mark.parametrize(
    ("stage", "offload"),
    params(
        [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")],
        [(3, "parameters")],
    ),
)
def test_what_is_offloaded_is_not_on_the_gpu(stage, offload):
    """Of fp32 weights, states and the part's gradients nothing is left; weights that are not
    offloaded are all there.
    """
    recipe = Recipe(config("llama"), 2, 24, num_layers=2, precision="bf16-mixed")
    here, there = (
        simulate(recipe.replace(sharding=Sharding(stage, 2, "deepspeed", offload=where)))
        .phases["between_steps"]
        .end
        for where in (None, offload)
    )
    assert here.optimizer_states > 0 and there.optimizer_states == there.gradients == 0
    assert here.parameters > 0 and there.parameters == (
        0 if offload == "parameters" else here.parameters
    )


@installed
def test_plain_linear_layers_keep_what_they_gathered():
    """Where weights are freed at all: stage 3 keeps a thousand million
    (`stage3_max_live_parameters`).
    """
    recipe = Recipe(
        "llama-3.1-8b", 1, 8, "bf16-mixed", num_layers=6, sharding=Sharding(3, 8, "deepspeed")
    )
    plain = recipe.replace(sharding=Sharding(3, 8, "deepspeed", memory_efficient_linear=False))
    lean, full = (simulate(each).phases["forward"].end for each in (recipe, plain))
    layer = 2 * sum(weight.size for weight in recipe.shape.weights() if "layers.0." in weight.name)
    assert full.workspace - lean.workspace > 3 * layer and full.activations == lean.activations
    with pytest.raises(RecipeError, match="ask simulate"):
        predict(plain)
    assert deepspeed_config(plain.sharding)["zero_optimization"]["memory_efficient_linear"] is False
    with pytest.raises(RecipeError, match="only stage 3 gathers"):
        Sharding(2, 8, "deepspeed", memory_efficient_linear=False)


@installed
def test_a_simulation_leaves_the_process_as_it_was(monkeypatch):
    """Stage 3 puts a linear layer of its own in torch's place, and the first process group is kept
    for good. It asks for NUMA nodes with each gradient, by a process that is started once here.
    """
    from deepspeed.utils import numa

    asked = []
    monkeypatch.setattr(numa, "get_numa_cores", lambda: asked.append(1))
    before = torch.nn.functional.linear
    recipe = Recipe(config("gpt2"), 1, 8, num_layers=1, sharding=Sharding(3, 2, "deepspeed"))
    first = simulate(recipe, "cpu").phases
    assert len(asked) <= 2
    assert torch.nn.functional.linear is before and not torch.distributed.is_initialized()
    other = recipe.replace(sharding=Sharding(2, 8, "deepspeed"))
    assert simulate(other, "cpu").phases != first
    assert simulate(recipe, "cpu").phases == first
