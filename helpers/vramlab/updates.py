"""The optimizer step: what it needs besides gradients and states.

Multi-tensor ("foreach") kernels, PyTorch's default on CUDA, work on all tensors of a parameter group and dtype at once,
so their temporaries are as large as the group. That is the hidden peak of a step with AdamW: √v for every parameter.
"""

from collections import Counter
from math import prod

from .blocks import rounded, slack
from .formulas import Row, held, written_out
from .ledger import Parameter
from .operators import FP32, HALF
from .recipe import Recipe

# Temporaries as large as the tensors updated together, (foreach, one by one), counted in torch/optim/*.py: AdamW's
# `denom` is √v, RMSprop's likewise, Adagrad's `std` and `numerator`; one by one, √v / correction is a second one.
COPIES = {"adamw_torch": (1, 2), "rmsprop": (1, 1), "adagrad": (2, 1), "sgd": (0, 0)}


def step_temporaries(recipe: Recipe) -> int:
    """Bytes of the step's temporaries at their highest moment."""
    if recipe.loop.optimizer_in_backward:
        return 0
    rows = [row for row in held(recipe) if row.trained]
    norms = clipping(recipe, rows)
    if recipe.optim == "adafactor":
        return max(norms, factored_step(recipe))
    if recipe.optim not in COPIES:
        return norms
    foreach, single = copies(recipe)
    if recipe.loop.foreach is False:
        return max(norms, single * max((row.size for row in rows), default=0))
    return max(norms, max((in_turn(sizes, foreach) for sizes in groups(recipe, rows)), default=0))


def copies(recipe: Recipe) -> tuple[int, int]:
    """How many temporaries the size of what is updated: (foreach, one by one)."""
    foreach, single = COPIES[recipe.optim]
    if recipe.optim != "adamw_torch" and recipe.optimizer_arguments().get("weight_decay"):
        foreach, single = max(foreach, foreach + (recipe.optim != "adagrad")), single + 1
    return foreach, single


def groups(recipe: Recipe, rows: list[Row]) -> list[list[int]]:
    """Bytes that are updated together: by dtype within each of the Trainer's two parameter groups."""
    found: dict[bool, Counter] = {}
    for row in rows:
        group = found.setdefault(row.decayed if recipe.loop.name == "trainer" else True, Counter())
        group[row.width] += row.count * (row.size + slack(row.size))
    return [list(group.values()) for group in found.values()]


def in_turn(sizes: list[int], copies: int) -> int:
    """The most that `copies` temporaries of each of `sizes` take, one size after the other.

    Names hold the temporaries of one go until the next go has made its own, one by one.
    """
    most = before = 0
    for size in sizes:
        most = max(most, *((copies - i) * before + (i + 1) * size for i in range(copies)), 0)
        before = size
    return most


def clipping(recipe: Recipe, rows: list[Row]) -> int:
    """Clipping needs one norm a tensor, each in a block of its own, and their stack.

    The Trainer computes the norm for its log even where it does not clip.
    """
    if recipe.loop.max_grad_norm is None and recipe.loop.name != "trainer":
        return 0
    tensors = sum(row.count for row in rows)
    return tensors * rounded(FP32) + rounded(FP32 * tensors)


def factored_step(recipe: Recipe) -> int:
    """Adafactor's highest moment: it goes tensor by tensor, and the last one's update lives on beside the next."""
    most = before = 0
    rows = {(row.name, row.shape): row for row in held(recipe) if row.trained}
    order = [rows[role, size] for _, role, size in written_out(recipe.shape) if (role, size) in rows]
    if recipe.loop.name == "trainer":
        order.sort(key=lambda row: not row.decayed)
    for row in order or rows.values():
        most = max(most, before + factored_temporaries(row.numbers, row.width))
        before = rounded(FP32 * row.numbers)
    return most


def factored_temporaries(numbers: int, width: int) -> int:
    """Adafactor needs g² and g² + ε, of fp32 copies of gradient and weight if those are in half precision."""
    whole = rounded(FP32 * numbers)
    return 2 * whole + (2 * whole if width == HALF else 0)


def single_temporaries(recipe: Recipe, parameter: Parameter) -> int:
    """Bytes that updating one tensor alone needs (`optimizer_in_backward`)."""
    numbers = prod(parameter.shape)
    if recipe.optim == "adafactor":
        return factored_temporaries(numbers, parameter.width)
    if recipe.optim not in COPIES:
        return 0
    foreach, single = copies(recipe)
    return (single if recipe.loop.foreach is False else foreach) * numbers * parameter.width
