"""GPUs of `data/gpus.json`: memory, bandwidth, rates, and the formats that they compute in.

Rates are bytes or operations per second.
"""

import dataclasses
import difflib
import json
import os
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from ..base.data import data_path
from ..base.errors import RecipeError, VramLabError
from ..report.report import GiB, MiB, format_bytes

# Lowest compute capability for each format: tensor-core data types in NVIDIA's CUDA C++ Programming
# Guide (compute capabilities), fp16 arithmetic in its table of arithmetic instructions. And
# FlashAttention-2's (`flash_api.cpp`: "FlashAttention only supports Ampere GPUs or newer").
NEEDS = {
    "fp32": (0, 0),
    "tf32": (8, 0),
    "fp16": (5, 3),
    "bf16": (8, 0),
    "fp8": (8, 9),
    "flash_attention_2": (8, 0),
}
SINCE = {(8, 0): "Ampere", (8, 9): "Ada", (5, 3): "Maxwell"}
INSTEAD = {
    "bf16": "fp16",
    "tf32": "fp32",
    "fp8": "bf16 or fp16",
    "fp16": "fp32",
    "flash_attention_2": "sdpa or eager",
}
# The most resident threads per multiprocessor, by compute capability (CUDA C++ Programming Guide,
# technical specifications).
THREADS = {
    (7, 5): 1024,
    (8, 6): 1536,
    (8, 7): 1536,
    (8, 9): 1536,
    (12, 0): 1536,
}
MOST_THREADS = 2048  # of all others
# People and torch's messages say a card's total to hundredths of a GiB.
ROUNDED_TOTAL = GiB // 100
BRANDS = ("nvidia", "geforce", "tesla", "quadro", "rtx")  # in the order in which names have them


class GpuError(VramLabError, LookupError):
    """A GPU that the table does not know."""


class Chip(NamedTuple):
    """What a kernel's choice of algorithm and scratch memory depends on."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def threads(self) -> int:
        """Return the most resident threads per multiprocessor."""
        return THREADS.get(self.capability, MOST_THREADS)


DEFAULT_CHIP = Chip((8, 0), 108)  # an A100, when no card is named


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; None and "" are unknown.

    Attributes:
        memory_gb: gigabytes on the box.
        total: bytes that torch reports as `total_memory`.
        other_totals: what it reported under other drivers.
        total_known: False: `total` is `memory_gb` taken as GiB, which is up to a tenth too much.
        bandwidth: bytes per second between the chip and its memory.
        peak: by format, dense operations per second.
        nvlink: bytes per second over all links, both directions added; None without NVLink.
        peer_to_peer: False: without NVLink, what goes from card to card goes through the host's
            memory.
        tdp: watts.
    """

    name: str
    compute_capability: tuple[int, int]
    memory_gb: int
    total: int
    total_known: bool = True
    other_totals: tuple[int, ...] = ()
    bandwidth: float | None = None
    peak: dict[str, float] = field(default_factory=dict, hash=False)
    nvlink: float | None = None
    pcie: str = ""
    peer_to_peer: bool = True
    tdp: int | None = None
    multiprocessors: int = DEFAULT_CHIP.multiprocessors

    def flops(self, precision: str) -> float | None:
        """Return peak operations per second of matmuls at `precision`.

        It is None when the card or the table has none.
        """
        return self.peak.get(_format(precision))

    def supports(self, precision: str) -> bool:
        """Tell whether the card computes in `precision` without emulation.

        That is "bf16-mixed", or a format such as "fp8".
        """
        return self.compute_capability >= NEEDS[_format(precision)]

    def why_not(self, precision: str) -> str:
        """Say in one sentence why the card lacks `precision` and what to take; "" if it has it."""
        if self.supports(precision):
            return ""
        form = _format(precision)
        need = NEEDS[form]
        slow = ""
        if form == "bf16":
            slow = ", below which torch only emulates it, slowly"
        starts = f"{form} starts at {_dotted(need)} ({SINCE[need]}){slow}: take {INSTEAD[form]}"
        return f"{self.name} has compute capability {_dotted(self.compute_capability)} and {starts}"

    def require(self, need: str, field: str = "precision") -> None:
        """Raise RecipeError, which names the recipe's `field`, when the card lacks `need`.

        That is a precision or "flash_attention_2".
        """
        why = self.why_not(need)
        if why:
            raise RecipeError(field, need, why)

    @property
    def chip(self) -> Chip:
        """Return what kernels choose their algorithm by."""
        return Chip(self.compute_capability, self.multiprocessors)

    def __str__(self) -> str:
        """Return one line: name, memory, bandwidth, bf16 or fp16 rate, compute capability."""
        memory = format_bytes(self.total, digits=2)
        if not self.total_known:
            memory += " (nominal)"
        parts = [self.name, memory]
        if self.bandwidth:
            parts.append(f"{self.bandwidth / 1e9:,.0f} GB/s")
        for form in ("bf16", "fp16", "fp32"):
            if form in self.peak:
                parts.append(f"{self.peak[form] / 1e12:,.0f} TFLOP/s {form}")
                break
        parts.append(f"compute capability {_dotted(self.compute_capability)}")
        return " · ".join(parts)


def _dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as NVIDIA writes it, "8.6"."""
    return ".".join(map(str, capability))


def _format(precision: str) -> str:
    """Return the format of a recipe's precision: "bf16" of "bf16-mixed" and of "bf16".

    Raises RecipeError for others.
    """
    form = precision
    if isinstance(precision, str):
        form = precision.removesuffix("-mixed").removesuffix("-true")
    if form not in NEEDS:
        raise RecipeError(
            "precision",
            precision,
            "allowed are " + ", ".join(map(repr, NEEDS)),
        )
    return form


def _key(name: str) -> str:
    """Strip case, signs and brand off a name.

    The key of "NVIDIA GeForce RTX 3060 12GB" is that of "rtx-3060 12gb".
    """
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for prefix in BRANDS:
        key = key.removeprefix(prefix)
    return key


@cache
def _index() -> dict[str, Gpu]:
    """Return by the key of each name its GPU, oldest architecture first."""
    index: dict[str, Gpu] = {}
    table = json.loads(data_path("gpus.json").read_text(encoding="utf-8"))
    for entry in table["gpus"]:
        gpu = _of_the_table(entry)
        for name in (entry["name"], *entry["aliases"]):
            index[_key(name)] = gpu
    return index


def _of_the_table(entry: dict[str, Any]) -> Gpu:
    """Return the GPU of an entry of `data/gpus.json`."""
    values = {}
    for each in dataclasses.fields(Gpu):
        if each.name in entry:
            values[each.name] = entry[each.name]
    total = entry["total_mib"]
    values["total_known"] = total is not None
    values["other_totals"] = tuple(size * MiB for size in entry.get("other_totals_mib", ()))
    values["total"] = total * MiB if total else entry["memory_gb"] * GiB
    values["compute_capability"] = tuple(entry["compute_capability"])
    return Gpu(**values)


def gpu_names() -> list[str]:
    """Return the names of the GPUs in the table, oldest architecture first."""
    return list(dict.fromkeys(gpu.name for gpu in _index().values()))


def find_gpu(name: "str | Gpu") -> Gpu:
    """Return the GPU called `name`, whatever its case, spaces and brand.

    A `Gpu` is returned as it is. A family's name means its smallest member ("A100" is the 40 GB
    one). Raises GpuError, which names those it knows.
    """
    if isinstance(name, Gpu):
        return name
    gpu = _index().get(_key(name)) if isinstance(name, str) else None
    if gpu is None:
        # "2x RTX 4090" is how many, and a name
        counted = re.match(r"(\d+) ?[x×*] ?", str(name))
        key = _key(str(name)[counted.end() :] if counted else str(name))
        # "A100 80G" looks like one of the table, and "RTX 4080 Ti" begins as one
        near = difflib.get_close_matches(key, _index(), n=1, cutoff=0.75)
        near = near or [known for known in sorted(_index(), key=len) if key.startswith(known)][-1:]
        # "4900" has the digits of a card's name in another order
        near = near or [known for known in _index() if sorted(known) == sorted(key)]
        hint = f"did you mean {_index()[near[0]].name!r}? " if near else ""
        if hint and counted:
            hint += f"How many is --gpus {counted[1]} (plan, run) or --world-size {counted[1]}; "
        known = ", ".join(gpu_names())
        raise GpuError(f"GPU {name!r} is not in the table: {hint}known are {known}.")
    return gpu


def is_also(name: str) -> list[str]:
    """Return the other cards that a family's name such as "A100" may mean; [] of a card's name."""
    key = _key(name)
    card = find_gpu(name)
    if key == _key(card.name):
        return []
    return [other for other in gpu_names() if _key(other).startswith(key) and other != card.name]


def cards_of(total: int) -> list[Gpu]:
    """Return the cards of the table that report `total` bytes, up to what drivers differ by."""
    alike = []
    for card in map(find_gpu, gpu_names()):
        # A driver's release moves the total by some MiB, so any of the known ones will do.
        readings = (card.total, *card.other_totals)
        if any(abs(total - reading) <= ROUNDED_TOTAL for reading in readings):
            alike.append(card)
    return alike


def usable_memory(card: Gpu) -> int:
    """Return the bytes that torch reports as the card's total.

    If unknown, its nominal size times the least known such share.
    """
    if card.total_known:
        return card.total
    # A card reports less than its box says, because the driver keeps some; the least known share
    # is the cautious one.
    known = [gpu for gpu in map(find_gpu, gpu_names()) if gpu.total_known]
    return int(card.total * min(gpu.total / (gpu.memory_gb << 30) for gpu in known))


class Device(NamedTuple):
    """What this process trains on: `kind` ("cuda" or "cpu"), name and, on CUDA, its `Gpu`."""

    kind: str
    name: str
    gpu: Gpu | None = None


def source_of(device: str) -> str:
    """Return the source of a run's report: "measured", or "emulated" on a stand-in for a GPU.

    `device`: "cuda" or "cpu".
    """
    if device == "cuda" and "STAND_IN_CAPABILITY" in os.environ:
        return "emulated"
    return "measured"


def current_device() -> Device:
    """Return the current CUDA device when torch sees one, else the CPU. Loads torch.

    `gpu` is the table's entry with this device's own memory and compute capability; for an unknown
    card it has no rates.
    """
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", "CPU")
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = seen_gpu(
        seen.name,
        seen.total_memory,
        (seen.major, seen.minor),
        seen.multi_processor_count,
    )
    return Device("cuda", seen.name, gpu)


def seen_gpu(
    name: str,
    total: int,
    compute_capability: tuple[int, int],
    multiprocessors: int,
) -> Gpu:
    """Return the table's entry of `name` with what a device says of itself.

    A card that the table lacks has no rates.
    """
    known = _index().get(_key(name))
    if known is None:
        known = Gpu(
            name=name,
            compute_capability=compute_capability,
            memory_gb=round(total / GiB),
            total=total,
        )
    return dataclasses.replace(
        known,
        total=total,
        total_known=True,
        compute_capability=compute_capability,
        multiprocessors=multiprocessors,
    )
