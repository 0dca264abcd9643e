"""The single checks of `doctor`: each looks at one thing and says what it found and what to do about it."""

import contextlib
import ctypes
import importlib.util
import io
import logging
import os
import platform
import runpy
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from ..hardware import host
from ..hardware.gpu import current_device
from ..hardware.nvml import Sensors, all_sensors, nvml_snapshot
from ..report.errors import MissingExtra
from ..report.report import GiB, format_bytes

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
    """(package, version specifier) for everything the course needs, from the metadata or pyproject.toml."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("vramlab") or []
    except metadata.PackageNotFoundError:
        import tomllib

        from ..report.data import data_folder

        text = (data_folder().parent / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        lines = project["dependencies"] + project["optional-dependencies"]["course"]
    found = [Requirement(line) for line in lines]
    return [(r.name, str(r.specifier)) for r in found if r.marker is None or r.marker.evaluate({"extra": "course"})]


def python() -> Iterator[Check]:
    version = platform.python_version()
    old = tuple(map(int, version.split(".")[:2])) < (3, 11)
    yield Check("python", MISSING if old else OK, version, "the course needs 3.11 or newer" if old else "", True)


def packages() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    for name, specifier in requirements():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, MISSING, f"none, {specifier} needed", f"pip install '{name}{specifier}'", True)
            continue
        if SpecifierSet(specifier).contains(version, prereleases=True):
            yield Check(name, OK, version, required=True)
            continue
        # On hosted notebooks torch comes with the machine and fits its driver: never say "reinstall" there.
        fresh = "make a fresh environment, or take a newer runtime where torch comes with the machine"
        advice = fresh if name == "torch" else f"pip install --upgrade '{name}{specifier}'"
        yield Check(name, WARN, f"{version}, {specifier} needed", advice, True)


def may_have_gpu() -> bool:
    """Whether NVIDIA's or AMD's driver is there. Without one torch need not be asked, whose import takes seconds."""
    return nvml_snapshot().available or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))


def torch_build() -> str | None:
    """CUDA's version that torch was built for, None of a CPU build, without loading torch. Raises ImportError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("No module named 'torch'")
    return runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py")).get("cuda")


def gpus() -> Iterator[Check]:
    loaded = "torch" in sys.modules or may_have_gpu()
    try:
        if loaded:
            import torch

            cuda = torch.version.cuda
        else:
            cuda = torch_build()
    except (ImportError, OSError) as error:
        yield Check("torch build", MISSING, "does not load", f"{error}: install torch again", required=True)
        return
    sensors = nvml_snapshot()
    yield Check("torch build", OK, f"CUDA {cuda}" if cuda else "CPU only")
    if not loaded or not torch.cuda.is_available():
        yield Check("GPU", *_why_no_gpu(cuda, sensors))
        return
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        memory, have = format_bytes(seen.total_memory, digits=2), f"{seen.major}.{seen.minor}"
        yield Check(f"GPU {index}", OK, f"{seen.name}, {memory}, compute capability {have}")
    card = current_device().gpu
    for form in ("bf16", "tf32", "fp8"):
        why = card.why_not(form)
        yield Check(form, WARN if why and form != "fp8" else OK, "no" if why else "yes", why if form != "fp8" else "")


def _why_no_gpu(cuda: str | None, sensors: Sensors) -> tuple[str, str, str]:
    """Status, value and advice when torch sees no GPU."""
    if sensors.available and not cuda:
        advice = "install a CUDA build of torch: pytorch.org/get-started"
        return WARN, f"{sensors.name}, but torch is a CPU build", advice
    if sensors.available:
        advice = f"driver {sensors.driver} may be too old for CUDA {cuda}: update it, or take a torch for an older CUDA"
        return WARN, f"{sensors.name}, but torch cannot use it", advice
    again = ", then run again from the top; " + WITHOUT_GPU
    if any(key.startswith("COLAB_") for key in os.environ):
        return MISSING, "none", "Runtime > Change runtime type > T4 GPU" + again
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return MISSING, "none", "Settings > Accelerator > GPU T4 x2" + again
    return MISSING, "none", WITHOUT_GPU


def sensors() -> Iterator[Check]:
    first = nvml_snapshot()
    if not first.available:
        torch = sys.modules.get("torch")
        has_gpu = torch is not None and torch.cuda.is_available()
        advice = "device-wide memory, heat and power cannot be shown" if has_gpu else ""
        yield Check("NVML", WARN if has_gpu else MISSING, first.reason, advice)
        return
    yield Check("driver", OK, first.driver or first.missing["driver"])
    for s in all_sensors():
        if s.free is not None:
            busy = s.used - (s.process or 0) > max(GiB, 0.05 * s.total)
            advice = "other processes hold memory (nvidia-smi lists them): stop them before measuring" if busy else ""
            value = f"{format_bytes(s.free, digits=2)} free of {format_bytes(s.total, digits=2)}"
            yield Check(f"GPU {s.index} memory", WARN if busy else OK, value, advice)
        shown = {"temperature": "°C", "power": "W", "clock": "MHz"}
        values = [f"{getattr(s, name):.0f} {unit}" for name, unit in shown.items() if getattr(s, name) is not None]
        lost = [f"no {name} ({s.missing[name]})" for name in shown if name in s.missing]
        trouble = ", ".join([*s.slowed, *([f"{s.temperature} °C"] if (s.temperature or 0) >= HOT else [])])
        advice = f"the card slows itself down ({trouble}): timings will not hold, see to cooling and power"
        value = ", ".join(values + lost) or "no sensors"
        yield Check(f"GPU {s.index} sensors", WARN if trouble or lost else OK, value, advice if trouble else "")


def bitsandbytes() -> Iterator[Check]:
    name, without = "bitsandbytes library", "without it no 4-bit, no int8 and no 8-bit optimizers"
    try:
        build = native_build()
    except ImportError as error:
        yield Check(name, MISSING, f"does not import ({error})", f"pip install bitsandbytes; {without}")
        return
    if build:
        yield Check(name, OK, f"loads, {build} build")
    else:
        yield Check(name, WARN, "its native library does not load", f"python -m bitsandbytes says why; {without}")


def native_build() -> str:
    """ "CUDA" or "CPU", the build of bitsandbytes' library that loads here; "" if none does. Raises ImportError.

    Where torch is not loaded, as on a machine without a GPU, the CPU library is loaded alone: bitsandbytes itself takes
    seconds to import.
    """
    if "torch" not in sys.modules:
        spec = importlib.util.find_spec("bitsandbytes")
        if spec is None or spec.origin is None:
            raise ImportError("No module named 'bitsandbytes'")
        ending = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
        try:
            ctypes.CDLL(os.path.join(os.path.dirname(spec.origin), f"libbitsandbytes_cpu.{ending}"))
        except OSError:
            return ""
        return "CPU"
    logger = logging.getLogger("bitsandbytes")
    before, logger.disabled = logger.disabled, True  # it complains about what is reported here anyway
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            from bitsandbytes import cextension
    finally:
        logger.disabled = before
    if "Mock" in type(cextension.lib).__name__:
        return ""
    return "CUDA" if getattr(cextension.lib, "compiled_with_cuda", False) else "CPU"


def machine() -> Iterator[Check]:
    try:
        total, available = host.memory()
    except MissingExtra as error:
        yield Check("RAM", MISSING, "not seen", str(error))
    else:
        value = f"{format_bytes(available, digits=1)} free of {format_bytes(total, digits=1)}"
        tight = "close other programs: notebooks that train on the CPU take a few GiB" if available < RAM_NEEDED else ""
        yield Check("RAM", WARN if tight else OK, value, tight)
    yield Check("CPU cores", OK, str(host.cores()))
    disk = shutil.disk_usage(os.getcwd())
    full = "recorded measurements and checkpoints need room: free some" if disk.free < DISK_NEEDED else ""
    yield Check("disk", WARN if full else OK, f"{format_bytes(disk.free, digits=1)} free here", full)
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "clang++", "cl") if c and shutil.which(c)), None)
    none = "" if compiler else "torch.compile needs one: install g++ (apt install g++); its sections are shown without"
    yield Check("C++ compiler", OK if compiler else WARN, compiler or "none", none)


LOOKS = (
    ("python", python),
    ("packages", packages),
    ("GPU", gpus),
    ("NVML", sensors),
    ("bitsandbytes library", bitsandbytes),
    ("machine", machine),
)
