"""What ms-swift makes of its YAML, or of the shell script that calls it: a recipe's fields.

The places named are in its source, `data/configurations.json` says of which version.
"""

import math
import re
import shlex
from pathlib import Path
from typing import Any

from ..base.errors import RecipeError
from ..base.files import read_text
from ..recipe.argument_classes import COMMON
from .configuration_file import (
    IN_INT8,
    RUN_IT,
    Configuration,
    names_in,
    note_others,
    take_ranks,
    take_reentrant,
    take_sharding,
)

COMMANDS = ("sft", "pt", "rlhf")
ATTENTION = {"flash_attn": "flash_attention_2"}  # else transformers' own names
# `swift/config/zero….json`
ZERO: dict[str, dict[str, Any]] = {
    f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)
}
_IN_HOST = {"device": "cpu"}
ZERO["zero2_offload"] = {"zero_optimization": {"stage": 2, "offload_optimizer": _IN_HOST}}
ZERO["zero3_offload"] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": _IN_HOST, "offload_param": _IN_HOST}
}
# `swift/config/fsdp2.json`
FSDP = {"reshard_after_forward": True, "activation_checkpointing": True}
ULYSSES = (
    "not modelled: ms-swift's own Ulysses; these figures are of DeepSpeed's, whose ranks hold as "
    "many tokens and heads"
)
GLOBAL_BATCH = 16  # `TrainArgumentsMixin.__post_init__`, where no accumulation is said
DEFAULTS = {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05}


def read_script(path: Path) -> dict[str, Any]:
    """Return the settings of the one `swift sft`, `swift pt` or `swift rlhf` in a shell script.

    Variables that the script sets to plain text are put in place. Values are read as YAML has them.

    Raises:
        RecipeError: there is no such command, more than one, or it cannot be read.
    """
    # A command over several lines has a backslash at the end of each.
    text = read_text(path).replace("\\\n", " ")
    # Also those that stand before the command, as in NPROC_PER_NODE=4 swift sft.
    variables = dict(re.findall(r"(?:^|\s)(?:export\s+)?(\w+)=([\w./:,${}-]+)", text))
    commands = []
    for line in text.splitlines():
        # Nothing after a # counts, and `swift` may follow a launcher's words.
        match = re.match(r"[^#]*?\bswift\s+(\w+)\s(.*)", line)
        if match and match[1] in COMMANDS:
            commands.append(match.groups())
    if len(commands) != 1:
        rest = f"a shell script must have one swift sft, pt or rlhf: it has {len(commands)}"
        raise RecipeError("model", str(path), rest)
    ((command, words),) = commands
    settings: dict[str, Any] = {"command": command}
    # ms-swift starts so many processes by torchrun on each machine where the variable is set.
    ranks = _put(variables.get("NPROC_PER_NODE", ""), variables)
    machines = _put(variables.get("NNODES", "1"), variables)
    devices = 1 + variables.get("CUDA_VISIBLE_DEVICES", "").count(",")
    settings["cuda_visible_devices"] = devices
    if ranks.isdigit() and machines.isdigit():
        settings["nproc_per_node"] = int(ranks) * int(machines)
        settings["cuda_visible_devices"] = devices * int(machines)
    try:
        said = shlex.split(_put(words, variables), comments=True)
    except ValueError as error:
        rest = f"its command cannot be read ({error})"
        raise RecipeError("model", str(path), rest) from error
    return settings | _said(said)


def _said(words: list[str]) -> dict[str, Any]:
    """Return options with their values: True for none, a list for several."""
    values: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            values[name] = []
        elif name:
            values[name].append(_value(word))
    settings: dict[str, Any] = {}
    for name, several in values.items():
        # An option without a value is a switch.
        settings[name] = several if len(several) > 1 else next(iter(several), True)
    return settings


def _value(word: str) -> Any:
    """Return a word as YAML reads it; what is none stays text."""
    import yaml

    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


def _put(text: str, variables: dict[str, str]) -> str:
    """Return `text` with the script's variables in place, and `$(expr A / B / C)` worked out."""

    def value(found: re.Match) -> str:
        # A variable that the script does not set stays as it is written, and is then refused by
        # whoever reads it.
        return variables.get(found[1] or found[2], found[0])

    def quotient(found: re.Match) -> str:
        first, *rest = map(int, found[1].split(" / "))
        return str(first // max(1, math.prod(rest)))  # the same as one division after the other

    for _ in range(2):  # a variable may stand for another
        text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)
    return re.sub(r"\$\(expr (\d+(?: / \d+)+)\)", quotient, text)


def read_swift(configuration: Configuration) -> None:
    """Fill in what `SftArguments` and `prepare_adapter` make of a configuration."""
    get = configuration.get
    if get("command", "sft") == "rlhf":
        rest = "its losses of preferences and rewards are its own, which no recipe models: "
        raise configuration.refuse("command", f"{rest}take sft or pt, {RUN_IT}")
    configuration.model = str(get("model"))
    configuration.kind = "TrainingArguments"
    fields = configuration.fields
    arguments = {}
    # What ms-swift calls as transformers does goes to the Trainer's own reader.
    for name in COMMON.intersection(configuration.values):
        arguments[name] = configuration.values[name]
    configuration.arguments = arguments
    _take_format(configuration, arguments)
    _take_batch(configuration, arguments)
    kernel = get("attn_impl")
    if kernel:
        fields["attn_implementation"] = ATTENTION.get(kernel, kernel)
    # On by default in ms-swift, off in transformers.
    arguments["gradient_checkpointing"] = get("gradient_checkpointing", True)
    arguments.pop("gradient_checkpointing_kwargs", None)
    _take_ranks(configuration)
    _take_method(configuration)
    # `_fix_gradient_checkpointing`
    usual = {"use_reentrant": fields.get("sharding", {}).get("engine") != "ddp"}
    said = get("gradient_checkpointing_kwargs", {})
    if arguments["gradient_checkpointing"] and (usual | said)["use_reentrant"]:
        take_reentrant(configuration)
    note_others(configuration, COMMON)
    configuration.notes.append(
        "each sample is taken as long as max_length, and each of its tokens as one with a label: "
        "ms-swift keeps the logits of the labelled ones alone"
    )


def _take_format(configuration: Configuration, arguments: dict[str, Any]) -> None:
    """Take the weights' dtype, and the autocast that it implies (`_init_mixed_precision`)."""
    dtype = configuration.get("torch_dtype")
    if dtype is None:
        dtype = "bfloat16"
        configuration.notes.append("torch_dtype is not said: taken as bfloat16")
    configuration.fields["dtype"] = dtype
    is_bf16 = dtype == "bfloat16"
    # The weights' dtype decides the autocast unless the file says one of both.
    arguments["bf16"] = configuration.get("bf16", is_bf16)
    arguments["fp16"] = configuration.get("fp16", not is_bf16)


def _take_batch(configuration: Configuration, arguments: dict[str, Any]) -> None:
    get = configuration.get
    if get("max_length") is None:
        if configuration.asked_length is None:
            rest = "without it the model's longest counts, hundreds of thousands of tokens: say "
            raise configuration.refuse("max_length", rest + "--seq-len")
    else:
        configuration.fields["seq_len"] = get("max_length")
    configuration.fields["pad_to_multiple_of"] = None
    batch = get("per_device_train_batch_size", 1)
    arguments["per_device_train_batch_size"] = batch
    if get("gradient_accumulation_steps") is None:
        ranks = get("nproc_per_node", 1)
        arguments["gradient_accumulation_steps"] = max(1, math.ceil(GLOBAL_BATCH / batch / ranks))


def _take_ranks(configuration: Configuration) -> None:
    deepspeed = configuration.get("deepspeed")
    # A short name for one of the files that ms-swift brings along.
    if isinstance(deepspeed, str) and deepspeed in ZERO:
        configuration.values["deepspeed"] = ZERO[deepspeed]
    if configuration.get("fsdp") == "fsdp2":
        configuration.values |= {"fsdp": "full_shard auto_wrap", "fsdp_config": FSDP}
    elif configuration.get("fsdp"):
        # a path from where ms-swift is started, or JSON itself (`_init_fsdp`)
        rest = "it is read as fsdp2 alone: what the JSON says is more than a recipe has"
        raise configuration.refuse("fsdp", rest)
    take_sharding(configuration)
    ranks = configuration.get("nproc_per_node", 1)
    devices = configuration.get("cuda_visible_devices", 1)
    # `is_mp`: each process divides its model among its devices; DeepSpeed and FSDP do not
    if devices >= 2 * ranks and "sharding" not in configuration.fields:
        rest = (
            "a process divides its model among several, which no recipe models: as many as "
            "NPROC_PER_NODE are read"
        )
        raise configuration.refuse("cuda_visible_devices", rest)
    take_ranks(configuration, "nproc_per_node")
    together = configuration.get("sequence_parallel_size") or 1
    if together > 1:
        sharding = configuration.fields.get("sharding", {})
        if sharding.get("engine") != "deepspeed":
            rest = f"it is modelled over DeepSpeed: say deepspeed, {RUN_IT}"
            raise configuration.refuse("sequence_parallel_size", rest)
        sharding["sp_size"] = together
        configuration.notes.append(ULYSSES)


def _take_method(configuration: Configuration) -> None:
    """Take what is trained, and in which format (`prepare_adapter`, `QuantizeArguments`)."""
    get = configuration.get
    method = get("tuner_type", get("train_type", "lora"))
    if method not in ("lora", "full"):
        raise configuration.refuse("tuner_type", f"recipes read lora and full of it, {RUN_IT}")
    if method == "full":
        return
    # `get_multimodal_target_regex`
    frozen = (get("freeze_vit", True), get("freeze_aligner", True))
    configuration.adapts_language_alone = all(frozen)
    lora: dict[str, Any] = {}
    for name, usual in DEFAULTS.items():
        # PEFT's own names but for the rank's.
        lora["r" if name == "lora_rank" else name] = get(name, usual)
    targets = names_in(get("target_modules", "all-linear"))
    # As one word and not as a list: PEFT takes it for a keyword then.
    lora["target_modules"] = "all-linear" if targets == ["all-linear"] else targets
    lora["target_parameters"] = names_in(get("target_parameters"))
    lora["modules_to_save"] = names_in(get("modules_to_save"))
    lora["use_dora"] = bool(get("use_dora"))
    lora["bias"] = get("lora_bias", "none")
    configuration.fields["lora"] = lora
    if get("quant_method") is None:
        return
    if get("quant_method") != "bnb" or get("quant_bits") not in (4, 8):
        raise configuration.refuse("quant_method", "recipes have bnb's bases in 4 and 8 bits")
    if get("quant_bits") == 8:
        configuration.fields["quantization"] = dict(IN_INT8)
        return
    configuration.fields["quantization"] = {
        "quant_type": get("bnb_4bit_quant_type", "nf4"),
        "double": get("bnb_4bit_use_double_quant", True),
        "prepare": False,
    }
