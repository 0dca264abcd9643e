"""A recipe as Python text for transformers, PEFT and bitsandbytes: to paste into a script and run."""

import dataclasses
import json

from ..recipe.arguments import arguments_class, settings
from ..recipe.families import TASKS
from ..recipe.knobs import knobs
from ..recipe.options import TRL, LoRA
from ..recipe.recipe import Recipe
from ..report.errors import needing


@needing("Code for the Trainer")
def code(recipe: Recipe) -> str:
    """Text that defines `training_args`, `load_model()` and, where needed, `quantization_config` and `peft_config`.

    Loads transformers. Raises RecipeError if its `Trainer` cannot train like this.
    """
    model_class = TASKS[recipe.shape.task].auto_class
    lora, quantization, sharding = recipe.lora, recipe.quantization, recipe.sharding
    arguments, trainer, given = arguments_class(recipe).__name__, TRL.get(recipe.trainer), _gives_adapters(recipe)
    names = [model_class, *(["BitsAndBytesConfig"] if quantization else [])]
    names += [] if trainer else ["Trainer", arguments]
    lines = [f"# {recipe}"]
    if sharding and sharding.world_size > 1:
        lines.append(f"# start it with: torchrun --nproc-per-node {min(8, sharding.world_size)} train.py")
    lines.append("import torch")
    if lora:
        also = ", prepare_model_for_kbit_training" if quantization and quantization.prepare else ""
        lines.append(f"from peft import LoraConfig{'' if given else ', get_peft_model' + also}")
    lines.append(f"from transformers import {', '.join(names)}")
    lines += [f"from trl import {', '.join(sorted((arguments, trainer)))}", ""] if trainer else [""]
    if quantization:
        lines += _call("quantization_config", "BitsAndBytesConfig", _quantization(recipe))
    if lora:
        lines += _call("peft_config", "LoraConfig", _lora(recipe))
    lines += _call("training_args", arguments, _arguments(recipe))
    more = ", peft_config=peft_config" if given else ""
    given = "args=training_args" if recipe.trainer in ("dpo", "kto") else "training_args"  # after the reference model
    ending = (
        f"# trainer = {trainer or 'Trainer'}(load_model(), {given}, train_dataset=...{more})  # your tokenized data",
        "# trainer.train()",
    )
    return "\n".join([*lines, "", "", *_load_model(recipe, model_class), "", "", *ending]) + "\n"


def _gives_adapters(recipe: Recipe) -> bool:
    """Whether the trainer itself gives the model its adapters, as TRL's do in PEFT's default dtype."""
    lora = recipe.trainer in TRL and recipe.lora
    return bool(lora and (lora.autocast_adapter_dtype or recipe.quantization))


def _arguments(recipe: Recipe) -> dict[str, str]:
    """Arguments of `TrainingArguments` that are not its defaults; batch size and optimizer always."""
    usual = {field.name: field.default for field in dataclasses.fields(arguments_class(recipe))}
    usual |= dict.fromkeys(("per_device_train_batch_size", "optim"))
    if recipe.trainer in TRL:  # whose defaults are other ones
        usual |= dict.fromkeys(("bf16", "activation_checkpointing", "gradient_checkpointing"), ...)
    wanted = {name: value for name, value in settings(recipe).items() if value != (usual.get(name) or False)}
    return {"output_dir": '"out"', **{name: _text(value) for name, value in wanted.items() if value is not None}}


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
    if task := TASKS[recipe.shape.task].peft:
        found["task_type"] = _text(task)
    return found


def _load_model(recipe: Recipe, model_class: str) -> list[str]:
    """The lines of `load_model`."""
    shape, quantization, lora = recipe.shape, recipe.quantization, recipe.lora
    name = shape.hub_id or (recipe.model if isinstance(recipe.model, str) else "path/to/the/model")
    arguments = {
        "dtype": f"torch.{recipe.weights_dtype}",
        "attn_implementation": _text(recipe.attn_implementation),
    }
    if recipe.trainer == "reward":
        arguments["num_labels"] = "1"
    if recipe.num_layers is not None:
        arguments["num_hidden_layers"] = _text(recipe.num_layers)
    if quantization:
        arguments["quantization_config"] = "quantization_config"
    lines = [f"def load_model(name={_text(name)}):"]
    lines += _call("model", f"{model_class}.from_pretrained", arguments, "name", indent=1)
    if quantization and quantization.prepare:
        prepared = {"use_gradient_checkpointing": _text(recipe.gradient_checkpointing)}
        if recipe.gradient_checkpointing:
            prepared["gradient_checkpointing_kwargs"] = _text({"use_reentrant": False})
        lines += _call("model", "prepare_model_for_kbit_training", prepared, "model", indent=1)
    if lora and not _gives_adapters(recipe):
        cast = "" if lora.autocast_adapter_dtype else ", autocast_adapter_dtype=False"
        lines.append(f"    model = get_peft_model(model, peft_config{cast})")
    return [*lines, "    return model"]


def _call(name: str, function: str, arguments: dict[str, str], first: str = "", indent: int = 0) -> list[str]:
    """`name = function(…)`, one argument a line."""
    space = "    " * indent
    inner = [first] if first else []
    inner += [f"{key}={value}" for key, value in arguments.items()]
    return [f"{space}{name} = {function}(", *(f"{space}    {argument}," for argument in inner), f"{space})"]


def _text(value: object) -> str:
    """The value as Python text with double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)
