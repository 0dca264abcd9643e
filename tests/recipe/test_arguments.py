"""Recipes and TrainingArguments: there and back, and what the arguments make of a real Trainer."""

import dataclasses
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vramlab.base.errors import RecipeError
from vramlab.recipe import arguments, parallel_limits
from vramlab.recipe.deepspeed_config import deepspeed_config
from vramlab.recipe.knobs import knobs
from vramlab.recipe.options import GENERATING
from vramlab.recipe.recipe import OPTIMIZERS, Loop, LoRA, Quantization, Recipe, Rollouts, Sharding

OPTIM_ARGS = {
    "sgd": [None, "momentum=0.9", "momentum=0.9,weight_decay=0.01,dampening=0.1"],
    "rmsprop": [None, "momentum=0.9,alpha=0.95", "eps=1e-6"],
    "adagrad": [None, "lr_decay=0.1"],
    "adamw_torch": [None, "lr=0.001,weight_decay=0.1", "eps=1e-6"],
    "lion_32bit": [None, "lr=0.001"],
}


@st.composite
def trainer_recipes(draw):
    """Recipes whose loop is the Trainer's; the arguments that `fields` must supply are the second
    value.
    """
    optim = draw(st.sampled_from(OPTIMIZERS))
    loop = Loop(
        use_cache=draw(st.booleans()),
        max_grad_norm=draw(st.sampled_from([None, 0.5, 1.0])),
        empty_cache_steps=draw(st.sampled_from([None, 1, 7])),
    )
    precision = draw(
        st.sampled_from(["fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true"])
    )
    fields = {}
    if draw(st.booleans()):
        fields["lora"] = LoRA(r=draw(st.integers(1, 8)))
        if precision in ("fp32", "bf16-true") and draw(st.booleans()):
            fields["quantization"] = Quantization("nf4", double=True)
    if draw(st.booleans()):
        fields["sharding"] = Sharding(
            stage=draw(st.sampled_from([2, 3])), world_size=2, engine="fsdp"
        )
        optim = draw(st.sampled_from(parallel_limits.OPTIMIZERS))
    if precision.endswith("-true"):
        fields["precision"] = precision
    if precision == "bf16-mixed" and "sharding" not in fields:
        fields["dtype"] = draw(st.sampled_from([None, "bfloat16", "float32"]))
    fields["seq_len"] = draw(st.sampled_from([16, 128]))
    fields["attn_implementation"] = draw(st.sampled_from(["sdpa", "eager"]))
    recipe = Recipe(
        "gpt2",
        batch_size=draw(st.integers(1, 64)),
        optim=optim,
        optim_args=draw(st.sampled_from(OPTIM_ARGS.get(optim, [None]))),
        gradient_checkpointing=draw(st.booleans()),
        gradient_accumulation_steps=draw(st.integers(1, 16)),
        torch_compile=draw(st.booleans()),
        loop=loop,
        **{"precision": precision, **fields},
    )
    return recipe, fields


@given(trainer_recipes())
def test_there_and_back(drawn):
    recipe, fields = drawn
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no deprecated name on the way
        args = recipe.training_arguments("unused")
    assert Recipe.from_training_arguments(args, "gpt2", **fields) == recipe
    assert args.optim == recipe.optim and args.train_batch_size >= recipe.batch_size
    assert (args.fp16, args.bf16) == (
        recipe.precision == "fp16-mixed",
        recipe.precision == "bf16-mixed",
    )
    assert args.max_grad_norm == (recipe.loop.max_grad_norm or 0)


def tiny(**fields):
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return Recipe({"model_type": "gpt2", **sizes}, seq_len=8, **fields)


def trained(recipe, tmp_path, model=None, **changes):
    """A Trainer of `recipe` after two steps."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    model = model or AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.shape.config))
    ids = torch.zeros(recipe.seq_len, dtype=torch.long)
    args = recipe.training_arguments(str(tmp_path), max_steps=2, disable_tqdm=True, **changes)
    trainer = Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 64)
    trainer.train()
    return trainer


def test_the_trainer_trains_so(tmp_path):
    recipe = tiny(
        batch_size=2,
        gradient_accumulation_steps=3,
        gradient_checkpointing=True,
        optim="sgd",
        optim_args="momentum=0.9,lr=0.5,weight_decay=0.25",
        precision="bf16-mixed",
    )
    trainer = trained(recipe, tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (2, 8)
    assert trainer.args.gradient_accumulation_steps == 3
    assert any(
        getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules()
    )
    assert trainer.accelerator.mixed_precision == "bf16"
    group = trainer.optimizer.param_groups[0]
    assert type(trainer.optimizer.optimizer).__name__ == "SGD"
    assert (group["momentum"], group["initial_lr"], group["weight_decay"]) == (0.9, 0.5, 0.25)
    assert trainer.model.config.use_cache is False
    assert trainer.state.global_step == 2
    again = Recipe.from_training_arguments(trainer.args, trainer.model.config, seq_len=8)
    assert (again.batch_size, again.precision, again.optim_args) == (
        2,
        "bf16-mixed",
        recipe.optim_args,
    )
    assert again.shape.weights() == recipe.shape.weights()


def test_clipping_and_cache_reach_the_trainer(tmp_path, monkeypatch):
    from transformers import Trainer

    called = []
    monkeypatch.setattr(
        Trainer,
        "_clip_grad_norm",
        lambda self, model: called.append(self.args.max_grad_norm) or 0.0,
    )
    trained(tiny(loop=Loop.named("trainer", max_grad_norm=None)), tmp_path)
    assert not called
    trainer = trained(tiny(loop=Loop.named("trainer", max_grad_norm=0.5, use_cache=True)), tmp_path)
    assert set(called) == {0.5} and trainer.model.config.use_cache is True


def test_a_built_model_says_its_configuration(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe = tiny(precision="bf16-mixed", dtype="bfloat16")
    config, args = (
        AutoConfig.for_model(**recipe.shape.config),
        recipe.training_arguments(str(tmp_path)),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    again = Recipe.from_training_arguments(args, model.config, dtype=model.dtype)
    assert args.bf16 and (again.dtype, again.precision) == ("bfloat16", "bf16-mixed")
    assert again.shape.weights() == recipe.shape.weights()
    with pytest.raises(RecipeError, match="such as a model's own `config`"):
        Recipe.from_training_arguments(args, model)
    with pytest.raises(RecipeError, match="which is autocast"):
        Recipe.from_training_arguments(args, model.config, precision="bf16-true")


def test_changes_come_last():
    args = Recipe("gpt2", batch_size=4).training_arguments(
        "there", learning_rate=0.5, save_strategy="epoch"
    )
    assert (args.output_dir, args.learning_rate, args.save_strategy) == ("there", 0.5, "epoch")
    assert args.per_device_train_batch_size == 4 and args.report_to == []


def test_copies_and_rings_are_a_parallelism_config():
    sharding = Sharding(3, 8, dp_replicate_size=2, cp_size=2)
    recipe = Recipe("qwen3-0.6b", precision="bf16-mixed", sharding=sharding)
    arguments = recipe.training_arguments("unused")
    config = arguments.parallelism_config
    assert (config.dp_replicate_size, config.dp_shard_size, config.cp_size) == (2, 2, 2)
    assert config.total_size == sharding.world_size
    fields = {"seq_len": recipe.seq_len, "sharding": sharding}
    assert Recipe.from_training_arguments(arguments, recipe.model, **fields) == recipe
    for other in (Sharding(3, 8), Sharding(3, 8, cp_size=4)):
        with pytest.raises(RecipeError, match="parallelism_config"):
            fields["sharding"] = other
            Recipe.from_training_arguments(arguments, recipe.model, **fields)


def test_ulysses_is_a_parallelism_config_with_the_models_attention():
    sharding = Sharding(3, 8, "deepspeed", sp_size=4)
    recipe = Recipe("qwen3-0.6b", precision="bf16-mixed", sharding=sharding)
    arguments = recipe.training_arguments("unused")
    config = arguments.parallelism_config
    assert (config.sp_size, config.sp_backend, config.data_parallel_size) == (4, "deepspeed", 2)
    assert config.sp_handler.sp_attn_implementation == "sdpa"
    fields = {"seq_len": recipe.seq_len, "sharding": sharding}
    assert Recipe.from_training_arguments(arguments, recipe.model, **fields) == recipe
    with pytest.raises(RecipeError, match="parallelism_config"):
        fields["sharding"] = Sharding(3, 8, "deepspeed")
        Recipe.from_training_arguments(arguments, recipe.model, **fields)


def test_sharding():
    recipe = Recipe("gpt2", sharding=Sharding(3, 8, "fsdp", offload="parameters"))
    args = recipe.training_arguments("unused")
    assert args.fsdp and args.fsdp_config["cpu_offload"] is True
    with pytest.raises(RecipeError, match="engine='fsdp'"):
        Recipe.from_training_arguments(args, "gpt2")
    plain = Recipe("gpt2", sharding=Sharding(0, 8, "ddp")).training_arguments("unused")
    assert not plain.fsdp and not plain.deepspeed


@pytest.mark.parametrize(
    "fields, field, words",
    [
        ({"loop": "plain"}, "loop.zero_grad", "use loop='trainer'"),
        ({"loop": "optimizer_in_backward"}, "loop.zero_grad", "Trainer"),
        ({"loop": Loop(foreach=False)}, "loop.foreach", "None"),
        ({"loop": Loop(use_cache=None)}, "loop.use_cache", "True or False"),
        ({"optim_args": "amsgrad=1"}, "optim_args", "not amsgrad"),
        (
            {"optim": "adagrad", "optim_args": "initial_accumulator_value=1"},
            "optim_args",
            "not initial_accumulator",
        ),
    ],
)
def test_what_the_trainer_cannot_do(fields, field, words):
    with pytest.raises(RecipeError) as caught:
        Recipe("gpt2", **fields).training_arguments("unused")
    assert caught.value.field == field and words in str(caught.value)


@pytest.mark.parametrize(
    "changes, fields, field",
    [
        ({"full_determinism": True}, {}, "full_determinism"),
        ({"label_smoothing_factor": 0.1}, {"loop": "plain"}, "label_smoothing_factor"),
        ({"optim": "stable_adamw"}, {}, "optim"),
        ({"bf16": True}, {"precision": "fp32"}, "precision"),
        ({}, {"precision": "tf32"}, "precision"),
        ({}, {"no_such_field": 1}, None),
    ],
)
def test_what_no_recipe_says(changes, fields, field):
    args = Recipe("gpt2").training_arguments("unused", **changes)
    with pytest.raises((RecipeError, TypeError)) as caught:
        Recipe.from_training_arguments(args, "gpt2", **fields)
    assert getattr(caught.value, "field", None) == field


def test_every_argument_is_classified():
    """A field that transformers adds is neither ignored nor taken for harmless: someone has to say
    what it does.
    """
    from transformers import Seq2SeqTrainingArguments
    from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

    modelled = {
        name
        for part in (Recipe, Loop, Rollouts)
        for knob in knobs(part).values()
        for name in knob.elsewhere
    }
    tables = [
        modelled | {"weight_decay", "max_length", "model_init_kwargs"},
        *(arguments.CLASSIFIED[t] for t in ("neutral", "refused", "refused_in_ddp")),
    ]
    known = [name for table in tables for name in table]
    assert len(known) == len(set(known)), "a field has one class"
    of_trl = (SFTConfig, DPOConfig, KTOConfig, RewardConfig, GRPOConfig, RLOOConfig)
    for kind in (Seq2SeqTrainingArguments, *of_trl):
        own = set(arguments.CLASSIFIED["refused_in"].get(kind.__name__, ()))
        fields = {field.name for field in dataclasses.fields(kind)}
        assert own <= fields and fields <= own.union(known)
        assert not own & {*modelled, *arguments.CLASSIFIED["neutral"]}


def test_every_field_of_adapters_and_quantization_is_classified():
    """What `LoRA` does not say of a LoraConfig is `peft`'s."""
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    bits = set(BitsAndBytesConfig().to_dict())
    lora = {field.name for field in dataclasses.fields(LoraConfig)}
    said = [name for knob in knobs(LoRA).values() for name in knob.elsewhere]
    others = arguments.CLASSIFIED["neutral_in"]["LoraConfig"]
    assert lora >= {*said, *others, *arguments.CLASSIFIED["refused_in"]["PeftConfig"]}
    bits -= {"quant_method", "_load_in_8bit", "_load_in_4bit"}  # what loads it, and two names twice
    modelled = [name for knob in knobs(Quantization).values() for name in knob.elsewhere]
    for table in ("refused_in", "neutral_in"):
        modelled += arguments.CLASSIFIED[table]["BitsAndBytesConfig"]
    assert sorted(modelled) == sorted(bits)


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"full_determinism": True}, "full_determinism"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"optim_target_modules": "all-linear"}, "optim_target_modules"),
        ({"debug": "underflow_overflow"}, "debug"),
        ({"torch_compile_mode": "reduce-overhead"}, "torch_compile_mode"),
        ({"torch_compile_backend": "eager"}, "torch_compile_backend"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        (
            {"gradient_checkpointing_kwargs": {"every_n_layers": 2}},
            "checkpointing_kwargs.every_n_layers",
        ),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, "checkpointing_kwargs.offload"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_what_moves_memory_and_is_not_modelled(changes, field):
    args = Recipe("gpt2").training_arguments(
        "unused", **{k: v for k, v in changes.items() if k != "full_determinism"}
    )
    args.full_determinism = changes.get("full_determinism", False)
    with pytest.raises(RecipeError) as caught:
        Recipe.from_training_arguments(args, "gpt2")
    assert caught.value.field.endswith(field) and "no recipe models" in str(caught.value)


def test_what_moves_memory_among_ranks_only():
    args = Recipe("gpt2").training_arguments("unused", ddp_bucket_cap_mb=100)
    assert Recipe.from_training_arguments(args, "gpt2") == Recipe("gpt2")
    with pytest.raises(RecipeError, match="ddp_bucket_cap_mb"):
        Recipe.from_training_arguments(args, "gpt2", sharding=Sharding(0, 2, "ddp"))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_arguments_of_another_trainer():
    """TRL's other configurations are TrainingArguments; its trainers load second models and batch
    and lose otherwise.
    """
    from transformers import Seq2SeqTrainingArguments
    from trl.experimental.online_dpo import OnlineDPOConfig

    for args in (OnlineDPOConfig("out", use_cpu=True), None, {"output_dir": "out"}):
        with pytest.raises(RecipeError) as caught:
            Recipe.from_training_arguments(args, "gpt2")
        assert caught.value.field == "args" and "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"trl\.experimental\.online_dpo.*WatchCallback"):
        Recipe.from_training_arguments(OnlineDPOConfig("out", use_cpu=True), "gpt2")
    assert (
        Recipe.from_training_arguments(
            Seq2SeqTrainingArguments("out", use_cpu=True), "gpt2"
        ).batch_size
        == 8
    )


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("trainer", GENERATING)
def test_trl_config_of_rollouts(trainer):
    """What it says of completions, but not how long a prompt is; and back."""
    import trl

    kind = getattr(trl, arguments.CONFIGS[trainer])
    args = kind("out", use_cpu=True, gradient_accumulation_steps=2)
    recipe = Recipe.from_training_arguments(args, "gpt2", rollouts={"prompt_length": 100})
    usual = {"grpo": Rollouts(8, 100), "rloo": Rollouts(2, 100, beta=0.05)}
    assert (recipe.rollouts, recipe.seq_len) == (usual[trainer], 612)
    other = Rollouts(4, 100, 60, num_iterations=2, steps_per_generation=4, beta=0.25, top_k=50)
    for again in (recipe, recipe.replace(rollouts=other, batch_size=3)):
        args = again.training_arguments("unused")
        assert type(args) is kind and args.max_completion_length == again.seq_len - 100
        found = Recipe.from_training_arguments(args, "gpt2", rollouts={"prompt_length": 100})
        assert found == again
    args = kind("out", use_cpu=True, mask_truncated_completions=True)
    with pytest.raises(RecipeError, match="mask_truncated_completions"):
        Recipe.from_training_arguments(args, "gpt2")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("trainer", [name for name in arguments.CONFIGS if name not in GENERATING])
def test_trl_config(trainer):
    """Its defaults are others: autocast to bf16, checkpointing, 1,024 tokens; and back."""
    import trl

    SFTConfig = getattr(trl, arguments.CONFIGS[trainer])
    recipe = Recipe.from_training_arguments(SFTConfig("out", use_cpu=True), "gpt2")
    said = (
        recipe.trainer,
        recipe.precision,
        recipe.gradient_checkpointing,
        recipe.seq_len,
        recipe.batch_size,
    )
    assert said == (trainer, "bf16-mixed", True, 1024, 8)
    reference = {"precompute_ref_log_probs": True} if trainer in ("dpo", "kto") else {}
    changes = {"gradient_checkpointing": False, "precision": "fp32", "seq_len": 64, "batch_size": 3}
    packed = {"packing": True, "pad_to_multiple_of": 8} if trainer == "sft" else {}
    for again in (recipe, recipe.replace(**changes, **reference, **packed)):
        args = again.training_arguments("unused")
        assert type(args) is SFTConfig and args.max_length == again.seq_len
        assert Recipe.from_training_arguments(args, "gpt2") == again
    uncut = SFTConfig("out", max_length=None, use_cpu=True)
    assert Recipe.from_training_arguments(uncut, "gpt2", seq_len=64).seq_len == 64
    if trainer == "sft":
        joined = recipe.replace(padding_free=True, lengths=(9, 7), batch_size=2)
        args = joined.training_arguments("unused")
        assert args.max_length is None and args.padding_free
        assert Recipe.from_training_arguments(args, "gpt2", lengths=(9, 7), seq_len=1024) == joined


@pytest.mark.parametrize(
    "changes, fields, field",
    [
        ({"completion_only_loss": True}, {}, "completion_only_loss"),
        ({"assistant_only_loss": True}, {"completion_lengths": (9,)}, "completion_lengths"),
        ({"router_aux_loss_coef": 0.0}, {}, "router_aux_loss_coef"),
        ({"packing": True, "packing_strategy": "wrapped"}, {}, "packing_strategy"),
        (
            {"model_init_kwargs": {"dtype": "bfloat16"}},
            {"dtype": "float16"},
            "model_init_kwargs.dtype",
        ),
        ({"model_init_kwargs": {"device_map": "auto"}}, {}, "model_init_kwargs.device_map"),
        ({"model_init_kwargs": {"dtype": "auto"}}, {}, "dtype"),
        ({"max_length": None}, {}, "max_length"),
        ({}, {"trainer": "transformers"}, "trainer"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_trl_config_that_is_not_modelled(changes, fields, field):
    from trl import SFTConfig

    with pytest.raises(RecipeError) as caught:
        Recipe.from_training_arguments(SFTConfig("out", use_cpu=True, **changes), "gpt2", **fields)
    assert caught.value.field == field and "\n" not in str(caught.value)


def test_how_trl_loads_the_model_is_read():
    import torch
    from trl import SFTConfig

    for dtype in ("bfloat16", torch.bfloat16):
        args = SFTConfig(
            "out", use_cpu=True, model_init_kwargs={"dtype": dtype, "attn_implementation": "eager"}
        )
        found = Recipe.from_training_arguments(args, "gpt2")
        assert (found.dtype, found.attn_implementation) == ("bfloat16", "eager")


@pytest.mark.parametrize("trainer", ["dpo", "kto", "reward"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_what_the_others_of_trl_refuse(trainer):
    import trl

    kind, name = getattr(trl, arguments.CONFIGS[trainer]), arguments.CONFIGS[trainer]
    others = {
        "loss_type": "apo_zero_unpaired" if trainer == "kto" else "ipo",
        "f_divergence_type": "forward_kl",
    }
    for field, (usual, *_) in arguments.CLASSIFIED["refused_in"][name].items():
        args = kind("out", use_cpu=True)
        setattr(args, field, others.get(field, not usual))
        with pytest.raises(RecipeError) as caught:
            Recipe.from_training_arguments(args, "gpt2")
        assert caught.value.field == field and repr(usual) in str(caught.value)


def test_weight_decay_of_the_arguments_is_the_optimizers():
    """The Trainer gives it to the parameter groups; SGD then copies the gradients."""
    args = Recipe("gpt2", optim="sgd", optim_args="momentum=0.9").training_arguments(
        "unused", weight_decay=0.1
    )
    assert (
        Recipe.from_training_arguments(args, "gpt2").optim_args == "momentum=0.9,weight_decay=0.1"
    )
    args = Recipe("gpt2").training_arguments("unused", weight_decay=0.1)
    assert Recipe.from_training_arguments(args, "gpt2") == Recipe("gpt2")


@pytest.mark.parametrize(
    "config, field",
    [
        ({"activation_checkpointing": True}, "fsdp_config.activation_checkpointing"),
        ({"cpu_offload": True}, "fsdp_config.cpu_offload"),
        ({"reshard_after_forward": False}, "fsdp_config.reshard_after_forward"),
        ({"auto_wrap_policy": "NO_WRAP"}, "fsdp_config.auto_wrap_policy"),
        ({"version": 1}, "fsdp_config.version"),
    ],
)
def test_fsdp_that_is_not_the_recipes(config, field):
    args = Recipe("gpt2").training_arguments("unused")
    args.fsdp, args.fsdp_config = True, config
    with pytest.raises(RecipeError) as caught:
        Recipe.from_training_arguments(args, "gpt2", sharding=Sharding(3, 2))
    assert caught.value.field == field


def test_deepspeed_that_is_not_the_recipes():
    sharding = Sharding(2, 2, "deepspeed")
    args, config = Recipe("gpt2").training_arguments("unused"), deepspeed_config(sharding)
    args.deepspeed = {**config, "steps_per_print": 10}
    assert Recipe.from_training_arguments(args, "gpt2", sharding=sharding).sharding == sharding
    args.deepspeed = {
        **config,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000},
    }
    with pytest.raises(RecipeError, match=r"zero_optimization\.reduce_bucket_size"):
        Recipe.from_training_arguments(args, "gpt2", sharding=sharding)
    with pytest.raises(RecipeError, match="'deepspeed'"):
        Recipe.from_training_arguments(args, "gpt2", sharding=Sharding(3, 2))


def test_defaults_of_transformers_are_readable():
    """A user's own TrainingArguments, with nothing set, describe a recipe."""
    from transformers import TrainingArguments

    recipe = Recipe.from_training_arguments(
        TrainingArguments("out", use_cpu=True), "bert-large", seq_len=512
    )
    assert (recipe.batch_size, recipe.precision, recipe.optim) == (8, "fp32", "adamw_torch_fused")
    assert recipe.loop == Loop()


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16-true"}, {"dtype": "bfloat16", "lora": LoRA(r=4)}], ids=str
)
def test_weights_that_zero_init_would_make_in_fp32_are_refused(changes):
    """`deepspeed.zero.Init` reads the configuration's bf16 and fp16, and no dtype."""
    third = Sharding(3, 2, "deepspeed")
    with pytest.raises(
        RecipeError, match=r"makes fp32 of bfloat16 weights then: take 'bf16-mixed'"
    ):
        Recipe("gpt2", sharding=third, **changes).training_arguments()
    arguments = Recipe("gpt2", sharding=third).training_arguments()
    with pytest.raises(RecipeError, match=r"makes fp32 of bfloat16 weights then"):
        Recipe.from_training_arguments(arguments, "gpt2", seq_len=64, sharding=third, **changes)
