"""`Report`: where every byte was, as each witness returns it.

Bytes inside, GiB on screen, one formatter.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from ..base import html
from ..base.errors import ReportError
from ..base.files import strict_json
from ..base.text import printable, text_table
from ..base.versions import installed
from .byte_counts import (  # noqa: F401 — others take all of them from here
    CATEGORIES,
    UNITS,
    Bytes,
    Cause,
    GiB,
    KiB,
    MiB,
    Moment,
    Phase,
    TensorGroup,
    format_bytes,
    in_unit,
    unit_for,
)
from .json_form import decode, encode, field_error

# Of a training step.
PHASES = ("load", "forward", "backward", "step", "between_steps")
# Every one that a report may have: of a trainer that samples, of a diffusion model whose latents
# are made in the step, and those of `generate` too.
ALL_PHASES = ("load", "generate", "score", "encode", *PHASES[1:], "prefill", "decode")
# The weakest witness first.
SOURCES = ("predicted", "simulated", "emulated", "recorded", "measured")
STATUSES = ("ok", "oom", "error")
# Which end of a process's interval has to fit the card.
TIERS = {"safe": "high", "likely": "value", "tight": "low"}
NO_TIER = "does not fit"
# By whether the allocator has expandable segments: its setting, in words.
SETTINGS = {
    True: "with expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True)",
    False: "without expandable segments (PyTorch's default)",
}
EITHER_SETTING = "with expandable segments and without"
# Categories of what comes and goes in a step; the others are there all the time.
PASSING = ("activations", "temporaries", "kv_cache")
MOST_BESIDE = 2  # of what else is there that `Report.why` names
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


@dataclass(frozen=True)
class Interval:
    """An estimate in bytes: between `low` and `high`, `value` most likely."""

    low: int
    value: int
    high: int

    def text(self, unit: str = "GiB") -> str:
        """Return text like "2.000 GiB (1.500 GiB to 3.000 GiB)".

        Where nothing is uncertain it is "2.000 GiB".
        """
        value = format_bytes(self.value, unit)
        if self.low == self.high:
            return value
        return f"{value} ({format_bytes(self.low, unit)} to {format_bytes(self.high, unit)})"

    __str__ = text

    @classmethod
    def of(cls, value: "int | Interval") -> "Interval":
        """Return `value` as an interval; the ends of a known figure are the figure."""
        return value if isinstance(value, Interval) else cls(value, value, value)

    def tier(self, total: int) -> str:
        """Return the surest of TIERS in which it fits `total` bytes, "" if none."""
        for tier, end in TIERS.items():
            if getattr(self, end) <= total:
                return tier
        return ""

    def verdict(self, total: int) -> str:
        """Return the same in words, which for none are NO_TIER."""
        return self.tier(total) or NO_TIER

    def __add__(self, other: "Interval") -> "Interval":
        """Return the sum, end by end."""
        return Interval(
            self.low + other.low,
            self.value + other.value,
            self.high + other.high,
        )

    def at_least(self, other: "Interval") -> "Interval":
        """Return the higher of the two, end by end."""
        return Interval(
            max(self.low, other.low),
            max(self.value, other.value),
            max(self.high, other.high),
        )

    def __int__(self) -> int:
        return self.value


@dataclass(frozen=True)
class Speed:
    """Seconds per optimizer step over `repeats` steps after warm-up.

    And tokens per second at the median.
    """

    median: float
    low: float
    high: float
    repeats: int
    tokens_per_second: float


@dataclass
class Report:
    """What one witness says of one recipe, in bytes and seconds; predictions may be an Interval."""

    source: str  # one of SOURCES; "emulated" is PyTorch's CUDA build on a stand-in for the GPU
    recipe: dict[str, Any] | None  # as `Recipe.to_dict()` gives it; `title` is the same in one line
    title: str
    target: str  # device whose kernels and rounding are described, "cuda" or "cpu"
    # Of the last (steady) step, by name of ALL_PHASES; "load" is the moment after loading.
    phases: dict[str, Phase]
    peak: Bytes  # the split at the highest moment of the whole run, which is in `peak_phase`
    peak_phase: str
    # "ok", "oom" (`message` says what was asked for and what was free) or "error".
    status: str = "ok"
    message: str = ""
    largest: list[TensorGroup] = field(default_factory=list)  # the largest tensors at the peak
    cause: Cause | None = None  # of the peak; None where the witness does not know it
    allocated: int | None = None  # the allocator's own peak (measured), else `peak.total`
    requested: int | None = None  # the same before the allocator rounded, where known
    reserved: int | Interval | None = None  # the allocator's segments
    process: int | Interval | None = None  # NVML's figure
    # Of the card's bytes what the process may have, where a card was named.
    usable: int | None = None
    granted: str = ""  # what of it the allocator was given in the simulation, in words
    # The allocator's setting that `reserved` and `process` are of, and the process with the other.
    expandable_segments: bool = False
    otherwise: Interval | None = None
    rss: int | None = None  # on a CPU run, the process's peak resident set
    # What an evaluation keeps of its predictions in host memory, at the highest moment.
    kept_on_host: int | None = None
    # The highest moment of loading a quantized base; None: not above phase "load".
    loading: Bytes | None = None
    speed: Speed | None = None
    timeline: list[Moment] = field(default_factory=list, repr=False)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One of TIERS or NO_TIER: how sure it is that the process fits; "" without a card."""
        if self.usable is None or self.process is None:
            return ""
        return Interval.of(self.process).verdict(self.usable)

    @property
    def grade(self) -> str:
        """The verdict and the allocator's setting that it is of, with the other one's.

        Where no setting makes it fit it is NO_TIER alone; "" without a card.
        """
        verdict = self.verdict
        if not verdict or self.usable is None or self.otherwise is None:
            return verdict
        other = self.otherwise.verdict(self.usable)
        if other == verdict:
            return verdict if verdict == NO_TIER else f"{verdict} {EITHER_SETTING}"
        with_it = SETTINGS[self.expandable_segments]
        return f"{verdict} {with_it}; {other} {SETTINGS[not self.expandable_segments]}"

    @property
    def beyond(self) -> int:
        """Bytes that the tensors alone take more than the card has, 0 where they fit.

        What the allocator would reserve for them without expandable segments is then another
        card's, and no figure to choose one by. With these it is close to the tensors, and this is
        0.
        """
        if self.usable is None or self.allocated is None or self.expandable_segments:
            return 0
        return max(0, self.allocated - self.usable)

    def answer(self, card: str, supposed: str = "") -> str:
        """Return in one sentence whether the process fits the card of that name, and `supposed`."""
        has = format_bytes(self.usable or 0)
        if self.beyond:
            takes = f"the tensors alone take {format_bytes(self.allocated or 0)}"
            return f"{NO_TIER}: {card} has {has}, {takes}, {format_bytes(self.beyond)} more"
        this, _, other = self.grade.removeprefix(self.verdict).partition("; ")
        needs = f"the process needs {Interval.of(self.process or 0)}{this}{supposed}"
        if other:
            other = f"; {other}: {self.otherwise}"
        return f"{self.verdict}: {card} has {has}, {needs}{other}"

    def process_with(self, expandable_segments: bool) -> Interval:
        """Return the process's bytes with the allocator's setting."""
        if self.otherwise is not None and expandable_segments != self.expandable_segments:
            return self.otherwise
        return Interval.of(self.process or 0)

    @property
    def why(self) -> str:
        """Why the peak is there, in one line; "" where it is not known.

        That is its cause, and what else the step has made and still holds then.
        """
        if self.cause is None:
            return ""
        others = []
        for group in self.largest:
            is_own = (group.op, group.category) == (self.cause.op, self.cause.category)
            if group.category not in PASSING or is_own:
                continue
            size = group.size * group.count
            if size >= self.cause.size:
                whole = format_bytes(size, unit_for(size))
                kind = group.category.replace("_", " ")
                others.append(f"{whole} of {kind} by {group.op}")
        others = others[:MOST_BESIDE]
        workspace = self.peak.workspace
        # cuBLAS's, and what ranks gather
        if workspace >= self.cause.size and self.cause.category != "workspace":
            others.append(f"{format_bytes(workspace, unit_for(workspace))} of workspace")
        beside = f", beside {' and '.join(others)}" if others else ""
        return f"{self.cause}{beside}"

    def __post_init__(self) -> None:
        for name, allowed in (("source", SOURCES), ("status", STATUSES)):
            value = getattr(self, name)
            if value not in allowed:
                raise field_error(name, value, f"one of {', '.join(allowed)}")
        if self.allocated is None and self.status == "ok":
            self.allocated = self.peak.total

    @classmethod
    def failed(
        cls,
        source: str,
        recipe: Any,
        target: str,
        status: str,
        message: str,
        **about: Any,
    ) -> "Report":
        """Return the report of a run that did not finish: no bytes, a status and a message.

        The status is "oom" or "error".
        """
        return cls(
            source=source,
            recipe=recipe.to_dict(),
            title=str(recipe),
            target=target,
            phases={},
            peak=Bytes(),
            peak_phase="",
            status=status,
            message=message,
            environment=environment(**about),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; each `Bytes` also carries its total."""
        return encode(vars(self))

    def to_json(self, indent: int | None = None) -> str:
        """Return the report as JSON text; `Report.from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Report":
        """Return the report that `to_dict` wrote.

        Raises ReportError, which names the field, for anything else.
        """
        if isinstance(d, dict):
            # the version that the command line writes
            d = {name: value for name, value in d.items() if name != "schema"}
        return decode(cls, d)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Return the report that `to_json` wrote.

        Raises ReportError as `from_dict`, and for text that is no JSON.
        """
        try:
            values = strict_json(text)
        except (ValueError, TypeError) as error:
            raise ReportError(f"This is no report, because it is no JSON ({error}).") from None
        return cls.from_dict(values)

    def __str__(self) -> str:
        """Return the report as a text table: phases down, categories across."""
        return printable("\n".join(self._lines()))

    def _repr_html_(self) -> str:
        """Return the report as a notebook shows it: the peak by category, and the process."""
        head, *rest = str(self).split("\n")
        if self.status != "ok":
            return html.table((), [(head,), *((line,) for line in rest)])
        unit = unit_for(self.peak.total)
        parts = sorted(((size, name) for name, size in self.peak.items() if size), reverse=True)
        rows = []
        for size, name in parts:
            rows.append(
                (name.replace("_", " "), in_unit(size, unit), html.bar(size, self.peak.total))
            )
        rows.append((f"peak, in {self.peak_phase}", in_unit(self.peak.total, unit), ""))
        for name, value in self._totals():
            rows.append((name, Interval.of(value).text(unit), ""))
        notes = list(self.notes)
        if self.cause:
            notes.insert(0, f"why there: {self.why}")
        if self.verdict and self.usable is not None:
            notes.insert(0, f"{self.grade}: {format_bytes(self.usable)} usable")
        return html.table(("at the peak", unit, ""), rows, f"{self.source}: {self.title}", notes)

    def _totals(self) -> Iterator[tuple[str, int | Interval]]:
        """Yield what is known of the process, but of the card where tensors alone exceed it."""
        values = {"reserved": self.reserved, "process": self.process, "rss": self.rss}
        for name, value in values.items():
            if value is not None and (name == "rss" or not self.beyond):
                yield name, value

    def _lines(self) -> Iterator[str]:
        if self.status != "ok":
            yield f"{self.source}: {self.title}"
            yield f"{self.status}: {self.message}"
            return
        unit = unit_for(self.peak.total)
        yield f"{self.source} ({self.target}), {unit}: {self.title}"
        yield text_table(self._table(unit))
        yield f"peak {format_bytes(self.peak.total, unit)} in {self.peak_phase}"
        if self.cause:
            yield f"why there: {self.why}"
        # In a unit of its own, for they may be far larger.
        for name, value in self._totals():
            yield f"{name} {Interval.of(value).text(unit_for(int(value)))}"
        if self.kept_on_host:
            kept = format_bytes(self.kept_on_host, unit_for(self.kept_on_host))
            yield f"predictions kept in host memory {kept}"
        if self.granted:
            yield self.granted
        # Loading counts only where it decides whether the recipe fits.
        if self.loading and self.loading.total > self.peak.total:
            size = format_bytes(self.loading.total, unit)
            yield f"loading peaks at {size}, above all of training"
        if self.speed:
            rate = f"{self.speed.tokens_per_second:,.0f} tokens/s"
            yield f"{self.speed.median:.4g} s a step, {rate}"
        for note in self.notes:
            yield f"note: {note}"

    def _table(self, unit: str) -> list[tuple[str, ...]]:
        """Return the peak of each phase; categories that no phase has are left out."""
        # The table is narrow enough for a terminal where empty columns are gone.
        peaks = [phase.peak for phase in self.phases.values()]
        used = []
        for category in CATEGORIES:
            if any(getattr(peak, category) for peak in peaks):
                used.append(category)
        titles = [category.replace("_", " ") for category in used]
        rows = [("phase peak", *titles, "total")]
        for name in ALL_PHASES:
            phase = self.phases.get(name)
            # A report of a single pass, as of a watch, may lack phases.
            if phase:
                mark = " ←" if name == self.peak_phase else ""
                sizes = [getattr(phase.peak, category) for category in used]
                sizes.append(phase.peak.total)
                rows.append((name + mark, *(in_unit(size, unit) for size in sizes)))
        return rows


def environment(**more: Any) -> dict[str, Any]:
    """Return versions, the date and what the caller adds. Import none of the libraries."""
    import platform

    libraries = {name: installed(name) for name in LIBRARIES}
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        **libraries,
        "date": time.strftime("%Y-%m-%d"),
        **more,
    }


def repository() -> str | None:
    """Return the project's address from the metadata of the installed vramlab.

    None where it is not installed.
    """
    if not installed("vramlab"):
        return None
    for url in metadata.metadata("vramlab").get_all("Project-URL") or []:
        if url.startswith("Repository"):
            return url.split(", ")[1]
    return None
