"""Work in place of a card's (`vramlab.measurement.card_work`), for tests without one: some of it
ends badly.
"""

import os
import signal
from pathlib import Path

from vramlab.measurement.facts import Fact
from vramlab.measurement.launch import RankError
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import MiB, environment

TOTAL = 14912 * MiB
T4 = {"gpu": "Tesla T4", "compute_capability": "7.5", "multiprocessors": 40, "total_memory": TOTAL}
BASE, CONTEXT = 3 * MiB, 141 * MiB


def versions() -> dict:
    return {**environment(), "cuda": "13.0", "driver": "580.1"}


def context(loaded: str, source: str = "measured", **changes) -> Fact:
    """What a T4 shows of a bare context."""
    found = {
        "used_before": BASE,
        "used_after": BASE + CONTEXT + 2 * MiB,
        "smi_used": None,
        "process": None,
        "allocated": 512,
        "reserved": 2 * MiB,
    }
    return Fact("context", {"loaded": loaded}, found | changes, source, versions() | T4)


def find(kind: str, asked: dict, scratch: str) -> Fact:
    """Killed with a file half written while it loads cuBLAS, out of memory with cuDNN, as any card
    otherwise.
    """
    if asked["loaded"] == "cuBLAS":
        Path(scratch, "half").write_bytes(b"0" * MiB)
        os.kill(os.getpid(), signal.SIGKILL)
    if asked["loaded"] == "cuDNN":
        raise RankError("no room", oom="CUDA out of memory. Tried to allocate 2.00 GiB.")
    return context(asked["loaded"])


def steps(recipe: Recipe, allocated: int, **changes) -> Fact:
    """What ten steps of `recipe` show on a T4 whose allocator held so many bytes."""
    reserved = -(-allocated // (2 * MiB)) * 2 * MiB
    found = {
        "used_before": BASE,
        "used_after": BASE + CONTEXT + reserved,
        "smi_used": None,
        "process": None,
        "allocated": allocated,
        "reserved": reserved,
        "requested": allocated - 512,
        "seconds": [0.05 + 0.001 * number for number in range(10)],
        "power": [60.0, 69.5],
        "power_limit": 70.0,
        "clock": [1200, 1590],
        "temperature": [61],
        "throttle": ["software power cap"],
    }
    asked = {"recipe": recipe.to_dict(), "expandable": False, "repeats": 10}
    return Fact("steps", asked, found | changes, "measured", versions() | T4)


def out_of_memory(recipe: Recipe, batch_size: int, **changes) -> Fact:
    """What a T4 says when `recipe` dies at a batch size."""
    found = {
        "batch_size": batch_size,
        "step": 1,
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 14.56 GiB of which "
        "5.00 MiB is free.",
        "free": TOTAL - 2 * BASE,
        "total": TOTAL,
        "allocated": 512,
        "reserved": 2 * MiB,
        "peak_allocated": TOTAL - 600 * MiB,
        "peak_reserved": TOTAL - 400 * MiB,
    }
    return Fact(
        "out_of_memory", {"recipe": recipe.to_dict()}, found | changes, "measured", versions() | T4
    )


def loading(recipe: Recipe, allocated: int, **changes) -> Fact:
    """What loading the 4-bit base of `recipe` takes on a T4."""
    state = steps(recipe, allocated).found
    names = (
        "used_before",
        "used_after",
        "smi_used",
        "process",
        "allocated",
        "reserved",
        "requested",
    )
    found = {name: state[name] for name in names} | {
        "kept": allocated - 512,
        "file": 10**9,
        "seconds": 2.0,
    }
    return Fact(
        "loading", {"recipe": recipe.to_dict()}, found | changes, "measured", versions() | T4
    )


def generation(recipe: Recipe, allocated: int, **changes) -> Fact:
    """What a T4 holds while it answers prompts of 512 tokens with 64 more."""
    found = loading(recipe, allocated).found
    del found["kept"], found["file"]
    found |= {"prefill": allocated, "decode": allocated - 512}
    asked = {"recipe": recipe.to_dict(), "prompt": 512, "new_tokens": 64}
    return Fact("generation", asked, found | changes, "measured", versions() | T4)
