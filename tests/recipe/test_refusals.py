"""What a recipe refuses: one sentence that names the field and the value, never a traceback, before
anything is built.
"""

import dataclasses
import json

import numpy
import pytest
import torch
from tiny_models import config
from vramlab import (
    Loop,
    LoRA,
    Quantization,
    Recipe,
    Sharding,
    measure,
    plan,
    predict,
    simulate,
    step_time,
)
from vramlab.base.errors import RecipeError
from vramlab.recipe import rollouts
from vramlab.recipe.optimizers import BESIDE_TRAINER, COMPILED, MODELLED, REFUSED, SIMULATED
from vramlab.recipe.options import Rollouts
from vramlab.recipe.recipe import OPTIMIZERS

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 80,
}
LLAMA = {"model_type": "llama", **SIZES}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 16, "num_key_value_heads": 4}


def refused(build, *args, **fields) -> RecipeError:
    """The error of `build(...)`, which is one sentence of readable length."""
    with pytest.raises(RecipeError) as caught:
        build(*args, **fields)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 600
    return caught.value


@pytest.mark.parametrize(
    "optim, text, words",
    [
        ("sgd", "nonsense=1", "has no 'nonsense'"),
        ("sgd", "=1", "has no '' here; it takes lr, weight_decay"),
        ("sgd", "momentum", "must read like"),
        ("sgd", "momentum=", "must read like"),
        ("sgd", "lr=0.1,,", "must read like"),
        ("sgd", "lr=1=2", "must read like"),
        ("sgd", "nesterov=maybe,momentum=0.9", "must read like"),
        ("adamw_torch", "momentum=0.9", "has no 'momentum'"),
        ("adafactor", "beta1=0.9", "has no 'beta1'"),
        ("lion_8bit", "eps=0.9", "has no 'eps'"),
        ("sgd", 5, "must be text"),
        ("sgd", ["lr=1"], "must be text"),
    ],
)
def test_optimizer_arguments(optim, text, words):
    error = refused(Recipe, "gpt2", optim=optim, optim_args=text)
    assert error.field == "optim_args" and words in str(error)


@pytest.mark.parametrize(
    ("sharding", "fields", "words"),
    [
        ({"dp_replicate_size": 3}, {}, "divide the 8 ranks into equal groups"),
        ({"dp_replicate_size": 8}, {}, "groups of 2 at least"),
        ({"dp_replicate_size": 2, "engine": "ddp", "stage": 0}, {}, "only engine 'fsdp' knows it"),
        ({"cp_size": 3}, {}, "must divide world_size, 8"),
        ({"cp_size": 3, "dp_replicate_size": 2}, {}, "must divide the ranks of a copy, 4"),
        ({"cp_size": 4, "dp_replicate_size": 2}, {}, "among 2 groups of so many at least"),
        ({"cp_size": 2}, {"attn_implementation": "eager"}, "computes attention by 'sdpa' only"),
        ({"cp_size": 2}, {"seq_len": 30}, "do not divide into two equal pieces"),
        ({"cp_size": 2}, {"loop": "plain"}, "the Trainer's and SFTTrainer's loops"),
        ({"cp_size": 2}, {"trainer": "dpo", "lora": LoRA()}, "the Trainer's and SFTTrainer's"),
        ({"cp_size": 2}, {"task": "sequence-classification"}, "is for causal models"),
        ({"cp_size": 2}, {"trainer": "sft", "padding_free": True}, "keeps joined samples apart"),
        ({"cp_size": 2}, {"model": MISTRAL}, "looks back 16 tokens only"),
        ({"cp_size": 2}, {"model": GROUPED, "precision": "fp32"}, "queries that share keys"),
    ],
)
def test_copies_and_rings(sharding, fields, words):
    def build():
        model = {"model": LLAMA, "seq_len": 32, "precision": "bf16-mixed"}
        Recipe(**model | fields, sharding=Sharding(**{"world_size": 8} | sharding))

    assert words in str(refused(build))


@pytest.mark.parametrize(
    ("sharding", "fields", "words"),
    [
        ({"sp_size": 3}, {}, "must divide world_size, 8"),
        ({"engine": "fsdp"}, {}, "only engine 'deepspeed' knows it"),
        ({}, {"attn_implementation": "eager"}, "the heads of 'sdpa' and 'flash_attention_2'"),
        ({}, {"seq_len": 31}, "an equal part for each of 2 ranks"),
        ({}, {"loop": "plain"}, "the Trainer's and SFTTrainer's loops"),
        ({}, {"task": "sequence-classification"}, "is for causal models"),
        ({}, {"trainer": "sft", "packing": True}, "leave packing and padding_free out"),
        ({}, {"model": MISTRAL}, "looks back 16 tokens only"),
        ({"sp_size": 8}, {}, "must divide the 4 heads"),
    ],
)
def test_ulysses(sharding, fields, words):
    def build():
        model = {"model": LLAMA, "seq_len": 32, "precision": "bf16-mixed"}
        usual = {"world_size": 8, "engine": "deepspeed", "sp_size": 2}
        Recipe(**model | fields, sharding=Sharding(**usual | sharding))

    assert words in str(refused(build))


def test_formulas_leave_ulysses_to_simulate():
    sharding = Sharding(3, 2, "deepspeed", sp_size=2)
    recipe = Recipe(LLAMA, seq_len=32, precision="bf16-mixed", sharding=sharding)
    assert refused(predict, recipe).field == "sharding.sp_size"


def test_a_model_that_transformers_divides():
    """Its `to_dict` leaves out how, so it would be read as a whole model."""
    from transformers import MixtralConfig
    from transformers.distributed import DistributedConfig

    model = MixtralConfig(num_hidden_layers=1)
    model.distributed_config = DistributedConfig(ep_size=2, fsdp_size=2)
    error = refused(Recipe, model)
    assert error.field == "model.distributed_config"
    assert "fsdp_size=2, ep_size=2" in str(error) and "the router sends it" in str(error)
    model.distributed_config = DistributedConfig()
    assert Recipe(model).shape.num_layers == 1


def test_a_ring_runs_on_gpus_alone():
    sharding = Sharding(3, 2, cp_size=2)
    recipe = Recipe(LLAMA, seq_len=32, precision="bf16-mixed", sharding=sharding)
    assert refused(simulate, recipe, "cpu").field == "target"
    assert refused(predict, recipe).field == "sharding.cp_size"
    in_fp32 = recipe.replace(precision="fp32", model=config("gpt2"), seq_len=96)
    assert "rows of 96 are no multiple of 128" in str(refused(simulate, in_fp32))


ADAPTED = {
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "vocab_size": 60},
    "falcon_h1": {
        **SIZES,
        "num_key_value_heads": 4,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_layers_that_peft_does_not_adapt(kind):
    task = (
        "sequence-classification" if kind == "distilbert" else None
    )  # PEFT saves its pre_classifier whole
    recipe = Recipe(
        {"model_type": kind, **ADAPTED[kind]},
        seq_len=8,
        task=task,
        lora=LoRA(target_modules="all-linear"),
    )
    error = refused(simulate, recipe)
    assert error.field == "lora.target_modules" and "PEFT refuses it" in str(error)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "router")])
def test_a_router_whose_result_no_adapter_adds_to(targets):
    """`Llama4Router` returns scores beside its product: PEFT's layer asks a tuple for its dtype."""
    named = LoRA(target_modules=("q_proj",))
    recipe = Recipe("llama-4-scout", seq_len=8, dtype="bfloat16", lora=named)
    lora = LoRA(target_modules=targets)
    error = refused(lambda lora: recipe.replace(lora=lora), lora)
    assert error.field == "lora.target_modules"
    assert "PEFT adapts the router too" in str(error) and "name the modules" in str(error)
    with pytest.raises(RecipeError, match="predict does not know llama4_text"):
        plan("llama-4-scout", "H200", seq_len=512, method="lora", confirm=False)


def test_a_library_that_is_too_old_for_peft(monkeypatch):
    """Colab has such a torchao."""

    def stop():
        raise ImportError("Found version 0.10.0, but only versions above 0.16.0 are supported")

    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", stop)
    error = refused(simulate, Recipe(LLAMA, seq_len=8, lora=LoRA()))
    assert error.field == "lora" and "PEFT makes no adapters here: Found version 0.10.0" in str(
        error
    )


def test_what_a_model_does_by_values_is_one_sentence(caplog):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "kv_channels": 16,
        "intermediate_size": 128,
    }
    recipe = Recipe(
        {"model_type": "jetmoe", **sizes, "num_key_value_heads": 2, "num_local_experts": 4},
        seq_len=8,
    )
    message = str(refused(simulate, recipe))
    assert "measure(recipe) runs it for real" in message and "(modeling_jetmoe.py, line " in message
    assert not caplog.records  # torch logs the traceback of a fake operator that fails


def test_heads_that_do_not_divide_the_hidden_size_where_they_need_not():
    """Such as GLM-4.5's 96 heads of 4,096 channels."""
    config = {
        "model_type": "glm4_moe",
        **SIZES,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
    }
    assert (
        Recipe(config | {"moe_intermediate_size": 16, "n_routed_experts": 4}).shape.head_dim == 10
    )


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"dtype": "float16", "precision": "bf16-true"}, "keeps the weights in bfloat16"),
        ({"dtype": "float32", "precision": "fp16-true"}, "keeps the weights in float16"),
        ({"dtype": "float16", "precision": "fp16-mixed"}, "loss scaler"),
        ({"dtype": "float16", "precision": "fp16-mixed", "lora": LoRA(bias="all")}, "loss scaler"),
        (
            {"dtype": "bfloat16", "precision": "bf16-mixed", "sharding": Sharding(3, 2)},
            "accelerate casts",
        ),
        ({"dtype": "auto"}, "allowed are 'float32', 'float16', 'bfloat16'"),
    ],
)
def test_weights_in_a_format_that_cannot_be_trained_so(fields, words):
    error = refused(Recipe, LLAMA, **fields)
    assert error.field == "dtype" and words in str(error)


@pytest.mark.parametrize("optim", ["paged_adamw_8bit", "lion_32bit", "adafactor"])
def test_fsdp_refuses_optimizers_that_take_no_dtensors(optim):
    """Their kernels have no sharding strategy: the real step fails too."""
    error = refused(Recipe, LLAMA, optim=optim, sharding=Sharding(3, 2))
    assert error.field == "optim" and "DTensors, which are trained with adamw_torch" in str(error)


def test_one_recipe_has_one_key_whether_its_dtype_is_said_or_implied():
    for said, meant in (
        ({"dtype": "bfloat16"}, {"precision": "bf16-true"}),
        ({"dtype": torch.float16, "precision": "tf32"}, {"precision": "fp16-true"}),
        ({"dtype": "float32", "precision": "bf16-mixed"}, {"precision": "bf16-mixed"}),
    ):
        one, other = Recipe(LLAMA, **said), Recipe(LLAMA, **meant)
        assert (
            one == other
            and one.key == other.key
            and str(one) == str(other)
            and "dtype" not in one.to_dict()
        )
    half = Recipe(LLAMA, dtype="bfloat16").replace(precision="bf16-mixed")
    assert (
        "bf16-mixed" in str(half)
        and "bfloat16 weights" in str(half)
        and Recipe.from_json(half.to_json()) == half
    )


def test_formulas_refuse_one_half_precision_format_under_the_other():
    error = refused(predict, Recipe(LLAMA, dtype="float16", precision="bf16-mixed"))
    assert error.field == "dtype" and "ask simulate" in str(error)


@pytest.mark.parametrize("field", ["modules_to_save", "target_parameters"])
def test_one_name_where_peft_takes_several(field):
    error = refused(LoRA, **{field: "lm_head"})
    assert error.field == f"lora.{field}" and "['lm_head']" in str(error)


@pytest.mark.parametrize(
    "fields", [{"use_dora": True}, {"lora_bias": True}, {"target_parameters": ("norm.weight",)}]
)
def test_formulas_refuse_adapters_of_more_than_two_matrices(fields):
    recipe = Recipe(LLAMA, lora=LoRA(**fields))
    (name,) = fields
    assert (
        refused(predict, recipe).field == f"lora.{name}"
        and Recipe.from_json(recipe.to_json()) == recipe
    )
    assert (
        name in recipe.to_dict()["lora"]
        and name not in Recipe(LLAMA, lora=LoRA()).to_dict()["lora"]
    )


def test_dora_on_a_quantized_base_is_refused():
    error = refused(Recipe, LLAMA, lora=LoRA(use_dora=True), quantization=Quantization())
    assert error.field == "lora.use_dora" and "not quantized" in str(error)


def test_every_optimizer_of_the_trainer_is_modelled_or_refused():
    from transformers.training_args import OptimizerNames

    names = {name.value for name in OptimizerNames}
    accepted = {name for name in names if name not in REFUSED and Recipe(LLAMA, optim=name)}
    assert names - accepted == REFUSED.keys() and accepted >= {*OPTIMIZERS, *COMPILED}
    assert not names & {*BESIDE_TRAINER} and MODELLED.keys() == {*OPTIMIZERS, *SIMULATED}
    for name in BESIDE_TRAINER:
        error = refused(Recipe(LLAMA, optim=name).training_arguments)
        assert error.field == "optim" and "give the Trainer its optimizers" in str(error)
    for name in SIMULATED:
        error = refused(Recipe, LLAMA, optim=name, loop="optimizer_in_backward")
        assert "an update of all weights" in str(error)
        recipe = Recipe(LLAMA, optim=name)
        assert "ask simulate" in str(refused(predict, recipe))
        assert "ask simulate" in str(refused(plan, LLAMA, "T4", optims=name))
        assert "simulate says its memory" in str(refused(step_time, recipe, "T4"))
    for name in REFUSED:
        error = refused(Recipe, LLAMA, optim=name)
        assert (
            error.field == "optim" and REFUSED[name] in str(error) and "WatchCallback" in str(error)
        )


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_optimizers_take_what_the_recipe_lets_pass(optim):
    """Each name in the table is an argument of the real optimizer, and is handed over."""
    from vramlab.training.make_optimizer import make_optimizer

    given = ",".join(
        f"{name}={0 if name == 'dampening' else 1}" for name in MODELLED[optim].arguments
    )
    recipe = Recipe(LLAMA, optim=optim, optim_args=given)
    optimizer = make_optimizer(recipe, [torch.nn.Parameter(torch.ones(2, 2))], multi_tensor=False)
    options = optimizer.param_groups[0] | getattr(optimizer, "defaults", {})
    assert all(options[name] == value for name, value in recipe.optimizer_arguments().items())


def test_states_of_amsgrad():
    """AdamW keeps a third number a weight."""
    states = [
        [
            witness(recipe).phases["between_steps"].end.optimizer_states
            for witness in (predict, simulate)
        ]
        for recipe in (Recipe(LLAMA, optim_args=text, seq_len=8) for text in (None, "amsgrad=1"))
    ]
    assert [predicted for predicted, _ in states] == [simulated for _, simulated in states]
    assert states[1][0] > 1.4 * states[0][0]


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"batch_size": 10**30}, "batch_size"),
        ({"batch_size": 10**5000}, "batch_size"),
        ({"seq_len": 10**30}, "seq_len"),
        ({"gradient_accumulation_steps": 10**9}, "gradient_accumulation_steps"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"optim": ["sgd"]}, "optim"),
        ({"optim": {}}, "optim"),
        ({"precision": ["fp32"]}, "precision"),
        ({"task": numpy.array([1, 2])}, "task"),
        ({"loop": None}, "loop"),
        ({"loop": {"name": 3}}, "loop.name"),
        ({"lora": {1: 2}}, "lora.1"),
    ],
)
def test_fields(fields, field):
    assert refused(Recipe, LLAMA, **fields).field == field


def test_parts():
    assert (
        refused(LoRA, lora_alpha=float("nan")).field
        == refused(LoRA, lora_alpha=10**400).field
        == "lora.lora_alpha"
    )
    assert refused(Loop, max_grad_norm=float("inf")).field == "loop.max_grad_norm"
    assert refused(Sharding, world_size=10**30).field == "sharding.world_size"


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"attention_dropout": "x"}, "model.attention_dropout"),
        ({"partial_rotary_factor": "x"}, "model"),
        ({"head_dim": 15}, "model.head_dim"),
        ({"hidden_size": 60}, "model.head_dim"),
        ({"num_labels": "x"}, "model.num_labels"),
        ({"rope_parameters": "x"}, "model"),
        ({"model_type": ["a"]}, "model"),
        ({"hidden_size": 10**30}, "model.hidden_size"),
        ({"num_hidden_layers": 10**9}, "model.num_hidden_layers"),
        ({"vocab_size": float("nan")}, "model.vocab_size"),
        ({(1, 2): 3}, "model"),
    ],
)
def test_configurations(changes, field):
    assert refused(Recipe, {**LLAMA, **changes}).field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "zzz"},
        {"layer_types": "x"},
        {"tie_word_embeddings": "x"},
        {"rope_theta": "x"},
    ],
)
def test_what_formulas_do_not_read_is_refused_where_the_model_is_built(changes):
    assert refused(simulate, Recipe({**LLAMA, **changes}, seq_len=8)).field == "model"


def test_a_configuration_within_itself():
    config = {**LLAMA}
    config["itself"] = config
    assert refused(Recipe, config).field == "model"


def test_files_and_names_that_are_no_models(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(300)}, tmp_path / "model.safetensors")
    assert "config.json" in str(refused(Recipe, str(tmp_path / "model.safetensors")))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "nested too deeply" in str(refused(Recipe, tmp_path / "deep.json"))
    assert "did you mean 'gpt2'" in str(refused(Recipe, "gpt2\x00"))
    for model in ("x" * 5000, str(tmp_path), b"gpt2", None, 3, Recipe("gpt2")):
        assert refused(Recipe, model).field == "model"
    assert "simulate(model=...)" in str(refused(Recipe, torch.nn.Linear(2, 2)))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "null",
            "[]",
            "{}",
            "[1]",
            "3",
            '"gpt2"',
            '{"model":',
            '{"model": null}',
            '{"model": [1]}',
            "\x00",
            None,
            5,
        ),
        *(
            b"\xff\xfe",
            "[" * 100_000,
            '{"a":' * 100_000,
            '{"model": "gpt2", "x": 1}',
            '{"model": {"model_type": "llama"}}',
        ),
        *(
            f'{{"model": "gpt2", {rest}}}'
            for rest in ('"lora": {"r": "x"}', '"sharding": [1]', '"loop": {"x": 1}')
        ),
        *(
            f'{{"model": "gpt2", "batch_size": {size}}}'
            for size in ("1e999", "NaN", '"4"', "true", "9" * 5000)
        ),
        '{"model": "gpt2", "lora": {"target_modules": [[1]]}}',
        '{"model": "gpt2", "quantization": "nf4"}',
    ],
)
def test_json(text):
    refused(Recipe.from_json, text)


@pytest.mark.parametrize("witness", [predict, simulate, measure])
def test_a_name_is_a_recipe(witness, monkeypatch):
    """Every witness takes what `Recipe` takes for a model; the other fields have their defaults."""
    stop = {"predict": "lora_modules.differ_by_layer", "simulate": "trace", "measure": "cannot"}[
        witness.__name__
    ]
    asked = []

    def first(recipe, *_):
        asked.append(
            recipe if isinstance(recipe, Recipe) else Recipe(json.loads(recipe.config_json))
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{witness.__module__}.{stop}", first)
    with pytest.raises(KeyboardInterrupt):
        witness("gpt2")
    assert asked[0].name == "gpt2"
    for wrong in (3, b"gpt2", "gpt-2"):
        assert refused(witness, wrong).field == "model"


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_flash_attention_needs_half_precision(precision):
    error = refused(Recipe, LLAMA, precision=precision, attn_implementation="flash_attention_2")
    assert error.field == "precision" and "fp16 and bf16" in str(error)


def test_a_loop_that_empties_the_cache_is_noted():
    recipe = Recipe(LLAMA, seq_len=8, loop=Loop(empty_cache_steps=2))
    assert any("empty_cache_steps" in note for note in simulate(recipe).notes)


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
@pytest.mark.parametrize(
    "option", [{"use_dora": True}, {"target_parameters": ("mlp.experts.gate_up_proj",)}]
)
def test_adapters_that_read_the_bases_weights_want_them_whole(engine, option):
    model = "mixtral-8x7b" if "target_parameters" in option else "llama-3.1-8b"
    recipe = Recipe(model, lora=LoRA(target_modules=("q_proj",), **option))
    error = refused(recipe.replace, sharding=Sharding(3, 8, engine))
    assert error.field == f"lora.{next(iter(option))}" and "one device, or 'ddp'" in str(error)
    recipe.replace(sharding=Sharding(0, 8, "ddp"))


def test_the_words_for_a_base_that_is_not_prepared():
    recipe = Recipe("gpt2", lora=LoRA(), quantization=Quantization(prepare=False))
    assert str(recipe).endswith("nf4 · not prepared")
    assert "prepared" not in str(recipe.replace(trainer="sft")) + str(
        recipe.replace(quantization=Quantization())
    )


def test_vllms_arguments_without_vllm_are_named():
    idle = Rollouts(vllm_gpu_memory_utilization=0.5, vllm_enable_sleep_mode=True)
    said = "vllm_gpu_memory_utilization and vllm_enable_sleep_mode: vLLM samples only with use_vllm"
    assert rollouts.notes(idle) == [said]
    assert rollouts.notes(dataclasses.replace(idle, use_vllm=True)) == []
    assert rollouts.notes(Rollouts()) == rollouts.notes(None) == []


def test_a_misspelt_field_of_a_json_has_the_nearest_name_said():
    with pytest.raises(RecipeError, match=r"no such field exists \(did you mean 'batch_size'\?\)"):
        Recipe.from_json('{"model": "gpt2", "batchsize": 4}')
