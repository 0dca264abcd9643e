"""Files of axolotl, LLaMA-Factory, TRL and ms-swift, as their own examples write them."""

import json

import pytest
import yaml
from typer.testing import CliRunner
from vramlab.base.errors import RecipeError
from vramlab.interfaces.axolotl_file import PACKED, RING, SEGMENTS
from vramlab.interfaces.cli import PLAN_OPTIONS, _asked, app
from vramlab.interfaces.configuration_file import REENTRANT, known_settings
from vramlab.interfaces.configurations import WITHOUT_IMAGES, question_of, read_configuration
from vramlab.interfaces.swift_file import ULYSSES
from vramlab.recipe.lora_modules import adapted
from vramlab.recipe.options import LoRA, Quantization, Sharding
from vramlab.recipe.recipe import Recipe

AXOLOTL = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "lora_mlp_kernel": False,
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": "paged_adamw_32bit",
    "bf16": "auto",
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "learning_rate": 0.0002,
}
IN_8_BITS = {"adapter": "lora", "load_in_4bit": None, "load_in_8bit": True}
OF_SWIFT = {"model": "Qwen/Qwen3-4B", "tuner_type": "lora", "max_length": 512}
FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "template": "qwen3_nothink",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "warmup_ratio": 0.1,
    "bf16": True,
}
TRL = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "dataset_name": "trl-lib/Capybara",
    "use_peft": True,
    "lora_r": 8,
    "lora_target_modules": "all-linear",
    "max_length": 1024,
    "per_device_train_batch_size": 2,
    "gradient_checkpointing": True,
    "bf16": True,
}


def written(folder, values, **changes):
    """Write a YAML; a setting that is changed to None is left out. Its path."""
    path = folder / "run.yml"
    kept = {name: value for name, value in (values | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(kept))
    return str(path)


def read(folder, values, given=None, **changes):
    return read_configuration(written(folder, values, **changes), given or {})


def test_axolotls_qlora(tmp_path):
    recipe, notes = read(tmp_path, AXOLOTL)
    assert recipe == Recipe(
        "NousResearch/Llama-3.2-1B",
        batch_size=2,
        seq_len=2048,
        precision="bf16-mixed",
        dtype="bfloat16",
        optim="paged_adamw_32bit",
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        attn_implementation="flash_attention_2",
        lora=LoRA(r=32, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear"),
        quantization=Quantization("nf4", double=True, prepare=False),
    )
    assert notes == [SEGMENTS, PACKED, REENTRANT, "2 settings move no memory of a step"]
    _, notes = read(tmp_path, AXOLOTL, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert REENTRANT not in notes


@pytest.mark.parametrize(
    "values, changes, reentrant",
    [
        (AXOLOTL, IN_8_BITS, True),
        (AXOLOTL, IN_8_BITS | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, False),
        (AXOLOTL, IN_8_BITS | {"sample_packing": None, "rl": "dpo"}, False),
        (FACTORY, {"quantization_bit": 8}, True),
        (FACTORY, {"quantization_bit": 8, "use_reentrant_gc": False}, False),
        (OF_SWIFT, {"quant_method": "bnb", "quant_bits": 8}, True),
        (TRL, {"load_in_8bit": True}, False),
    ],
)
def test_bases_in_8_bits_and_how_layers_are_checkpointed(values, changes, reentrant, tmp_path):
    """It is decisive for them alone, so that others are only told of it."""
    recipe, notes = read(tmp_path, values, **changes)
    assert recipe.quantization == Quantization("int8", prepare=False)
    assert recipe.use_reentrant == reentrant and REENTRANT not in notes


def test_axolotls_targets_in_one_text_are_pefts_regular_expression(tmp_path):
    said = {
        "lora_target_linear": None,
        "lora_target_modules": r"model.layers.[\d]+.mlp.(up|down)_proj",
    }
    recipe, _ = read(tmp_path, AXOLOTL, **said)
    names = {
        name.rpartition(".")[2]
        for name, *_ in recipe.shape.lora_targets(recipe.lora.target_modules)
    }
    assert names == {"up_proj", "down_proj"}


def test_axolotls_cut_cross_entropy_is_a_head_of_its_own(tmp_path):
    """Its plugin turns it on unless the file turns it off; Liger's other kernels go with it."""
    plugins = ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]
    recipe, _ = read(tmp_path, AXOLOTL, plugins=plugins)
    assert recipe.cut_cross_entropy and not recipe.use_liger_kernel
    assert not read(tmp_path, AXOLOTL, plugins=plugins, cut_cross_entropy=False)[
        0
    ].cut_cross_entropy
    parts = {"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}
    recipe, _ = read(tmp_path, AXOLOTL, plugins=[*plugins, "a.LigerPlugin"], **parts)
    assert recipe.cut_cross_entropy and recipe.use_liger_kernel


def test_axolotl_packs_experts_as_they_are_loaded(tmp_path):
    mixture = {"base_model": "Qwen/Qwen3-30B-A3B", "quantize_moe_experts": True}
    attention = {"lora_target_linear": None, "lora_target_modules": ["q_proj", "v_proj"]}
    recipe, _ = read(tmp_path, AXOLOTL, **mixture, **attention)
    assert recipe.quantization.experts == "loading"
    with pytest.raises(RecipeError, match="has no fused experts"):
        read(tmp_path, AXOLOTL, quantize_moe_experts=True)


def test_axolotls_full_training_keeps_weights_in_16_bits_under_autocast(tmp_path):
    """`resolve_dtype` loads in bfloat16, and TrainingArguments(bf16=True) makes autocast."""
    full = {"adapter": None, "load_in_4bit": None}
    recipe, _ = read(tmp_path, AXOLOTL, **full)
    assert (recipe.precision, recipe.dtype) == ("bf16-mixed", "bfloat16")
    recipe, _ = read(tmp_path, AXOLOTL, bf16="full", **full)
    assert recipe.precision == "bf16-true"
    cut = {"plugins": ["a.CutCrossEntropyPlugin"], "sample_packing": None}
    recipe, _ = read(tmp_path, AXOLOTL, attn_implementation="sdpa", **full, **cut)
    assert recipe.cut_cross_entropy, "for which embeddings and norms are cast back"
    with pytest.raises(RecipeError, match="keeps embeddings, head and norms in fp32"):
        read(tmp_path, AXOLOTL, attn_implementation="sdpa", sample_packing=None, **full)


def test_axolotls_own_kernels_are_said_to_be_left_out(tmp_path):
    """It turns them on where the file says nothing of them."""
    _, silent = read(tmp_path, AXOLOTL, lora_mlp_kernel=None)
    _, said = read(tmp_path, AXOLOTL, lora_mlp_kernel=True)
    assert any("fused LoRA kernels that axolotl turns on" in note for note in silent)
    assert any("lora_mlp_kernel" in note for note in said)


def test_axolotls_liger_is_the_trainers_or_refused(tmp_path):
    plugin = ["axolotl.integrations.liger.LigerPlugin"]
    parts = {
        "liger_rope": True,
        "liger_rms_norm": True,
        "liger_glu_activation": True,
        "liger_fused_linear_cross_entropy": True,
    }
    recipe, _ = read(tmp_path, AXOLOTL, plugins=plugin, **parts)
    assert recipe.use_liger_kernel
    unturned, notes = read(tmp_path, AXOLOTL, plugins=plugin, **parts | {"liger_rope": None})
    assert unturned == recipe and "liger_rope is off, which leaves the peak as it is" in notes
    parts["liger_fused_linear_cross_entropy"] = False
    with pytest.raises(RecipeError, match="here lacks liger_fused_linear_cross_entropy"):
        read(tmp_path, AXOLOTL, plugins=plugin, **parts)


def test_ranks_come_from_the_command_line(tmp_path):
    (tmp_path / "zero2.json").write_text(
        json.dumps(
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        )
    )
    sharded = {"adapter": None, "load_in_4bit": None, "deepspeed": "zero2.json"}
    with pytest.raises(RecipeError, match="say --world-size"):
        read(tmp_path, AXOLOTL, **sharded)
    recipe, _ = read(tmp_path, AXOLOTL, {"world_size": 4}, **sharded, optimizer="adamw_torch")
    assert recipe.sharding == Sharding(2, 4, "deepspeed", offload="optimizer")
    lost = sharded | {"deepspeed": "elsewhere/zero3.json"}
    with pytest.raises(RecipeError, match="not here, nor beside"):
        read(tmp_path, AXOLOTL, {"world_size": 4}, **lost)


def test_deepspeeds_file_may_lie_above_the_yaml(tmp_path):
    """As in the programs' own repositories, whose examples are started from the root."""
    folder = tmp_path / "examples" / "llama-3"
    folder.mkdir(parents=True)
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    sharded = {"adapter": None, "load_in_4bit": None, "deepspeed": "zero3.json"}
    recipe, _ = read(folder, AXOLOTL, {"world_size": 4}, **sharded, optimizer="adamw_torch")
    assert recipe.sharding == Sharding(3, 4, "deepspeed")


def test_what_a_program_would_take_by_itself_is_taken(tmp_path):
    """Rows of embeddings that are a multiple of 32, and transformers' own kernel of experts."""
    said = {"resize_token_embeddings_to_32x": True, "experts_implementation": "grouped_mm"}
    assert read(tmp_path, AXOLOTL, **said) == read(tmp_path, AXOLOTL)


def test_an_older_name_of_fsdps_settings_counts(tmp_path):
    """axolotl and transformers take the prefix off; most of axolotl's own examples have it."""
    full = {"adapter": None, "load_in_4bit": None, "gradient_checkpointing": None}
    full["optimizer"] = "adamw_torch"
    names = {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True}
    recipe, _ = read(tmp_path, AXOLOTL, {"world_size": 4}, fsdp_config=names, **full)
    assert recipe.sharding == Sharding(3, 4, "fsdp", offload="parameters")
    assert recipe.gradient_checkpointing
    names = {"fsdp_reshard_after_forward": False}
    recipe, _ = read(tmp_path, AXOLOTL, {"world_size": 4}, fsdp_config=names, **full)
    assert recipe.sharding == Sharding(2, 4, "fsdp")


def test_the_trainers_own_name_of_fsdps_offloading_counts(tmp_path):
    says = {"fsdp": "full_shard", "fsdp_config": {"cpu_offload": True}}
    recipe, _ = read(tmp_path, TRL, {"world_size": 2}, gradient_checkpointing=None, **says)
    assert recipe.sharding == Sharding(3, 2, "fsdp", offload="parameters")


def test_many_ranks_without_an_engine_hold_copies(tmp_path):
    recipe, _ = read(tmp_path, AXOLOTL, {"world_size": 2})
    assert recipe.sharding == Sharding(0, 2, "ddp")


def test_llama_factorys_lora(tmp_path):
    recipe, notes = read(tmp_path, FACTORY)
    assert recipe == Recipe(
        "Qwen/Qwen3-4B-Instruct-2507",
        seq_len=2048,
        precision="bf16-mixed",
        dtype="bfloat16",
        optim="adamw_torch_fused",
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        lora=LoRA(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    assert any("re-entrant" in note for note in notes)
    assert not any("no setting" in note for note in notes)


def test_llama_factorys_full_training_has_fp32_weights(tmp_path):
    """`init_adapter` casts what is trained to float32, unless pure_bf16 is said."""
    recipe, _ = read(tmp_path, FACTORY, finetuning_type="full")
    assert (recipe.precision, recipe.weights_dtype) == ("bf16-mixed", "float32")
    recipe, _ = read(tmp_path, FACTORY, finetuning_type="full", bf16=None, pure_bf16=True)
    assert recipe.precision == "bf16-true"
    recipe, _ = read(tmp_path, FACTORY, quantization_bit=4)
    assert recipe.quantization == Quantization("nf4", double=True, prepare=False)


def test_trls_sft(tmp_path):
    recipe, _ = read(tmp_path, TRL)
    assert (recipe.trainer, recipe.seq_len, recipe.batch_size) == ("sft", 1024, 2)
    assert recipe.lora.r == 8
    assert recipe.lora.target_modules == "all-linear"


@pytest.mark.parametrize(
    ("values", "changes", "said"),
    [
        (AXOLOTL, {"unfrozen_parameters": ["^lm_head"]}, "unfrozen_parameters"),
        (
            AXOLOTL,
            {"context_parallel_size": 2},
            "context_parallel_size.*over FSDP2: say fsdp_config",
        ),
        (AXOLOTL, {"tensor_parallel_size": 2}, "or say --engine tensor for that alone"),
        (AXOLOTL, {"attn_implementation": "sdpa"}, "a mask of tokens × tokens"),
        (AXOLOTL, {"plugins": ["a.KDPlugin"]}, "leave the others out"),
        (AXOLOTL, IN_8_BITS | {"quantize_moe_experts": True}, "packs linear layers alone"),
        (AXOLOTL, {"rl": "orpo"}, "recipes train as dpo"),
        (AXOLOTL, {"processor_type": "AutoProcessor"}, "--images 1 --image-size 1024x768 say"),
        (AXOLOTL, {"gradient_checkpointing": "offload"}, "simulate.*--activation-offloading"),
        (AXOLOTL, {"activation_offloading": True}, "activation_offloading.*the nearest"),
        (AXOLOTL, {"experts_implementation": "batched_mm"}, "experts_implementation"),
        (
            AXOLOTL,
            {"base_model": "gpt2", "resize_token_embeddings_to_32x": True},
            "the model's 50257 rows",
        ),
        (AXOLOTL, {"attn_implementation": None, "attention": "flash"}, "say attn_implementation"),
        (FACTORY, {"stage": "dpo"}, "take sft or pt"),
        (FACTORY, {"finetuning_type": "freeze"}, "take full or lora"),
        (FACTORY, {"use_galore": True}, "use_galore"),
        (
            AXOLOTL,
            {"flash_attn_fuse_mlp": True},
            r"run.yml, line \d+: flash_attn_fuse_mlp' is True.*without it the rest is read",
        ),
        (FACTORY, {"do_train": None}, "nothing is trained"),
        (FACTORY, {"pipeline_model_parallel_size": 4}, "Megatron's training"),
        (FACTORY, {"quantization_bit": 3}, "in 4 and 8 bits"),
        ({"compute_environment": "LOCAL_MACHINE"}, {}, "accelerate's file"),
        ({"model": {"_component_": "torchtune.models.llama3.llama3_8b"}}, {}, "torchtune"),
        ({"lr": 1}, {}, "a YAML must be axolotl's"),
    ],
)
def test_what_no_recipe_has_is_refused_by_its_name(values, changes, said, tmp_path):
    with pytest.raises(RecipeError, match=said):
        read(tmp_path, values, **changes)


@pytest.mark.parametrize("values", [AXOLOTL | {"use_ray": True}, FACTORY])
def test_workers_of_ray_are_ranks(values, tmp_path):
    recipe, _ = read(tmp_path, values, ray_num_workers=4)
    assert (recipe.sharding.engine, recipe.sharding.world_size) == ("ddp", 4)


@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_torch_4bit", "ao_adamw_fp8"])
def test_axolotls_optimizers_of_torchao(optim, tmp_path):
    recipe, _ = read(tmp_path, AXOLOTL, optimizer=optim)
    assert recipe.optim == optim


def test_a_parallel_size_of_one_is_none(tmp_path):
    recipe, _ = read(tmp_path, AXOLOTL, context_parallel_size=1, tensor_parallel_size=1)
    assert recipe.sharding is None


def test_axolotls_mesh_is_copies_and_rings_over_fsdp(tmp_path):
    """Its sizes say how many ranks there are; packed rows are one sample to the ring."""
    changes = {"adapter": None, "load_in_4bit": None, "optimizer": "adamw_torch_fused"}
    changes |= {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    sizes = {"dp_shard_size": 2, "context_parallel_size": 4, "dp_replicate_size": 2}
    recipe, notes = read(tmp_path, AXOLOTL, **changes, **sizes)
    assert recipe.sharding == Sharding(3, 16, "fsdp", cp_size=4, dp_replicate_size=2)
    assert recipe.attn_implementation == "sdpa" and RING in notes
    copies = {"dp_shard_size": 2, "dp_replicate_size": 2}
    recipe, notes = read(tmp_path, AXOLOTL, **changes, **copies)
    assert recipe.sharding == Sharding(3, 4, "fsdp", dp_replicate_size=2)
    assert recipe.attn_implementation == "flash_attention_2" and RING not in notes
    del sizes["dp_shard_size"]
    recipe, _ = read(tmp_path, AXOLOTL, {"world_size": 32}, **changes, **sizes)
    assert recipe.sharding.world_size == 32


def test_plan_says_that_it_leaves_a_files_mesh_out(tmp_path, capsys):
    ring = {"context_parallel_size": 2, "fsdp_version": 2}
    ring |= {"fsdp_config": {"reshard_after_forward": True}}
    changes = {"adapter": None, "load_in_4bit": None, "optimizer": "adamw_torch_fused"}
    for sizes, is_mesh in (({}, False), (ring, True)):
        question_of(written(tmp_path, AXOLOTL | changes | sizes), {"gpus": 2})
        assert ("plan tries no meshes of ranks" in capsys.readouterr().err) is is_mesh


def test_ms_swifts_sequence_parallel_is_ulysses_over_deepspeed(tmp_path):
    recipe, notes = read_shell(tmp_path, SWIFT.rstrip() + " --sequence_parallel_size 2")
    assert recipe.sharding == Sharding(2, 2, "deepspeed", sp_size=2) and ULYSSES in notes


def test_options_count_before_the_file(tmp_path):
    recipe, _ = read(tmp_path, AXOLOTL, {"batch_size": 8, "lora_r": 4})
    assert recipe.batch_size == 8
    assert recipe.lora.r == 4
    assert recipe.lora.lora_alpha == 16


def test_no_setting_has_two_fates():
    """And each that the reader takes is one of the program."""
    for program, known in known_settings().items():
        groups = [known["mapped"], known["neutral"]]
        groups += [*known["refused"].values(), *known["unmodelled"].values()]
        names = [name for group in groups for name in group]
        assert len(names) == len(set(names)), program


def test_a_name_that_is_not_known_is_said(tmp_path):
    _, notes = read(tmp_path, AXOLOTL, gptq_groupsize=128)
    assert notes[-1] == "no settings of axolotl 0.18.0: gptq_groupsize"


def test_plan_takes_model_length_batch_and_method(tmp_path):
    asked = question_of(written(tmp_path, AXOLOTL), {"seq_len": 512})
    assert (asked["method"], asked["global_batch"], asked["seq_len"]) == ("qlora", 8, 512)
    assert asked["model"] == "NousResearch/Llama-3.2-1B"


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_the_command_line_reads_it_and_says_what_it_left_out(command, tmp_path):
    answer = CliRunner().invoke(app, [command, written(tmp_path, AXOLOTL)])
    assert answer.exit_code == 0, answer.output
    assert "settings move no memory" in answer.output
    assert "LoRA r=32 · nf4 double" in answer.output


def test_a_kernel_that_the_card_lacks_has_the_files_name(tmp_path):
    path = written(tmp_path, AXOLOTL, attn_implementation=None, flash_attention=True)
    answer = CliRunner().invoke(app, ["explain", path, "--gpu", "T4"])
    assert answer.exit_code == 2 and ": flash_attention is True, but flash-attn 2" in answer.stderr
    assert f"take 'sdpa', or `vramlab plan {path}` with --gpu chooses" in answer.stderr


def test_a_file_that_is_none_is_one_sentence(tmp_path):
    path = tmp_path / "bad.yml"
    path.write_text("a: [1, 2")
    answer = CliRunner().invoke(app, ["predict", str(path)])
    assert answer.exit_code == 2
    assert "it is no YAML that can be read" in answer.output


def test_a_part_said_at_its_default_counts_before_the_file(tmp_path):
    """The file has rank 32, and 8 is what an adapter has where nobody says a rank."""
    given = {option: None for option, (place, _) in PLAN_OPTIONS.items() if len(place) > 1}
    asked = _asked(written(tmp_path, AXOLOTL), given | {"lora_r": LoRA().r})
    assert asked["lora"].r == LoRA().r == 8
    assert asked["lora"].target_modules == "all-linear"


SWIFT = """# one card
ranks=2
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$ranks \\
swift sft \\
    --model Qwen/Qwen2.5-1.5B \\
    --tuner_type lora \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' \\
              'swift/self-cognition' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps $(expr 16 / $ranks) \\
    --lora_rank 16 \\
    --target_modules q_proj v_proj \\
    --max_length 2048 \\
    --attn_impl flash_attn \\
    --system 'You are a helpful assistant.' \\
    --deepspeed zero2
"""


def read_shell(folder, text=SWIFT, given=None):
    path = folder / "train.sh"
    path.write_text(text)
    return read_configuration(str(path), given or {})


def test_ms_swifts_shell_script(tmp_path):
    recipe, notes = read_shell(tmp_path)
    assert recipe == Recipe(
        "Qwen/Qwen2.5-1.5B",
        batch_size=2,
        seq_len=2048,
        precision="bf16-mixed",
        optim="adamw_torch_fused",
        dtype="bfloat16",
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        attn_implementation="flash_attention_2",
        lora=LoRA(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=("q_proj", "v_proj")),
        sharding=Sharding(stage=2, world_size=2, engine="deepspeed"),
    )
    assert any("re-entrant" in note for note in notes)
    assert any("keeps the logits of the labelled ones alone" in note for note in notes)


def test_ms_swifts_ranks_are_those_of_all_machines(tmp_path):
    two = SWIFT.replace("NPROC_PER_NODE", "NNODES=2 NPROC_PER_NODE")
    recipe, _ = read_shell(tmp_path, two.replace("16 / $ranks", "16 / $ranks / 2"))
    assert recipe.sharding.world_size == 4 and recipe.gradient_accumulation_steps == 4
    with pytest.raises(RecipeError, match="say --world-size"):
        read_shell(tmp_path, two.replace("NNODES=2", "NNODES=$WORLD_SIZE"))


def test_ms_swifts_yaml_and_what_it_takes_by_itself(tmp_path):
    values = {"model": "Qwen/Qwen3-8B", "tuner_type": "lora", "max_length": 1024}
    values |= {"quant_method": "bnb", "quant_bits": 4, "dataset": ["a", "b"]}
    recipe, notes = read(tmp_path, values)
    assert recipe.lora == LoRA(r=8, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    assert recipe.quantization == Quantization("nf4", double=True, prepare=False)
    assert recipe.batch_size == 1 and recipe.gradient_accumulation_steps == 16
    assert recipe.gradient_checkpointing and recipe.precision == "bf16-mixed"
    assert "torch_dtype is not said: taken as bfloat16" in notes
    longer, _ = read(tmp_path, values, {"seq_len": 2048}, max_length=None)
    assert longer.seq_len == 2048


@pytest.mark.parametrize(
    "change, said",
    [
        (("--max_length 2048", ""), "train.sh: max_length"),
        (("swift sft", "swift rlhf"), "its losses of preferences"),
        (("swift sft", "megatron sft"), "must have one swift sft, pt or rlhf: it has 0"),
        (("--deepspeed zero2", "--deepspeed zero2\nswift sft --model gpt2"), "it has 2"),
        (("--tuner_type lora", "--tuner_type vera"), "recipes read lora and full of it"),
        (("--deepspeed zero2", "--sequence_parallel_size 2"), "over DeepSpeed: say deepspeed"),
        (("--deepspeed zero2", "--use_galore true"), "its optimizer is none of a recipe's"),
        (("'You are", '"You are'), "its command cannot be read (No closing quotation)"),
    ],
)
def test_a_script_that_cannot_be_taken_is_refused_in_a_sentence(tmp_path, change, said):
    with pytest.raises(RecipeError) as error:
        read_shell(tmp_path, SWIFT.replace(*change))
    assert said in str(error.value)


def alone() -> str:
    """The script with one process and its one card."""
    script = SWIFT.replace(" \\\n    --deepspeed zero2", "").replace("NPROC_PER_NODE=$ranks", "")
    return script.replace("VISIBLE_DEVICES=0,1", "VISIBLE_DEVICES=0")


def test_a_process_with_several_cards_divides_its_model(tmp_path):
    """`is_mp` of ms-swift; DeepSpeed and FSDP do not."""
    script = alone().replace("VISIBLE_DEVICES=0", "VISIBLE_DEVICES=0,1")
    with pytest.raises(RecipeError, match="divides its model among several"):
        read_shell(tmp_path, script)
    with pytest.raises(RecipeError, match="it is read as fsdp2 alone"):
        read_shell(tmp_path, alone().rstrip() + " --fsdp offload/fsdp2.json")


def test_ms_swifts_checkpointing_is_as_it_is_asked(tmp_path):
    _, notes = read_shell(tmp_path, alone())
    assert REENTRANT in notes
    asked = alone().rstrip() + """ --gradient_checkpointing_kwargs '{"use_reentrant": false}'"""
    _, notes = read_shell(tmp_path, asked)
    assert REENTRANT not in notes


def test_a_model_that_reads_images_is_said_to_be_without(tmp_path):
    """Its adapters are the language model's, as both programs freeze the rest by themselves."""
    script = (
        alone().replace("2.5-1.5B", "2.5-VL-7B-Instruct").replace("q_proj v_proj", "all-linear")
    )
    recipe, notes = read_shell(tmp_path, script)
    assert WITHOUT_IMAGES in notes
    asked, _ = read(tmp_path, FACTORY, model_name_or_path="Qwen/Qwen2.5-VL-7B-Instruct")
    for one in (recipe, asked):
        names = [name for name, *_ in adapted(one.shape, one.lora)]
        assert len(names) == 7 * 28 and not any("visual" in name for name in names)
    whole, _ = read_shell(tmp_path, script.rstrip() + " --freeze_vit false")
    assert whole.lora.target_modules == "all-linear"


def test_explain_and_predict_take_a_shell_script(tmp_path):
    read_shell(tmp_path, alone())
    path = str(tmp_path / "train.sh")
    answer = CliRunner().invoke(app, ["predict", path, "--json"])
    assert answer.exit_code == 0 and "Qwen/Qwen2.5-1.5B" in answer.stdout, answer.output
    told = CliRunner().invoke(app, ["explain", path, "--gpu", "RTX 4090"])
    assert "predicted: " in told.stdout or "simulated: " in told.stdout, told.output
