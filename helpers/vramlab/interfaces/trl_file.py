"""What LLaMA-Factory and TRL's command line make of their YAML: a recipe's fields, and arguments.

The places named are in their sources, `data/configurations.json` says of which version.
"""

from collections.abc import Mapping
from typing import Any

from ..base.errors import RecipeError
from ..recipe.argument_classes import COMMON, TRAINERS, class_of
from .configuration_file import (
    IN_INT8,
    RUN_IT,
    TRUE,
    Configuration,
    names_in,
    note_others,
    take_ranks,
    take_reentrant,
    take_sharding,
)

# LLaMA-Factory's words to transformers' names of kernels.
FLASH_ATTN = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
LORA_OF_TRL = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_dora": "use_dora",
}
LISTS = ("target_modules", "target_parameters", "modules_to_save")
OF_TRL = ("model_name_or_path", "dtype", "attn_implementation", "use_peft", *LORA_OF_TRL)
QUANTIZATION_OF_TRL = (
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "use_bnb_nested_quant",
)
# `trl/scripts/utils.py` and `trl/trainer/model_config.py`: what moves no memory of a step
NEUTRAL_OF_TRL = (
    "model_revision",
    "trust_remote_code",
    "lora_task_type",
    "use_rslora",
    "bnb_4bit_quant_storage",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_streaming",
    "datasets",
    "ignore_bias_buffers",
    "num_processes",
)


def read_llama_factory(configuration: Configuration) -> None:
    """Fill in what `model/adapter.py` and `hparams/parser.py` make of a configuration."""
    get = configuration.get
    configuration.model = get("model_name_or_path")
    configuration.kind = "TrainingArguments"
    arguments = {}
    for name in COMMON.intersection(configuration.values):
        arguments[name] = configuration.values[name]
    configuration.arguments = arguments
    if not get("do_train"):
        rest = "without it nothing is trained: the file is for chat, export or evaluation"
        raise configuration.refuse("do_train", rest)
    stage = get("stage", "sft")
    if stage not in ("sft", "pt"):
        rest = "its losses of preferences and rewards are its own, which no recipe models: "
        raise configuration.refuse("stage", f"{rest}take sft or pt, {RUN_IT}")
    fields = configuration.fields
    fields["seq_len"] = get("cutoff_len", 2048)
    fields["use_liger_kernel"] = bool(get("enable_liger_kernel"))
    fields["pad_to_multiple_of"] = None
    _take_attention(configuration)
    # LLaMA-Factory says it the other way round, and checkpoints unless told not to.
    arguments["gradient_checkpointing"] = not get("disable_gradient_checkpointing", False)
    arguments.pop("gradient_checkpointing_kwargs", None)
    take_sharding(configuration)
    # `train/tuner.py`: Ray's workers are processes of one training, where it is started so
    take_ranks(configuration, "ray_num_workers")
    _take_method(configuration)
    if arguments["gradient_checkpointing"] and get("use_reentrant_gc", True):
        take_reentrant(configuration)
    note_others(configuration, COMMON)
    configuration.notes.append("each sample is taken as long as cutoff_len")


def _take_attention(configuration: Configuration) -> None:
    kernel = configuration.get("flash_attn", "auto")
    if kernel != "auto":
        if kernel not in FLASH_ATTN:
            known = ", ".join(("auto", *FLASH_ATTN))
            raise configuration.refuse("flash_attn", f"recipes know {known}")
        configuration.fields["attn_implementation"] = FLASH_ATTN[kernel]
    if configuration.get("neat_packing") and kernel != "fa2":
        rest = "it makes a mask of tokens × tokens without fa2, which no recipe models: take fa2"
        raise configuration.refuse("neat_packing", rest)


def _take_method(configuration: Configuration) -> None:
    """Take what is trained, and in which format (`init_adapter`)."""
    get = configuration.get
    fields = configuration.fields
    # The format that frozen weights are loaded in.
    half = None
    if get("bf16") or get("pure_bf16"):
        half = "bfloat16"
    elif get("fp16"):
        half = "float16"
    method = get("finetuning_type", "lora")
    if method not in ("lora", "full"):
        rest = "recipes train all weights or LoRA: take full or lora, "
        raise configuration.refuse("finetuning_type", rest + RUN_IT)
    if get("pure_bf16"):
        if method == "lora":
            rest = "with lora its adapters are in 16 bits, which no recipe has: leave it out"
            raise configuration.refuse("pure_bf16", rest)
        fields["precision"] = TRUE["bfloat16"]
        assert configuration.arguments is not None
        # Autocast off: weights and arithmetic have one format.
        configuration.arguments |= {"bf16": False, "fp16": False}
    if method == "full":
        return
    # `find_all_linear_modules` leaves out what `get_forbidden_modules` names
    frozen = (get("freeze_vision_tower", True), get("freeze_multi_modal_projector", True))
    configuration.adapts_language_alone = all(frozen)
    rank = get("lora_rank", 8)
    targets = names_in(get("lora_target", "all"))
    fields["lora"] = {
        "r": rank,
        # Its parser's default: twice the rank.
        "lora_alpha": get("lora_alpha", 2 * rank),
        "lora_dropout": get("lora_dropout", 0.0),
        "target_modules": "all-linear" if targets == ["all"] else targets,
        "modules_to_save": names_in(get("additional_target")),
        "use_dora": bool(get("use_dora")),
    }
    # Only adapters are trained, so the base may stay in 16 bits; a full training loads fp32.
    fields["dtype"] = half
    bits = get("quantization_bit")
    if bits is None:
        return
    is_bitsandbytes = get("quantization_method", "bnb") in ("bnb", "bitsandbytes")
    if bits not in (4, 8) or not is_bitsandbytes:
        rest = "recipes have bitsandbytes' bases in 4 and 8 bits"
        raise configuration.refuse("quantization_bit", rest)
    if bits == 8:
        fields["quantization"] = dict(IN_INT8)
        return
    fields["quantization"] = {
        "quant_type": get("quantization_type", "nf4"),
        "double": get("double_quantization", True),
        "prepare": False,
    }


def read_trl(configuration: Configuration) -> None:
    """Fill in what TRL's scripts make of a file for `trl sft --config` and its like.

    `trl/trainer/model_config.py` has the fields, `trl/trainer/utils.py` what is made of them.
    """
    get = configuration.get
    configuration.model = get("model_name_or_path")
    arguments = {}
    for name, value in configuration.values.items():
        # All other settings are fields of the Trainer's own configuration class.
        is_own = name in OF_TRL or name in QUANTIZATION_OF_TRL or name in NEUTRAL_OF_TRL
        if not is_own:
            arguments[name] = value
    configuration.arguments = arguments
    fields = configuration.fields
    fields["trainer"] = _trainer_of(configuration, arguments)
    # The newer name counts before the one that it replaced.
    dtype = get("dtype", get("torch_dtype"))
    if dtype not in (None, "auto"):
        fields["dtype"] = dtype
    if get("attn_implementation"):
        fields["attn_implementation"] = get("attn_implementation")
    if get("use_peft"):
        fields["lora"] = _lora_of_trl(configuration)
    if get("load_in_8bit") and not get("load_in_4bit"):
        fields["quantization"] = dict(IN_INT8)
    if get("load_in_4bit"):
        fields["quantization"] = {
            "quant_type": get("bnb_4bit_quant_type", "nf4"),
            "double": get("use_bnb_nested_quant", False),
            "prepare": False,
        }
    take_sharding(configuration)


def _lora_of_trl(configuration: Configuration) -> dict[str, Any]:
    """Return the adapter that `get_peft_config` makes."""
    # Defaults of TRL's ModelConfig, which are not PEFT's.
    lora: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    for name, its in LORA_OF_TRL.items():
        value = configuration.get(name)
        if value is not None:
            lora[its] = names_in(value) if its in LISTS else value
    if lora.get("target_modules") == ["all-linear"]:
        lora["target_modules"] = "all-linear"
    return lora


def _trainer_of(configuration: Configuration, arguments: Mapping[str, Any]) -> str:
    """Return the trainer whose arguments a file has: what is asked, else sft or another."""
    if configuration.asked is not None:
        return TRAINERS[class_of(arguments, configuration.asked)]
    try:
        # sft first, as most files are its; fields that SFTConfig lacks tell another class.
        kind = class_of(arguments, "sft")
    except RecipeError:
        kind = class_of(arguments)
    configuration.notes.append(f"taken as {kind}'s: --trainer says another")
    return TRAINERS[kind]
