"""A plan's answer as a program for transformers' Trainer or one of TRL's, from the files in `templates/`.

For several GPUs there is also FSDP's or DeepSpeed's configuration and a Slurm script. What decides the memory is said
once, in the arguments; the program reads its recipe off them and stops where the card cannot hold it.
"""

import dataclasses
import json
import textwrap
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

from ..recipe.arguments import arguments_class, settings
from ..recipe.families import TASKS
from ..recipe.knobs import knobs, python_arguments, unchecked
from ..recipe.options import TRL, LoRA
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, needing

TEMPLATES = Path(__file__).parent / "templates"
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
    data = _template("samples_trl" if trl else "samples_trainer")
    pack = _template("pack").template if packing and not trl else ""
    wide = LEARNING_RATES.get(recipe.trainer, LEARNING_RATE) * (ADAPTERS_TIMES if recipe.lora else 1)
    text = _template("train.py").substitute(
        head,
        name=recipe.name,
        words=words(recipe),
        pins=textwrap.fill(" ".join(_pins(recipe)), 100, subsequent_indent=" " * 8, break_on_hyphens=False).replace(
            "\n", " \\\\\n"
        ),
        launch=launch,
        samples=SAMPLES[recipe.trainer],
        environment=_environment(expandable),
        imports=_imports(recipe, packing),
        tokens=recipe.seq_len,
        longer=LONGER.get(recipe.trainer, "cut"),
        configs=_configs(recipe, beside),
        model=_text(recipe.shape.hub_id or (recipe.model if isinstance(recipe.model, str) else "path/to/the/model")),
        result="adapters" if recipe.lora else "model",
        learning_rate=f"{wide:.0e}".replace("e-0", "e-"),
        arguments_class=arguments_class(recipe).__name__,
        arguments=_lines(arguments, 8),
        batch_size=recipe.batch_size,
        recipe="".join(f"\n{_lines({name: value}, 8)}" for name, value in _recipe(recipe).items()),
        data=data.substitute(pack=pack) if not trl else data.template,
        model_class=_model_class(recipe),
        loading=_lines(_loading(recipe), 8),
        adapt=_adapt(recipe),
        trainer_class=trl or "Trainer",
        more=_more(recipe, packing),
    )
    found = {name: text} | ({beside: json.dumps(config, indent=2) + "\n"} if beside else {})
    if ranks > 1:
        nodes = next(n for n in range(1, ranks + 1) if ranks % n == 0 and ranks // n <= PER_NODE)
        said = dict(script=name, sbatch=f"{stem}.sbatch", stem=stem, gpus=ranks, nodes=nodes, per_node=ranks // nodes)
        found[f"{stem}.sbatch"] = _template("train.sbatch").substitute(said)
    return found


def _template(name: str) -> Template:
    return Template((TEMPLATES / f"{name}.template").read_text(encoding="utf-8"))


def _pins(recipe: Recipe) -> list[str]:
    """What pip is to install, with the versions that are installed here."""
    found = ["psutil"]
    unused = {"peft": not recipe.lora, "trl": recipe.trainer == "transformers"}
    unused["bitsandbytes"] = not recipe.quantization and "bit" not in recipe.optim
    unused["deepspeed"] = not (recipe.sharding and recipe.sharding.engine == "deepspeed")
    for name in TESTED:
        if not unused.get(name):
            try:
                found.append(f"{name}=={metadata.version(name).partition('+')[0]}")
            except metadata.PackageNotFoundError:
                found.append(name)
    urls = metadata.metadata("vramlab").get_all("Project-URL") or []
    return [*found, *(f"git+{url.split(', ')[1]}" for url in urls if url.startswith("Repository"))]


def words(recipe: Recipe) -> str:
    """The recipe without its model."""
    said = str(unchecked(recipe, lengths=None)).replace(f"{recipe.name} · ", "", 1)
    return f"{said} · padded" if recipe.lengths else said


def _environment(expandable: bool) -> str:
    if not expandable:
        return ""
    said = 'os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")'
    return f"\n{said}  # before torch is loaded\n"


def _imports(recipe: Recipe, packing: bool) -> str:
    """The imports that depend on the recipe."""
    trl, given, base = TRL.get(recipe.trainer), _gives_adapters(recipe), recipe.quantization
    peft = ["LoraConfig"] + ([] if given else ["get_peft_model"])
    peft += ["prepare_model_for_kbit_training"] if base and base.prepare else []
    names = ["AutoConfig", _model_class(recipe), "AutoTokenizer"] + (["BitsAndBytesConfig"] if base else [])
    names += ["set_seed"] if trl else [_collator(packing), "Trainer", "TrainingArguments", "set_seed"]
    own = [type(part).__name__ for part in (recipe.lora, base, recipe.sharding) if part]
    own = sorted([*own, "Recipe", "WatchCallback", "predict"])
    lines = [f"from peft import {', '.join(peft)}"] if recipe.lora else []
    lines += [
        "from transformers import (",
        *(f"    {name}," for name in sorted(names, key=lambda name: (name[0].islower(), name))),
        ")",
    ]
    lines += ["from transformers.trainer_utils import get_last_checkpoint"]
    lines += [f"from trl import {', '.join(sorted((arguments_class(recipe).__name__, trl)))}"] if trl else []
    return "\n".join([*lines, f"from vramlab import {', '.join(own)}"])


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


def _collator(packing: bool) -> str:
    return "DefaultDataCollator" if packing else "DataCollatorForSeq2Seq"


def _model_class(recipe: Recipe) -> str:
    return "AutoModelForSequenceClassification" if recipe.trainer == "reward" else "AutoModelForCausalLM"


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
        made = (
            "(),  # rows have the same length" if packing else "(tokenizer),  # pads, and leaves that out of the loss"
        )
        return f"        data_collator={_collator(packing)}{made}\n"
    return "        peft_config=ADAPTERS,\n" if _gives_adapters(recipe) else ""


def _quantization(recipe: Recipe) -> dict[str, str]:
    """Arguments of `BitsAndBytesConfig`."""
    q, compute = recipe.quantization, recipe.implied_dtype
    if q.quant_type == "int8":
        return {"load_in_8bit": "True"}
    found = {"load_in_4bit": "True", "bnb_4bit_quant_type": _text(q.quant_type)}
    if q.double:
        found["bnb_4bit_use_double_quant"] = "True"
    found["bnb_4bit_compute_dtype"] = f"torch.{compute}"
    if recipe.sharding and recipe.sharding.stage >= 2:  # shards have to be of a floating dtype
        found["bnb_4bit_quant_storage"] = f"torch.{compute}"
    return found


def _lora(recipe: Recipe) -> dict[str, str]:
    """Arguments of `LoraConfig` that are not its defaults; rank and scale always."""
    found = {}
    for name, knob in knobs(LoRA).items():
        value = getattr(recipe.lora, name)
        if name in ("r", "lora_alpha") or (knob.elsewhere and value != knob.default):
            found[name] = _text(list(value) if isinstance(value, tuple) else value)
    if any(weight.kind == "conv1d" for weight in recipe.shape.weights()):
        found["fan_in_fan_out"] = "True"  # its Conv1D is stored transposed
    return found | ({"task_type": _text("SEQ_CLS" if recipe.trainer == "reward" else TASKS["causal-lm"].peft)})


def _lines(arguments: dict[str, str], indent: int) -> str:
    """`name=value,` one a line."""
    return "\n".join(f"{' ' * indent}{name}={value}," for name, value in arguments.items())


def _text(value: object) -> str:
    """The value as Python text with double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(_text, value)) + "]" if isinstance(value, list) else repr(value)
