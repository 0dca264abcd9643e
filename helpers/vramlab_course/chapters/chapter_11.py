"""What chapter 11's cells share: bytes between two cards, the bus, a data loader, and a sheet.

Some are of this machine, and some published (`data/elsewhere/answer_ai.json`). The
loader also runs with a /dev/shm of its own, as small as in a container.
"""

import ctypes
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from math import ceil
from pathlib import Path
from typing import Any

import torch
from vramlab import Recipe, find_gpu
from vramlab.hardware.links import pcie_bandwidth
from vramlab.planning.step_traffic import link_of
from vramlab.report.report import MiB

from ..published import json_of
from .chapter_01 import best_seconds
from .chapter_04 import RankFailed, apart

SHARED = Path("/dev/shm")  # where the workers of a data loader leave batches
SETTLED = 1.0  # seconds without a change
NO_MOUNTS = "this machine allows no mounts"
APART = 0x10000000 | 0x00020000  # sched.h: CLONE_NEWUSER, CLONE_NEWNS
TOKENS = 2048  # of a micro-batch, and of a published sample
ADAPTERS = 6_815_744  # LoRA of rank 16 on two matrices in each layer of Llama 3.1 8B
TEST = (
    "-m torch.distributed.run --standalone --nproc_per_node 2 -m vramlab_course.chapters.two_ranks"
)


def two_cards(
    speed: float,
    rate: float,
    ring_bytes: Callable[[float, int], float],
) -> list[tuple]:
    """Return rows: ms of one card and of two for two micro-batches, and how much faster two are.

    `speed`: operations a second; `rate`: bytes a second between the cards.
    """
    small = Recipe("qwen3-0.6b").shape.num_parameters
    big = Recipe("llama-3.1-8b").shape.num_parameters
    rows: list[tuple] = [
        (
            "two micro-batches",
            "one card, ms",
            "two, exchange after, ms",
            "times as fast",
            "DDP's best",
        )
    ]
    for name, weights, trained, times in (
        ("0.6B, an exchange each", small, small, 1),
        ("0.6B, an exchange for 8", small, small, 8),
        ("8B by LoRA", big + ADAPTERS, ADAPTERS, 1),
    ):
        forward = TOKENS * 2 * weights / speed
        backward = TOKENS * 2 * (weights + trained) / speed  # 4 operations for a trained weight
        sending = ring_bytes(4 * trained, 2) / rate
        one = 2 * (forward + backward)
        two = one / 2 + sending / times
        best = one / 2 + max(0, sending - backward) / times  # the backward pass hides the rest
        rows.append((name, 1000 * one, 1000 * two, one / two, one / best))
    return rows


def published(**wanted: Any) -> list[dict[str, Any]]:
    """Return Answer.AI's runs with these fields; `step` is the seconds of one step."""
    found = []
    for run in json_of("elsewhere/answer_ai")["runs"]:
        samples = run["batch_size"]
        steps = ceil((1024 - 1024 % samples) / run["ranks"] / samples)
        if run | wanted == run:
            found.append(run | {"step": run["seconds"] / steps})
    return found


def published_step(
    gpu: str,
    method: str,
    samples: int,
    offload: str | None = None,
) -> tuple[float, float]:
    """Return the seconds of Llama-2 7B's step under FSDP on two cards, and those of computing.

    Computing takes as long a sample as under DDP, which sends hardly anything.
    """
    same = {
        "gpu": gpu,
        "model": "llama-2-7b",
        "method": method,
        "tokens": TOKENS,
    }
    (whole,) = published(**same, sharding="ddp")
    (cut,) = published(
        **same,
        sharding="fsdp",
        batch_size=samples,
        offload=offload,
    )
    return cut["step"], samples * whole["step"] / whole["batch_size"]


def two_gpus() -> dict[str, Any] | None:
    """Return what `two_ranks` finds on this machine's GPUs; None with fewer than two."""
    if torch.cuda.device_count() < 2:
        return None
    said = subprocess.check_output([sys.executable, *TEST.split()], text=True)
    return json.loads(said.splitlines()[-1])


def bus_and_speed() -> tuple[float, float] | None:
    """Return bytes a second to this GPU from RAM, and its operations a second; None without one."""
    if not torch.cuda.is_available():
        return None
    weights = torch.randn(4096, 4096, dtype=torch.float16).pin_memory()
    here = torch.empty_like(weights, device="cuda")
    bus = weights.nbytes / best_seconds(lambda: here.copy_(weights), times=10)
    batch = torch.randn(8192, 4096, device="cuda", dtype=torch.float16)
    return bus, 2 * weights.numel() * len(batch) / best_seconds(lambda: batch @ here)


def pixels(index: int) -> torch.Tensor:
    """Return a picture of 3 × 512 × 512 whole numbers of 0 to 255, of a byte each."""
    return torch.full((3, 512, 512), index, dtype=torch.uint8)


def shared_mib(batches: Iterable) -> float | None:
    """Return the MiB of /dev/shm that a loader fills while the first batch is held.

    None where there is no /dev/shm.
    """
    if not SHARED.exists():
        return None
    before = shutil.disk_usage(SHARED).used
    rest = iter(batches)
    held = next(rest)
    found = -1
    # The workers go on until each is as far ahead as it may be.
    while (used := shutil.disk_usage(SHARED).used) != found:
        found = used
        time.sleep(SETTLED)
    del held, rest  # ends the workers
    return (found - before) / MiB


def with_shared(mib: int, work: Callable[[], Any]) -> Any:
    """Return what `work()` returns in a process whose /dev/shm has `mib` MiB, as in a container.

    Raises RankFailed where `work` fails, and where this machine does not allow such a process:
    its text ends with NO_MOUNTS.
    """
    ids = {
        "setgroups": "deny",
        "uid_map": f"0 {os.getuid()} 1",
        "gid_map": f"0 {os.getgid()} 1",
    }

    def inside() -> Any:
        kernel = ctypes.CDLL(None)
        # As its own user this process may mount, and no other sees what.
        if kernel.unshare(APART):
            raise OSError(NO_MOUNTS)
        for name, text in ids.items():
            Path("/proc/self", name).write_text(text)
        if kernel.mount(b"tmpfs", bytes(SHARED), b"tmpfs", 0, f"size={mib}m".encode()):
            raise OSError(NO_MOUNTS)
        try:
            return work()
        finally:
            # Those of a loader that died would be waited for, ten seconds.
            for worker in multiprocessing.active_children():
                worker.terminate()

    return apart(inside)


def ending(batches: Callable[[], Iterable], mib: int) -> str:
    """Return in a line how `batches()` ends where /dev/shm has `mib` MiB."""

    def count() -> str:
        return f"all {sum(1 for _ in batches())} batches came"

    try:
        return with_shared(mib, count)
    except RankFailed as error:
        return str(error).splitlines()[-1]


def sheet(
    name: str,
    link: dict[str, Any] | None,
    mine: tuple[float, float] | None,
    mib: float,
    equal_tokens: Callable[[float, float], float],
) -> list[tuple]:
    """Return the rows of a machine's sheet, predicted for the card `name` unless they are given.

    `link`: by `two_gpus`; `mine`: by `bus_and_speed`; `mib`: the size of /dev/shm. With a link
    slower than "worry if", section 1's exchange for 8 micro-batches takes a tenth of the step.
    """
    card = find_gpu(name)
    line = pcie_bandwidth(card.pcie)
    bus, speed = mine or (0.83 * line, 0.4 * card.flops("fp16"))
    rate, shares = link_of(card)
    way = link["link_gb_per_second"] if link else rate * shares[0] / 1e9
    by_bus = "measured" if mine else "predicted"
    # For each weight 4 bytes, and 6 operations a token; the exchange takes 1/9 of the computing.
    slow = 9 * 4 * speed / (8 * TOKENS * 6) / 1e9
    return [
        (name, "found", "by", "elsewhere", "worry if"),
        (
            "two GPUs: link, GB/s",
            way,
            "measured" if link else "predicted",
            "3.2: two TITAN RTX",
            f"under {slow:.0f}: 8 × 2,048 tokens",
        ),
        (
            "weights from RAM, GB/s",
            bus / 1e9,
            by_bus,
            "52: an H200",
            f"under {line / 2e9:.0f}: half the lanes",
        ),
        (
            "offloading adds 1/4: tokens",
            4 * equal_tokens(speed, bus),
            by_bus,
            "20,000: an H200",
            "you have fewer",
        ),
        ("/dev/shm, MiB", mib, "measured", "64: Docker", "loaders fill more"),
    ]
