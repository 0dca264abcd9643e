"""What this machine and environment can do, and what to do about what they cannot.

Nothing here raises.
"""

import os
import platform
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..base.errors import MissingExtra
from ..base.versions import untested, version_ranges
from ..hardware import host
from ..hardware.gpu import current_device
from ..hardware.nvml import all_sensors, nvml_snapshot
from ..report.report import GiB, encode, environment, format_bytes, installed

MARKER = "machine: "
OK = "ok"
WARN = "warn"
MISSING = "missing"
# About what the notebooks' training on a CPU takes at most.
RAM_NEEDED = 4 * GiB
HOSTED = {  # by the start of a variable of the environment
    "COLAB_": "Runtime > Change runtime type > T4 GPU, then run again from the top; ",
    "KAGGLE_KERNEL_RUN": "Settings > Accelerator > GPU T4 x2, then run again from the top; ",
}


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: str  # "ok", "warn" or "missing"
    value: str
    advice: str = ""  # what to do
    required: bool = False  # the package does not run without it


@dataclass(frozen=True)
class Doctor:
    """All checks, in the order in which they are shown."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that the package itself requires is missing; extras may be."""
        return not any(c.required and c.status == MISSING for c in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the checks, and whether all is well, as JSON has them."""
        return {"ok": self.ok, **encode(vars(self))}

    def __str__(self) -> str:
        """A line per check: name, state, what was found, and under it what to do."""
        width = max(len(c.name) for c in self.checks)
        lines = []
        for c in self.checks:
            lines.append(f"{c.name:<{width}}  {c.status:<7}  {c.value}".rstrip())
            if c.advice:
                lines += [" " * width + f"           → {c.advice}"]
        return "\n".join(lines)


def doctor() -> Doctor:
    """Look at Python, libraries, GPU, driver, memory and cores.

    Loads torch only where a GPU may be.
    """
    checks: list[Check] = []
    # Each look has a try of its own, so that a broken driver hides no line about the packages.
    for name, look in LOOKS.items():
        try:
            checks += look()
        except Exception as error:
            checks.append(
                Check(name, WARN, "could not be checked", f"{type(error).__name__}: {error}")
            )
    return Doctor(tuple(checks))


def environment_stamp() -> str:
    """Return where a notebook ran: two lines that start with "machine: ".

    Loads neither torch nor transformers.
    """
    seen = environment()
    versions = [
        f"{name} {version or 'missing'}"
        for name, version in seen.items()
        if name not in ("system", "date")
    ]
    # NVML's names, because torch would have to be loaded to ask it.
    cards = (
        " + ".join(s.name or "a GPU without a name" for s in all_sensors()) or f"no GPU{_hidden()}"
    )
    try:
        ram = format_bytes(host.memory()[0], digits=1)
    except MissingExtra:
        ram = "unknown"
    parts = [cards, f"{host.cores()} CPU cores", f"{ram} RAM", seen["system"], seen["date"]]
    return f"{MARKER}{' · '.join(versions)}\n{MARKER}{' · '.join(parts)}"


def requirements(extra: str = "course") -> list[tuple[str, str]]:
    """Return (package, version specifier) of what the course needs, from the package's metadata.

    Of `extra` "" what the package itself does.
    """
    from packaging.requirements import Requirement

    # The metadata of the installed distribution, so that the versions stand in pyproject.toml
    # alone.
    found = [Requirement(line) for line in metadata.requires("vramlab") or []]
    # A line without a marker belongs to the package itself, whatever the extra.
    needed = [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]
    return [(r.name, str(r.specifier)) for r in needed]


def judged(
    name: str,
    value: str,
    trouble: str = "",
    required: bool = False,
) -> Check:
    """Return a check that warns where `trouble` says what to do."""
    return Check(name, WARN if trouble else OK, value, trouble, required)


def packages() -> Iterator[Check]:
    """Yield a line for Python and for each library, with what to install."""
    from packaging.specifiers import SpecifierSet

    yield Check("python", OK, platform.python_version(), required=True)
    # Only these are required: `ok` stays true for someone who has predict alone.
    own = {name for name, _ in requirements("")}
    for name, specifier in requirements():
        version = installed(name)
        if version is None:
            advice = f"pip install '{name}{specifier}'"
            if name not in own:
                advice += " where simulate, measure or the course want it; predict does not"
            yield Check(name, MISSING, f"none, {specifier} needed", advice, name in own)
            continue
        advice = f"pip install --upgrade '{name}{specifier}'"
        if name == "torch":  # on hosted notebooks it comes with the machine and fits its driver
            advice = (
                "make a fresh environment, or take a newer runtime where torch comes with "
                "the machine"
            )
        # A nightly or an alpha counts as its number, or every pre-release of torch would be
        # refused.
        fits = SpecifierSet(specifier).contains(version, prereleases=True)
        if fits:
            yield judged(name, version, _newer(name, version), required=True)
        else:
            yield judged(name, f"{version}, {specifier} needed", advice, required=True)
    listed = {name for name, _ in requirements()}
    for tested, version in untested().items():  # of extras that the course does without
        if tested.name not in listed:
            yield judged(tested.name, version, tested.trouble(version))


def _newer(name: str, version: str) -> str:
    """Say that `version` is newer than what was tested, and what to do if that matters.

    "" where it is not.
    """
    tested = version_ranges().get(name)
    if not tested or not tested.is_newer(version):
        return ""
    return (
        f"{tested.trouble(version)}: figures may differ; pip install "
        f"'{name}=={tested.newest}' is a tested one"
    )


def may_have_gpu() -> bool:
    """Return whether NVIDIA's or AMD's driver is there.

    Without one torch, whose import takes seconds, is not asked.
    """
    # /dev/nvidiactl is there where NVML's library is missing, as in some containers; /dev/kfd is
    # AMD's.
    return nvml_snapshot().available or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))


def gpus() -> Iterator[Check]:
    """Yield what torch is built for, the cards that it sees, and their formats."""
    try:
        loaded = "torch" in sys.modules or may_have_gpu()
        if loaded:
            import torch

            cuda = torch.version.cuda
        else:
            # `torch/version.py` has plain assignments and can be run without importing torch.
            cuda = runpy.run_path(
                str(metadata.distribution("torch").locate_file("torch/version.py"))
            )["cuda"]
    except (ImportError, OSError) as error:
        is_there = installed("torch") is not None
        yield Check(
            "torch build",
            MISSING,
            "does not load",
            f"{error}: install torch again",
            required=is_there,
        )
        return
    yield Check("torch build", OK, f"CUDA {cuda}" if cuda else "CPU only")
    if not loaded or not torch.cuda.is_available():
        yield _no_gpu(cuda)
        return
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        memory = format_bytes(seen.total_memory, digits=2)
        have = f"{seen.major}.{seen.minor}"
        yield Check(f"GPU {index}", OK, f"{seen.name}, {memory}, compute capability {have}")
    # fp8 is reported without advice: nothing in a recipe needs it.
    for form in ("bf16", "tf32", "fp8"):
        gpu = current_device().gpu
        why = gpu.why_not(form) if gpu else "no GPU"
        yield judged(form, "no" if why else "yes", why if form != "fp8" else "")


def _no_gpu(cuda: str | None) -> Check:
    """Say why torch sees no GPU."""
    seen = nvml_snapshot()
    if seen.available:
        advice = (
            f"driver {seen.driver} may be too old for CUDA {cuda}: update it, or take a "
            f"torch for an older CUDA"
        )
        # A build for CUDA that sees no card points to the driver; a CPU build could never see one.
        advice = (
            advice
            if cuda
            else "torch is a CPU build: install one for CUDA (pytorch.org/get-started)"
        )
        return judged("GPU", f"{seen.name}, but torch cannot use it", advice)
    hidden = _hidden()
    if hidden:
        return judged("GPU", f"none{hidden}", "unset the variable, then start Python again")
    # On a hosted notebook the remedy is a menu, since nobody can install a card there.
    where = (
        menu for start, menu in HOSTED.items() if any(key.startswith(start) for key in os.environ)
    )
    without = (
        "predict and simulate need none; what fits runs on the CPU, the rest shows "
        "recorded measurements"
    )
    return Check("GPU", MISSING, "none", next(where, "") + without)


def _hidden() -> str:
    """Say that the environment keeps this machine's GPUs from the process; "" where it does not."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        f" (CUDA_VISIBLE_DEVICES={said!r} hides it)"
        if "CUDA_VISIBLE_DEVICES" in nvml_snapshot().reason
        else ""
    )


def nvml() -> Iterator[Check]:
    """Yield the driver, and how much of each card's memory is free."""
    first = nvml_snapshot()
    if not first.available:
        yield Check("NVML", MISSING, first.reason)
        return
    yield Check("driver", OK, first.driver or first.missing["driver"])
    for s in all_sensors():
        if s.free is not None:
            # A twentieth of the card, or 1 GiB, is more than a desktop or the context of an idle
            # process holds.
            busy = s.used - (s.process or 0) > max(GiB, 0.05 * s.total)
            advice = (
                "other processes hold memory (nvidia-smi lists them): stop them before measuring"
                if busy
                else ""
            )
            free, total = (format_bytes(n, digits=2) for n in (s.free, s.total))
            yield judged(f"GPU {s.index} memory", f"{free} free of {total}", advice)


def machine() -> Iterator[Check]:
    """Yield the cores, and how much of the machine's memory is free."""
    yield Check("CPU cores", OK, str(host.cores()))
    total, free = host.memory()
    advice = (
        "close other programs: notebooks that train on the CPU take a few GiB"
        if free < RAM_NEEDED
        else ""
    )
    yield judged(
        "RAM",
        f"{format_bytes(free, digits=1)} free of {format_bytes(total, digits=1)}",
        advice,
    )


# In the order in which they are shown; the names stand for a look that failed as a whole.
LOOKS = {"packages": packages, "GPU": gpus, "NVML": nvml, "machine": machine}
