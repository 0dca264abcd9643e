"""Between a `Recipe` and `transformers.TrainingArguments`: the same training, said either way.

`TrainingArguments` describe how the `Trainer` trains, not what: the model, its format ("-true"
precisions), sequence length, adapters, quantization, attention kernel and the number of ranks are
said elsewhere, so they are arguments here.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..base.data import data_path
from ..base.errors import RecipeError, needing
from .argument_classes import CONFIGS, unmodelled
from .configuration import read_json_file
from .deepspeed_config import check_dtype, deepspeed_config
from .fields import RecipeFields
from .knobs import knobs
from .optimizers import BESIDE_TRAINER, DROPPED, MODELLED, OWN, optimizer_arguments
from .options import GENERATING, TRL, Loop, Rollouts, Sharding

# What moves memory and no recipe says, and what moves none; every field is in one of these or in a
# recipe's own.
CLASSIFIED = json.loads(data_path("training_arguments.json").read_text(encoding="utf-8"))
FORMATS = ("fp16", "bf16", "tf32")
# Optimizers whose weight decay copies the gradients, so that its size moves memory.
COPYING = ("sgd", "adagrad", "rmsprop")


def to_training_arguments(recipe: RecipeFields, output_dir: str = "out", **changes: Any) -> Any:
    """Return the `TrainingArguments` (`DPOConfig`, …) that train as `recipe` says.

    `changes` are set on top. Nothing is reported or saved unless they ask for it. Without a GPU the
    arguments say `use_cpu`: bf16 then trains on the CPU, tf32 is only recorded, and fp16 needs a
    GPU when the `Trainer` starts. Raises RecipeError if the `Trainer` cannot train so: another
    loop, or optimizer arguments that it does not pass on.
    """
    import torch

    values = {
        **settings(recipe),
        "output_dir": output_dir,
        "save_strategy": "no",
        "use_cpu": not torch.accelerator.is_available(),
        **changes,
    }
    if "parallelism_config" in values:
        values["parallelism_config"] = _parallelism_config(recipe, values["parallelism_config"])
    # on a CPU transformers refuses what it would not use
    recorded = {"tf32": values.pop("tf32")} if values["use_cpu"] else {}
    try:
        arguments = arguments_class(recipe)(**values)
    except (ValueError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0].rstrip(".")
        rest = f"transformers refuses it on this machine: {first_line}"
        raise RecipeError("precision", recipe.precision, rest) from error
    vars(arguments).update(recorded)
    return arguments


def _parallelism_config(recipe: RecipeFields, sizes: dict[str, int]) -> Any:
    """Return accelerate's configuration of a mesh."""
    from accelerate import ParallelismConfig

    if "sp_size" not in sizes:
        return ParallelismConfig(**sizes)
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=recipe.attn_implementation)
    return ParallelismConfig(**sizes, sp_handler=handler)


def arguments_class(recipe: RecipeFields) -> Any:
    """Return the class of the arguments of the recipe's trainer."""
    if recipe.trainer != "transformers":
        with needing(f"trainer={recipe.trainer!r}"):
            import trl

            return getattr(trl, CONFIGS[recipe.trainer])
    from transformers import TrainingArguments

    return TrainingArguments


def settings(recipe: RecipeFields) -> dict[str, Any]:
    """Return arguments by name, the same on every machine.

    Raises RecipeError as `to_training_arguments` does.
    """
    _check_loop(recipe.loop)
    check_dtype(recipe)
    options = recipe.optimizer_arguments()
    _check_options(recipe, options)
    known = {field.name for field in dataclasses.fields(arguments_class(recipe))}
    # transformers 5.2x renames the switch and warns about the old name
    checkpointing = "gradient_checkpointing"
    if "activation_checkpointing" in known:
        checkpointing = "activation_checkpointing"
    values = _values(recipe, _same_names(type(recipe), known))
    values |= _values(recipe.loop, _same_names(Loop))
    values["max_grad_norm"] = recipe.loop.max_grad_norm or 0.0
    values[checkpointing] = recipe.gradient_checkpointing
    for name, value in options.items():
        if name in OWN:
            values[OWN[name]] = value
    form = recipe.precision.removesuffix("-mixed")
    for name in FORMATS:
        values[name] = form == name
    values["report_to"] = "none"
    values |= _sharding_arguments(recipe.sharding)
    # The recipe says which kind it is, whatever a release has for its default.
    if recipe.gradient_checkpointing:
        values[f"{checkpointing}_kwargs"] = {"use_reentrant": recipe.use_reentrant}
    if recipe.rollouts:
        values |= _values(recipe.rollouts, _same_names(Rollouts))
        if recipe.rollouts.use_vllm:
            # Left out, vLLM wants a cache for the model's whole context, and stops without one.
            longest = recipe.rollouts.prompt_length + recipe.rollouts.max_completion_length
            values["vllm_max_model_length"] = longest
    elif recipe.trainer != "transformers":
        # SFTTrainer refuses it where it does not cut samples, and must not cut images
        is_uncut = recipe.images or (recipe.padding_free and not recipe.packing)
        values["max_length"] = None if is_uncut else recipe.seq_len
    return values


def _values(part: Any, arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a part's fields, by the names of arguments."""
    return {argument: getattr(part, name) for name, argument in arguments.items()}


def _check_loop(loop: Loop) -> None:
    """Raise RecipeError for a loop that is not the Trainer's."""
    for name, knob in knobs(Loop).items():
        value = getattr(loop, name)
        if name != "name" and not knob.elsewhere and value != knob.default:
            rest = f"the Trainer's loop has {knob.default!r}: use loop='trainer'"
            raise RecipeError(f"loop.{name}", value, rest)
    if loop.use_cache is None:
        rest = "the Trainer always sets it: say True or False"
        raise RecipeError("loop.use_cache", None, rest)


def _check_options(recipe: RecipeFields, options: Mapping[str, float]) -> None:
    """Raise RecipeError for an optimizer that the Trainer does not make, or arguments it drops."""
    if recipe.optim in BESIDE_TRAINER:
        rest = "TrainingArguments has no name for it: give the Trainer its optimizers"
        raise RecipeError("optim", recipe.optim, rest)
    lost = [name for name in options if name in DROPPED]
    if lost:
        passed = [name for name in MODELLED[recipe.optim].arguments if name not in DROPPED]
        takes = ", ".join(passed)
        rest = f"the Trainer gives {recipe.optim} only {takes}, not {lost[0]}"
        raise RecipeError("optim_args", recipe.optim_args, rest)


def to_recipe(kind: Any, args: Any, model: Any, **fields: Any) -> Any:
    """Return the recipe, of the class `kind`, of a `Trainer` with `args` that trains `model`.

    Raises RecipeError for another Trainer's `args`, for what moves memory and no recipe models, and
    where `args` and `fields` contradict each other.
    """
    # What no recipe can say is refused first, so that the error names the argument and not what
    # follows from it.
    trainer = _trainer(args)
    _check_refused(args, fields)
    loop = _values_of(args, _same_names(Loop))
    # The Trainer clips to norms over 0 only.
    loop["max_grad_norm"] = args.max_grad_norm or None
    if trainer != "transformers":
        fields = _of_trl(args, trainer, fields)
        loop["use_cache"] = False
    said = {
        "model": model,
        **_values_of(args, _same_names(kind, dir(args))),
        "gradient_checkpointing": _recomputes(args),
        "use_reentrant": _recomputes(args) and _is_reentrant(args),
        "optim": getattr(args.optim, "value", args.optim),
        "optim_args": _optim_args(args),
        "loop": Loop(**loop),
    }
    if args.fsdp or args.deepspeed:
        _check_sharding(args, fields.get("sharding"))
    precision = _precision(args, fields.get("precision"))
    # What the caller says takes the place of what the arguments say, except where that is checked
    # above.
    recipe = kind(**said | fields | {"precision": precision})
    check_dtype(recipe)
    return recipe


def _values_of(args: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of arguments, by the names of a recipe's fields."""
    return {name: getattr(args, argument) for name, argument in names.items()}


def _check_refused(args: Any, fields: Mapping[str, Any]) -> None:
    """Raise RecipeError for what moves memory and no recipe models."""
    refused = dict(CLASSIFIED["refused"])
    if _says_parallelism(args, fields.get("sharding")):
        del refused["parallelism_config"]
    if getattr(fields.get("sharding"), "engine", None) == "ddp":
        refused |= CLASSIFIED["refused_in_ddp"]
    refused |= CLASSIFIED["refused_in"].get(type(args).__name__, {})
    check_table(args, refused)


def _says_parallelism(args: Any, sharding: Any) -> bool:
    """Tell whether copies of the model and rings are those of `sharding`.

    Raises RecipeError where that has some, and the arguments not the same.
    """
    wanted = getattr(sharding, "parallelism", {})
    said = getattr(args, "parallelism_config", None)
    if not wanted:
        return False
    if any(getattr(said, name, 1) != size for name, size in wanted.items()):
        rest = (
            f"this sharding needs ParallelismConfig(**{wanted}), as "
            "Recipe.training_arguments() writes it"
        )
        raise RecipeError("parallelism_config", said, rest)
    return True


def _recomputes(args: Any) -> bool:
    """Tell whether layers are recomputed, by the argument's new name or the old one."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return any(getattr(args, name, None) for name in names)


def _is_reentrant(args: Any) -> bool:
    """Tell whether checkpointing is asked to be re-entrant, by either name of its arguments."""
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    said = [getattr(args, name, None) or {} for name in names]
    return any(options.get("use_reentrant") for options in said)


def _same_names(part: Any, known: Iterable[str] | None = None) -> dict[str, str]:
    """Return the fields of `part` whose value is that of one argument, and its name.

    Only arguments that are `known` count.
    """
    names = {}
    for name, knob in knobs(part).items():
        if len(knob.elsewhere) == 1:
            argument = knob.elsewhere[0]
            if known is None or argument in known:
                names[name] = argument
    return names


def _trainer(args: Any) -> str:
    """Return whose `args` they are, as a recipe's trainer. Raises RecipeError for others."""
    from transformers import TrainingArguments

    kind = type(args)
    package = kind.__module__.partition(".")[0]
    if package == "transformers" and isinstance(args, TrainingArguments):
        return package
    if package == "trl":
        for trainer, config in CONFIGS.items():
            if config == kind.__name__:
                return trainer
    raise RecipeError("args", f"{kind.__module__}.{kind.__qualname__}", unmodelled())


def _of_trl(args: Any, trainer: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` and those that TRL's `args` say.

    Raises RecipeError where lengths are left to the data.
    """
    if trainer in GENERATING:
        fields = {**fields, "rollouts": _rollouts(args, fields.get("rollouts"))}
    else:
        fields = {"seq_len": args.max_length, **fields}
    fields = {"trainer": trainer, **fields}
    if fields["trainer"] != trainer:
        rest = f"the arguments are {TRL[trainer]}'s: leave it out"
        raise RecipeError("trainer", fields["trainer"], rest)
    if fields.get("seq_len", 1) is None and not fields.get("lengths"):
        rest = "samples are not cut: say seq_len, the longest one's"
        raise RecipeError("max_length", None, rest)
    for name, given in (args.model_init_kwargs or {}).items():
        value = str(given).removeprefix("torch.")
        is_a_field = name in ("dtype", "attn_implementation")
        if not is_a_field or fields.setdefault(name, value) != value:
            rest = "allowed: the recipe's dtype and attn_implementation"
            raise RecipeError(f"model_init_kwargs.{name}", value, rest)
    for name in ("completion_only_loss", "assistant_only_loss"):
        if getattr(args, name, None) and not fields.get("completion_lengths"):
            rest = "say completion_lengths, the tokens of each sample that have a label"
            raise RecipeError(name, True, rest)
    return fields


def _rollouts(args: Any, given: Rollouts | Mapping | None) -> Rollouts:
    """Return what TRL's `args` say of rollouts, with what is `given` besides.

    They do not say how long a prompt is.
    """
    said = _values_of(args, _same_names(Rollouts))
    # as the arguments fill it in
    if said["steps_per_generation"] == args.gradient_accumulation_steps:
        said["steps_per_generation"] = None
    if isinstance(given, Rollouts):
        said |= vars(given)
    else:
        said |= given or {}
    return Rollouts(**said)


def check_table(args: Any, table: Mapping[str, Any], prefix: str = "") -> None:
    """Raise RecipeError at the first argument in `table` that has not its allowed values.

    It moves memory, and no recipe models it.
    """
    for name, allowed in table.items():
        value = args.get(name) if isinstance(args, dict) else getattr(args, name, None)
        if value is None:
            continue
        if isinstance(allowed, dict):
            # what the table does not name may not be said
            others = {}
            if isinstance(value, dict):
                others = {key: [None] for key in value}
            check_table(value, others | allowed, f"{name}.")
        elif value not in allowed:
            reasons = CLASSIFIED["reasons"]
            why = f" ({reasons[name]})" if name in reasons else ""
            rest = f"no recipe models what it does to memory{why}: leave it at its default, "
            raise RecipeError(prefix + name, value, f"{rest}{allowed[0]!r}")


def _check_sharding(args: Any, sharding: Sharding | None) -> None:
    """Raise RecipeError unless `sharding` is what the arguments' FSDP or DeepSpeed says."""
    engine = "fsdp" if args.fsdp else "deepspeed"
    if sharding is None or getattr(sharding, "engine", None) != engine:
        rest = (
            f"the arguments ask for it: say sharding=Sharding(stage, world_size, engine={engine!r})"
        )
        raise RecipeError("sharding", sharding, rest)
    if engine == "deepspeed":
        said = args.deepspeed
        if isinstance(said, str):
            said = read_json_file("deepspeed", said)
        _check_entries("deepspeed", said, deepspeed_config(sharding))
        return
    wanted = dict(CLASSIFIED["fsdp_defaults"])
    said = {key: (args.fsdp_config or {}).get(key, value) for key, value in wanted.items()}
    wanted |= _sharding_arguments(sharding)["fsdp_config"]
    by_layers = sharding.wrap == "layers"
    wanted["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP" if by_layers else "NO_WRAP"
    _check_entries("fsdp_config", said, wanted)


def _check_entries(name: str, said: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise RecipeError where a configuration is not the one that recipes are modelled with.

    `said` is FSDP's configuration or DeepSpeed's.
    """
    for key in dict.fromkeys((*wanted, *said)):
        value = said.get(key)
        expected = wanted.get(key)
        if isinstance(value, dict) and isinstance(expected, dict):
            _check_entries(f"{name}.{key}", value, expected)
        elif value != expected and key not in CLASSIFIED["neutral_in_deepspeed"]:
            rest = (
                f"this sharding is modelled with {expected!r}, as "
                "Recipe.training_arguments() writes it"
            )
            raise RecipeError(f"{name}.{key}", value, rest)


def _optim_args(args: Any) -> str | None:
    """Return the optimizer's arguments.

    The Trainer's weight decay is among them where gradients are copied for it.
    """
    optim = getattr(args.optim, "value", args.optim)
    text = args.optim_args or None
    if optim not in COPYING:
        return text
    if optimizer_arguments(optim, text).get("weight_decay", 0) == args.weight_decay:
        return text
    decay = f"weight_decay={args.weight_decay:g}"
    return f"{text},{decay}" if text else decay  # the last one counts


def _sharding_arguments(sharding: Sharding | None) -> dict[str, Any]:
    """Return `fsdp` or `deepspeed`.

    The number of ranks is the launcher's business, and "auto" leaves it to the arguments.
    """
    if sharding is None or sharding.engine == "ddp":
        return {}
    if sharding.engine != "fsdp":
        parallel = {"parallelism_config": sharding.parallelism} if sharding.parallelism else {}
        return {"deepspeed": deepspeed_config(sharding), **parallel}
    is_third = sharding.stage == 3
    config = {"version": 2, "reshard_after_forward": is_third}
    if sharding.offload:
        config["cpu_offload"] = True
    mode = "full_shard auto_wrap" if is_third else "shard_grad_op auto_wrap"
    arguments = {"fsdp": mode, "fsdp_config": config}
    if sharding.parallelism:
        arguments["parallelism_config"] = sharding.parallelism
    return arguments


def _precision(args: Any, wanted: str | None) -> str:
    """Return the precision that `args` say, or `wanted` if it does not contradict them."""
    said = "fp32"
    if args.fp16:
        said = "fp16-mixed"
    elif args.bf16:
        said = "bf16-mixed"
    elif args.tf32:
        said = "tf32"
    if wanted in (None, said):
        return said
    is_true = str(wanted).endswith("-true")
    if is_true and not said.endswith("-mixed"):
        return str(wanted)
    rest = f"the arguments say {said}"
    if is_true:
        rest += (
            ", which is autocast: unset fp16 and bf16, or say dtype for weights in half "
            "precision under it"
        )
    raise RecipeError("precision", wanted, rest)
