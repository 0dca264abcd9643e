"""Between a `Recipe` and `transformers.TrainingArguments`: the same training, said either way.

`TrainingArguments` describe how the `Trainer` trains, not what: the model, its format ("-true" precisions), sequence
length, adapters, quantization, attention kernel and the number of ranks are said elsewhere, so they are arguments here.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from ..report.data import data_path
from ..report.errors import RecipeError, needing
from .argument_classes import CONFIGS, unmodelled
from .configuration import read_json_file
from .deepspeed_config import check_dtype, deepspeed_config
from .knobs import knobs
from .optimizers import DROPPED, MODELLED, OWN, optimizer_arguments
from .options import TRL, Loop, Sharding

# What moves memory and no recipe says, and what moves none; every field is in one of these or in a recipe's own.
CLASSIFIED = json.loads(data_path("training_arguments.json").read_text(encoding="utf-8"))


def to_training_arguments(recipe: Any, output_dir: str = "out", **changes: Any) -> Any:
    """Return the `TrainingArguments` (`DPOConfig`, …) that train as `recipe` says, `changes` set on top.

    Nothing is reported or saved unless `changes` ask for it. Without a GPU the arguments say `use_cpu`: bf16 then trains
    on the CPU, tf32 is only recorded, and fp16 needs a GPU when the `Trainer` starts. Raises RecipeError if the `Trainer`
    cannot train so: another loop, or optimizer arguments that it does not pass on.
    """
    import torch

    use_cpu = not torch.accelerator.is_available()
    values = {**settings(recipe), "output_dir": output_dir, "save_strategy": "no", "use_cpu": use_cpu, **changes}
    recorded = {"tf32": values.pop("tf32")} if values["use_cpu"] else {}
    try:
        arguments = arguments_class(recipe)(**values)
    except (ValueError, ImportError) as error:
        reason = "transformers refuses it on this machine: " + str(error).strip().splitlines()[0].rstrip(".")
        raise RecipeError("precision", recipe.precision, reason) from error
    vars(arguments).update(recorded)
    return arguments


def arguments_class(recipe: Any) -> type:
    """Return the class of the arguments of the recipe's trainer."""
    if recipe.trainer != "transformers":
        with needing(f"trainer={recipe.trainer!r}"):
            import trl

            return getattr(trl, CONFIGS[recipe.trainer])
    from transformers import TrainingArguments

    return TrainingArguments


def settings(recipe: Any) -> dict[str, Any]:
    """Return arguments by name, the same on every machine. Raises RecipeError as `to_training_arguments` does."""
    loop, options = recipe.loop, recipe.optimizer_arguments()
    for name, knob in knobs(Loop).items():
        if name != "name" and not knob.elsewhere and getattr(loop, name) != knob.default:
            rest = f"the Trainer's loop has {knob.default!r}: use loop='trainer'"
            raise RecipeError(f"loop.{name}", getattr(loop, name), rest)
    if loop.use_cache is None:
        raise RecipeError("loop.use_cache", None, "the Trainer always sets it: say True or False")
    check_dtype(recipe)
    if lost := [name for name in options if name in DROPPED]:
        takes = ", ".join(name for name in MODELLED[recipe.optim].arguments if name not in DROPPED)
        rest = f"the Trainer gives {recipe.optim} only {takes}, not {lost[0]}"
        raise RecipeError("optim_args", recipe.optim_args, rest)
    known = {field.name for field in dataclasses.fields(arguments_class(recipe))}
    # transformers 5.2x renames the switch and warns about the old name
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    values = {
        **{argument: getattr(recipe, name) for name, argument in _same_names(type(recipe), known).items()},
        **{argument: getattr(loop, name) for name, argument in _same_names(Loop).items()},
        "max_grad_norm": loop.max_grad_norm or 0.0,
        checkpointing: recipe.gradient_checkpointing,
        **{OWN[name]: value for name, value in options.items() if name in OWN},
        **{name: recipe.precision.removesuffix("-mixed") == name for name in ("fp16", "bf16", "tf32")},
        "report_to": "none",
        **_sharding_arguments(recipe.sharding),
    }
    if recipe.gradient_checkpointing:
        values[f"{checkpointing}_kwargs"] = {"use_reentrant": False}
    if recipe.trainer != "transformers":
        # which SFTTrainer refuses where it does not cut samples
        values["max_length"] = None if recipe.padding_free and not recipe.packing else recipe.seq_len
    return values


def to_recipe(kind: type, args: Any, model: Any, **fields: Any) -> Any:
    """Return the recipe, of the class `kind`, of a `Trainer` with `args` that trains `model`.

    Raises RecipeError for another Trainer's `args`, for what moves memory and no recipe models, and where `args` and
    `fields` contradict each other.
    """
    trainer = _trainer(args)
    among_ranks = CLASSIFIED["refused_in_ddp"] if getattr(fields.get("sharding"), "engine", None) == "ddp" else {}
    check_table(args, CLASSIFIED["refused"] | among_ranks | CLASSIFIED["refused_in"].get(type(args).__name__, {}))
    loop = {name: getattr(args, argument) for name, argument in _same_names(Loop).items()}
    loop["max_grad_norm"] = args.max_grad_norm or None
    if trainer != "transformers":
        fields, loop["use_cache"] = _of_trl(args, trainer, fields), False
    said = {
        "model": model,
        **{name: getattr(args, argument) for name, argument in _same_names(kind, dir(args)).items()},
        "gradient_checkpointing": any(getattr(args, f"{of}_checkpointing", None) for of in ("activation", "gradient")),
        "optim": getattr(args.optim, "value", args.optim),
        "optim_args": _optim_args(args),
        "loop": Loop(**loop),
    }
    if args.fsdp or args.deepspeed:
        _check_sharding(args, fields.get("sharding"))
    recipe = kind(**said | fields | {"precision": _precision(args, fields.get("precision"))})
    check_dtype(recipe)
    return recipe


def _same_names(part: type, known: Iterable[str] | None = None) -> dict[str, str]:
    """Return the fields of `part` whose value is that of one argument, of those `known`, and its name."""
    found = {name: knob.elsewhere[0] for name, knob in knobs(part).items() if len(knob.elsewhere) == 1}
    return {name: argument for name, argument in found.items() if known is None or argument in known}


def _trainer(args: Any) -> str:
    """Return whose `args` they are, as a recipe's trainer. Raise RecipeError for those of others."""
    from transformers import TrainingArguments

    kind, known = type(args), {("trl", config): trainer for trainer, config in CONFIGS.items()}
    package = kind.__module__.partition(".")[0]
    if package == "transformers" and isinstance(args, TrainingArguments):
        return package
    if trainer := known.get((package, kind.__name__)):
        return trainer
    raise RecipeError("args", f"{kind.__module__}.{kind.__qualname__}", unmodelled())


def _of_trl(args: Any, trainer: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` and those that TRL's `args` say. Raise RecipeError where lengths are left to the data."""
    fields = {"seq_len": args.max_length, "trainer": trainer, **fields}
    if fields["trainer"] != trainer:
        raise RecipeError("trainer", fields["trainer"], f"the arguments are {TRL[trainer]}'s: leave it out")
    if fields["seq_len"] is None and not fields.get("lengths"):
        raise RecipeError("max_length", None, "samples are not cut: say seq_len, the longest one's")
    for name, value in (args.model_init_kwargs or {}).items():
        value = str(value).removeprefix("torch.")
        if name not in ("dtype", "attn_implementation") or fields.setdefault(name, value) != value:
            raise RecipeError(f"model_init_kwargs.{name}", value, "allowed: the recipe's dtype and attn_implementation")
    for name in ("completion_only_loss", "assistant_only_loss"):
        if getattr(args, name, None) and not fields.get("completion_lengths"):
            raise RecipeError(name, True, "say completion_lengths, the tokens of each sample that have a label")
    return fields


def check_table(args: Any, table: dict[str, Any], prefix: str = "") -> None:
    """Raise RecipeError at the first of the arguments in `table` that moves memory and that no recipe models."""
    for name, allowed in table.items():
        value = args.get(name) if isinstance(args, dict) else getattr(args, name, None)
        if value is not None and isinstance(allowed, dict):
            others = {key: [None] for key in value} if isinstance(value, dict) else {}
            check_table(value, others | allowed, f"{name}.")
        elif value is not None and value not in allowed:
            why = f" ({CLASSIFIED['reasons'][name]})" if name in CLASSIFIED["reasons"] else ""
            rest = f"no recipe models what it does to memory{why}: leave it at its default, {allowed[0]!r}"
            raise RecipeError(prefix + name, value, rest)


def _check_sharding(args: Any, sharding: Sharding | None) -> None:
    """Raise RecipeError unless `sharding` is what the arguments' FSDP or DeepSpeed configuration says."""
    engine = "fsdp" if args.fsdp else "deepspeed"
    if getattr(sharding, "engine", None) != engine:
        rest = f"the arguments ask for it: say sharding=Sharding(stage, world_size, engine={engine!r})"
        raise RecipeError("sharding", sharding, rest)
    if engine == "deepspeed":
        found = args.deepspeed
        found = read_json_file("deepspeed", found) if isinstance(found, str) else found
        _check_entries("deepspeed", found, deepspeed_config(sharding))
    else:
        usual = CLASSIFIED["fsdp_defaults"]
        found = {key: (args.fsdp_config or {}).get(key, value) for key, value in usual.items()}
        policy = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if sharding.wrap == "layers" else "NO_WRAP"}
        _check_entries("fsdp_config", found, usual | _sharding_arguments(sharding)["fsdp_config"] | policy)


def _check_entries(name: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise RecipeError where FSDP's or DeepSpeed's configuration is not the one that recipes are modelled with."""
    for key in dict.fromkeys((*wanted, *found)):
        value, expected = found.get(key), wanted.get(key)
        if isinstance(value, dict) and isinstance(expected, dict):
            _check_entries(f"{name}.{key}", value, expected)
        elif value != expected and key not in CLASSIFIED["neutral_in_deepspeed"]:
            rest = f"this sharding is modelled with {expected!r}, as Recipe.training_arguments() writes it"
            raise RecipeError(f"{name}.{key}", value, rest)


def _optim_args(args: Any) -> str | None:
    """Return the optimizer's arguments, with the Trainer's weight decay where gradients are copied for it."""
    optim, text = getattr(args.optim, "value", args.optim), args.optim_args or None
    copies = optim in ("sgd", "adagrad", "rmsprop")
    if not copies or optimizer_arguments(optim, text).get("weight_decay", 0) == args.weight_decay:
        return text
    return ",".join(filter(None, (text, f"weight_decay={args.weight_decay:g}")))  # the last one counts


def _sharding_arguments(sharding: Sharding | None) -> dict[str, Any]:
    """Return `fsdp` or `deepspeed`; the number of ranks is the launcher's business, and "auto" leaves it to the arguments."""
    if sharding is None or sharding.engine == "ddp":
        return {}
    if sharding.engine == "fsdp":
        offload = {"cpu_offload": True} if sharding.offload else {}
        mode = "full_shard auto_wrap" if sharding.stage == 3 else "shard_grad_op auto_wrap"
        return {"fsdp": mode, "fsdp_config": {"version": 2, "reshard_after_forward": sharding.stage == 3, **offload}}
    return {"deepspeed": deepspeed_config(sharding)}


def _precision(args: Any, wanted: str | None) -> str:
    """Return the precision that `args` say, or `wanted` if it does not contradict them."""
    said = "fp16-mixed" if args.fp16 else "bf16-mixed" if args.bf16 else "tf32" if args.tf32 else "fp32"
    true = bool(wanted) and wanted.endswith("-true")
    if wanted in (None, said) or (true and not said.endswith("-mixed")):
        return wanted or said
    rest = ", which is autocast: unset fp16 and bf16, or say dtype for weights in half precision under it" * true
    raise RecipeError("precision", wanted, f"the arguments say {said}{rest}")
