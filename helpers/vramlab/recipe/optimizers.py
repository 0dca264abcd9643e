"""The optimizers of `transformers.training_args.OptimizerNames`: what each does to memory, or why it is refused."""

import json
import math
from functools import lru_cache
from typing import NamedTuple

from ..report.data import data_path
from ..report.errors import RecipeError


class Optimizer(NamedTuple):
    """What an optimizer does to memory."""

    library: str
    kind: str  # its class there
    arguments: tuple[str, ...]  # those of its signature that `optim_args` may say
    states: tuple[int, ...] = ()  # numbers in each block kept for a trained one; AdEMAMix has two averages in one block
    # bytes of one: 4 or 1 in bitsandbytes (Optimizer2State and Optimizer1State.init_state); None: as `torch.zeros_like`
    width: int | None = None
    # temporaries as large as the tensors updated together, (foreach, one by one): AdamW's `denom` is √v, and √v / correction
    # one by one; Adagrad's are `std` and `numerator`; None: kernels that need none
    copies: tuple[int, int] | None = None


_TABLE = json.loads(data_path("optimizers.json").read_text(encoding="utf-8"))
MODELLED = {
    name: Optimizer(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})
    for name, row in _TABLE["modelled"].items()
}
OPTIMIZERS, REFUSED, ALIASES = tuple(MODELLED), _TABLE["refused"], _TABLE["aliases"]
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
        if name not in MODELLED[optim].arguments:
            allowed = ", ".join(MODELLED[optim].arguments)
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
