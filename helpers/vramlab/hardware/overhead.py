"""What torch and CUDA take for themselves on a GPU: rounding and workspaces in the allocator."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from ..report.report import Interval, MiB, installed

# torch's allocator (c10/cuda/CUDACachingAllocator.cpp): kMinBlockSize; kSmallSize and kSmallBuffer;
# kMinLargeAlloc and kLargeBuffer; kRoundLarge. `allocator.py` says what they are for.
UNIT = 512
SMALL_BLOCK = 1 * MiB
SMALL_SEGMENT = 2 * MiB
LARGE_REQUEST = 10 * MiB
LARGE_SEGMENT = 20 * MiB
ROUND_LARGE = 2 * MiB

# Bytes beyond the peak in the least memory that held a simulated step with
# `expandable_segments:True`, in the allocator's model (`benchmarks/expandable.py`): median of 114,
# and half as much again as the worst. Whole unused pages go back before memory is full; what is
# left over is in pages that are partly used. No published run says so.
PAGES = 80 * MiB
MOST_PAGES = 512 * MiB
EXACT = 0.97  # a predicted peak is known to 3 %
# Offloaded activations are copied on a stream of their own, and the simulation has one: on the real
# allocator two runs reserved 2.2 % more and 4.7 % less (site/accuracy.md).
TWO_STREAMS = 0.953

Release = tuple[int, int]  # of torch: (2, 13) of 2.13.0+cu130
NEWEST = "2.13"  # of torch whose rules are known

_asked: ContextVar[Release | None] = ContextVar("torch_release", default=None)


def rounded(size: int) -> int:
    """Round `size` up as the CUDA allocator does."""
    return -(-size // UNIT) * UNIT


def segment(size: int) -> int:
    """Return the bytes of the segment for a request of over 1 MiB where no free block fits."""
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def expandable(peak: int, known: float = 1.0) -> Interval:
    """Estimate the memory that a peak needs with expandable segments.

    `peak`: in bytes, known to the share `known`.
    """
    low = int(peak * min(1, known / EXACT))
    high = int(peak / known) + MOST_PAGES
    return Interval(low, peak + PAGES, high)


def cublas_workspace(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of the workspace of each cuBLAS handle on each stream.

    torch's allocator gives it. ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: 32 MiB
    on Hopper and 8,519,680 bytes (":4096:2:16:8") elsewhere; since 2.12 (PyTorch pull request
    175344) 32 MiB on Blackwell too. CUBLAS_WORKSPACE_CONFIG overrides both.

    A handle belongs to a thread (`DeviceThreadHandlePool`), and backward runs on autograd's own: a
    training step on one stream holds two workspaces, from the first matmul of forward and of
    backward on, to the end of the process; since 2.15 none, see `frees_workspaces`.
    """
    major, _ = compute_capability
    with_large = (9, 10, 12) if torch_release() >= (2, 12) else (9,)
    if major in with_large:
        return 4096 * 8 * 1024
    return 4096 * 1024 * 2 + 16 * 1024 * 8


# What cuBLASLt, which multiplies with a bias, is given: `parseCUDABlasLtWorkspaceSize` of the same
# file.
CUBLASLT_WORKSPACE = 1 * MiB


def has_lt_workspaces() -> bool:
    """Tell whether cuBLASLt keeps workspaces of its own.

    Since 2.12 it shares cuBLAS's (PyTorch pull request 168175).
    """
    return torch_release() < (2, 12)


def frees_workspaces() -> bool:
    """Tell whether each product allocates its workspace and frees it.

    It does since 2.15 (PyTorch pull request 194311). cuBLASLt does not share cuBLAS's then.
    TORCH_CUBLAS_WORKSPACE_CACHE=1 brings back what was before.
    """
    return torch_release() >= (2, 15)


def efficient_takes_groups() -> bool:
    """Tell whether memory-efficient attention takes fewer key heads than query heads.

    It does since 2.14 (PyTorch pull request 191085).
    """
    return torch_release() >= (2, 14)


def torch_release() -> Release:
    """Return (2, 13) where torch 2.13.0+cu130 is installed, or what `rules_of` named.

    Without a torch it is the newest known.
    """
    return _asked.get() or _installed_release(installed)


@contextmanager
def rules_of(version: str) -> Iterator[None]:
    """While entered, torch's workspaces are those of `version`, such as "2.11.0+cu128".

    That is what a record's own torch held.
    """
    token = _asked.set(_release(version))
    try:
        yield
    finally:
        _asked.reset(token)


@cache
def _installed_release(version_of: Callable[[str], str | None]) -> Release:
    """Read once: a package's metadata are a file, and a prediction asks often."""
    return _release(version_of("torch") or NEWEST)


@cache
def _release(version: str) -> Release:
    major, minor, *_ = re.findall(r"\d+", version)
    return int(major), int(minor)
