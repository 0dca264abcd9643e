"""`Report`: where every byte was, as each witness returns it. Bytes inside, GiB on screen, one formatter."""

import dataclasses
import json
import reprlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from . import html
from .errors import ReportError
from .files import strict_json
from .text import printable
from .versions import installed

PHASES = ("load", "forward", "backward", "step", "between_steps")
SOURCES = ("predicted", "simulated", "emulated", "recorded", "measured")  # the weakest witness first
KiB, MiB, GiB = 1024, 1024**2, 1024**3
UNITS = {"GiB": GiB, "MiB": MiB, "KiB": KiB, "B": 1}
MOST = 2**63  # bytes, and any other number of a report
TIERS = {"safe": "high", "likely": "value", "tight": "low"}  # which end of a process's interval has to fit the card
NO_TIER = "does not fit"


def format_bytes(n: int | float, unit: str = "GiB", digits: int = 3) -> str:
    """Return `n` bytes as text, "2.481 GiB" by default."""
    return f"{in_unit(n, unit, digits)} {unit}"


def in_unit(n: int | float, unit: str = "GiB", digits: int = 3) -> str:
    """Return `n` bytes as a number of `unit`, as in tables."""
    if unit == "B":
        return f"{int(n):,}" if n == int(n) else f"{n:,.2f}"
    return f"{n / UNITS[unit]:,.{digits}f}"


def unit_for(largest: int) -> str:
    """Return the unit in which `largest` bytes are at least 1: "GiB", "MiB", else "KiB"."""
    return next((unit for unit in ("GiB", "MiB") if largest >= UNITS[unit]), "KiB")


@dataclass(frozen=True)
class Bytes:
    """Bytes at one moment, by what they are for."""

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    temporaries: int = 0
    buffers: int = 0
    inputs: int = 0
    workspace: int = 0  # of libraries, kernels and the allocator: cuBLAS's buffers, scratch, internal fragmentation
    unexplained: int = 0  # the allocator's figure minus the rest, in measured reports only

    @property
    def total(self) -> int:
        """The sum of all categories in bytes."""
        return sum(vars(self).values())

    def items(self) -> Iterator[tuple[str, int]]:
        """Return (category, bytes) in the order of CATEGORIES."""
        return iter(vars(self).items())

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in self.items() if n]
        return f"{format_bytes(self.total)} = " + (" + ".join(parts) or "nothing")


CATEGORIES = tuple(field.name for field in dataclasses.fields(Bytes))


@dataclass(frozen=True)
class Phase:
    """One phase of the step: the split at its peak and at its end."""

    peak: Bytes
    end: Bytes


@dataclass(frozen=True)
class Interval:
    """An estimate in bytes: between `low` and `high`, `value` most likely."""

    low: int
    value: int
    high: int

    def text(self, unit: str = "GiB") -> str:
        """Return text like "2.000 GiB (1.500 GiB to 3.000 GiB)", or "2.000 GiB" where nothing is uncertain."""
        value, low, high = (format_bytes(n, unit) for n in (self.value, self.low, self.high))
        return value if self.low == self.high else f"{value} ({low} to {high})"

    __str__ = text

    @classmethod
    def of(cls, value: "int | Interval") -> "Interval":
        """Return `value` as an interval; the ends of a known figure are the figure."""
        return value if isinstance(value, Interval) else cls(value, value, value)

    def tier(self, total: int) -> str:
        """Return the surest of TIERS in which it fits `total` bytes, "" if none."""
        return next((name for name, end in TIERS.items() if getattr(self, end) <= total), "")

    def verdict(self, total: int) -> str:
        """Return the same in words, which for none are NO_TIER."""
        return self.tier(total) or NO_TIER

    def __add__(self, other: "Interval") -> "Interval":
        """Return the sum, end by end."""
        return Interval(self.low + other.low, self.value + other.value, self.high + other.high)

    def at_least(self, other: "Interval") -> "Interval":
        """Return the higher of the two, end by end."""
        return Interval(max(self.low, other.low), max(self.value, other.value), max(self.high, other.high))

    def __int__(self) -> int:
        return self.value


@dataclass(frozen=True)
class TensorGroup:
    """`count` equal tensors alive at the peak: size of one in bytes, the operator and the module that made them."""

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
    """One point of the timeline: the split after `index` allocation events of the last step."""

    index: int
    phase: str
    bytes: Bytes


@dataclass(frozen=True)
class Speed:
    """Seconds per optimizer step over `repeats` steps after warm-up, and tokens per second at the median."""

    median: float
    low: float
    high: float
    repeats: int
    tokens_per_second: float


@dataclass
class Report:
    """What one witness says of one recipe, in bytes and seconds; what is predicted may be an Interval."""

    source: str  # one of SOURCES; "emulated" is PyTorch's CUDA build on a stand-in for the GPU
    recipe: dict[str, Any] | None  # as `Recipe.to_dict()` gives it; `title` is the same in one line
    title: str
    target: str  # device whose kernels and rounding are described, "cuda" or "cpu"
    phases: dict[str, Phase]  # of the last (steady) step, by name of PHASES; "load" is the moment after loading
    peak: Bytes  # the split at the highest moment of the whole run, which is in `peak_phase`
    peak_phase: str
    status: str = "ok"  # or "oom" (`message` says what was asked for and what was free), or "error"
    message: str = ""
    largest: list[TensorGroup] = field(default_factory=list)  # the largest tensors at the peak
    allocated: int | None = None  # the allocator's own peak (measured), else `peak.total`
    requested: int | None = None  # the same before the allocator rounded, where known
    reserved: int | Interval | None = None  # the allocator's segments
    process: int | Interval | None = None  # NVML's figure
    usable: int | None = None  # of the card's bytes what the process may have, where a card was named
    granted: str = ""  # what of it the allocator was given in the simulation, in words
    rss: int | None = None  # on a CPU run, the process's peak resident set
    loading: Bytes | None = None  # the highest moment of loading a quantized base; None: not above phase "load"
    speed: Speed | None = None
    timeline: list[Moment] = field(default_factory=list, repr=False)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One of TIERS or NO_TIER: how sure it is that the process fits the card; "" without a card."""
        known = self.usable is not None and self.process is not None
        return Interval.of(self.process).verdict(self.usable) if known else ""

    def __post_init__(self):
        for name, allowed in (("source", SOURCES), ("status", ("ok", "oom", "error"))):
            if getattr(self, name) not in allowed:
                raise _field_error(name, getattr(self, name), f"one of {', '.join(allowed)}")
        if self.allocated is None and self.status == "ok":
            self.allocated = self.peak.total

    @classmethod
    def failed(cls, source: str, recipe: Any, target: str, status: str, message: str, **about: Any) -> "Report":
        """Return the report of a run that did not finish: no bytes, a status ("oom" or "error") and a message."""
        values, about = recipe.to_dict(), environment(**about)
        return cls(source, values, str(recipe), target, {}, Bytes(), "", status, message, environment=about)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; each `Bytes` also carries its total."""
        return encode(vars(self))

    def to_json(self, indent: int | None = None) -> str:
        """Return the report as JSON text; `Report.from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Report":
        """Return the report that `to_dict` wrote. Raises ReportError, which names the field, for anything else."""
        return _decode(cls, d, "")

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Return the report that `to_json` wrote. Raises ReportError as `from_dict`, and for text that is no JSON."""
        try:
            values = strict_json(text)
        except (ValueError, TypeError) as error:
            raise ReportError(f"This is no report, because it is no JSON ({error}).") from None
        return cls.from_dict(values)

    def __str__(self) -> str:
        """Return the report as a text table: phases down, categories across."""
        return printable(self._text())

    def _repr_html_(self) -> str:
        """Return the report as a notebook shows it: the peak by category, and what the process needs."""
        head, *rest = str(self).split("\n")
        if self.status != "ok":
            return html.table((), [(head,), *((line,) for line in rest)])
        unit = unit_for(self.peak.total)
        found = sorted(((n, name) for name, n in self.peak.items() if n), reverse=True)
        rows = [(name.replace("_", " "), in_unit(n, unit), html.bar(n, self.peak.total)) for n, name in found]
        rows.append((f"peak, in {self.peak_phase}", in_unit(self.peak.total, unit), ""))
        for name in ("reserved", "process", "rss"):
            if (value := getattr(self, name)) is not None:
                rows.append((name, Interval.of(value).text(unit), ""))
        verdict = [f"{self.verdict}: {format_bytes(self.usable)} usable"] if self.verdict else []
        return html.table(("at the peak", unit, ""), rows, f"{self.source}: {self.title}", [*verdict, *self.notes])

    def _text(self) -> str:
        if self.status != "ok":
            return f"{self.source}: {self.title}\n{self.status}: {self.message}"
        unit = unit_for(self.peak.total)
        used = [c for c in CATEGORIES if any(getattr(p.peak, c) for p in self.phases.values())]
        rows = [("phase peak", *[c.replace("_", " ") for c in used], "total")]
        for name in filter(self.phases.get, PHASES):
            split, mark = self.phases[name].peak, " ←" if name == self.peak_phase else ""
            rows.append((name + mark, *(in_unit(n, unit) for n in (*(getattr(split, c) for c in used), split.total))))
        lines = [f"{self.source} ({self.target}), {unit}: {self.title}", text_table(rows)]
        lines.append(f"peak {format_bytes(self.peak.total, unit)} in {self.peak_phase}")
        for name in ("reserved", "process", "rss"):
            if (value := getattr(self, name)) is not None:
                lines.append(f"{name} {Interval.of(value).text(unit_for(int(value)))}")
        lines += [self.granted] if self.granted else []
        if self.loading and self.loading.total > self.peak.total:
            lines.append(f"loading peaks at {format_bytes(self.loading.total, unit)}, above all of training")
        if self.speed:
            lines.append(f"{self.speed.median:.4g} s a step, {self.speed.tokens_per_second:,.0f} tokens/s")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def text_table(rows: list[tuple[str, ...]]) -> str:
    """Return rows of text as an aligned table: the first row is the head, the first column is left-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    head, *lines = ("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in rows)
    return "\n".join([head, "  ".join("─" * width for width in (first, *others)), *lines])


def environment(**more: Any) -> dict[str, Any]:
    """Return versions, the date and what the caller adds. Import none of the libraries."""
    import platform

    machine = {"python": platform.python_version(), "system": platform.system()}
    libraries = {name: installed(name) for name in ("torch", "transformers", "peft", "bitsandbytes", "accelerate")}
    return {**machine, **libraries, "date": time.strftime("%Y-%m-%d"), **more}


def repository() -> str | None:
    """Return the project's address from the metadata of the installed vramlab; None where it is not installed."""
    urls = (installed("vramlab") and metadata.metadata("vramlab").get_all("Project-URL")) or []
    return next((url.split(", ")[1] for url in urls if url.startswith("Repository")), None)


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Return JSON's `value` as a `kind`, by the types of the dataclasses' fields. Raises ReportError."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and NoneType in inner):
        return value
    if origin is UnionType:  # a number or an object, or None
        return _decode(Interval if Interval in inner and isinstance(value, dict) else inner[0], value, where)
    if dataclasses.is_dataclass(kind):
        types, fields = {field.name: field.type for field in dataclasses.fields(kind)}, _typed(value, dict, where)
        extra = {"total"} if kind is Bytes else {"schema"} if kind is Report else set()
        if unknown := sorted(fields.keys() - types.keys() - extra):
            name = f"{where}.{unknown[0]}".lstrip(".")
            raise ReportError(f"Report field {name!r} is unknown: known there are {', '.join(types)}.")
        values = {name: _decode(types.get(name, Any), v, f"{where}.{name}".lstrip(".")) for name, v in fields.items()}
        total = values.pop("total", None)
        values.pop("schema", None)  # the version that the command line writes
        needed = (field.name for field in dataclasses.fields(kind) if _is_required(field))
        if missing := [name for name in needed if name not in values]:
            raise ReportError(f"{where or 'A report'} lacks {', '.join(missing)}.")
        made = kind(**values)
        if total is not None and total != made.total:  # `Bytes` have one, their sum
            raise _field_error(f"{where}.total", total, f"the sum of the categories, {made.total}")
        return made
    if origin is dict:
        return {name: _decode(inner[1], v, f"{where}.{name}") for name, v in _typed(value, dict, where).items()}
    if origin in (list, tuple):
        return origin(_decode(inner[0], v, f"{where}[{i}]") for i, v in enumerate(_typed(value, list, where)))
    least = -MOST if where.endswith("unexplained") else 0
    if kind is not str and not least <= _typed(value, kind, where) <= MOST:
        raise _field_error(where, value, "at least 0, and at most 2 to the 63" if least == 0 else "within 64 bits")
    return _typed(value, kind, where)


def _is_required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _typed(value: Any, kind: type, where: str) -> Any:
    """Return `value` if it is a `kind`; a float may be a whole number."""
    if type(value) is not kind and (kind, type(value)) != (float, int):
        words = {dict: "an object with names and values", list: "a list", str: "text", int: "a whole number"}
        raise _field_error(where, value, words.get(kind, "a number"))
    return value


def _field_error(where: str, value: Any, allowed: str) -> ReportError:
    subject = f"Report field '{where}'" if where else "A report"
    return ReportError(f"{subject} is {reprlib.repr(value)}, but it must be {allowed}.")


def encode(value: Any) -> Any:
    """Return `value` as JSON has it: recipes and reports by their `to_dict`, other dataclasses by their fields."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return encode(vars(value) | ({"total": value.total} if isinstance(value, Bytes) else {}))
    if isinstance(value, dict):
        return {name: encode(each) for name, each in value.items()}
    return [encode(each) for each in value] if isinstance(value, list | tuple) else value
