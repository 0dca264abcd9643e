"""The roofline (Williams, Waterman and Patterson 2009): the best rate of a computation, by its intensity.

A kernel that does `i` operations per byte it moves runs at min(peak, i × bandwidth) at most. This module measures peak
and bandwidth on this machine; `Gpu.flops` and `Gpu.bandwidth` have the datasheets' figures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from vramlab.report.errors import MeasurementError, VramLabError

FORMATS = ("fp32", "tf32", "bf16", "fp16")
PATIENCE = 1.0  # seconds after which no further repeat begins: a CPU may emulate a format very slowly


class RooflineError(VramLabError, ValueError):
    """A rate, an intensity or a size that is not positive."""


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """Operations a second at `intensity` operations per byte: min(peak, intensity × bandwidth)."""
    if min(intensity, peak, bandwidth) <= 0:
        raise RooflineError("Intensity, peak and bandwidth have to be above zero.")
    return min(peak, intensity * bandwidth)


def matmul_intensity(m: int, n: int, k: int, width: int) -> float:
    """Operations per byte of an m×k by k×n product: 2mnk over the bytes of both factors and the result."""
    if min(m, n, k, width) <= 0:
        raise RooflineError("Sizes and the width of a number have to be above zero.")
    return 2 * m * n * k / (width * (m * k + k * n + m * n))


@dataclass(frozen=True)
class Rate:
    """A rate per second: from the best of several timings, and from their median."""

    best: float
    median: float


def copy_bandwidth(device: str | None = None, size: int | None = None, repeats: int = 30) -> Rate:
    """Bytes a second, read and written, of a copy within the device's memory.

    Args:
        size: bytes to copy; 256 MiB on CUDA and 64 MiB on a CPU if left out, far more than the caches hold.
    """
    import torch

    device = _device(device)
    size = size or (256 if device == "cuda" else 64) << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * size, device, repeats)


def matmul_rate(form: str, device: str | None = None, size: int | None = None, repeats: int = 20) -> Rate:
    """Operations a second of a square matmul in `form`, one of FORMATS.

    Args:
        size: rows; 8192 on CUDA and 768 on a CPU if left out.
    Raises:
        MeasurementError: an unknown format, or one that this device does not compute in ("tf32" on a CPU).
    """
    import torch

    device = _device(device)
    if form not in FORMATS or (form == "tf32" and device == "cpu"):
        raise MeasurementError(f"A matmul in {form!r} cannot be timed on {device}: formats are {', '.join(FORMATS)}.")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form, torch.float32)
    size = size or (8192 if device == "cuda" else 768)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if form == "tf32" else "highest")
    try:
        return _rate(lambda: a @ b, 2 * size**3, device, repeats)
    finally:
        torch.set_float32_matmul_precision(before)


def _device(device: str | None) -> str:
    import torch

    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if found not in ("cpu", "cuda") or (found == "cuda" and not torch.cuda.is_available()):
        raise MeasurementError(f"There is no device {found!r} here: take 'cpu', or 'cuda' where torch sees a GPU.")
    return found


def _rate(work: Callable[[], object], amount: float, device: str, repeats: int) -> Rate:
    """`amount` over the seconds of `work`, after a warm-up and until the GPU has finished."""
    import torch

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    seconds: list[float] = []
    while len(seconds) <= repeats and sum(seconds) < PATIENCE:  # the first one warms up
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    timed = seconds[1:] or seconds
    return Rate(amount / min(timed), amount / median(timed))
