"""The GPU's own sensors, through NVML (package nvidia-ml-py, module pynvml).

A sensor that a card, driver or container does not have is None, with the reason in `missing`. Nothing here raises.
"""

import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ..report.report import format_bytes, text_table

# Reasons for clocks below what was asked for: bits of nvml.h's nvmlClocksEventReason*, without those of settings.
REASONS = {
    0x4: "software power cap",  # normal under load
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

# Each sensor: its unit, and how NVML `n` is asked for that of the card `h`. `used` contains the driver's own part;
# `process` is this process's memory; `throttle` why the clocks are held back, () when they are not.
SENSORS = {
    "name": ("", lambda n, h: n.nvmlDeviceGetName(h)),
    "driver": ("", lambda n, h: n.nvmlSystemGetDriverVersion()),
    "total": ("bytes", lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total),
    "used": ("bytes", lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used),
    "free": ("bytes", lambda n, h: n.nvmlDeviceGetMemoryInfo(h).free),
    "process": ("bytes", lambda n, h: _process(n, h)),
    "temperature": ("°C", lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
    "power": ("W", lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000),
    "power_limit": ("W", lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000),
    "clock": ("MHz", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
    "throttle": ("", lambda n, h: _throttle(n.nvmlDeviceGetCurrentClocksEventReasons(h))),
}


class Sensors(SimpleNamespace):
    """One GPU at one moment: an attribute for each of SENSORS, None without a reading.

    `available`: NVML answered; if not, `reason` says why. `missing`: sensor to the reason that it is None.
    """

    def __init__(self, available: bool, index: int = 0, reason: str = "", missing: dict | None = None, **values: Any):
        super().__init__(available=available, index=index, reason=reason, missing=missing or {})
        vars(self).update({**dict.fromkeys(SENSORS), **values})

    def __str__(self) -> str:
        rows = [("sensor", "value")]
        for name, (unit, _) in SENSORS.items():
            value = getattr(self, name)
            if value is None:
                text = f"none: {self.missing.get(name, 'not reported')}"
            elif name == "throttle":
                text = ", ".join(value) or "no"
            else:
                text = format_bytes(value) if unit == "bytes" else f"{value} {unit}".strip()
            rows.append((name.replace("_", " "), text))
        return text_table(rows) if self.available else f"NVML: {self.reason}"


def nvml_snapshot(index: int = 0) -> Sensors:
    """The sensors of the GPU of that index among those that CUDA_VISIBLE_DEVICES lets through. Never raises.

    NVML numbers GPUs by PCI bus and CUDA by speed: on a machine with unlike GPUs set CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    why = "no NVIDIA driver answers on this machine"
    try:
        import pynvml

        pynvml.nvmlInit()
        why = f"GPU {index} does not answer"
        handle = _handle(pynvml, index)
    except ImportError:
        return Sensors(False, index, "the package nvidia-ml-py is not installed: pip install nvidia-ml-py")
    except Exception as error:
        return Sensors(False, index, f"{why} ({error})")
    values, missing = {}, {}
    for name, (_, ask) in SENSORS.items():
        try:
            values[name] = ask(pynvml, handle)
        except Exception as error:
            missing[name] = str(error) or type(error).__name__
    return Sensors(True, index, missing=missing, **values)


def all_sensors() -> Iterator[Sensors]:
    """The sensors of every GPU that this process may use; none on a machine without NVML."""
    return itertools.takewhile(lambda seen: seen.available, map(nvml_snapshot, range(64)))


def held_by_others(index: int = 0) -> int:
    """Return bytes of that GPU that a display or other processes hold; 0 where NVML does not say."""
    seen = nvml_snapshot(index)
    return max(0, (seen.used or 0) - (seen.process or 0))


def _handle(nvml: Any, index: int) -> Any:
    """NVML's handle of the `index`-th entry of CUDA_VISIBLE_DEVICES, which holds numbers or UUIDs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    # CUDA reads the list up to the first entry that is no device, such as -1.
    names = list(itertools.takewhile(lambda name: name and name[0] != "-", map(str.strip, visible.split(","))))
    if index >= len(names):
        raise LookupError(f"CUDA_VISIBLE_DEVICES={visible!r} lets {len(names) or 'no'} GPU through")
    name = names[index]
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _process(nvml: Any, handle: Any) -> int | None:
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid():
            return process.usedGpuMemory
    raise LookupError("this process is not among those on the GPU (a container hides or renumbers them)")


def _throttle(mask: int) -> tuple[str, ...]:
    return tuple(reason for bit, reason in REASONS.items() if mask & bit)
