"""The optimizers of `transformers.training_args.OptimizerNames`, and some that it lacks.

What each does to memory is in `data/optimizers.json`, or why it is refused.
"""

import json
from functools import lru_cache
from typing import Any, NamedTuple

from ..base.data import data_path
from ..base.errors import RecipeError


class Optimizer(NamedTuple):
    """What an optimizer does to memory."""

    library: str
    kind: str  # its class there
    arguments: tuple[str, ...]  # those of its signature that `optim_args` may say
    # numbers in each block kept for a trained one; AdEMAMix has two averages in one block
    states: tuple[int, ...] = ()
    # bytes of one: 4 or 1 in bitsandbytes (Optimizer2State and Optimizer1State.init_state); None:
    # as `torch.zeros_like`
    width: int | None = None
    # temporaries as large as the tensors updated together, (foreach, one by one): AdamW's `denom`
    # is √v, and √v / correction one by one; Adagrad's are `std` and `numerator`; None: kernels that
    # need none
    copies: tuple[int, int] | None = None

    @property
    def compiles_updates(self) -> bool:
        """Whether the update of each parameter is compiled (torchao's)."""
        return self.library == "torchao"

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Optimizer":
        """Read a row of the table."""
        values: dict[str, Any] = {}
        for key, value in row.items():
            values[key] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


_TABLE = json.loads(data_path("optimizers.json").read_text(encoding="utf-8"))
MODELLED = {}
for _rows in ("modelled", "compiled", "beside_trainer"):
    for _name, _row in _TABLE[_rows].items():
        MODELLED[_name] = Optimizer.of(_row)
OPTIMIZERS = tuple(_TABLE["modelled"])
COMPILED = tuple(_TABLE["compiled"])  # by torchao; formulas do not know what that leaves
BESIDE_TRAINER = tuple(_TABLE["beside_trainer"])  # that the Trainer has no name for
SIMULATED = (*COMPILED, *BESIDE_TRAINER)  # that no formula knows
REFUSED = _TABLE["refused"]
ALIASES = _TABLE["aliases"]
# Those that `Trainer` drops without a word (transformers/trainer_optimizer.py).
DROPPED = ("amsgrad", "initial_accumulator_value", "clip_threshold", "decay_rate")
# Those that it has arguments of its own for.
OWN = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
SWITCHES = {"true": "1", "false": "0"}


@lru_cache(maxsize=512)
def optimizer_arguments(optim: str, text: str | None) -> dict[str, float]:
    """Return `optim_args` by name, not to be written to.

    Raises RecipeError where they are not that optimizer's.
    """
    arguments: dict[str, float] = {}
    pairs = text.split(",") if text else []
    for pair in pairs:
        said, _, value = pair.partition("=")
        name = said.strip()
        value = value.strip()
        try:
            arguments[name] = float(SWITCHES.get(value.lower(), value))
        except ValueError:
            rest = "it must read like 'momentum=0.9,nesterov=True'"
            raise RecipeError("optim_args", text, rest) from None
        if name not in MODELLED[optim].arguments:
            allowed = ", ".join(MODELLED[optim].arguments)
            rest = f"{optim} has no {name!r} here; it takes {allowed}"
            raise RecipeError("optim_args", text, rest)
    return arguments
