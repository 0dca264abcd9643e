"""Where every byte was: what each witness returns. Bytes inside, GiB on screen, one formatter."""

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "temporaries",
    "buffers",
    "inputs",
    "workspace",
    "unexplained",
)
PHASES = ("load", "forward", "backward", "step", "between_steps")
SOURCES = ("predicted", "simulated", "measured", "recorded")
KiB, MiB, GiB = 1024, 1024**2, 1024**3


def format_bytes(n: int | float, unit: str = "GiB", digits: int = 3) -> str:
    """`n` bytes as text, "2.481 GiB" by default; the only place where this package turns bytes into text."""
    size = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}[unit]
    return f"{n:,} B" if unit == "B" else f"{n / size:,.{digits}f} {unit}"


@dataclass(frozen=True)
class Bytes:
    """One moment's memory, split by what it is for; every field is a number of bytes.

    `workspace` is what libraries, kernels and the allocator take for themselves: cuBLAS's buffers, scratch while a
    kernel runs, and what the allocator's blocks hold beyond what was asked for.

    `unexplained` is allocator truth minus all that was accounted for; only measured reports have it.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    temporaries: int = 0
    buffers: int = 0
    inputs: int = 0
    workspace: int = 0
    unexplained: int = 0

    @property
    def total(self) -> int:
        """The sum of all categories in bytes."""
        return sum(n for _, n in self.items())

    def items(self) -> Iterator[tuple[str, int]]:
        """(category, bytes) in the order of CATEGORIES."""
        return ((name, getattr(self, name)) for name in CATEGORIES)

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in self.items() if n]
        return f"{format_bytes(self.total)} = " + (" + ".join(parts) or "nothing")


@dataclass(frozen=True)
class Phase:
    """One phase of the step: the split at its highest moment and at its end."""

    peak: Bytes
    end: Bytes


@dataclass(frozen=True)
class Interval:
    """A figure that cannot be known to the byte: bytes between `low` and `high`, `value` most likely."""

    low: int
    value: int
    high: int

    def __str__(self) -> str:
        return f"{format_bytes(self.value)} ({format_bytes(self.low)} to {format_bytes(self.high)})"


@dataclass(frozen=True)
class Tensor:
    """One tensor alive at the peak: what it is, its size in bytes, who made it."""

    size: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    where: str = ""
    count: int = 1

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        times = f"{self.count} × " if self.count > 1 else ""
        where = f" in {self.where}" if self.where else ""
        return f"{times}{format_bytes(self.size)} {self.category} {self.dtype} [{shape}] by {self.op}{where}"


@dataclass(frozen=True)
class Moment:
    """One point of the timeline: the split after the `index`-th allocation event of the last step."""

    index: int
    phase: str
    bytes: Bytes


@dataclass(frozen=True)
class Speed:
    """Seconds per optimizer step over `repeats` repeats after warm-up, and tokens per second at the median."""

    median: float
    low: float
    high: float
    repeats: int
    tokens_per_second: float


@dataclass
class Report:
    """What one witness says of one recipe. All sizes are bytes, all times seconds.

    Attributes:
        source: "predicted", "simulated", "measured" or "recorded"; nothing may pass one off as another.
        recipe: the recipe as `Recipe.to_dict()` gives it, and `title`, the same in one line.
        target: whose kernels and rounding: "cuda" or "cpu".
        status: "ok", "oom" (out of memory; `message` says what was asked for and what was free) or "error".
        phases: `PHASES` to `Phase`, of the last (steady) step; "load" is the moment after loading.
        peak: the split at the highest moment of the whole run, in phase `peak_phase`.
        largest: the largest tensors alive at that moment, largest first.
        allocated: the allocator's own peak (measured), else `peak.total`.
        requested: what the program asked for before the allocator rounded, where known.
        reserved: the allocator's segments: an int when measured, an Interval when predicted.
        process: the whole process as the device sees it (NVML): likewise.
        rss: on a CPU run, the process's own peak resident set.
        host: on a CPU run, the most bytes that this rank kept in host memory of what is offloaded there; not in `peak`.
    """

    source: str
    recipe: dict[str, Any] | None
    title: str
    target: str
    phases: dict[str, Phase]
    peak: Bytes
    peak_phase: str
    status: str = "ok"
    message: str = ""
    largest: list[Tensor] = field(default_factory=list)
    allocated: int | None = None
    requested: int | None = None
    reserved: int | Interval | None = None
    process: int | Interval | None = None
    rss: int | None = None
    host: int | None = None
    speed: Speed | None = None
    timeline: list[Moment] = field(default_factory=list, repr=False)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"a report's source is one of {', '.join(SOURCES)}, not {self.source!r}")
        if self.allocated is None and self.status == "ok":
            self.allocated = self.peak.total

    @classmethod
    def failed(cls, source: str, recipe: Any, target: str, status: str, message: str, **more: Any) -> "Report":
        """The report of a run that did not finish: no bytes, a status ("oom" or "error") and a message."""
        title = str(recipe) if recipe else ""
        values = recipe.to_dict() if recipe else None
        return cls(source, values, title, target, {}, Bytes(), "", status, message, environment=environment(), **more)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; each `Bytes` also carries its total."""
        return _encode(self)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON text; `Report.from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Report":
        """The report that `to_dict` wrote."""
        d = dict(d)
        d["phases"] = {name: Phase(_bytes(p["peak"]), _bytes(p["end"])) for name, p in d["phases"].items()}
        d["peak"] = _bytes(d["peak"])
        d["largest"] = [Tensor(**{**t, "shape": tuple(t["shape"])}) for t in d.get("largest", [])]
        d["timeline"] = [Moment(m["index"], m["phase"], _bytes(m["bytes"])) for m in d.get("timeline", [])]
        d["speed"] = Speed(**d["speed"]) if d.get("speed") else None
        for name in ("reserved", "process"):
            if isinstance(d.get(name), dict):
                d[name] = Interval(**d[name])
        return cls(**d)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def summary(self) -> str:
        """The report as a text table: phases down, categories across, GiB."""
        if self.status != "ok":
            return f"{self.source}: {self.title}\n{self.status}: {self.message}"
        used = [c for c in CATEGORIES if any(getattr(p.peak, c) for p in self.phases.values())]
        rows = [("phase peak", *[c.replace("_", " ") for c in used], "total")]
        for name in PHASES:
            if name in self.phases:
                split = self.phases[name].peak
                mark = name + (" ←" if name == self.peak_phase else "")
                rows.append((mark, *[f"{getattr(split, c) / GiB:.3f}" for c in used], f"{split.total / GiB:.3f}"))
        lines = [f"{self.source} ({self.target}), GiB: {self.title}", text_table(rows)]
        lines.append(f"peak {format_bytes(self.peak.total)} in {self.peak_phase}")
        for name in ("reserved", "process", "rss", "host"):
            value = getattr(self, name)
            if value is not None:
                lines.append(f"{name} {value if isinstance(value, Interval) else format_bytes(value)}")
        if self.speed:
            lines.append(f"{self.speed.median:.4g} s a step, {self.speed.tokens_per_second:,.0f} tokens/s")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    __str__ = summary


def text_table(rows: list[tuple[str, ...]]) -> str:
    """Rows of text as an aligned table: the first row is the head, the first column is left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0].rstrip(), "  ".join("─" * w for w in widths), *[line.rstrip() for line in lines[1:]]])


def environment(**more: Any) -> dict[str, Any]:
    """Python, library versions and the date, plus what the caller adds; imports nothing heavy."""
    import platform
    from importlib import metadata

    versions = {"python": platform.python_version(), "system": platform.system()}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "accelerate"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {**versions, "date": time.strftime("%Y-%m-%d"), **more}


def _bytes(d: dict[str, int]) -> Bytes:
    return Bytes(**{name: d.get(name, 0) for name in CATEGORIES})


def _encode(value: Any) -> Any:
    if isinstance(value, Bytes):
        return {**dict(value.items()), "total": value.total}
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    return value
