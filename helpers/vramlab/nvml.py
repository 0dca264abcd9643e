"""The GPU's own sensors, through NVML (package nvidia-ml-py, module pynvml).

A sensor that a card, a driver or a container does not have is None, with the reason beside it; a machine without NVML
gives an answer too. Nothing here raises.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .report import format_bytes, text_table

# Reasons why the clocks are below what was asked for: bits of nvml.h's nvmlClocksEventReason*. The application-clock,
# sync-boost and idle bits are settings, not distress, but they explain a slow benchmark all the same.
REASONS = {
    0x1: "idle",
    0x2: "application clocks set",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks set",
}
DISTRESS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake")


@dataclass(frozen=True)
class Sensors:
    """What NVML says of one GPU at one moment; None where it says nothing, with the reason in `missing`.

    Attributes:
        available: NVML answered; if not, `reason` says why in one sentence.
        total, used, free, reserved: bytes; `reserved` is the driver's own part, which `used` leaves out where NVML
            tells them apart (`nvmlDeviceGetMemoryInfo_v2`) and contains where it does not (`reserved` None).
        process: bytes of this process on the GPU.
        temperature, slowdown_temperature: degrees Celsius.
        power, power_limit: watts.
        clock, clock_max, memory_clock: MHz (`clock` is that of the multiprocessors).
        utilization: percent of the last sample period in which a kernel ran.
        throttle: why the clocks are held back, () when they are not; see REASONS.
        pcie_generation, pcie_width: of the link as it is now; an idle card may lower the generation.
        ecc: memory error correction is on.
    """

    available: bool
    index: int = 0
    reason: str = ""
    name: str | None = None
    driver: str | None = None
    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None
    process: int | None = None
    temperature: int | None = None
    slowdown_temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    clock: int | None = None
    clock_max: int | None = None
    memory_clock: int | None = None
    utilization: int | None = None
    throttle: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc: bool | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def slowed(self) -> tuple[str, ...]:
        """The throttle reasons that mean heat or power trouble."""
        return tuple(r for r in self.throttle or () if r in DISTRESS)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self) | {"throttle": None if self.throttle is None else list(self.throttle)}

    def __str__(self) -> str:
        """A table, a line a sensor, with the reason where there is no value."""
        if not self.available:
            return f"NVML: {self.reason}"
        rows = [("sensor", "value")]
        for name, unit in UNITS.items():
            value = getattr(self, name)
            if value is None:
                text = f"none: {self.missing[name]}" if name in self.missing else "none"
            elif unit == "bytes":
                text = format_bytes(value)
            elif name == "throttle":
                text = ", ".join(value) or "no"
            else:
                text = f"{value:.1f} {unit}" if isinstance(value, float) else f"{value} {unit}".strip()
            rows.append((name.replace("_", " "), text))
        return text_table(rows)


UNITS = {
    **dict.fromkeys(("name", "driver"), ""),
    **dict.fromkeys(("total", "used", "free", "reserved", "process"), "bytes"),
    **dict.fromkeys(("temperature", "slowdown_temperature"), "°C"),
    **dict.fromkeys(("power", "power_limit"), "W"),
    **dict.fromkeys(("clock", "clock_max", "memory_clock"), "MHz"),
    "utilization": "%",
    **dict.fromkeys(("throttle", "pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max", "ecc"), ""),
}


def nvml_snapshot(index: int = 0) -> Sensors:
    """The sensors of the `index`-th GPU that this process may use (CUDA_VISIBLE_DEVICES is honoured). Never raises.

    NVML numbers GPUs by PCI bus and CUDA by speed: on a machine with unlike GPUs set CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    try:
        import pynvml
    except ImportError:
        return Sensors(False, index, "the package nvidia-ml-py is not installed: pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except Exception as error:
        return Sensors(False, index, f"no NVIDIA driver answers on this machine ({error})")
    try:
        return _read(pynvml, index)
    except Exception as error:
        return Sensors(False, index, f"GPU {index} does not answer ({_say(error)})")
    finally:
        _quiet(pynvml.nvmlShutdown)


def all_sensors() -> Iterator[Sensors]:
    """The sensors of every GPU that this process may use, none on a machine without NVML."""
    for index in range(64):
        seen = nvml_snapshot(index)
        if not seen.available:
            return
        yield seen


def _read(nvml: Any, index: int) -> Sensors:
    handle = _handle(nvml, index)
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}

    def read(names: str, ask: Callable[[], Any]) -> None:
        """Stores what `ask` returns under `names`, or why it returned nothing."""
        try:
            answer = ask()
        except Exception as error:
            missing.update(dict.fromkeys(names.split(), _say(error)))
        else:
            found = zip(names.split(), answer if " " in names else (answer,), strict=True)
            for name, value in found:
                if value is None:
                    missing[name] = "not reported"
                values[name] = value

    read("name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
    read("driver", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
    read("total used free reserved", lambda: _memory(nvml, handle))
    read("process", lambda: _process(nvml, handle))
    read("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    slowdown = "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"
    read("slowdown_temperature", lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, getattr(nvml, slowdown)))
    read("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    read("power_limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    read("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    read("clock_max", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    read("memory_clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
    read("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    read("throttle", lambda: _throttle(nvml, handle))
    read("pcie_generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
    read("pcie_generation_max", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    read("pcie_width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    read("pcie_width_max", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    read("ecc", lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]))
    return Sensors(True, index, **values, missing=missing)


def _handle(nvml: Any, index: int) -> Any:
    """NVML's handle of the `index`-th GPU that CUDA_VISIBLE_DEVICES lets through; it holds numbers or UUIDs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA reads the list up to the first entry that is no device, such as -1.
    stop = next((i for i, name in enumerate(names) if name.startswith("-")), len(names))
    if index >= stop:
        raise LookupError(f"CUDA_VISIBLE_DEVICES={visible!r} lets {stop or 'no'} GPU{'s' * (stop > 1)} through")
    name = names[index]
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _memory(nvml: Any, handle: Any) -> tuple[int, int, int, int | None]:
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except Exception:  # older drivers know the first version only
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return info.total, info.used, info.free, getattr(info, "reserved", None)


def _process(nvml: Any, handle: Any) -> int:
    processes = {p.pid: p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    pid = os.getpid()
    if pid in processes:
        if processes[pid] is None:
            raise LookupError("the driver does not tell memory per process here")
        return processes[pid]
    if processes:
        raise LookupError(f"process {pid} is not among those on the GPU (containers number processes differently)")
    raise LookupError("no process is on the GPU, or a container hides them")


def _throttle(nvml: Any, handle: Any) -> tuple[str, ...]:
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    mask = (ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)
    return tuple(reason for bit, reason in REASONS.items() if mask & bit)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _say(error: Exception) -> str:
    if isinstance(error, AttributeError):
        return "this nvidia-ml-py does not know it"
    return str(error) or type(error).__name__


def _quiet(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        return
