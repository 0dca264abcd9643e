"""What torch and CUDA take for themselves on a GPU: rounding and workspaces in the allocator, the context outside it."""

import re
from functools import cache

from ..report.report import Interval, MiB, installed

# torch's allocator (c10/cuda/CUDACachingAllocator.cpp): kMinBlockSize; kSmallSize and kSmallBuffer; kMinLargeAlloc and
# kLargeBuffer; kRoundLarge. `allocator.py` says what they are for.
UNIT = 512
SMALL_BLOCK, SMALL_SEGMENT = 1 * MiB, 2 * MiB
LARGE_REQUEST, LARGE_SEGMENT, ROUND_LARGE = 10 * MiB, 20 * MiB, 2 * MiB

# What a process holds outside torch's allocator: CUDA's context, the code of loaded kernels, library handles. torch sets
# CUDA_MODULE_LOADING=LAZY, so a kernel's code is loaded at its first use. The bare context is the low end; cuBLAS,
# cuDNN, bitsandbytes and NCCL add to it; it grows with the multiprocessors and changes with the driver. Published:
# 140.875 MiB on a T4 (fitcheck-llm 0.3.1); 128 to 256 MiB, by card and driver (InvokeAI pull request 9447);
# 287,047,680 bytes with lazy loading against 666,632,192 without (PyTorch pull request 86509, the likely value here);
# 1,008 MiB on a Titan V before lazy loading (PyTorch issue 28394); 1.79 GiB with a server's kernels loaded
# on an H100 (vLLM pull request 10511).
CONTEXT = Interval(133 * MiB, 287_047_680, 1823 * MiB)


def rounded(size: int) -> int:
    """Round `size` up as the CUDA allocator does."""
    return -(-size // UNIT) * UNIT


def segment(size: int) -> int:
    """Return the bytes of the segment for a request of over 1 MiB where no free block fits."""
    return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // ROUND_LARGE) * ROUND_LARGE


def cublas_workspace(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of the workspace that torch's allocator gives to each cuBLAS handle on each stream.

    ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: 32 MiB on Hopper and 8,519,680 bytes (":4096:2:16:8")
    elsewhere; since 2.12 (PyTorch pull request 175344) 32 MiB on Blackwell too. CUBLAS_WORKSPACE_CONFIG overrides both.

    A handle belongs to a thread (`DeviceThreadHandlePool`), and backward runs on autograd's own: a training step on
    one stream holds two workspaces, from the first matmul of forward and of backward on, to the end of the process.
    After 2.14 (PyTorch pull request 194311) they are allocated for each call.
    """
    large = (9, 10, 12) if torch_release() >= (2, 12) else (9,)
    return 4096 * 8 * 1024 if compute_capability[0] in large else 4096 * 1024 * 2 + 16 * 1024 * 8


@cache
def torch_release() -> tuple[int, int]:
    """Return (2, 13) where torch 2.13.0+cu130 is installed; without a torch the newest known here."""
    return tuple(int(part) for part in re.findall(r"\d+", installed("torch") or "2.13")[:2])
