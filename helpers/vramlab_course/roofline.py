"""The shortest time of computations on this machine, for chapter 07.

It is held against a roofline (Williams, Waterman and Patterson 2009).
"""

import time
from collections.abc import Callable, Mapping

ROUNDS = 8  # of all computations by turns, so that a busy moment spoils one turn of each


def best_seconds(work: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest time of each computation in seconds.

    On a GPU it is timed until it has finished, on a CPU on one core.

    On a CPU the clock stops while another program has the core, so that a busy machine gives nearly
    the same figures.
    """
    import torch

    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    clock = time.perf_counter if cuda else time.thread_time
    threads = torch.get_num_threads()
    best = dict.fromkeys(work, float("inf"))
    torch.set_num_threads(1)
    try:
        for run in work.values():
            run()  # the first run also pays for new memory
        # By turns, so that a busy moment does not hit all rounds of one.
        for name, run in [*work.items()] * ROUNDS:
            wait()
            start = clock()
            run()
            wait()
            best[name] = min(best[name], clock() - start)
    finally:
        torch.set_num_threads(threads)
    return best
