"""Bytes of the optimizer step's temporaries.

Multi-tensor ("foreach") kernels have √v of all parameters at once.
"""

from collections import Counter
from math import prod

from ..hardware.kernels import norms_scratch
from ..hardware.overhead import rounded
from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe
from .model_states import ParameterRow, parameter_table
from .reserved import internal_fragmentation
from .tensor_sizes import FP32, HALF


def step_temporaries(recipe: Recipe, rows: tuple[ParameterRow, ...] | None = None) -> int:
    """Return the peak of the step's temporaries, for all tensors or for `rows`, one rank's."""
    if recipe.loop.optimizer_in_backward:
        return 0
    if rows is None:
        rows = parameter_table(recipe)
    trained = [row for row in rows if row.trained]
    # Norms are gone when the update begins, so the larger of the two counts.
    clipping = 0
    # The Trainer logs the norm even where it does not clip.
    if recipe.loop.max_grad_norm is not None or recipe.loop.name == "trainer":
        clipping = _norms(trained)
    if recipe.optim == "adafactor":
        update = _adafactor(recipe, trained)
    elif recipe.loop.foreach is False:
        update = _one_by_one(recipe, trained)
    else:
        update = _foreach(recipe, trained)
    return max(clipping, update)


def _norms(rows: list[ParameterRow]) -> int:
    """Return the bytes of all gradients' norms, each in a block of its own, and of their stack."""
    # `clip_grad_norm_` takes a norm of each gradient, stacks the norms and takes one of the stack;
    # each norm is a block of 512 bytes.
    count = sum(row.count for row in rows)
    largest = max((prod(row.shape) for row in rows), default=0)
    stack = max(FP32 * count, norms_scratch(count, largest))
    return count * rounded(FP32) + rounded(stack)


def _adafactor(recipe: Recipe, rows: list[ParameterRow]) -> int:
    """Return the most that one tensor takes while the last one's update lives on beside it."""
    in_groups = recipe.loop.name == "trainer"
    most = 0
    before = 0
    # The Trainer updates decayed weights first.
    for row in sorted(rows, key=lambda row: in_groups and not row.decayed):
        most = max(most, before + single_temporaries(recipe, row.shape, row.width))
        before = rounded(FP32 * prod(row.shape))
    return most


def _one_by_one(recipe: Recipe, rows: list[ParameterRow]) -> int:
    """Return the most that one tensor takes; some optimizers remember the last one's."""
    remembers = _remembers(recipe)
    _, single = copies(recipe)
    most = 0
    before = 0
    for row in rows:
        own = single * row.size
        remembered = 0
        if remembers:
            # Of several equal tensors the one before is as large as this one.
            remembered = before if row.count == 1 else own
        most = max(most, own + remembered)
        before = own
    return most


def _foreach(recipe: Recipe, rows: list[ParameterRow]) -> int:
    """Return the most that is updated together, by dtype within the Trainer's parameter groups."""
    # `_group_tensors_by_device_and_dtype` is called for each parameter group, of which the Trainer
    # makes two: with weight decay and without.
    one_group = recipe.loop.name != "trainer"
    groups: dict[bool, Counter[int]] = {}
    for row in rows:
        group = groups.setdefault(row.decayed or one_group, Counter())
        # Temporaries are as large as the weights, and rounded as they are.
        size = row.size + internal_fragmentation(row.size)
        group[row.width] += row.count * size
    temporaries, _ = copies(recipe)
    most = 0
    before = 0
    for group in groups.values():
        if not _remembers(recipe):
            before = 0
        for size in group.values():
            # Names hold the temporaries of one dtype until the next has made its own, one by one.
            for made in range(temporaries):
                most = max(most, (temporaries - made) * before + (made + 1) * size)
            before = size
    return most


def _remembers(recipe: Recipe) -> bool:
    """Tell whether the last group's temporaries live until the next one's are made."""
    return MODELLED[recipe.optim].library == "schedulefree"


def copies(recipe: Recipe) -> tuple[int, int]:
    """Count the temporaries that are as large as what is updated: (foreach, one by one)."""
    foreach, single = MODELLED[recipe.optim].copies or (0, 0)  # kernels that need none
    given = recipe.optimizer_arguments()
    if recipe.optim in ("sgd", "rmsprop", "adagrad") and given.get("weight_decay"):
        # The gradient with the decayed weight, which foreach Adagrad has anyway.
        single += 1
        if recipe.optim != "adagrad":
            foreach += 1
    if given.get("nesterov"):
        single += 1
    return foreach, single


def single_temporaries(recipe: Recipe, shape: tuple[int, ...], width: int) -> int:
    """Return the bytes that updating one tensor needs."""
    numbers = prod(shape)
    if recipe.optim == "adafactor":
        # g² and g² + ε, and fp32 copies of halves.
        count = 4 if width == HALF else 2
        return count * rounded(FP32 * numbers)
    foreach, single = copies(recipe)
    count = single if recipe.loop.foreach is False else foreach
    return count * numbers * width
