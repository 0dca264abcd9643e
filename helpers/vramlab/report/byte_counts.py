"""Bytes by what they are for, at a moment, and what made them; sizes in words."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

KiB = 1024
MiB = 1024**2
GiB = 1024**3
UNITS = {"GiB": GiB, "MiB": MiB, "KiB": KiB, "B": 1}
# What operators of the loss make, by direction, as PyTorch and the formulas call them.
LOGITS_GRADIENT = "the gradient of the logits"
RESULTS = {
    ("forward", "log_softmax"): "the log-probabilities",
    ("backward", "nll_loss"): "the gradient of the log-probabilities",
    ("backward", "nll_loss_backward"): "the gradient of the log-probabilities",
    ("backward", "log_softmax"): LOGITS_GRADIENT,
    ("backward", "log_softmax_backward_data"): LOGITS_GRADIENT,
}


def format_bytes(
    n: int | float,
    unit: str = "GiB",
    digits: int = 3,
) -> str:
    """Return `n` bytes as text, "2.481 GiB" by default."""
    return f"{in_unit(n, unit, digits)} {unit}"


def in_unit(
    n: int | float,
    unit: str = "GiB",
    digits: int = 3,
) -> str:
    """Return `n` bytes as a number of `unit`, as in tables."""
    if unit == "B":
        return f"{int(n):,}" if n == int(n) else f"{n:,.2f}"
    return f"{n / UNITS[unit]:,.{digits}f}"


def unit_for(largest: int) -> str:
    """Return the unit in which `largest` bytes are at least 1: "GiB", "MiB", else "KiB"."""
    for unit in ("GiB", "MiB"):
        if largest >= UNITS[unit]:
            return unit
    return "KiB"


@dataclass(frozen=True)
class Bytes:
    """Bytes at one moment, by what they are for."""

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    kv_cache: int = 0  # keys, values and states that `generate` keeps for the next tokens
    temporaries: int = 0
    buffers: int = 0
    inputs: int = 0
    # Of libraries, kernels and the allocator: cuBLAS's buffers, scratch, internal fragmentation.
    workspace: int = 0
    unexplained: int = 0  # the allocator's figure minus the rest, in measured reports only

    @property
    def total(self) -> int:
        """The sum of all categories in bytes."""
        return sum(vars(self).values())

    def items(self) -> Iterator[tuple[str, int]]:
        """Return (category, bytes) in the order of CATEGORIES."""
        return iter(vars(self).items())

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in self.items() if n]
        return f"{format_bytes(self.total)} = " + (" + ".join(parts) or "nothing")


CATEGORIES = tuple(field.name for field in dataclasses.fields(Bytes))


@dataclass(frozen=True)
class Cause:
    """What one operator allocated, in one place, before memory stood at a peak."""

    direction: str  # the phase, or "recomputation" of a checkpoint's forward pass in backward
    op: str
    where: str  # the module whose forward or backward ran, or the parameter; "" outside of modules
    size: int  # bytes of all its results
    category: str
    count: int = 1  # of results; what follows is that of the largest
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        place = f"{self.direction} of {self.where}" if self.where else self.direction
        size = format_bytes(self.size, unit_for(self.size))
        words = RESULTS.get((self.direction, self.op.removeprefix("_")), "")
        what = f"{words}, " if words else ""
        made = f"{place}: {self.op} makes {what}{size} of {self.category.replace('_', ' ')}"
        if not self.dtype:
            return made
        shape = "×".join(map(str, self.shape)) or "scalar"
        largest = f"{self.count} tensors, the largest " if self.count > 1 else ""
        return f"{made}, {largest}{self.dtype} [{shape}]"


@dataclass(frozen=True)
class Phase:
    """One phase of the step: the split at its peak and at its end.

    The cause of a peak that is at the phase's begin lies in the phase before, and is None here.
    """

    peak: Bytes
    end: Bytes
    cause: Cause | None = None


@dataclass(frozen=True)
class TensorGroup:
    """`count` equal tensors alive at the peak.

    Size of one in bytes, and the operator and the module that made them.
    """

    size: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    where: str = ""
    count: int = 1

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        times = f"{self.count} × " if self.count > 1 else ""
        size = f"{times}{format_bytes(self.size)}"
        where = f" in {self.where}" if self.where else ""
        return f"{size} {self.category} {self.dtype} [{shape}] by {self.op}{where}"


@dataclass(frozen=True)
class Moment:
    """One point of the timeline: the split after `index` allocation events of the last step."""

    index: int
    phase: str
    bytes: Bytes
