"""The single checks of `doctor`: each looks at one thing and says what it found and what to do about it."""

import contextlib
import io
import logging
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from .gpu import Gpu, current_device
from .nvml import Sensors, all_sensors, nvml_snapshot
from .report import GiB, format_bytes

OK, WARN, MISSING = "ok", "warn", "missing"
# Degrees from which cards lower their clocks (Transformers' "Custom hardware for training": 84 to 90 °C, by card).
HOT = 84
DISK_NEEDED, RAM_NEEDED = 5 * GiB, 4 * GiB
WITHOUT_GPU = "predict and simulate need none; what fits runs on the CPU, the rest shows recorded measurements"


@dataclass(frozen=True)
class Check:
    """One line of the report: `status` is "ok", "warn" or "missing"; `advice` says what to do, "" when nothing is.

    `required`: the course does not run without it.
    """

    name: str
    status: str
    value: str
    advice: str = ""
    required: bool = False


def requirements() -> list[tuple[str, str]]:
    """(package, version specifier) for everything the package needs, from its metadata or its pyproject.toml."""
    from packaging.requirements import Requirement

    found = []
    for line in _requirement_lines():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append((requirement.name, str(requirement.specifier)))
    return found


def _requirement_lines() -> list[str]:
    try:
        return metadata.requires("vramlab") or []
    except metadata.PackageNotFoundError:
        import tomllib

        from .data import data_folder

        text = (data_folder().parent / "pyproject.toml").read_text(encoding="utf-8")
        return tomllib.loads(text)["project"]["dependencies"]


def python() -> Iterator[Check]:
    version = platform.python_version()
    if tuple(map(int, version.split(".")[:2])) >= (3, 11):
        yield Check("python", OK, version, required=True)
    else:
        yield Check("python", MISSING, version, "the course needs Python 3.11 or newer", required=True)


def packages() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    for name, specifier in requirements():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, MISSING, f"none, {specifier} needed", f"pip install '{name}{specifier}'", required=True)
            continue
        if SpecifierSet(specifier).contains(version, prereleases=True):
            yield Check(name, OK, version, required=True)
        elif name == "torch":
            # On hosted notebooks torch comes with the machine and fits its driver: never say "reinstall" there.
            advice = "make a fresh environment, or take a newer runtime where torch comes with the machine"
            yield Check(name, WARN, f"{version}, {specifier} needed", advice, required=True)
        else:
            advice = f"pip install --upgrade '{name}{specifier}'"
            yield Check(name, WARN, f"{version}, {specifier} needed", advice, required=True)


def gpus() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check("torch build", MISSING, "does not load", f"{error}: install torch again", required=True)
        return
    cuda = torch.version.cuda
    sensors = nvml_snapshot()
    yield Check("torch build", OK, f"CUDA {cuda}" if cuda else "CPU only")
    if not torch.cuda.is_available():
        yield Check("GPU", *_why_no_gpu(cuda, sensors))
        return
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        memory, have = format_bytes(seen.total_memory, digits=2), f"{seen.major}.{seen.minor}"
        yield Check(f"GPU {index}", OK, f"{seen.name}, {memory}, compute capability {have}")
        if not _has_kernels(torch.cuda.get_arch_list(), (seen.major, seen.minor)):
            advice = f"install a torch build that lists sm_{seen.major}{seen.minor} (torch.cuda.get_arch_list())"
            yield Check(f"GPU {index} kernels", MISSING, f"this torch has none for {have}", advice)
    yield from _precisions(current_device().gpu)


def _why_no_gpu(cuda: str | None, sensors: Sensors) -> tuple[str, str, str]:
    """Status, value and advice when torch sees no GPU."""
    if sensors.available and not cuda:
        return (
            WARN,
            f"{sensors.name}, but torch is a CPU build",
            "install a CUDA build of torch: pytorch.org/get-started",
        )
    if sensors.available:
        advice = (
            f"driver {sensors.driver} may be too old for CUDA {cuda}: update it, or install torch for an older CUDA"
        )
        return WARN, f"{sensors.name}, but torch cannot use it", advice
    if any(key.startswith("COLAB_") for key in os.environ):
        return MISSING, "none", "Runtime > Change runtime type > T4 GPU, then run again from the top; " + WITHOUT_GPU
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return MISSING, "none", "Settings > Accelerator > GPU T4 x2, then run again from the top; " + WITHOUT_GPU
    return MISSING, "none", WITHOUT_GPU


def _has_kernels(built: list[str], have: tuple[int, int]) -> bool:
    """Whether a build with these targets runs on compute capability `have`: machine code ("sm_80") runs on its own
    major from its minor on, PTX ("compute_80") on everything newer (CUDA C++ Programming Guide, compatibility)."""
    for target in built:
        kind, _, digits = target.partition("_")
        digits = digits.rstrip("af")
        major, minor = int(digits[:-1]), int(digits[-1])
        if (kind == "sm" and major == have[0] and minor <= have[1]) or (kind == "compute" and (major, minor) <= have):
            return True
    return not built


def _precisions(gpu: Gpu) -> Iterator[Check]:
    for form in ("bf16", "tf32", "fp8"):
        why = gpu.why_not(form)
        status = OK if not why or form == "fp8" else WARN
        yield Check(form, status, "no" if why else "yes", "" if form == "fp8" else why)


def sensors() -> Iterator[Check]:
    first = nvml_snapshot()
    if not first.available:
        has_gpu = "torch" in sys.modules and sys.modules["torch"].cuda.is_available()
        advice = "device-wide memory, heat and power cannot be shown" if has_gpu else ""
        yield Check("NVML", WARN if has_gpu else MISSING, first.reason, advice)
        return
    yield Check("driver", OK, first.driver or first.missing["driver"])
    for s in all_sensors():
        yield from _condition(s)


def _condition(s: Sensors) -> Iterator[Check]:
    """What one GPU's sensors say of its memory, heat and power."""
    if s.free is not None:
        busy = s.used - (s.process or 0) > max(GiB, 0.05 * s.total)
        advice = "other processes hold memory (nvidia-smi lists them): stop them before measuring" if busy else ""
        value = f"{format_bytes(s.free, digits=2)} free of {format_bytes(s.total, digits=2)}"
        yield Check(f"GPU {s.index} memory", WARN if busy else OK, value, advice)
    shown = {"temperature": "°C", "power": "W", "clock": "MHz"}
    values = [f"{getattr(s, name):.0f} {unit}" for name, unit in shown.items() if getattr(s, name) is not None]
    lost = [f"{name.replace('_', ' ')} ({s.missing[name]})" for name in shown if name in s.missing]
    trouble = list(s.slowed) + ([f"{s.temperature} °C"] if (s.temperature or 0) >= HOT else [])
    advice = f"the card slows itself down ({', '.join(trouble)}): timings will not hold, see to cooling and power"
    value = ", ".join(values + [f"no {name}" for name in lost]) or "no sensors"
    yield Check(f"GPU {s.index} sensors", WARN if trouble or lost else OK, value, advice if trouble else "")


def bitsandbytes() -> Iterator[Check]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), _silent("bitsandbytes"):
        warnings.simplefilter("ignore")
        try:
            from bitsandbytes import cextension
        except ImportError as error:
            advice = "pip install bitsandbytes; without it no 4-bit, no int8 and no 8-bit optimizers"
            yield Check("bitsandbytes library", MISSING, f"does not import ({error})", advice)
            return
    lib = cextension.lib
    if "Mock" in type(lib).__name__:
        advice = "python -m bitsandbytes says why; without it no 4-bit, no int8 and no 8-bit optimizers"
        yield Check("bitsandbytes library", WARN, "its native library does not load", advice)
    else:
        built = "CUDA" if getattr(lib, "compiled_with_cuda", False) else "CPU"
        yield Check("bitsandbytes library", OK, f"loads, {built} build")


def machine() -> Iterator[Check]:
    total, available = memory()
    value = f"{format_bytes(available, digits=1)} free of {format_bytes(total, digits=1)}"
    tight = "close other programs: notebooks that train on the CPU take a few GiB" if available < RAM_NEEDED else ""
    yield Check("RAM", WARN if tight else OK, value, tight)
    yield Check("CPU cores", OK, str(cores()))
    disk = shutil.disk_usage(os.getcwd())
    full = "recorded measurements and checkpoints need room: free some" if disk.free < DISK_NEEDED else ""
    yield Check("disk", WARN if full else OK, f"{format_bytes(disk.free, digits=1)} free here", full)
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "clang++", "cl") if c and shutil.which(c)), None)
    none = "" if compiler else "torch.compile needs one: install g++ (apt install g++); its sections are shown without"
    yield Check("C++ compiler", OK if compiler else WARN, compiler or "none", none)


def memory() -> tuple[int, int]:
    """(total, available) bytes of RAM; a container's own limit counts where it has one (cgroup version 2)."""
    import psutil

    host = psutil.virtual_memory()
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            most = int(limit.read())
            return min(host.total, most), min(host.available, most - int(used.read()))
    except (OSError, ValueError):  # no container, or "max": no limit
        return host.total, host.available


def cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _silent(name: str) -> Iterator[None]:
    """Keeps the logger `name` quiet while a library complains about what is reported here anyway."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


LOOKS = (
    ("python", python),
    ("packages", packages),
    ("GPU", gpus),
    ("NVML", sensors),
    ("bitsandbytes library", bitsandbytes),
    ("machine", machine),
)
