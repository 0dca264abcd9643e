"""A plan's answer as a program for transformers' Trainer or one of TRL's, from the files in `templates/`.

For several GPUs there is also FSDP's or DeepSpeed's configuration and a Slurm script. What decides the memory is said
once, in the arguments; the program reads its recipe off them and stops where the card cannot hold it.
"""

import dataclasses
import json
import re
import textwrap
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

from ..recipe.arguments import CONFIGS, arguments_class, settings
from ..recipe.families import TASKS
from ..recipe.knobs import knobs, python_arguments, unchecked
from ..recipe.options import TRL, LoRA
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, needing
from ..report.report import installed

TEMPLATES = Path(__file__).parent / "templates"
EXPANDABLE = """
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch is loaded
"""
# Of full training, TRL's own defaults where preferences are learned; adapters take ten times as much (chapter 05).
LEARNING_RATES, ADAPTERS_TIMES = {"dpo": 1e-6, "kto": 1e-6, "reward": 1e-5}, 10
LEARNING_RATE = 2e-5
SAMPLES = {
    "transformers": 'Each sample has a "text", or "messages" for the chat template of a model that has one.',
    "sft": 'Each sample has a "text", "messages", or a "prompt" and a "completion".',
    "kto": 'Each sample has a "prompt", a "completion" and a "label", true or false.',
    "dpo": 'Each sample has a "prompt", a "chosen" and a "rejected" answer.',
    "reward": 'Each sample has a "chosen" and a "rejected" text.',
}
LONGER = {"reward": "left out", **dict.fromkeys(("dpo", "kto"), "cut, and left out where the prompt alone is")}  # TRL
TESTED = ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "bitsandbytes", "deepspeed")
PER_NODE = 8  # GPUs
COLLATORS = {  # by whether rows are packed
    True: "DefaultDataCollator(),  # rows have the same length",
    False: "DataCollatorForSeq2Seq(tokenizer),  # pads, and leaves that out of the loss",
}
TRANSFORMERS = (
    "AutoConfig AutoModelForCausalLM AutoModelForSequenceClassification AutoTokenizer BitsAndBytesConfig "
    "DataCollatorForSeq2Seq DefaultDataCollator Trainer TrainingArguments set_seed"
)
# What a program may import, by module, in the order in which it stands there.
IMPORTS = {
    "peft": ["LoraConfig", "get_peft_model", "prepare_model_for_kbit_training"],
    "transformers": TRANSFORMERS.split(),
    "transformers.trainer_utils": ["get_last_checkpoint"],
    "trl": sorted([*CONFIGS.values(), *TRL.values()]),
    "vramlab": ["LoRA", "Quantization", "Recipe", "Sharding", "WatchCallback", "predict"],
}


@needing("--write")
def scripts(recipe: Recipe, name: str, head: dict[str, str], packing: bool, expandable: bool) -> dict[str, str]:
    """File name to text of the program `name` and of what it takes along.

    `head`: what its docstring says of the plan: version, cards, peak, source, process, tier, usable. Raises RecipeError
    where there is no template or the `Trainer` cannot train like this.
    """
    if recipe.shape.task != "causal-lm" and recipe.trainer != "reward":
        raise RecipeError("task", recipe.shape.task, "programs are written for causal-lm")
    trl, sharding, stem = TRL.get(recipe.trainer), recipe.sharding, Path(name).stem
    beside = f"{stem}.{sharding.engine}.json" if sharding and sharding.engine != "ddp" else ""
    ranks = sharding.world_size if sharding else 1
    launch = f"torchrun --nproc-per-node {ranks} {name}" if ranks > 1 or beside else f"python {name}"
    launch = f"sbatch {stem}.sbatch" if ranks > PER_NODE else launch
    arguments, config = _arguments(recipe, beside)
    pack = _template("pack").template if packing and not trl else ""
    rate = LEARNING_RATES.get(recipe.trainer, LEARNING_RATE) * (ADAPTERS_TIMES if recipe.lora else 1)
    pins = textwrap.wrap(" ".join(_pins(recipe)), 100, subsequent_indent=" " * 8, break_on_hyphens=False)
    text = _template("train.py").safe_substitute(
        head,
        name=recipe.name,
        words=words(recipe),
        pins=" \\\\\n".join(pins),
        launch=launch,
        samples=SAMPLES[recipe.trainer],
        environment=EXPANDABLE if expandable else "",
        tokens=recipe.seq_len,
        longer=LONGER.get(recipe.trainer, "cut"),
        configs=_configs(recipe, beside),
        model=_text(recipe.shape.hub_id or (recipe.model if isinstance(recipe.model, str) else "path/to/the/model")),
        result="adapters" if recipe.lora else "model",
        learning_rate=f"{rate:.0e}".replace("e-0", "e-"),
        arguments_class=arguments_class(recipe).__name__,
        arguments=_lines(arguments, 8),
        batch_size=recipe.batch_size,
        recipe="".join(f"\n{_lines({name: value}, 8)}" for name, value in _recipe(recipe).items()),
        data=_template("samples_trl" if trl else "samples_trainer").safe_substitute(pack=pack),
        model_class=TASKS[recipe.shape.task].auto_class,
        loading=_lines(_loading(recipe), 8),
        adapt=_adapt(recipe),
        trainer_class=trl or "Trainer",
        more=_more(recipe, packing),
    )
    found = {name: text.replace("$imports", _imports(text))}
    if beside:
        found[beside] = json.dumps(config, indent=2) + "\n"
    if ranks > 1:
        nodes = next(n for n in range(1, ranks + 1) if ranks % n == 0 and ranks // n <= PER_NODE)
        said = dict(script=name, sbatch=f"{stem}.sbatch", stem=stem, gpus=ranks, nodes=nodes, per_node=ranks // nodes)
        found[f"{stem}.sbatch"] = _template("train.sbatch").substitute(said)
    return found


def _template(name: str) -> Template:
    return Template((TEMPLATES / f"{name}.template").read_text(encoding="utf-8"))


def _pins(recipe: Recipe) -> list[str]:
    """What pip is to install, with the versions that are installed here."""
    unused = {"peft": not recipe.lora, "trl": recipe.trainer == "transformers"}
    unused["bitsandbytes"] = not recipe.quantization and "bit" not in recipe.optim
    unused["deepspeed"] = not (recipe.sharding and recipe.sharding.engine == "deepspeed")
    versions = {name: installed(name) for name in TESTED if not unused.get(name)}
    pins = [f"{name}=={version.partition('+')[0]}" if version else name for name, version in versions.items()]
    urls = metadata.metadata("vramlab").get_all("Project-URL") or []
    return ["psutil", *pins, *(f"git+{url.split(', ')[1]}" for url in urls if url.startswith("Repository"))]


def words(recipe: Recipe) -> str:
    """The recipe without its model."""
    said = str(unchecked(recipe, lengths=None)).replace(f"{recipe.name} · ", "", 1)
    return f"{said} · padded" if recipe.lengths else said


def _imports(text: str) -> str:
    """The imports of what the program `text` calls."""
    lines = []
    for module, names in IMPORTS.items():
        used = [name for name in names if re.search(rf"\b{name}[(.]", text)]
        listed = "(\n    " + ",\n    ".join(used) + ",\n)" if module == "transformers" else ", ".join(used)
        lines += [f"from {module} import {listed}"] if used else []
    return "\n".join(lines)


def _configs(recipe: Recipe, beside: str) -> str:
    """Constants of the program: the configuration files beside it, of the quantized base, and of adapters."""
    lines = [f"CONFIG = os.path.join(os.path.dirname(os.path.abspath(__file__)), {_text(beside)})"] if beside else []
    if recipe.quantization:
        lines += ["QUANTIZATION = BitsAndBytesConfig(", _lines(_quantization(recipe), 4), ")"]
    if recipe.lora:
        lines += ["ADAPTERS = LoraConfig(", _lines(_lora(recipe), 4), ")"]
    return "".join(f"{line}\n" for line in [*lines, ""])


def _arguments(recipe: Recipe, beside: str) -> tuple[dict[str, str], dict[str, Any]]:
    """(arguments that are not the defaults of their class, and those that memory always depends on; the content of the
    file `beside`, which they name)."""
    usual = {field.name: field.default for field in dataclasses.fields(arguments_class(recipe))}
    usual |= dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "optim"), ...)
    if recipe.trainer in TRL:  # whose defaults are other ones
        usual |= dict.fromkeys(("bf16", "activation_checkpointing", "gradient_checkpointing"), ...)
    wanted = {name: value for name, value in settings(recipe).items() if value != (usual.get(name) or False)}
    found = {name: _text(value) for name, value in wanted.items() if value is not None}
    config = {}
    for name in {"fsdp_config", "deepspeed"} & found.keys():
        found[name], config = "CONFIG", wanted[name]
    if recipe.sharding and recipe.sharding.engine == "deepspeed" and recipe.sharding.stage == 3:  # else none is saved
        config["zero_optimization"] = config["zero_optimization"] | {"stage3_gather_16bit_weights_on_model_save": True}
    if "fsdp_config" in found:  # one rank reads the weights, the others get their shards from it
        config = config | {"cpu_ram_efficient_loading": True, "state_dict_type": "FULL_STATE_DICT"}
    if "max_length" in found:
        found["max_length"] = "TOKENS"
    return found, config


def _recipe(recipe: Recipe) -> dict[str, str]:
    """What `Recipe.from_training_arguments` cannot see in the arguments."""
    names = ("dtype", "attn_implementation", "lora", "quantization", "sharding")
    usual = Recipe(recipe.model, recipe.batch_size, trainer=recipe.trainer)
    found = {} if recipe.trainer in TRL else {"seq_len": "TOKENS"}
    found |= {"precision": _text(recipe.precision)} if recipe.precision.endswith("-true") else {}
    if recipe.lengths:
        found["lengths"] = f"(TOKENS,) * {recipe.batch_size - 1} + ({recipe.lengths[-1]},)"
    said = dict(line.split("=", 1) for line in python_arguments(recipe, usual))
    return found | {name: said[name].replace("'", '"') for name in names if name in said}


def _gives_adapters(recipe: Recipe) -> bool:
    """Whether the trainer itself gives the model its adapters, as TRL's do in PEFT's default dtype."""
    lora = recipe.trainer in TRL and recipe.lora
    return bool(lora and (lora.autocast_adapter_dtype or recipe.quantization))


def _loading(recipe: Recipe) -> dict[str, str]:
    """Arguments of `from_pretrained`."""
    found = {"dtype": f"torch.{recipe.weights_dtype}", "attn_implementation": _text(recipe.attn_implementation)}
    found |= {"num_labels": "1"} if recipe.trainer == "reward" else {}
    found |= {"num_hidden_layers": _text(recipe.num_layers)} if recipe.num_layers is not None else {}
    return found | ({"quantization_config": "QUANTIZATION"} if recipe.quantization else {})


def _adapt(recipe: Recipe) -> str:
    """The lines that make adapters of the loaded model."""
    lines = []
    if recipe.quantization and recipe.quantization.prepare:
        lines = [f"model = prepare_model_for_kbit_training(model, {_text(recipe.gradient_checkpointing)}"]
        lines[0] += ', {"use_reentrant": False})' if recipe.gradient_checkpointing else ")"
    if recipe.lora and not _gives_adapters(recipe):
        cast = "" if recipe.lora.autocast_adapter_dtype else ", autocast_adapter_dtype=False"
        lines.append(f"model = get_peft_model(model, ADAPTERS{cast})")
    return "".join(f"    {line}\n" for line in lines)


def _more(recipe: Recipe, packing: bool) -> str:
    """The arguments that only one kind of trainer takes."""
    if recipe.trainer == "transformers":
        return f"        data_collator={COLLATORS[packing]}\n"
    return "        peft_config=ADAPTERS,\n" if _gives_adapters(recipe) else ""


def _quantization(recipe: Recipe) -> dict[str, str]:
    """Arguments of `BitsAndBytesConfig`."""
    base, compute = recipe.quantization, f"torch.{recipe.implied_dtype}"
    if base.quant_type == "int8":
        return {"load_in_8bit": "True"}
    found = {"load_in_4bit": "True", "bnb_4bit_quant_type": _text(base.quant_type)}
    found |= {"bnb_4bit_use_double_quant": "True"} if base.double else {}
    found |= {"bnb_4bit_compute_dtype": compute}
    shards = recipe.sharding and recipe.sharding.stage >= 2  # which have to be of a floating dtype
    return found | ({"bnb_4bit_quant_storage": compute} if shards else {})


def _lora(recipe: Recipe) -> dict[str, str]:
    """Arguments of `LoraConfig` that are not its defaults; rank and scale always."""
    found = {}
    for name, knob in knobs(LoRA).items():
        value = getattr(recipe.lora, name)
        if name in ("r", "lora_alpha") or (knob.elsewhere and value != knob.default):
            found[name] = _text(list(value) if isinstance(value, tuple) else value)
    if any(weight.kind == "conv1d" for weight in recipe.shape.weights()):
        found["fan_in_fan_out"] = "True"  # its Conv1D is stored transposed
    return found | ({"task_type": _text(TASKS[recipe.shape.task].peft)})


def _lines(arguments: dict[str, str], indent: int) -> str:
    """`name=value,` one a line."""
    return "\n".join(f"{' ' * indent}{name}={value}," for name, value in arguments.items())


def _text(value: object) -> str:
    """The value as Python text with double quotes."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')
