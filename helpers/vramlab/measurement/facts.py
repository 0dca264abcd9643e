"""Facts of a card that no report of a training step holds.

What a CUDA context takes, ten times of a step with power and clocks, a run that goes out of memory,
what loading a base in 4 bits takes, what `generate` holds.

A kind of fact is an entry of ASKED, of FOUND and of `card_work.WORK`; sizes are bytes, times
seconds.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..base.errors import RecipeError, ReportError
from ..base.text import CONTROLS
from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe
from ..report.report import format_bytes

Check = Callable[[Any], bool]
MOST_BYTES = 2**44
MOST_TEXT = 4000
MOST_VALUES = 1000
# What a process has used of CUDA when its context is read (`card_work.py` does it).
LOADED = (
    "bare",
    "cuBLAS",
    "cuBLASLt",
    "cuDNN",
    "math attention",
    "efficient attention",
    "flash attention",
    "cuDNN attention",
    "bitsandbytes imported",
    "bitsandbytes 4 bits",
    "bitsandbytes 8-bit optimizer",
    "Triton",
    "NCCL",
    "training",
)


def is_size(value: Any) -> bool:
    """Whether `value` is a number of bytes that a machine can have."""
    # By exact type, since True is an int too.
    return type(value) is int and 0 <= value <= MOST_BYTES


def is_number(value: Any) -> bool:
    """Whether `value` is a positive number: of seconds, watts, MHz or degrees."""
    return type(value) in (int, float) and 0 < value < 1e6


def is_count(value: Any) -> bool:
    """Whether `value` is a whole number of things, from one to a million."""
    return type(value) is int and 0 < value < 1_000_000


def is_text(value: Any) -> bool:
    """Whether `value` is a text without control characters, at most MOST_TEXT long."""
    return isinstance(value, str) and len(value) <= MOST_TEXT and not CONTROLS.search(value)


def is_recipe(value: Any) -> bool:
    """Whether `value` is what `Recipe.to_dict` gives for a recipe."""
    try:
        # Equal again after a round trip, so that nothing else hides in it.
        return rebuild(Recipe, "recipe", value).to_dict() == value
    except (RecipeError, TypeError):
        return False


def list_of(check: Check) -> Check:
    """Return the check of a list whose values all pass `check`, at most MOST_VALUES of them."""
    return lambda value: (
        isinstance(value, list) and len(value) <= MOST_VALUES and all(map(check, value))
    )


def or_none(check: Check) -> Check:
    """Return the check of what passes `check` or is None."""
    return lambda value: value is None or check(value)


# Of the device and of torch's allocator. `used_…`: NVML's memory in use on the whole device, before
# this process touched it and at the reading; `smi_used`: nvidia-smi's figure at the reading;
# `process`: NVML's for this process, which a container hides. At the reading the allocator still
# holds all that it `reserved`.
STATE = {
    "used_before": or_none(is_size),
    "used_after": or_none(is_size),
    "smi_used": or_none(is_size),
    "process": or_none(is_size),
    "allocated": is_size,
    "reserved": is_size,
}
ASKED: dict[str, dict[str, Check]] = {
    "context": {"loaded": LOADED.__contains__},
    "steps": {
        "recipe": is_recipe,
        "expandable": lambda value: type(value) is bool,
        "repeats": is_count,
    },
    "out_of_memory": {"recipe": is_recipe},
    "loading": {"recipe": is_recipe},
    "generation": {"recipe": is_recipe, "prompt": is_count, "new_tokens": is_count},
}
FOUND: dict[str, dict[str, Check]] = {
    "context": STATE,
    # allocated, requested, reserved: the peaks of the steps
    "steps": STATE
    | {
        "requested": is_size,
        "seconds": list_of(is_number),
        "power": list_of(is_number),  # W, sampled while further steps ran
        "power_limit": or_none(is_number),
        "clock": list_of(is_number),  # MHz
        "temperature": list_of(is_number),  # °C
        "throttle": list_of(is_text),  # every reason that was seen
    },
    # the step that failed: at which batch size, which step, and the card before it
    "out_of_memory": {
        "batch_size": is_count,
        "step": is_count,
        "message": is_text,
        "free": is_size,
        "total": is_size,
        "allocated": is_size,
        "reserved": is_size,
        "peak_allocated": is_size,
        "peak_reserved": is_size,
    },
    # allocated, requested, reserved: the peaks of from_pretrained; `kept`: allocated when it had
    # returned
    "loading": STATE
    | {"requested": is_size, "kept": is_size, "file": is_size, "seconds": is_number},
    # allocated, requested, reserved: the peaks of `generate`; of allocated also apart, up to the
    # first token and for all after it
    "generation": STATE
    | {
        "requested": is_size,
        "prefill": is_size,
        "decode": is_size,
        "seconds": is_number,
    },
}


@dataclass(frozen=True)
class Fact:
    """What was `asked` of a card and what was `found`.

    `source` as a report's ("measured", or "emulated").
    """

    kind: str
    asked: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    source: str = "measured"
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the name under which it is kept: the same question has the same key."""
        return f"{self.kind} {json.dumps(self.asked, sort_keys=True)}"

    @property
    def title(self) -> str:
        """Return what was asked, in words."""
        said = [self.kind.replace("_", " ")]
        for name, value in self.asked.items():
            said.append(
                str(rebuild(Recipe, name, value)) if name == "recipe" else f"{name} {value}"
            )
        return " · ".join(said)

    @property
    def outside(self) -> int | None:
        """Return the bytes of the device that this process took outside torch's allocator.

        None where nobody tells.
        """
        if self.found.get("process") is not None:
            return self.found["process"] - self.found["reserved"]
        if self.found.get("used_before") is None or self.found.get("used_after") is None:
            return None
        return self.found["used_after"] - self.found["used_before"] - self.found["reserved"]

    @property
    def words(self) -> str:
        """Return the main of what was found in a few words."""
        if self.kind == "out_of_memory":
            return f"dies at batch {self.found['batch_size']}"
        outside = "unknown" if self.outside is None else format_bytes(self.outside)
        return f"{format_bytes(self.found['allocated'])} allocated, {outside} outside the allocator"

    @classmethod
    def from_dict(cls, said: Any) -> "Fact":
        """Return the fact that a JSON object says.

        Raises ReportError unless it has each field of one and no other.
        """
        # Records come from others: nothing but what is known may be in one.
        if not isinstance(said, dict) or said.keys() != {
            "kind",
            "asked",
            "found",
            "source",
            "environment",
        }:
            raise ReportError("it is no fact: one has kind, asked, found, source and environment")
        if said["kind"] not in ASKED:
            raise ReportError(f"its kind is {said['kind']!r:.60}, but kinds are {', '.join(ASKED)}")
        if not isinstance(said["environment"], dict):
            raise ReportError("its environment is no object")
        for part, kinds in (("asked", ASKED), ("found", FOUND)):
            _check_values(part, said[part], kinds[said["kind"]])
        return cls(**said)

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` takes."""
        return asdict(self)


def _check_values(part: str, values: Any, checks: dict[str, Check]) -> None:
    """Raise ReportError unless `values` has the names of `checks`, and each value passes."""
    if not isinstance(values, dict) or values.keys() != checks.keys():
        raise ReportError(
            f"what it {'was asked' if part == 'asked' else 'found'} must be {', '.join(checks)}"
        )
    for name, check in checks.items():
        if not check(values[name]):
            raise ReportError(f"its {name} is {values[name]!r:.60}, which cannot be")
