"""What torch and CUDA take for themselves on a GPU: library workspaces inside the allocator, the context outside it."""

import re
from functools import cache

from ..report.report import Interval, MiB

# torch's allocator (c10/cuda/CUDACachingAllocator.cpp): kMinBlockSize; kSmallSize and kSmallBuffer, the segment that
# requests up to that share; kMinLargeAlloc and kLargeBuffer, the segment of larger ones below it; kRoundLarge, to which
# a segment of its own is rounded up. Of a large segment no rest of kSmallSize or less is split off.
UNIT = 512
SMALL_BLOCK, SMALL_SEGMENT = 1 * MiB, 2 * MiB
LARGE_REQUEST, LARGE_SEGMENT, ROUND_LARGE = 10 * MiB, 20 * MiB, 2 * MiB

# What a process holds outside torch's allocator: CUDA's context, the code of loaded kernels, library handles. It is no
# constant: torch sets CUDA_MODULE_LOADING=LAZY, so a kernel's code comes in at its first use. The bare context is the
# low end; cuBLAS, cuDNN, bitsandbytes and NCCL add to it as a run uses them; it grows with the card's multiprocessors
# and changes with the driver. Measure it once per machine and store it. Published figures run from 133 to 1,823 MiB:
# 140.875 MiB on a T4 (fitcheck-llm 0.3.1); 128 to 256 MiB, by card and driver (InvokeAI pull request 9447);
# 287,047,680 bytes with lazy loading against 666,632,192 without (PyTorch pull request 86509, the likely value here);
# 1,008 MiB on a Titan V before lazy loading (PyTorch issue 28394); 1.79 GiB with a server's kernels loaded
# on an H100 (vLLM pull request 10511).
CONTEXT = Interval(133 * MiB, 287_047_680, 1823 * MiB)


def rounded(size: int) -> int:
    """`size` bytes as the CUDA allocator hands them out."""
    return -(-size // UNIT) * UNIT


def cublas_workspace(compute_capability: tuple[int, int], torch_version: str | None = None) -> int:
    """Bytes of the workspace that torch's allocator gives to each cuBLAS handle on each stream.

    ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: "default_size = sm90 ? 4096 * 8 * 1024 :
    4096 * 1024 * 2 + 16 * 1024 * 8", that is 32 MiB on Hopper and 8,519,680 bytes (":4096:2:16:8") elsewhere. Since
    2.12 (PyTorch pull request 175344, after 2.11 was branched) majors 10 and 12, Blackwell, take 32 MiB too. The
    environment variable CUBLAS_WORKSPACE_CONFIG overrides both.

    A handle belongs to a thread (`DeviceThreadHandlePool`), and backward runs on autograd's own: a training step on
    one stream holds two workspaces, the first from the first matmul of forward on, the second from backward's.
    They stay to the end of the process. Newer than 2.14 (PyTorch pull request 194311) they are allocated for each call.

    Args:
        compute_capability: of the device, (9, 0) for Hopper.
        torch_version: like "2.13.0+cu130"; None takes the torch installed here, unloaded.
    """
    large = (9, 10, 12) if torch_release(torch_version) >= (2, 12) else (9,)
    return 4096 * 8 * 1024 if compute_capability[0] in large else 4096 * 1024 * 2 + 16 * 1024 * 8


def cublaslt_workspace(torch_version: str | None = None) -> int:
    """Bytes of the further workspace of a handle whose matmuls go through cuBLASLt (a bias or an activation fused in).

    `parseCUDABlasLtWorkspaceSize` in the same file says 1,024 KiB. Up to 2.11 `getCUDABlasLtWorkspace` shares cuBLAS's
    only when TORCH_CUBLASLT_UNIFIED_WORKSPACE is set; since 2.12 (pull request 175879) it always does, so nothing is
    added; `torch.backends.cuda.blas_workspace_size` documents the sharing.
    """
    return 1024 * 1024 if torch_release(torch_version) < (2, 12) else 0


@cache
def torch_release(torch_version: str | None = None) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cu130"; the installed torch's for None, and the newest one known here without any torch."""
    if torch_version is None:
        from importlib import metadata

        try:
            torch_version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return (2, 13)
    return tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2])
