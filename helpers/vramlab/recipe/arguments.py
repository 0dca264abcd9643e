"""Between a `Recipe` and `transformers.TrainingArguments`: the same training, said either way.

`TrainingArguments` describe how the `Trainer` trains, not what: the model, its format ("-true" precisions), sequence
length, adapters, quantization, attention kernel and the number of ranks are said elsewhere, so they are arguments here.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..report.data import data_path
from ..report.errors import RecipeError, needing
from . import lora_modules
from .deepspeed_config import deepspeed_config
from .knobs import knobs
from .optimizers import DROPPED, MODELLED, OWN, optimizer_arguments
from .options import ATTENTION, HALF, LOOPS, TRL, Loop, Sharding

if TYPE_CHECKING:
    from transformers import TrainingArguments

# What moves memory and no recipe says, and what moves none; every field is in one of these or in a recipe's own.
CONFIGS = {trainer: name.replace("Trainer", "Config") for trainer, name in TRL.items()}
CLASSIFIED = json.loads(data_path("training_arguments.json").read_text(encoding="utf-8"))


def to_training_arguments(recipe: Any, output_dir: str = "out", **changes: Any) -> "TrainingArguments":
    """Return the `TrainingArguments` (`DPOConfig`, …) that train as `recipe` says, `changes` set on top.

    Nothing is reported or saved unless `changes` ask for it. Without a GPU the arguments say `use_cpu`: bf16 then trains
    on the CPU, tf32 is only recorded, and fp16 needs a GPU when the `Trainer` starts. Raises RecipeError if the `Trainer`
    cannot train so: another loop, or optimizer arguments that it does not pass on.
    """
    import torch

    use_cpu = not torch.accelerator.is_available()
    values = {**settings(recipe), "output_dir": output_dir, "save_strategy": "no", "use_cpu": use_cpu, **changes}
    without_tf32 = bool(values["tf32"]) and values["use_cpu"]
    if without_tf32:
        values["tf32"] = None
    try:
        arguments = arguments_class(recipe)(**values)
    except (ValueError, ImportError) as error:
        reason = "transformers refuses it on this machine: " + str(error).strip().splitlines()[0].rstrip(".")
        raise RecipeError("precision", recipe.precision, reason) from error
    if without_tf32:
        arguments.tf32 = True
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
    _check_loop(loop)
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


def recipe_fields(kind: type, args: "TrainingArguments", model: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields of the recipe of a `Trainer` with `args` that trains `model`.

    Args:
        kind: the class `Recipe`.
        model: what `Recipe` takes, or the model itself, of which dtype and attention kernel are read off.
        fields: of the recipe, for what the arguments do not say; they go before what is read off.
    Raises:
        RecipeError: `args` of another Trainer than transformers' own and those of TRL in `CONFIGS` (GRPO's, for
            example), arguments that move memory and that no recipe models, or `fields` that contradict `args`.
    """
    trainer = _trainer(args)
    among_ranks = CLASSIFIED["refused_in_ddp"] if getattr(fields.get("sharding"), "engine", None) == "ddp" else {}
    _check_table(args, CLASSIFIED["refused"] | among_ranks | CLASSIFIED["refused_in"].get(type(args).__name__, {}))
    if trainer != "transformers":
        fields = {"seq_len": args.max_length, "trainer": trainer, **fields}
        if fields["seq_len"] is None and not fields.get("lengths"):
            raise RecipeError("max_length", None, "samples are not cut: say seq_len, the longest one's")
        for name in ("completion_only_loss", "assistant_only_loss"):
            if getattr(args, name, None) and not fields.get("completion_lengths"):
                raise RecipeError(name, True, "say completion_lengths, the tokens of each sample that have a label")
        if fields["trainer"] != trainer:
            raise RecipeError("trainer", fields["trainer"], f"the arguments are {TRL[trainer]}'s: leave it out")
    loop = {name: getattr(args, argument) for name, argument in _same_names(Loop).items()}
    checkpointing = ("activation_checkpointing", "gradient_checkpointing")
    said = {
        **{name: getattr(args, argument) for name, argument in _same_names(kind, dir(args)).items()},
        "gradient_checkpointing": any(getattr(args, name, None) for name in checkpointing),
        "optim": getattr(args.optim, "value", args.optim),
        "optim_args": _optim_args(args),
        "loop": Loop(
            **{**loop, "max_grad_norm": args.max_grad_norm or None, **({"use_cache": False} if trainer in TRL else {})}
        ),
    }
    if hasattr(model, "named_parameters"):
        said.update(_of_model(model, fields))
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        model = {**base.config.to_dict(), "architectures": [type(base).__name__]}
        model.pop("quantization_config", None)
    said["precision"] = _precision(args, fields.get("precision"))
    if args.fsdp or args.deepspeed:
        _check_sharding(args, fields.get("sharding"))
    return {"model": model, **said, **fields, "precision": said["precision"]}


def _same_names(part: type, known: Iterable[str] | None = None) -> dict[str, str]:
    """Return the fields of `part` whose value is that of one argument, of those `known`, and its name."""
    found = {name: knob.elsewhere[0] for name, knob in knobs(part).items() if len(knob.elsewhere) == 1}
    return {name: argument for name, argument in found.items() if known is None or argument in known}


def _trainer(args: Any) -> str:
    """Return whose `args` they are, as a recipe's trainer. Raise RecipeError for those of others."""
    from transformers import TrainingArguments

    kind = type(args)
    if not isinstance(args, TrainingArguments):
        raise RecipeError("args", args, "it must be a transformers.TrainingArguments")
    name, package = f"{kind.__module__}.{kind.__qualname__}", kind.__module__.partition(".")[0]
    if package == "transformers":
        return package
    for trainer, config in CONFIGS.items():
        if (package, kind.__name__) == ("trl", config):
            return trainer
    allowed = f"only transformers' own TrainingArguments and TRL's {', '.join(CONFIGS.values())} are modelled: another "
    allowed += "Trainer's loss, second model or batch moves the peak, so measure that Trainer with WatchCallback"
    raise RecipeError("args", name, allowed)


def _check_table(args: Any, table: dict[str, Any]) -> None:
    """Raise RecipeError at the first of the arguments in `table` that moves memory and that no recipe models."""
    for name, allowed in table.items():
        value = getattr(args, name, None)
        if not isinstance(allowed, dict):
            _check_value(name, value, allowed)
        elif value is not None:
            given = value if isinstance(value, dict) else {key: getattr(value, key, None) for key in allowed}
            for key, entry in given.items():
                _check_value(f"{name}.{key}", entry, allowed.get(key, [None]))


def _check_value(name: str, value: Any, allowed: list) -> None:
    if value is not None and value not in allowed:
        why = f" ({CLASSIFIED['reasons'][name]})" if name in CLASSIFIED["reasons"] else ""
        rest = f"no recipe models what it does to memory{why}: leave it at its default, {allowed[0]!r}"
        raise RecipeError(name, value, rest)


def _check_sharding(args: "TrainingArguments", sharding: Sharding | None) -> None:
    """Raise RecipeError unless `sharding` is what the arguments' FSDP or DeepSpeed configuration says."""
    engine = "fsdp" if args.fsdp else "deepspeed"
    if sharding is None:
        rest = f"the arguments ask for {engine}: say sharding=Sharding(stage, world_size, engine={engine!r})"
        raise RecipeError("sharding", None, rest)
    if sharding.engine != engine:
        raise RecipeError("sharding.engine", sharding.engine, f"the arguments ask for {engine!r}")
    if engine == "deepspeed":
        found, wanted = args.deepspeed, deepspeed_config(sharding)
        if isinstance(found, str):
            with open(found, encoding="utf-8") as file:
                found = json.load(file)
    else:
        usual = CLASSIFIED["fsdp_defaults"]
        found = {key: (args.fsdp_config or {}).get(key, value) for key, value in usual.items()}
        wanted = usual | _sharding_arguments(sharding)["fsdp_config"]
        wanted["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP" if sharding.wrap == "layers" else "NO_WRAP"
    _check_entries("deepspeed" if engine == "deepspeed" else "fsdp_config", found, wanted)


def _check_entries(name: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise RecipeError where FSDP's or DeepSpeed's configuration is not the one that recipes are modelled with."""
    for key in dict.fromkeys((*wanted, *found)):
        value, expected = found.get(key), wanted.get(key)
        if isinstance(value, dict) and isinstance(expected, dict):
            _check_entries(f"{name}.{key}", value, expected)
        elif value != expected and key not in CLASSIFIED["neutral_in_deepspeed"]:
            rest = f"this sharding is modelled with {expected!r}, as Recipe.training_arguments() writes it"
            raise RecipeError(f"{name}.{key}", value, rest)


def _check_loop(loop: Loop) -> None:
    """Raise RecipeError unless the `Trainer` can run it."""
    adjustable = ("name", *_same_names(Loop))
    for field in dataclasses.fields(Loop):
        value, wanted = getattr(loop, field.name), getattr(LOOPS["trainer"], field.name)
        if field.name not in adjustable and value != wanted:
            raise RecipeError(f"loop.{field.name}", value, f"the Trainer's loop has {wanted!r}: use loop='trainer'")
    if loop.use_cache is None:
        raise RecipeError("loop.use_cache", None, "the Trainer always sets it: say True or False")


def _optim_args(args: "TrainingArguments") -> str | None:
    """Return the optimizer's arguments, with the Trainer's weight decay where gradients are copied for it."""
    optim, text = getattr(args.optim, "value", args.optim), args.optim_args or None
    if optim not in ("sgd", "adagrad", "rmsprop"):
        return text
    given = optimizer_arguments(optim, text)
    if given.get("weight_decay", 0) == args.weight_decay:
        return text
    return ",".join(f"{name}={value:g}" for name, value in (given | {"weight_decay": args.weight_decay}).items())


def _sharding_arguments(sharding: Sharding | None) -> dict[str, Any]:
    """Return `fsdp` or `deepspeed`; the number of ranks is the launcher's business, and "auto" leaves it to the arguments."""
    if sharding is None or sharding.engine == "ddp":
        return {}
    if sharding.engine == "fsdp":
        offload = {"cpu_offload": True} if sharding.offload else {}
        mode = "full_shard auto_wrap" if sharding.stage == 3 else "shard_grad_op auto_wrap"
        return {"fsdp": mode, "fsdp_config": {"version": 2, "reshard_after_forward": sharding.stage == 3, **offload}}
    return {"deepspeed": deepspeed_config(sharding)}


def _precision(args: "TrainingArguments", wanted: str | None) -> str:
    """Return the precision that `args` say, or `wanted` if it does not contradict them."""
    said = "fp16-mixed" if args.fp16 else "bf16-mixed" if args.bf16 else "tf32" if args.tf32 else "fp32"
    if wanted is None or wanted == said:
        return said
    if wanted.endswith("-true") and not said.endswith("-mixed"):
        return wanted
    rest = f"the arguments say {said}"
    if wanted.endswith("-true"):
        rest += ", which is autocast: unset fp16 and bf16, or say dtype for weights in half precision under it"
    raise RecipeError("precision", wanted, rest)


def _check_part(name: str, part: Any, config: Any) -> None:
    """Raise RecipeError where PEFT's or bitsandbytes' `config` is not what `part` says, or what no recipe models."""
    if part is None:
        raise RecipeError(name, None, f"the model has it: say {name}=...")
    if (kind := type(config).__name__) not in CLASSIFIED["refused_in"]:
        raise RecipeError(name, kind, "no recipe models it, only LoraConfig and BitsAndBytesConfig: use WatchCallback")
    _check_table(config, CLASSIFIED["refused_in"][kind])
    for field, argument in _same_names(type(part), dir(config)).items():
        said, has = getattr(part, field), getattr(config, argument)
        compared = field == "bias" or isinstance(has, bool | int | float)  # other names may be said in several ways
        if compared and said != has:
            raise RecipeError(f"{name}.{field}", said, f"the model has {has!r}")


def check_built(recipe: Any, model: Any) -> None:
    """Raise RecipeError where a built `model` is adapted, frozen or quantized otherwise than `recipe` says."""
    lora, shape, adapters = recipe.lora, recipe.shape, getattr(model, "peft_config", None) or {}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and "positions" not in name]
    if frozen and not lora:
        raise RecipeError("model", frozen[0], "every weight is trained where there is no LoRA, and this one is frozen")
    if len(adapters) > 1:
        raise RecipeError("lora", [*adapters], "a model with one adapter is modelled")
    names = [name.removeprefix("base_model.model.") for name, _ in model.named_modules()]
    for config in adapters.values():
        has = {name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")}
        said = {name for name, *_ in lora_modules.adapted(shape, lora)}
        if not lora.target_parameters:
            _check_same("lora.target_modules", lora.target_modules, said, has)
        said, has = (
            {name for name in names if any(name in weight.name for weight in shape.weights())}
            for names in (lora_modules.trained_whole(shape, lora.modules_to_save), config.modules_to_save or ())
        )
        _check_same("lora.modules_to_save", lora.modules_to_save, said, has)
    config = getattr(model.config, "quantization_config", None)
    if recipe.quantization and config:
        asked, kind = recipe.quantization.quant_type, "int8" if config.load_in_8bit else config.bnb_4bit_quant_type
        _check_same("quantization.quant_type", asked, {asked}, {kind})
        asked, compute = recipe.implied_dtype, str(config.bnb_4bit_compute_dtype).removeprefix("torch.")
        _check_same("quantization.compute_dtype", asked, {asked}, {compute if kind != "int8" else asked})


def _check_same(field: str, value: Any, said: set[str], has: set[str]) -> None:
    if said != has:
        few = ", ".join(sorted(has)[:2]) + ", …" * (len(has) > 2)
        raise RecipeError(field, value, f"that makes {len(said)}, and the model has {len(has)}: {few or 'none'}")


def _of_model(model: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return recipe fields that show on a built model."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        _check_part("lora", fields.get("lora"), config)
    if getattr(model, "quantization_method", None):
        _check_part("quantization", fields.get("quantization"), getattr(model.config, "quantization_config", None))
    found: dict[str, Any] = {}
    kernel = getattr(model.config, "_attn_implementation", None)
    if kernel in ATTENTION:
        found["attn_implementation"] = kernel
    quantization, dtypes = fields.get("quantization"), Counter()
    for name, parameter in model.named_parameters():
        if "lora_" not in name and type(parameter).__name__ not in ("Params4bit", "Int8Params"):
            dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    dtype = dtypes.most_common(1)[0][0]  # a few modules, such as T5's, stay in fp32
    if dtype in HALF.values() or (dtype == "float32" and quantization and not quantization.prepare):
        found["dtype"] = dtype
    return found
