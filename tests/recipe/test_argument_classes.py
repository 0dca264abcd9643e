"""Dictionaries of arguments are told apart by their fields, and every field that moves memory
counts or is named.
"""

import ast
import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from vramlab.base.errors import RecipeError
from vramlab.interfaces.recipe_options import recipe_of_arguments
from vramlab.recipe import argument_classes as classes
from vramlab.recipe.arguments import CLASSIFIED
from vramlab.recipe.options import GENERATING, Rollouts

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning", "ignore::UserWarning"
)


def declaring() -> dict[str, set[str]]:
    """Every class of TRL that is a TrainingArguments, with its own and inherited fields, from its
    text.
    """
    folder = Path(importlib.util.find_spec("trl").origin).parent
    bases, fields = {}, {"TrainingArguments": set()}
    for path in folder.rglob("*_config.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [getattr(base, "id", "") for base in node.bases]
                fields[node.name] = {
                    line.target.id for line in node.body if isinstance(line, ast.AnnAssign)
                }

    def inherited(name: str) -> set[str] | None:
        """Fields of the class and those above it, None if it is no TrainingArguments."""
        above = [inherited(base) for base in bases[name] if base in bases]
        above += [set() for base in bases[name] if base == "TrainingArguments"]
        above = [each for each in above if each is not None]
        return fields[name].union(*above) if above else None

    found = {name: inherited(name) for name in bases if not name.startswith("_")}
    return {name: own - classes.COMMON for name, own in found.items() if own is not None}


def written(name: str) -> dict:
    """What the class writes of its defaults as JSON."""
    import transformers
    import trl

    kind = getattr(trl, name, None) or getattr(transformers, name)
    return json.loads(kind("out", use_cpu=True).to_json_string())


def test_the_table_has_the_fields_of_every_class():
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    common, more = (
        {f.name for f in dataclasses.fields(k)}
        for k in (TrainingArguments, Seq2SeqTrainingArguments)
    )
    assert common == classes.COMMON and classes.OWN["Seq2SeqTrainingArguments"] == more - common
    found = declaring()
    assert len(found) > 15
    assert classes.OWN.keys() - {"TrainingArguments", "Seq2SeqTrainingArguments"} == found.keys()
    for name, own in found.items():
        assert classes.OWN[name] == own, name


@pytest.mark.parametrize("name", classes.OWN)
def test_every_class_is_told_by_its_fields(name):
    """All of TRL's were once read as a plain Trainer's: eight samples of 512 tokens."""
    names = [*classes.COMMON, *classes.OWN[name]]
    twins = [kind for kind in classes.TRAINERS if classes.OWN[kind] == classes.OWN[name]]
    if twins:
        assert classes.class_of(names) == twins[0] and name in (*twins, "GMPOConfig")
        return
    with pytest.raises(RecipeError, match="only transformers' own") as caught:
        classes.class_of(names)
    assert name in caught.value.value.split(" or ")


@pytest.mark.parametrize("name", [*classes.TRAINERS, "DistillationConfig"])
def test_what_a_class_writes_is_read(name):
    values = written(name)
    if name not in classes.TRAINERS:
        with pytest.raises(RecipeError, match=name):
            recipe_of_arguments("gpt2", {}, values)
        return
    recipe, foreign = recipe_of_arguments("gpt2", {}, values)
    trainer = classes.TRAINERS[name]
    precision = "fp32" if trainer == "transformers" else "bf16-mixed"
    tokens = {"transformers": 512, **dict.fromkeys(GENERATING, 256 + 512)}.get(trainer, 1024)
    assert (recipe.trainer, recipe.batch_size, recipe.seq_len, recipe.precision) == (
        trainer,
        8,
        tokens,
        precision,
    )
    assert foreign == []


@pytest.mark.parametrize("trainer", ["transformers", *classes.CONFIGS])
def test_a_recipe_comes_back_from_the_json_of_its_arguments(trainer):
    from vramlab import Recipe

    samples = trainer in GENERATING
    recipe = Recipe(
        "gpt2",
        4,
        seq_len=None if samples else 64,
        trainer=trainer,
        precision="bf16-mixed",
        gradient_accumulation_steps=3,
        rollouts=Rollouts(4, 256, 32, beta=0.5) if samples else None,
    )
    changes = {
        "sft": {"packing": True},
        "dpo": {"precompute_ref_log_probs": True},
        "kto": {"pad_to_multiple_of": None},
    }
    recipe = recipe.replace(
        gradient_checkpointing=True, optim="adamw_8bit", **changes.get(trainer, {})
    )
    values = json.loads(recipe.training_arguments("unused").to_json_string())
    fields = {"seq_len": 64} if trainer == "transformers" else {}
    assert recipe_of_arguments("gpt2", {}, values, **fields) == (recipe, [])


OTHER = {
    "tf32": True,
    "optim": "adafactor",
    "optim_args": "eps=1e-6",
    "optim_target_modules": "all-linear",
    "label_smoothing_factor": 0.1,
    "accelerator_config": {"split_batches": True},
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "torch_compile_backend": "eager",
    "torch_compile_mode": "max-autotune",
    "liger_kernel_config": {"rope": False},
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 2,
    "parallelism_config": {"tp_size": 2},
    "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "debug": "underflow_overflow",
    "max_length": 77,
    "model_init_kwargs": {"dtype": "float16", "attn_implementation": "eager"},
    "router_aux_loss_coef": 0.5,
    "chat_template_path": "template.jinja",
    "loss_type": "ipo",
    "packing_strategy": "wrapped",
    "padding_free": True,
    "pad_to_multiple_of": 1000,
    "loss_weights": [0.5],
    "ld_alpha": 0.5,
    "f_divergence_type": "js_divergence",
    "precompute_ref_batch_size": 64,
    "center_rewards_coefficient": 0.5,
}
# Memory depends on these only where another field says so: of ranks, or with packing.
ELSEWHERE = {
    *CLASSIFIED["refused_in_ddp"],
    "fsdp_config",
    "packing_strategy",
    "weight_decay",
    "optim_args",
}


@pytest.mark.parametrize("name", ["TrainingArguments", *classes.CONFIGS.values()])
def test_no_field_that_moves_memory_is_dropped(name):
    """Each field is changed alone: the recipe changes, or a sentence refuses it by name."""
    values = written(name)
    usual = recipe_of_arguments("gpt2", {}, values)[0]
    silent = []
    assert len(values.keys() - set(CLASSIFIED["neutral"])) > 20
    neutral = {*CLASSIFIED["neutral"], *CLASSIFIED["neutral_in"].get(name, ())}
    for field in values.keys() - neutral - ELSEWHERE:
        value = values[field]
        changed = OTHER.get(field, not value if isinstance(value, bool | None) else 3)
        try:
            recipe, foreign = recipe_of_arguments("gpt2", {}, values | {field: changed})
        except RecipeError as error:
            assert "\n" not in str(error)
        else:
            silent += [field] if recipe == usual and not foreign else []
    # TRL's have autocast, under which there is no TF32, and their trainers never ask for a cache
    assert set(silent) <= ({"tf32", "use_cache"} if name != "TrainingArguments" else set())


def test_weight_decay_and_optimizer_arguments_count():
    values = {"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.1}
    assert recipe_of_arguments("gpt2", {}, values)[0].optim_args == "momentum=0.9,weight_decay=0.1"


def test_names_that_no_class_declares_are_named():
    values = {"per_device_train_batch_size": 2, "foo": 3, "group_by_length": True}
    assert recipe_of_arguments("gpt2", {}, values)[1] == ["foo", "group_by_length"]
    values = {
        "packing": True,
        "max_length": 64,
        "beta": 0.1,
    }  # of SFTConfig's heirs, which no recipe models
    with pytest.raises(RecipeError, match="GKDConfig or GOLDConfig"):
        recipe_of_arguments("gpt2", {}, values)


def test_what_several_classes_declare_asks_for_the_trainer():
    values = {"max_length": 64, "beta": 0.1}
    with pytest.raises(
        RecipeError, match="fields beta, max_length do not say which: say --trainer"
    ):
        recipe_of_arguments("gpt2", {}, values)
    assert recipe_of_arguments("gpt2", {"trainer": "kto"}, values)[0].trainer == "kto"
    with pytest.raises(RecipeError, match="the arguments are SFTConfig's"):
        recipe_of_arguments("gpt2", {"trainer": "dpo"}, {"packing": True, "max_length": 64})


def test_a_null_is_no_default():
    with pytest.raises(RecipeError, match="samples are not cut"):
        recipe_of_arguments("gpt2", {}, {"max_length": None, "packing": True})


def test_two_names_of_one_field_that_differ_are_refused():
    values = {"gradient_checkpointing": True, "activation_checkpointing": False}
    with pytest.raises(RecipeError, match="say one of them"):
        recipe_of_arguments("gpt2", {}, values)


def test_training_arguments_of_sfttrainer_become_its_own():
    """As SFTTrainer.__init__ does: their values count, also where SFTConfig's defaults differ."""
    values = {"per_device_train_batch_size": 2}
    recipe, _ = recipe_of_arguments("gpt2", {}, values, kind="TrainingArguments", trainer="sft")
    said = (recipe.trainer, recipe.seq_len, recipe.precision, recipe.gradient_checkpointing)
    assert said == ("sft", 1024, "fp32", False)
    with pytest.raises(RecipeError, match="DPOTrainer takes no TrainingArguments"):
        recipe_of_arguments("gpt2", {}, values, kind="TrainingArguments", trainer="dpo")


def test_arguments_of_rollouts_are_told():
    values = {"num_generations": 4, "per_device_train_batch_size": 4, "epsilon_high": 0.3}
    with pytest.raises(RecipeError, match=r"GRPOConfig or RLOOConfig.*say --trainer"):
        recipe_of_arguments("gpt2", {}, values)
    recipe, _ = recipe_of_arguments("gpt2", {"prompt": 100}, values | {"loss_type": "dapo"})
    assert recipe.trainer == "grpo"
    assert recipe.rollouts == Rollouts(4, 100)
    batch = {"generation_batch_size": 16, "gradient_accumulation_steps": 2}
    recipe, _ = recipe_of_arguments("gpt2", {}, values | batch, trainer="grpo")
    assert recipe.rollouts.steps_per_generation == 4
