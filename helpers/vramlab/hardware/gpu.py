"""GPUs of `data/gpus.json`: memory, bandwidth, rates (bytes, operations per second), and formats they compute in."""

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from ..report.data import data_path
from ..report.errors import RecipeError, VramLabError
from ..report.report import GiB, MiB, format_bytes

# Lowest compute capability for each format: tensor-core data types in NVIDIA's CUDA C++ Programming Guide (compute
# capabilities), fp16 arithmetic in its table of arithmetic instructions. And FlashAttention-2's (`flash_api.cpp`:
# "FlashAttention only supports Ampere GPUs or newer").
NEEDS = {"fp32": (0, 0), "tf32": (8, 0), "fp16": (5, 3), "bf16": (8, 0), "fp8": (8, 9), "flash_attention_2": (8, 0)}
SINCE = {(8, 0): "Ampere", (8, 9): "Ada", (5, 3): "Maxwell"}
INSTEAD = {"bf16": "fp16", "tf32": "fp32", "fp8": "bf16 or fp16", "fp16": "fp32", "flash_attention_2": "sdpa or eager"}


class GpuError(VramLabError, LookupError):
    """A GPU that the table does not know."""


class Chip(NamedTuple):
    """What a kernel's choice of algorithm and scratch memory depends on."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def threads(self) -> int:
        """Return the most resident threads per multiprocessor (CUDA C++ Programming Guide, technical specifications)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability, 2048)


DEFAULT_CHIP = Chip((8, 0), 108)  # an A100, when no card is named


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; None and "" are unknown."""

    name: str
    compute_capability: tuple[int, int]
    memory_gb: int  # gigabytes on the box
    total: int  # bytes that torch reports as `total_memory`
    total_known: bool = True  # False: `total` is `memory_gb` taken as GiB, which is up to a tenth too much
    bandwidth: float | None = None  # bytes per second between the chip and its memory
    peak: dict[str, float] = field(default_factory=dict, hash=False)  # by format: dense operations per second
    nvlink: float | None = None  # bytes per second over all links, both directions added; None without NVLink
    pcie: str = ""
    peer_to_peer: bool = True  # False: without NVLink, what goes from card to card goes through the host's memory
    tdp: int | None = None  # watts
    multiprocessors: int = DEFAULT_CHIP.multiprocessors

    def flops(self, precision: str) -> float | None:
        """Return peak operations per second of matmuls at `precision`; None when the card or the table has none."""
        return self.peak.get(_format(precision))

    def ridge(self, precision: str) -> float | None:
        """Return the roofline's ridge point in operations per byte (Williams et al. 2009): below it, memory is the limit."""
        flops = self.flops(precision)
        return flops / self.bandwidth if flops and self.bandwidth else None

    def supports(self, precision: str) -> bool:
        """Tell whether the card computes in `precision` ("bf16-mixed") or format ("fp8") without emulation."""
        return self.compute_capability >= NEEDS[_format(precision)]

    def why_not(self, precision: str) -> str:
        """Say in one sentence why the card lacks `precision` and what to take; "" when it has it."""
        if self.supports(precision):
            return ""
        form = _format(precision)
        need = NEEDS[form]
        has, since = (".".join(map(str, each)) for each in (self.compute_capability, need))
        slow = ", below which torch only emulates it, slowly" if form == "bf16" else ""
        starts = f"{form} starts at {since} ({SINCE[need]}){slow}: take {INSTEAD[form]}"
        return f"{self.name} has compute capability {has} and {starts}"

    def require(self, need: str, field: str = "precision") -> None:
        """Raise RecipeError, which names the recipe's `field`, when the card lacks a precision or "flash_attention_2"."""
        if why := self.why_not(need):
            raise RecipeError(field, need, why)

    @property
    def chip(self) -> Chip:
        """Return what kernels choose their algorithm by."""
        return Chip(self.compute_capability, self.multiprocessors)

    def __str__(self) -> str:
        """One line: name, memory, bandwidth, bf16 or fp16 rate, compute capability."""
        parts = [self.name, format_bytes(self.total, digits=2) + ("" if self.total_known else " (nominal)")]
        parts += [f"{self.bandwidth / 1e9:,.0f} GB/s"] if self.bandwidth else []
        best = [form for form in ("bf16", "fp16", "fp32") if form in self.peak][:1]
        parts += [f"{self.peak[form] / 1e12:,.0f} TFLOP/s {form}" for form in best]
        return " · ".join([*parts, f"compute capability {'.'.join(map(str, self.compute_capability))}"])


def _format(precision: str) -> str:
    """The format of a recipe's precision: "bf16" of "bf16-mixed" and of "bf16". Raises RecipeError for others."""
    form = precision.removesuffix("-mixed").removesuffix("-true") if isinstance(precision, str) else precision
    if form not in NEEDS:
        raise RecipeError("precision", precision, "allowed are " + ", ".join(map(repr, NEEDS)))
    return form


def _key(name: str) -> str:
    """Strip case, signs and brand off a name, so that "NVIDIA GeForce RTX 3060 12GB" equals "rtx-3060 12gb"."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for prefix in ("nvidia", "geforce", "tesla", "quadro", "rtx"):
        key = key.removeprefix(prefix)
    return key


@cache
def _index() -> dict[str, Gpu]:
    """Key of each name to its GPU, oldest architecture first."""
    found: dict[str, Gpu] = {}
    for entry in json.loads(data_path("gpus.json").read_text(encoding="utf-8"))["gpus"]:
        total = entry["total_mib"]
        values = {field.name: entry[field.name] for field in dataclasses.fields(Gpu) if field.name in entry}
        values |= {"total": total * MiB if total else entry["memory_gb"] * GiB, "total_known": total is not None}
        values |= {"compute_capability": tuple(entry["compute_capability"])}
        found |= dict.fromkeys(map(_key, (entry["name"], *entry["aliases"])), Gpu(**values))
    return found


def gpu_names() -> list[str]:
    """List the names of the GPUs in the table, oldest architecture first."""
    return list(dict.fromkeys(gpu.name for gpu in _index().values()))


def find_gpu(name: "str | Gpu") -> Gpu:
    """Find the GPU called `name`, whatever its case, spaces and brand; a `Gpu` is returned as it is.

    A family's name means its smallest member ("A100" is the 40 GB one). Raises GpuError, which names those it knows.
    """
    if isinstance(name, Gpu):
        return name
    if gpu := _index().get(_key(name) if isinstance(name, str) else ""):
        return gpu
    raise GpuError(f"GPU {name!r} is not in the table: known are {', '.join(gpu_names())}.")


def usable_memory(card: Gpu) -> int:
    """Bytes that torch reports as the card's total; if unknown, its nominal size times the least known such share."""
    if card.total_known:
        return card.total
    known = [gpu for gpu in map(find_gpu, gpu_names()) if gpu.total_known]
    return int(card.total * min(gpu.total / (gpu.memory_gb << 30) for gpu in known))


class Device(NamedTuple):
    """What this process trains on: `kind` ("cuda" or "cpu"), name and, on CUDA, its `Gpu`."""

    kind: str
    name: str
    gpu: Gpu | None = None


def witness(device: str) -> str:
    """Return what a run on `device` ("cuda" or "cpu") is: "measured", or "emulated" on a stand-in for a GPU."""
    return "emulated" if device == "cuda" and "STAND_IN_CAPABILITY" in os.environ else "measured"


def current_device() -> Device:
    """Return the current CUDA device when torch sees one, else the CPU. Loads torch.

    `gpu` is the table's entry with this device's own memory and compute capability; for an unknown card it has no rates.
    """
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", "CPU")
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = seen_gpu(seen.name, seen.total_memory, (seen.major, seen.minor), seen.multi_processor_count)
    return Device("cuda", seen.name, gpu)


def seen_gpu(name: str, total: int, compute_capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """Return the table's entry of `name` with what a device says of itself; a card that the table lacks has no rates."""
    said = dict(total=total, compute_capability=compute_capability, multiprocessors=multiprocessors)
    if known := _index().get(_key(name)):
        return dataclasses.replace(known, **said, total_known=True)
    return Gpu(name=name, memory_gb=round(total / GiB), **said)
