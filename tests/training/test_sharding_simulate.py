"""One rank of many, simulated, against each rank of real processes: every allocation, to the byte.

Real ranks (`real_ranks.py`) run over gloo, followed by the tracker; simulated ones are alone, on
fake tensors, in a process group whose other ranks do not exist. Losses, gradients and weights of
the real ranks are held against one process that trains the same global batch.
"""

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from allocator_events import LITERALS
from quick import params
from real_ranks import assert_learned_alike, births, cases, differing, learned, when_asked
from tiny_models import config
from vramlab.base.errors import RecipeError
from vramlab.formulas.predict import predict
from vramlab.recipe.recipe import Loop, LoRA, Quantization, Recipe, Sharding
from vramlab.simulation.simulate import simulate, trace
from vramlab.tracking.history import History
from vramlab.training.engines import ddp
from vramlab_course.chapters import fsdp_units
from vramlab_course.training_on_rank import alone

SMALL = {"batch_size": 2, "seq_len": 24, "num_layers": 2}
FSDP3, FSDP2 = {"stage": 3, "engine": "fsdp"}, {"stage": 2, "engine": "fsdp"}
DDP, ZERO1 = {"stage": 0, "engine": "ddp"}, {"stage": 1, "engine": "ddp"}
EVERYWHERE = LoRA(r=4, target_modules="all-linear")

# name to (model, what is changed of it, sharding, what else the recipe says)
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama, stage 3": ("llama", {}, FSDP3, {}),
    "llama, stage 2": ("llama", {}, FSDP2, {}),
    "llama, stage 3, plain loop": ("llama", {}, FSDP3, {"loop": "plain"}),
    "llama, one unit": ("llama", {}, {**FSDP3, "wrap": "model"}, {}),
    "llama, resharded root": ("llama", {}, {**FSDP3, "reshard_root": True}, {}),
    "gpt2, resharded root, plain loop": (
        "gpt2",
        {},
        {**FSDP3, "reshard_root": True},
        {"loop": "plain"},
    ),
    "gpt2, tied, stage 3": ("gpt2", {}, FSDP3, {}),
    "gpt2, tied, stage 2, plain loop": ("gpt2", {}, FSDP2, {"loop": "plain"}),
    "gpt2, sizes that nothing divides": (
        "gpt2",
        {"n_embd": 66, "vocab_size": 1001, "n_positions": 37},
        FSDP3,
        {},
    ),
    "llama, accumulating": ("llama", {}, FSDP3, {"gradient_accumulation_steps": 2}),
    "llama, accumulating, bf16-mixed": (
        "llama",
        {},
        FSDP3,
        {"gradient_accumulation_steps": 2, "precision": "bf16-mixed"},
    ),
    "llama, checkpointing": ("llama", {}, FSDP3, {"gradient_checkpointing": True}),
    "gpt2, checkpointing, stage 2": ("gpt2", {}, FSDP2, {"gradient_checkpointing": True}),
    "llama, bf16-mixed": ("llama", {}, FSDP3, {"precision": "bf16-mixed"}),
    "llama, bf16-true": ("llama", {}, FSDP3, {"precision": "bf16-true"}),
    "llama, LoRA": ("llama", {}, FSDP3, {"lora": EVERYWHERE}),
    "llama, LoRA on bf16": ("llama", {}, FSDP3, {"lora": EVERYWHERE, "precision": "bf16-true"}),
    "llama, offloaded": (
        "llama",
        {},
        {**FSDP3, "offload": "parameters"},
        {"gradient_accumulation_steps": 2},
    ),
    "gpt2, offloaded, plain loop, bf16-mixed": (
        "gpt2",
        {},
        {**FSDP3, "offload": "parameters"},
        {"loop": "plain", "precision": "bf16-mixed"},
    ),
    "llama, foreach": ("llama", {}, FSDP3, {"loop": Loop.named("trainer", foreach=True)}),
    "bert, momentum": ("bert", {}, FSDP3, {"optim": "sgd", "optim_args": "momentum=0.9"}),
    "llama, two copies": (
        "llama",
        {},
        {**FSDP3, "dp_replicate_size": 2},
        {"gradient_accumulation_steps": 2},
    ),
    "gpt2, two copies, stage 2, bf16-mixed": (
        "gpt2",
        {},
        {**FSDP2, "dp_replicate_size": 2},
        {"precision": "bf16-mixed"},
    ),
    "llama, DDP": ("llama", {}, DDP, {}),
    "gpt2, DDP, plain loop": ("gpt2", {}, DDP, {"loop": "plain"}),
    "gpt2, DDP, accumulating": ("gpt2", {}, DDP, {"gradient_accumulation_steps": 2}),
    "llama, DDP, checkpointing": ("llama", {}, DDP, {"gradient_checkpointing": True}),
    "llama, DDP, LoRA": ("llama", {}, DDP, {"lora": EVERYWHERE}),
    "llama, DDP, int8, re-entrant": (
        "llama",
        {},
        DDP,
        {
            "lora": EVERYWHERE,
            "quantization": Quantization("int8", prepare=False),
            "precision": "bf16-true",
            "gradient_checkpointing": True,
            "use_reentrant": True,
        },
    ),
    "llama, DDP, bf16-mixed": ("llama", {}, DDP, {"precision": "bf16-mixed"}),
    "gpt2, ZeRO-1, plain loop": ("gpt2", {}, ZERO1, {"loop": "plain"}),
    "llama, ZeRO-1": ("llama", {}, ZERO1, {}),
    "llama, SFTTrainer, stage 3": ("llama", {}, FSDP3, {"trainer": "sft"}),
    "llama, SFTTrainer, stage 3, accumulating, checkpointing, bf16-mixed": (
        "llama",
        {},
        FSDP3,
        {
            "trainer": "sft",
            "gradient_accumulation_steps": 2,
            "gradient_checkpointing": True,
            "precision": "bf16-mixed",
        },
    ),
    "llama, SFTTrainer, stage 3, LoRA on bf16": (
        "llama",
        {},
        FSDP3,
        {"trainer": "sft", "lora": EVERYWHERE, "precision": "bf16-true"},
    ),
    "gpt2, SFTTrainer, stage 2": ("gpt2", {}, FSDP2, {"trainer": "sft"}),
    "llama, SFTTrainer, DDP": ("llama", {}, DDP, {"trainer": "sft"}),
    "llama, SFTTrainer, DDP, LoRA, checkpointing, bf16-mixed": (
        "llama",
        {},
        DDP,
        {
            "trainer": "sft",
            "lora": EVERYWHERE,
            "gradient_checkpointing": True,
            "precision": "bf16-mixed",
        },
    ),
    "llama, SFTTrainer, DDP, packed": (
        "llama",
        {},
        DDP,
        {"trainer": "sft", "packing": True, "lengths": (9, 20, 12)},
    ),
    "llama, SFTTrainer, stage 3, joined": (
        "llama",
        {},
        FSDP3,
        {"trainer": "sft", "padding_free": True, "lengths": (9, 20)},
    ),
    "llama, SFTTrainer, DDP, padded": ("llama", {}, DDP, {"trainer": "sft", "lengths": (9, 20)}),
    "llama, DPOTrainer, DDP": (
        "llama",
        {},
        DDP,
        {"trainer": "dpo", "gradient_accumulation_steps": 2},
    ),
    "llama, DPOTrainer, DDP, LoRA, bf16-mixed": (
        "llama",
        {},
        DDP,
        {"trainer": "dpo", "lora": EVERYWHERE, "precision": "bf16-mixed"},
    ),
    "llama, KTOTrainer, ZeRO-1": ("llama", {}, ZERO1, {"trainer": "kto"}),
    "llama, RewardTrainer, DDP": (
        "llama",
        {},
        DDP,
        {"trainer": "reward", "task": "sequence-classification"},
    ),
    "llama, Liger, DDP": ("llama", {}, DDP, {"use_liger_kernel": True}),
    "llama, DPOTrainer, stage 3, LoRA, bf16-mixed": (
        "llama",
        {},
        FSDP3,
        {"trainer": "dpo", "lora": EVERYWHERE, "precision": "bf16-mixed"},
    ),
    "llama, KTOTrainer, stage 2, precomputed": (
        "llama",
        {},
        FSDP2,
        {"trainer": "kto", "precompute_ref_log_probs": True},
    ),
    "llama, RewardTrainer, stage 3, bf16-mixed": (
        "llama",
        {"pad_token_id": 0},
        FSDP3,
        {"trainer": "reward", "precision": "bf16-mixed"},
    ),
    "llama, Liger, stage 3, checkpointing, bf16-mixed": (
        "llama",
        {},
        FSDP3,
        {"use_liger_kernel": True, "gradient_checkpointing": True, "precision": "bf16-mixed"},
    ),
    "llama, SFTTrainer, Liger, stage 2, LoRA": (
        "llama",
        {},
        FSDP2,
        {"trainer": "sft", "use_liger_kernel": True, "lora": EVERYWHERE},
    ),
    "llama, SFTTrainer, Liger, DDP, bf16-mixed": (
        "llama",
        {},
        DDP,
        {"trainer": "sft", "use_liger_kernel": True, "precision": "bf16-mixed"},
    ),
}
# those whose losses and gradients are held against one process's
LEARNED = (
    "llama, stage 3",
    "gpt2, tied, stage 2, plain loop",
    "gpt2, sizes that nothing divides",
    "llama, accumulating",
    "llama, checkpointing",
    "llama, LoRA",
    "llama, offloaded",
    "llama, DDP",
    "gpt2, DDP, accumulating",
    "gpt2, ZeRO-1, plain loop",
    "llama, bf16-mixed",
)
# those that the allocator itself is asked about; a first step that makes DDP's buckets anew has no
# steady second one
WITNESSED = ("llama, stage 3", "llama, one unit", "llama, DDP")
OF_COPIES = ("llama, two copies", "gpt2, two copies, stage 2, bf16-mixed")  # each on two ranks
OF_FOUR = (
    *OF_COPIES,
    "llama, stage 3",
    "gpt2, tied, stage 2, plain loop",
    "gpt2, sizes that nothing divides",
    "llama, accumulating, bf16-mixed",
    "llama, LoRA on bf16",
    "llama, DDP",
    "gpt2, ZeRO-1, plain loop",
)
WORLDS = {2: tuple(name for name in TABLE if name not in OF_COPIES), 4: OF_FOUR}
# What `make test` runs: each engine and stage, each knob on two ranks once. The rest is for `make
# test-all`.
QUICK = {
    2: (
        "llama, stage 3",
        "llama, one unit",
        "gpt2, tied, stage 2, plain loop",
        "gpt2, sizes that nothing divides",
        "llama, accumulating, bf16-mixed",
        "llama, LoRA on bf16",
        "llama, offloaded",
        "llama, DDP",
        "gpt2, DDP, accumulating",
        "gpt2, ZeRO-1, plain loop",
    ),
}


def recipe_of(name: str, world_size: int = 2) -> Recipe:
    family, changes, sharding, options = TABLE[name]
    return Recipe(
        config(family, **changes),
        sharding=Sharding(world_size=world_size, **sharding),
        **SMALL | options,
    )


@pytest.fixture(scope="module")
def real(launcher):
    return when_asked(
        launcher,
        WORLDS,
        QUICK,
        recipe_of,
        learn={2: LEARNED, 4: OF_COPIES[:1]},
        witness={2: WITNESSED},
    )


@pytest.mark.parametrize(("world", "name"), cases(WORLDS, QUICK))
def test_every_rank_allocates_what_its_simulation_says(real, world, name):
    assert differing(recipe_of(name, world), real(world, name)) is None


def test_ranks_differ_where_sizes_do_not_divide(real):
    """The comparison above is no tautology: ranks of one world are told apart, and so are other
    units.
    """
    first, second = (left["phases"] for left in real(2, "gpt2, sizes that nothing divides"))
    states = [phases["between_steps"]["end"]["optimizer_states"] for phases in (first, second)]
    assert states[0] > states[1]
    assert real(2, "llama, one unit")[0]["births"] != real(2, "llama, stage 3")[0]["births"]
    assert (
        first["load"]["end"]["parameters"] == second["load"]["end"]["parameters"]
    )  # shards are padded to equal sizes


@pytest.mark.parametrize("name", WITNESSED)
def test_the_allocator_says_the_same_on_every_rank(real, name):
    """The tracker's bytes on a rank are the CPU allocator's, but for literals of a few bytes, in
    every phase.
    """
    for left in real(2, name):
        for phase, claimed in left["tracked"].items():
            for seen, said in zip(left["witnessed"][phase], claimed, strict=True):
                assert 0 <= seen - said <= LITERALS, phase
        assert left["witnessed"].keys() == left["tracked"].keys()
        assert left["witnessed"]["backward"][0] > 1_000_000


@pytest.mark.parametrize(
    ("world", "name"),
    cases({2: [name for name in LEARNED if "mixed" not in name], 4: OF_COPIES[:1]}, QUICK),
)
def test_ranks_learn_what_one_process_does(real, world, name):
    """Equal losses, gradients and weights over two steps, up to the order of fp32 sums."""
    assert_learned_alike(recipe_of(name, world), real(world, name))


@pytest.mark.slow
def test_half_precision_policy_learns_nearly_the_same(real):
    """The bf16 policy is another computation than autocast, so it is held to bf16's three digits
    only.
    """
    name = "llama, bf16-mixed"
    expected = learned(alone(recipe_of(name)).replace(precision="fp32"), steps=1)["losses"][0]
    loss = sum(left["losses"][0][0] for left in real(2, name)) / 2
    assert [loss] == pytest.approx(expected, rel=1e-2)
    assert [loss] != expected


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (3, {}),
        (3, {"loop": "plain", "gradient_checkpointing": True}),
        (2, {"precision": "bf16-mixed"}),
        (3, {"gradient_accumulation_steps": 3, "precision": "bf16-mixed"}),
        (3, {"lora": EVERYWHERE, "precision": "bf16-true"}),
        (2, {"loop": Loop.named("plain", foreach=True, max_grad_norm=1.0)}),
    ],
)
@pytest.mark.parametrize(("family", "target"), [("llama", "cpu"), ("gpt2", "cuda")])
@pytest.mark.slow  # `make test` has the stages' phases, in tests/simulation/test_simulate_depth.py
def test_deepened_units_equal_the_full_depth(family, target, stage, changes):
    """A unit is a layer's, so the shallow run's middle unit repeats as its layer does."""
    sharding = Sharding(stage=stage, world_size=8, rank=5)
    recipe = Recipe(config(family), 2, 24, num_layers=9, sharding=sharding, **changes)
    shallow, full = trace(recipe, target), trace(recipe, target, full=True)

    def sizes(
        history: History,
    ) -> list[tuple]:  # all but shapes: the vector of norms keeps the shallow run's
        return [(*birth[:3], *birth[4:]) for birth in births(history)]

    assert sizes(shallow) == sizes(full)
    assert shallow.phases() == full.phases()


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_samples_with_lengths_go_after_the_step(stage):
    """What knows the contents of a batch held those of the first step, a whole set too much."""
    sharding = Sharding(stage, 2, "fsdp")
    recipe = Recipe(config("llama"), num_layers=1, lengths=(9, 20), sharding=sharding)
    assert simulate(recipe).phases["between_steps"].end.gradients == 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true"])
def test_looking_for_unused_parameters_copies_outputs_below_the_peak(precision, monkeypatch):
    """Programs that turn it off have a lower forward pass and the peak of these figures."""
    wide = config("llama", vocab_size=20_000)
    recipe = Recipe(wide, **SMALL, precision=precision, lora=EVERYWHERE, sharding=DDP)
    looking = simulate(recipe)
    plain = ddp.DistributedDataParallel

    def without(model, **options):
        return plain(model, **options | {"find_unused_parameters": False})

    monkeypatch.setattr(ddp, "DistributedDataParallel", without)
    blind = simulate(recipe)
    logits = 2 * 24 * 20_000
    # without autocast the loss's own fp32 logits are higher than the copy in half precision
    saved = looking.phases["forward"].peak.total - blind.phases["forward"].peak.total
    assert saved > logits or precision == "bf16-true"
    assert abs(looking.peak.total - blind.peak.total) < logits / 100


@pytest.mark.slow
def test_the_sharded_optimizer_is_loaded_before_anything_is_changed():
    """TorchScript compiles a module of it, and read functions that a simulation had replaced."""
    program = f"""
from vramlab import Recipe, simulate
from vramlab.recipe.options import Sharding
recipe = Recipe({config("llama")!r}, 2, 8, num_layers=1, trainer="sft", padding_free=True,
                sharding=Sharding(1, 2, "ddp"))
assert simulate(recipe).peak.total > 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_thousand_ranks_in_seconds():
    """Llama 3.1 8B at stage 3 on 1,024 ranks: 1/1,024 of parameters and of states, and one layer
    gathered at a time.
    """
    options = {"precision": "bf16-true", "seq_len": 1024}
    simulate(
        Recipe(config("llama"), 1, 8, num_layers=2, sharding=Sharding(3, 2))
    )  # what loads once has loaded
    start = time.monotonic()
    rank = simulate(Recipe("llama-3.1-8b", 1, sharding=Sharding(3, 1024), **options))
    assert time.monotonic() - start < 60
    weights = 2 * 8_030_261_248
    held = rank.phases["load"].end.parameters
    assert weights / 1024 <= held < 1.01 * weights / 1024
    assert rank.phases["between_steps"].end.optimizer_states == pytest.approx(2 * held, rel=0.02)
    whole = simulate(Recipe("llama-3.1-8b", 1, sharding=None, **options))
    assert rank.peak.total < whole.peak.total / 6
    assert rank.phases["forward"].end.activations == whole.phases["forward"].end.activations


def test_stages_order_as_zero_says():
    """What a rank holds between steps falls with each stage; gathering shows as workspace."""
    engines = {0: "ddp", 1: "ddp", 2: "fsdp", 3: "fsdp"}
    found = {
        stage: simulate(
            Recipe(
                config("llama"), 2, 24, num_layers=4, sharding=Sharding(stage, 4, engine=engine)
            ),
            "cpu",
        ).phases
        for stage, engine in engines.items()
    }
    rest = {stage: phases["between_steps"].end for stage, phases in found.items()}
    assert rest[0].optimizer_states > 3 * rest[1].optimizer_states
    assert rest[1].parameters == pytest.approx(4 * rest[2].parameters, rel=0.01)
    assert rest[2].parameters == rest[3].parameters
    assert found[2]["forward"].end.workspace > 2 * found[3]["forward"].end.workspace
    assert found[3]["backward"].end.gradients == rest[3].parameters


@pytest.mark.parametrize("family", params(["llama", "gpt2", "qwen2", "opt"], ["llama", "gpt2"]))
def test_units_are_accelerates(family):
    """The Trainer's loop has the units that accelerate itself makes, module by module."""
    from importlib.metadata import version
    from types import SimpleNamespace

    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp2_prepare_model
    from packaging.version import Version
    from torch.distributed.fsdp import FSDPModule
    from vramlab.training.engines.fsdp import shard, units
    from vramlab.training.models import build_model
    from vramlab.training.process_group import one_rank_of

    def seen(model: torch.nn.Module) -> list[tuple]:
        names = {id(module): name for name, module in model.named_modules()}
        groups = []
        for module in model.modules():
            state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
            if state and (group := state._fsdp_param_group):
                inside = sorted(
                    (names[id(p._module_info.module)], p._module_info.param_name)
                    for p in group.fsdp_params
                )
                kept = not group._reshard_after_forward or state._auto_reshard_after_forward
                groups.append((inside, kept, group.mp_policy))
        return sorted(groups, key=str)

    recipe = Recipe(config(family), 2, 24, num_layers=2, sharding=Sharding(3, 2))
    if recipe.shape.tied and Version(version("accelerate")) < Version("1.15"):
        pytest.skip("accelerate 1.14 leaves a tied head to the root's unit, which unties it")
    with one_rank_of(recipe.sharding):
        ours = build_model(recipe)
        shard(ours, units(ours), half="bfloat16")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        plugin.set_mixed_precision("bf16")
        state = SimpleNamespace(fsdp_plugin=plugin)
        accelerator = SimpleNamespace(
            state=state, mixed_precision="bf16", is_main_process=True, device="cpu"
        )
        theirs = build_model(recipe)
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # without a GPU, FSDP would take the mesh of one
            from torch.distributed.device_mesh import init_device_mesh

            accelerator.torch_device_mesh = {("fsdp",): init_device_mesh("cpu", (2,))}
            accelerator.parallelism_config = SimpleNamespace(fsdp_dim_names=("fsdp",))
            patch.setattr("torch.accelerator.is_available", lambda: False)
            fsdp2_prepare_model(accelerator, theirs)
        assert seen(ours) == seen(theirs)


@pytest.mark.slow  # `make test` judges a claim by the same runs
def test_wrapping_a_plain_module(launcher):
    """A hundred linear layers: in one unit everything is gathered at once; in units of one, a layer
    or two.
    """
    units = fsdp_units.__name__
    found = [
        launcher.run(f"{units}:hundred", {"wrapping": wrapping}, preload=f"{units}:preload")
        for wrapping in fsdp_units.WRAPPINGS
    ]
    for plain, one, each in zip(*found, strict=True):
        whole = 100 * 256 * 256 * 4
        assert one["gathered"] == 2 * whole  # full weights, and the flat tensor that they arrive in
        assert each["gathered"] <= 6 * whole // 100
        assert plain["gathered"] == 0
        assert 4 * whole <= plain["peak"] <= one["peak"]  # so one unit saves nothing
        assert each["peak"] <= 2 * whole + 6 * whole // 100


def test_a_resharded_root_is_freed_after_its_forward_pass():
    """`fully_shard(model, reshard_after_forward=True)`, as accelerate said before 1.14; by default
    the root is kept.
    """
    kept = Recipe(config("llama"), **SMALL, loop="plain", sharding=Sharding(**FSDP3, world_size=2))
    freed = kept.replace(sharding=Sharding(**FSDP3, world_size=2, reshard_root=True))
    before, after = (simulate(each, "cpu").phases["forward"].end for each in (kept, freed))
    root = 4 * sum(weight.size for weight in kept.shape.weights() if ".layers." not in weight.name)
    assert before.total - after.total == before.workspace == root and after.workspace == 0
    with pytest.raises(RecipeError, match="ask simulate"):
        predict(freed)
    with pytest.raises(RecipeError, match="only engine 'fsdp' knows it"):
        Sharding(3, 2, "deepspeed", reshard_root=True)


def test_recipes_that_no_engine_runs_are_refused():
    with pytest.raises(RecipeError, match="sharding"):
        Sharding(stage=1, engine="fsdp")
    with pytest.raises(RecipeError, match="rank"):
        Sharding(world_size=2, rank=2)


def test_a_program_that_is_a_rank_itself_simulates_one_too():
    """As a written program does, which asks what it takes when its own group is there."""
    from torch import distributed

    recipe = Recipe(config("gpt2"), 2, 24, num_layers=1, sharding=Sharding(0, 2, "ddp"))
    expected = simulate(recipe, "cpu").peak.total
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert simulate(recipe, "cpu").peak.total == expected
        assert distributed.get_world_size() == 1
    finally:
        distributed.destroy_process_group()


def test_ddp_finds_no_unused_parameters_quietly(capfd):
    """C++ says so once a process, on standard error."""
    sharding = Sharding(stage=0, world_size=2, engine="ddp")
    torch.set_warn_always(True)
    try:
        simulate(Recipe(config("llama"), sharding=sharding, loop="trainer"), "cpu")
    finally:
        torch.set_warn_always(False)
    assert "find_unused_parameters" not in capfd.readouterr().err
