"""Bytes of the optimizer step's temporaries: multi-tensor ("foreach") kernels have √v of every parameter at once."""

from collections import Counter
from math import prod

from ..hardware.kernels import norms_scratch
from ..hardware.overhead import rounded
from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe
from .model_states import FP32, HALF, ParameterRow, parameter_table
from .reserved import internal_fragmentation


def step_temporaries(recipe: Recipe, rows: tuple[ParameterRow, ...] | None = None) -> int:
    """Return the peak of the step's temporaries, for all tensors or for those in `rows`, one rank's."""
    loop, rows = recipe.loop, [row for row in (parameter_table(recipe) if rows is None else rows) if row.trained]
    if loop.optimizer_in_backward:
        return 0
    most, before, trainer = 0, 0, loop.name == "trainer"
    remembers = MODELLED[recipe.optim].library == "schedulefree"  # the last group's until the next one's are made
    if loop.max_grad_norm is not None or trainer:  # the Trainer logs the norm even where it does not clip
        count, largest = sum(row.count for row in rows), max((prod(row.shape) for row in rows), default=0)
        # each gradient's norm has a block of its own, and there is their stack
        most = count * rounded(FP32) + rounded(max(FP32 * count, norms_scratch(count, largest)))
    if recipe.optim == "adafactor":  # tensor by tensor, and the last one's update lives on beside the next
        for row in sorted(rows, key=lambda row: trainer and not row.decayed):
            most = max(most, before + single_temporaries(recipe, row.shape, row.width))
            before = rounded(FP32 * prod(row.shape))
    elif loop.foreach is False:
        single = copies(recipe)[1]
        for row in rows:
            remembered = before if row.count == 1 else single * row.size  # by a name, until the next one's is made
            most = max(most, single * row.size + (remembered if remembers else 0))
            before = single * row.size
    else:
        groups: dict[bool, Counter] = {}  # what is updated together: by dtype within the Trainer's two parameter groups
        for row in rows:
            group = groups.setdefault(row.decayed or not trainer, Counter())
            group[row.width] += row.count * (row.size + internal_fragmentation(row.size))
        for group in groups.values():
            n, before = copies(recipe)[0], before if remembers else 0
            for size in group.values():  # names hold one go's temporaries until the next has made its own, one by one
                most = max(most, *((n - i) * before + (i + 1) * size for i in range(n)), 0)
                before = size
    return most


def copies(recipe: Recipe) -> tuple[int, int]:
    """Count the temporaries that are as large as what is updated: (foreach, one by one)."""
    foreach, single = MODELLED[recipe.optim].copies or (0, 0)  # kernels that need none
    given = recipe.optimizer_arguments()
    if recipe.optim in ("sgd", "rmsprop", "adagrad") and given.get("weight_decay"):
        foreach, single = foreach + (recipe.optim != "adagrad"), single + 1
    return foreach, single + bool(given.get("nesterov"))


def single_temporaries(recipe: Recipe, shape: tuple[int, ...], width: int) -> int:
    """Return the bytes that updating one tensor needs. Adafactor: g² and g² + ε, and fp32 copies of halves."""
    numbers = prod(shape)
    if recipe.optim == "adafactor":
        return (4 if width == HALF else 2) * rounded(FP32 * numbers)
    foreach, single = copies(recipe)
    return (single if recipe.loop.foreach is False else foreach) * numbers * width
