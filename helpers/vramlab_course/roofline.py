"""The roofline (Williams, Waterman and Patterson 2009): the best rate of a computation, by its
intensity.

A kernel that does `i` operations per byte it moves runs at min(peak, i × bandwidth) at most.
`best_seconds` times computations on this machine; `Gpu.flops` and `Gpu.bandwidth` have the
datasheets' figures.
"""

import time
from collections.abc import Callable, Mapping

from vramlab.report.errors import VramLabError

ROUNDS = 8  # of all computations by turns, so that a busy moment spoils one turn of each


class RooflineError(VramLabError, ValueError):
    """A rate or an intensity that is not positive."""


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """Operations a second at `intensity` operations per byte: min(peak, intensity × bandwidth)."""
    if min(intensity, peak, bandwidth) <= 0:
        raise RooflineError("Intensity, peak and bandwidth have to be above zero.")
    return min(peak, intensity * bandwidth)


def best_seconds(work: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest time of each computation in seconds: on a GPU until it has finished, on a
    CPU on one core.

    On a CPU the clock stops while another program has the core, so that a busy machine gives nearly
    the same figures.
    """
    import torch

    cuda = torch.cuda.is_available()
    wait, clock = (
        (torch.cuda.synchronize, time.perf_counter) if cuda else (lambda: None, time.thread_time)
    )
    threads, best = torch.get_num_threads(), dict.fromkeys(work, float("inf"))
    torch.set_num_threads(1)
    try:
        for run in work.values():
            run()  # the first run also pays for new memory
        for name, run in [*work.items()] * ROUNDS:
            wait()
            start = clock()
            run()
            wait()
            best[name] = min(best[name], clock() - start)
    finally:
        torch.set_num_threads(threads)
    return best
