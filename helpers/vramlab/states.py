"""What an optimizer keeps between steps, and what all that stays costs in rests of segments."""

from functools import lru_cache
from math import ceil, prod

from .blocks import rounded
from .formulas import SMALLEST_IN_8_BITS, SMALLEST_PAGED, STATE_BLOCK, STATES, Row, held, role, stored_sizes, table
from .operators import FP32
from .recipe import Recipe
from .reserve import pack
from .shapes import Shape


def optimizer_state_bytes(recipe: Recipe) -> int:
    """Bytes of what the optimizer keeps between steps, on the GPU."""
    return sum(row.count * state_bytes(row, recipe) for row in held(recipe) if row.trained)


def state_bytes(row: Row, recipe: Recipe) -> int:
    """Bytes of one trained tensor's states; what a paged optimizer keeps in unified memory is left out."""
    return sum(state_sizes(row, recipe.optim, *_state_key(recipe)))


@lru_cache(maxsize=4096)
def state_sizes(row: Row, optim: str, optim_args: str | None, trainer: bool) -> list[int]:
    """Bytes of the blocks of one trained tensor's states. The Trainer keeps those of embeddings out of 8 bits."""
    n = row.numbers
    count, width = STATES[optim]
    if optim == "adafactor":
        return _factored(row.shape)
    if "bit" not in optim:
        if optim in ("sgd", "rmsprop") and optim_args:
            count += _given(optim_args, "momentum")
            count += optim == "rmsprop" and _given(optim_args, "centered")
        return [row.size] * count + ([rounded(FP32)] if optim == "adamw_torch_fused" else [])
    if width == 1 and (n < SMALLEST_IN_8_BITS or (row.kind == "embedding" and trainer)):
        width = FP32
    scales = [rounded(FP32 * ceil(n / STATE_BLOCK))] if width == 1 else []
    if optim.startswith("paged") and n >= SMALLEST_PAGED:
        return scales * count
    return ([rounded(n * width), *scales]) * count


def _given(optim_args: str, name: str) -> bool:
    """Whether an argument is there and not zero."""
    pairs = (pair.partition("=") for pair in optim_args.split(","))
    return any(key.strip() == name and float(value) != 0 for key, _, value in pairs)


def _factored(shape: tuple[int, ...]) -> list[int]:
    """Adafactor: one fp32 number for each row and each column of a matrix, or for each number of a vector."""
    if len(shape) < 2:
        return [rounded(FP32 * prod(shape))]
    return [rounded(FP32 * prod(shape[:-1])), rounded(FP32 * prod(shape[:-2]) * shape[-1])]


def _state_key(recipe: Recipe) -> tuple[str | None, bool]:
    return recipe.optim_args, recipe.loop.name == "trainer"


def slack_bytes(recipe: Recipe) -> dict[str, int]:
    """Bytes that the allocator holds beyond parameters, gradients and optimizer states: rests it does not split off."""
    return dict(
        _slack(recipe.shape, recipe.precision, recipe.quantization, recipe.lora, recipe.optim, _state_key(recipe))
    )


@lru_cache(maxsize=512)
def _slack(shape: Shape, precision: str, quantization, lora, optim: str, state_key) -> tuple[tuple[str, int], ...]:
    """All layers packed in the order of their names; gradients in the other order, states two by two."""
    rows = {(row.name, row.shape): row for row in table(shape, precision, quantization, lora)}
    order = [rows[role(weight.name), weight.shape] for weight in shape.weights()]
    order += [row for row in rows.values() if row.kind == "lora" for _ in range(row.count)]
    trained = [row for row in order if row.trained]
    double = bool(quantization and quantization.double)
    found = {
        "parameters": [size for row in order for size in stored_sizes(row, double)],
        "gradients": [row.size for row in reversed(trained)],
        "optimizer_states": [size for row in trained for size in state_sizes(row, optim, *state_key)],
    }
    return tuple((name, pack(sizes) - sum(sizes)) for name, sizes in found.items())
