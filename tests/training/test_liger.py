"""`use_liger_kernel=True` is what the Trainer does with Liger's kernels: real steps, watched,
against the simulation.

Kernels write where host code has allocated, so they are not launched: what is compared does not
depend on values.
"""

import sys
from unittest.mock import patch

import pytest
from quick import params
from test_sft import real as sft_trainer
from test_trainer_loop import assert_same_but_for_scalars, trainer
from tiny_models import config
from vramlab import LoRA, Quantization, Recipe, RecipeError, Sharding, WatchCallback, simulate
from vramlab.recipe import liger
from vramlab.training.models import build_model

pytest.importorskip("liger_kernel", reason="Triton, which Liger needs, is for Linux")
pytestmark = pytest.mark.usefixtures("quiet")

SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2, "use_liger_kernel": True}
MIXED = {"precision": "bf16-mixed"}
CASES = {
    "llama": ("llama", {}),
    "llama bf16-mixed LoRA": ("llama", {**MIXED, "lora": LoRA(r=4, target_modules="all-linear")}),
    "llama bf16 under bf16-mixed": ("llama", {**MIXED, "dtype": "bfloat16"}),
    "llama nf4": ("llama", {**MIXED, "lora": LoRA(r=4), "quantization": Quantization("nf4")}),
    "mistral eager": ("mistral", {"attn_implementation": "eager", **MIXED}),
    "qwen2 accumulation": ("qwen2", {"gradient_accumulation_steps": 2}),
    "qwen3 tied LoRA bf16-true": ("qwen3", {"lora": LoRA(r=4), "precision": "bf16-true"}),
    "gemma checkpointing bf16-mixed": ("gemma", {"gradient_checkpointing": True, **MIXED}),
    "gemma2": ("gemma2", {"optim": "sgd"}),
    "gpt2, which Liger leaves as it is": ("gpt2", {}),
    "sft qwen3": ("qwen3", {"trainer": "sft", **MIXED}),
    "sft gemma LoRA": ("gemma", {"trainer": "sft", "lora": LoRA(r=4), "precision": "bf16-true"}),
}
QUICK = {"llama", "qwen3 tied LoRA bf16-true", "gemma checkpointing bf16-mixed", "sft qwen3"}


def make(name: str) -> Recipe:
    family, fields = CASES[name]
    model = config("gemma2", model_type="gemma") if family == "gemma" else config(family)
    return Recipe(model, **{**SIZES, **fields})


@pytest.fixture
def kernels(monkeypatch):
    """Triton's kernels, not launched."""
    from triton.runtime.jit import KernelInterface

    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None
    )


@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_a_real_step_is_what_simulate_says(name, kernels, tmp_path):
    recipe, seen = make(name), WatchCallback()
    plain = recipe.replace(use_liger_kernel=False)
    if recipe.trainer == "sft":
        made = sft_trainer(recipe, tmp_path, seen)
    else:
        made = trainer(recipe, tmp_path, seen, model=build_model(plain))
    home = vars(
        sys.modules[
            type(build_model(plain.replace(lora=None, quantization=None), "meta")).__module__
        ]
    )
    with patch.dict(home):
        made.train()
    simulated = simulate(recipe, target="cpu", full=True)
    assert_same_but_for_scalars(seen.report, simulated)


def test_nothing_is_left_behind():
    """Liger replaces functions for every model of the process; after a simulation they are
    transformers' own.
    """
    from transformers.models.qwen3 import modeling_qwen3

    before = dict(vars(modeling_qwen3))
    plain = Recipe(config("qwen3"), **{**SIZES, "use_liger_kernel": False})
    was = simulate(plain).peak
    fused = simulate(plain.replace(use_liger_kernel=True))
    assert (
        fused.phases["forward"].end.activations < simulate(plain).phases["forward"].end.activations
    )
    assert dict(vars(modeling_qwen3)) == before and simulate(plain).peak == was


def test_the_table_names_the_families_that_liger_knows():
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert set(liger.FAMILIES) == set(MODEL_TYPE_TO_APPLY_LIGER_FN)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_deepened_is_the_whole_depth(family):
    fields = {**SIZES, "num_layers": 12, "precision": "bf16-mixed", "gradient_checkpointing": True}
    recipe = Recipe(config(family), **fields)
    deepened, whole = simulate(recipe), simulate(recipe, full=True)
    assert (deepened.phases, deepened.peak) == (whole.phases, whole.peak)


@pytest.mark.parametrize(
    "family, fields, field",
    [
        ("llama", {"task": "sequence-classification"}, "use_liger_kernel"),
        (
            "mixtral",
            {},
            "use_liger_kernel",
        ),  # what its fused experts allocate depends on the router
        ("llama", {"sharding": Sharding(2, 2, "deepspeed")}, "use_liger_kernel"),
        ("llama", {"sharding": Sharding(3, 2), "lora": LoRA()}, "use_liger_kernel"),
        ("llama", {"lora": LoRA(target_modules=("q_proj", "lm_head"))}, "lora.target_modules"),
    ],
)
def test_what_it_does_not_train_is_refused(family, fields, field):
    with pytest.raises(RecipeError) as caught:
        Recipe(config(family), **{**SIZES, **fields})
    assert caught.value.field == field


def test_it_is_said_both_ways():
    recipe = Recipe(config("qwen3"), **SIZES)
    arguments = recipe.training_arguments()
    assert arguments.use_liger_kernel and not arguments.liger_kernel_config
    assert (
        Recipe.from_training_arguments(arguments, recipe.model, seq_len=32, num_layers=2) == recipe
    )
    assert Recipe.from_json(recipe.to_json()) == recipe and "Liger kernels" in str(recipe)
    with pytest.raises(RecipeError, match=r"liger_kernel_config.*modelled together"):
        changed = recipe.training_arguments(liger_kernel_config={"rope": False})
        Recipe.from_training_arguments(changed, recipe.model, seq_len=32)
    plain = Recipe("gpt2")
    assert (
        "use_liger_kernel" not in plain.to_dict()
        and plain.replace(use_liger_kernel=True).key != plain.key
    )
