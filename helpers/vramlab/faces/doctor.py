"""What this machine and environment can do, and what to do about what they cannot. Nothing here raises."""

from dataclasses import asdict, dataclass
from typing import Any

from ..hardware import host
from ..hardware.nvml import all_sensors
from ..report.errors import MissingExtra
from ..report.report import environment, format_bytes
from . import checks
from .checks import MISSING, WARN, Check

MARKER = "machine: "


@dataclass(frozen=True)
class Doctor:
    """All checks, in the order in which they are shown."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Nothing that the course requires is missing."""
        return not any(c.required and c.status == MISSING for c in self.checks)

    def __getitem__(self, name: str) -> Check:
        """The check called `name`. Raises KeyError."""
        return {check.name: check for check in self.checks}[name]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"ok": self.ok, "checks": [asdict(c) for c in self.checks]}

    def __str__(self) -> str:
        """A line a check: name, state, what was found, and under it what to do."""
        width = max(len(c.name) for c in self.checks)
        lines = []
        for c in self.checks:
            lines.append(f"{c.name:<{width}}  {c.status:<7}  {c.value}".rstrip())
            if c.advice:
                lines.append(" " * width + f"           → {c.advice}")
        return "\n".join(lines)


def doctor() -> Doctor:
    """Looks at Python, libraries, GPU, driver, sensors, memory, cores and disk.

    Loads torch and bitsandbytes only where a GPU may be.
    """
    found: list[Check] = []
    for name, look in checks.LOOKS:
        try:
            found += look()
        except Exception as error:
            found.append(Check(name, WARN, "could not be checked", f"{type(error).__name__}: {error}"))
    return Doctor(tuple(found))


def environment_stamp() -> str:
    """Where a notebook ran: two lines that start with "machine: ". Quick: loads neither torch nor transformers."""
    seen = environment()
    versions = [f"{name} {version or 'missing'}" for name, version in seen.items() if name not in ("system", "date")]
    gpus = [s.name or "a GPU without a name" for s in all_sensors()]
    try:
        ram = format_bytes(host.memory()[0], digits=1)
    except MissingExtra:
        ram = "unknown"
    parts = [" + ".join(gpus) or "no GPU", f"{host.cores()} CPU cores", f"{ram} RAM", seen["system"], seen["date"]]
    return f"{MARKER}{' · '.join(versions)}\n{MARKER}{' · '.join(parts)}"
