"""The optimizers of `transformers.training_args.OptimizerNames`: what each does to memory, or why it is refused."""

import json
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


@lru_cache(maxsize=512)
def optimizer_arguments(optim: str, text: str | None) -> dict[str, float]:
    """Return `optim_args` by name, not to be written to. Raises RecipeError where they are not that optimizer's."""
    found: dict[str, float] = {}
    for pair in text.split(",") if text else ():
        name, _, value = (part.strip() for part in pair.partition("="))
        try:
            found[name] = float({"true": 1, "false": 0}.get(value.lower(), value))
        except ValueError:
            raise RecipeError("optim_args", text, "it must read like 'momentum=0.9,nesterov=True'") from None
        if name not in MODELLED[optim].arguments:
            allowed = ", ".join(MODELLED[optim].arguments)
            raise RecipeError("optim_args", text, f"{optim} has no {name!r} here; it takes {allowed}")
    return found
