"""Optimizers whose memory the package models: names, and which of their arguments `optim_args` may say."""

import math
from functools import lru_cache

from ..report.errors import RecipeError

_TORCH, _BNB = ("lr", "weight_decay", "eps"), ("lr", "weight_decay")
# What each takes (its signature in torch, transformers or bitsandbytes) of what the package models; the names are those
# of `transformers.training_args.OptimizerNames`.
OPTIMIZER_ARGUMENTS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), (*_TORCH, "amsgrad")),
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit"), _TORCH),
    **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), _BNB),
    "sgd": (*_BNB, "momentum", "dampening", "nesterov"),
    "adagrad": (*_TORCH, "lr_decay", "initial_accumulator_value"),
    "rmsprop": (*_TORCH, "momentum", "alpha", "centered"),
    "adafactor": (*_BNB, "clip_threshold", "decay_rate"),
}
OPTIMIZERS = tuple(OPTIMIZER_ARGUMENTS)
ALIASES = {
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw": "adamw_torch",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
}
# Those that `Trainer` drops without a word (transformers/trainer_optimizer.py), and those it has arguments of its own for.
DROPPED = ("amsgrad", "initial_accumulator_value", "clip_threshold", "decay_rate")
OWN = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
SWITCHES = ("nesterov", "centered", "amsgrad")
ANY_SIGN = ("dampening", "decay_rate")
FLAGS = {"true": 1.0, "yes": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "no": 0.0, "0": 0.0, "0.0": 0.0}


@lru_cache(maxsize=512)
def _parse(optim: str, text: str) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if not value:
            raise RecipeError("optim_args", text, "it must read like 'momentum=0.9,weight_decay=0.01'")
        if name not in OPTIMIZER_ARGUMENTS[optim]:
            allowed = ", ".join(OPTIMIZER_ARGUMENTS[optim])
            raise RecipeError("optim_args", text, f"{optim} has no {name!r} here; it takes {allowed}")
        found[name] = _value(text, name, value)
    if found.get("nesterov") and (not found.get("momentum") or found.get("dampening")):
        raise RecipeError("optim_args", text, "nesterov needs a momentum over 0 and no dampening")
    return tuple(found.items())


def _value(text: str, name: str, value: str) -> float:
    try:
        number = FLAGS[value.lower()] if name in SWITCHES else float(value)
    except (KeyError, ValueError):
        kind = "True or False" if name in SWITCHES else "a number"
        raise RecipeError("optim_args", text, f"{name} must be {kind}") from None
    if not math.isfinite(number) or (number < 0 and name not in ANY_SIGN):
        allowed = "a finite number" + ("" if name in ANY_SIGN else " of at least 0")
        raise RecipeError("optim_args", text, f"{name} must be {allowed}")
    return number


def optimizer_arguments(optim: str, text: str | None) -> dict[str, float]:
    """Return `optim_args` as a dictionary. Raises RecipeError where it is of another form, or not for that optimizer."""
    return dict(_parse(optim, text)) if text else {}
