"""The GPU's own sensors, through NVML (package nvidia-ml-py, module pynvml).

A sensor that a card, driver or container does not have is None, with the reason in `missing`.
Nothing here raises.
"""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ..report.report import format_bytes, text_table

# Reasons for clocks below what was asked for: bits of nvml.h's nvmlClocksEventReason*, without
# those of settings.
REASONS = {
    0x4: "software power cap",  # normal under load
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

# Each sensor: its unit, and how NVML `n` is asked for that of the card `h`. `used` contains the
# driver's own part; `process` is this process's memory; `throttle` why the clocks are held back, ()
# when they are not.
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
MOST_GPUS = 64  # of a machine


class Sensors(SimpleNamespace):
    """One GPU at one moment: an attribute for each of SENSORS, None without a reading.

    `available`: NVML answered; if not, `reason` says why. `missing`: sensor to the reason that it
    is None.
    """

    def __init__(
        self,
        available: bool,
        index: int = 0,
        reason: str = "",
        missing: dict[str, str] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(
            available=available,
            index=index,
            reason=reason,
            missing=missing or {},
        )
        vars(self).update({**dict.fromkeys(SENSORS), **values})

    def __str__(self) -> str:
        if not self.available:
            return f"NVML: {self.reason}"
        rows = [("sensor", "value")]
        for name in SENSORS:
            rows.append((name.replace("_", " "), self._text(name)))
        return text_table(rows)

    def _text(self, name: str) -> str:
        """Return the reading of a sensor with its unit."""
        value = getattr(self, name)
        if value is None:
            return f"none: {self.missing.get(name, 'not reported')}"
        if name == "throttle":
            return ", ".join(value) or "no"
        unit, _ = SENSORS[name]
        if unit == "bytes":
            return format_bytes(value)
        return f"{value} {unit}".strip()


def nvml_snapshot(index: int = 0) -> Sensors:
    """Return the sensors of a GPU. Never raises.

    `index` is that among the GPUs that CUDA_VISIBLE_DEVICES lets through. NVML numbers GPUs by PCI
    bus and CUDA by speed: on a machine with unlike GPUs set CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    why = "no NVIDIA driver answers on this machine"
    try:
        import pynvml

        pynvml.nvmlInit()
        why = f"GPU {index} does not answer"
        handle = _handle(pynvml, index)
    except ImportError:
        why = "the package nvidia-ml-py is not installed: pip install nvidia-ml-py"
        return Sensors(False, index, why)
    except Exception as error:
        return Sensors(False, index, f"{why} ({error})")
    values = {}
    missing = {}
    for name, (_, ask) in SENSORS.items():
        # A sensor may be one that this card, driver or container lacks; others still answer.
        try:
            values[name] = ask(pynvml, handle)
        except Exception as error:
            missing[name] = str(error) or type(error).__name__
    return Sensors(True, index, missing=missing, **values)


def all_sensors() -> Iterator[Sensors]:
    """Yield the sensors of every GPU that this process may use; none on a machine without NVML."""
    for index in range(MOST_GPUS):
        sensors = nvml_snapshot(index)
        if not sensors.available:
            return
        yield sensors


def held_by_others() -> int:
    """Return bytes of the first GPU that others hold, as a display; 0 where NVML is silent."""
    sensors = nvml_snapshot()
    return max(0, (sensors.used or 0) - (sensors.process or 0))


def _handle(nvml: Any, index: int) -> Any:
    """Return NVML's handle of the `index`-th entry of CUDA_VISIBLE_DEVICES.

    The variable holds numbers or UUIDs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    names = []
    for name in map(str.strip, visible.split(",")):
        # CUDA reads the list up to the first entry that is no device, such as -1.
        if not name or name.startswith("-"):
            break
        names.append(name)
    if index >= len(names):
        count = len(names) or "no"
        raise LookupError(f"CUDA_VISIBLE_DEVICES={visible!r} lets {count} GPU through")
    name = names[index]
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _process(nvml: Any, handle: Any) -> int | None:
    """Return the bytes that this process holds on the card. Raises LookupError if it is hidden."""
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid():
            return process.usedGpuMemory
    why = "a container hides or renumbers them"
    raise LookupError(f"this process is not among those on the GPU ({why})")


def _throttle(mask: int) -> tuple[str, ...]:
    """Return the reasons whose bits are in the mask."""
    return tuple(reason for bit, reason in REASONS.items() if mask & bit)
