"""What the sources claim, and whether it holds: each claim has an experiment, and the verdict is computed from it.

`data/claims.json` holds the claims: where each stands, the quoted figure, and the experiment that tests it, in one case
or in several (with and without momentum, say). The experiments of chapter 02 are the functions of the module
`vramlab/chapters/claims_02.py` that return a `Finding`, by their annotation; nothing else has to be told. An experiment
takes a case's arguments; it raises `RecordError` where only a GPU can answer and no record of one is there yet.

    >>> from vramlab.claims import judge, load_claims
    >>> print(judge(load_claims("02")["B-sgd"]).text)
    holds under SGD without momentum
"""

import importlib
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from .data import data_path
from .errors import RecordError, VramLabError
from .report import Interval

HOLDS, UNDER, NOT, WAITS = "holds", "holds under", "does not hold", "waits for a GPU record"
RULES = ("equals", "at least", "within", "is")


class ClaimError(VramLabError, ValueError):
    """A claim that cannot be tested as it stands in the ledger."""


@dataclass(frozen=True)
class Finding:
    """What an experiment found in one case.

    Attributes:
        value: a number in the claim's unit, an Interval, or True or False.
        witness: "derived" (arithmetic), "predicted", "simulated", "recorded" or "measured".
        configuration: what the number depends on: the recipe, or the terms of the sum.
    """

    value: float | bool | Interval
    witness: str
    configuration: str


@dataclass(frozen=True)
class Claim:
    """One claim of a source.

    Attributes:
        name: unique, beginning with the source's letter: "B-sgd".
        chapter: the chapter that tests it, "02".
        place: where in the source it stands.
        claim: what is claimed, in one sentence of our own.
        quoted: the source's figure, or True for a claim without one.
        unit: of the figure.
        experiment: the name of one of the chapter's experiments.
        cases: name of a condition to the experiment's arguments; a claim may hold under some and not under others.
        rule: "equals" (within the relative `tolerance`), "at least", "within" (the experiment's interval), "is".
    Raises:
        ClaimError: a field that is missing, unknown or out of its range.
    """

    name: str
    chapter: str
    place: str
    claim: str
    quoted: float | bool
    unit: str
    experiment: str
    cases: Mapping[str, Mapping[str, Any]]
    rule: str = "equals"
    tolerance: float = 0.0

    def __post_init__(self):
        if not re.fullmatch(r"[A-E]-[a-z0-9-]+", self.name):
            raise ClaimError(f"claim {self.name!r}: a name is the source's letter and words, like 'B-sgd'.")
        if not self.cases or not all(isinstance(case, Mapping) for case in self.cases.values()):
            raise ClaimError(f"claim {self.name}: it needs a case or more, each with its experiment's arguments.")
        if self.rule not in RULES or (self.rule == "is") is not isinstance(self.quoted, bool):
            raise ClaimError(f"claim {self.name}: rules are {', '.join(RULES)}; 'is' goes with true or false only.")
        if not 0 <= self.tolerance <= 0.05:
            raise ClaimError(f"claim {self.name}: tolerance is {self.tolerance}, but allowed is 0 to 0.05.")
        if self.experiment not in experiments(self.chapter):
            known = f"in chapter {self.chapter}: it has {', '.join(experiments(self.chapter)) or 'none'}"
            raise ClaimError(f"claim {self.name}: no experiment {self.experiment!r} {known}.")

    @property
    def source(self) -> str:
        """The source's letter."""
        return self.name[0]

    def agrees(self, value: float | bool | Interval) -> bool:
        """Whether what an experiment found is what the source says, by the claim's rule."""
        if self.rule == "is":
            return value is self.quoted
        if self.rule == "within":
            return value.low <= self.quoted <= value.high
        if self.rule == "at least":
            return value >= self.quoted * (1 - self.tolerance)
        return abs(value - self.quoted) <= self.tolerance * abs(self.quoted)


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: the finding of each case, None where a GPU record is missing, and what is missing."""

    claim: Claim
    findings: Mapping[str, Finding | None]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def holding(self) -> list[str]:
        """The cases in which the claim holds."""
        return [case for case, found in self.findings.items() if found and self.claim.agrees(found.value)]

    @property
    def outcome(self) -> str:
        """One of "holds", "holds under", "does not hold", "waits for a GPU record"."""
        waiting = None in self.findings.values()
        if not self.holding:
            return WAITS if waiting else NOT
        return HOLDS if len(self.holding) == len(self.findings) else UNDER

    @property
    def text(self) -> str:
        """The outcome with its conditions."""
        return f"{self.outcome} {'; '.join(self.holding)}" if self.outcome == UNDER else self.outcome

    def waits_for(self, case: str) -> str:
        """What a case without a finding waits for, "waits for a GPU with …", where its experiment names it; else ""."""
        said = self.missing.get(case, "")
        return f"w{said[1:].rstrip('.')}" if said.startswith("Waits for ") else ""

    @property
    def found(self) -> str:
        """What was found, case by case, with the witness."""
        several = len(self.findings) > 1
        said = []
        for case, found in self.findings.items():
            if found:
                figure = f"{shown(found.value, self.claim.unit)} ({found.witness})"
            else:
                figure = self.waits_for(case) or "no record yet"
            said.append(f"{case}: {figure}" if several else figure)
        return "; ".join(said)


class Ledger(tuple):
    """Verdicts as a table: text when printed, Markdown in a notebook."""

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Claim, what the source says, what was found and the verdict, for each."""
        return [
            (f"{v.claim.source} {v.claim.place}: {v.claim.claim}", shown(v.claim.quoted, v.claim.unit), v.found, v.text)
            for v in self
        ]

    def __str__(self) -> str:
        wrapped = partial(textwrap.fill, width=112, subsequent_indent="    ")
        lines = [(claim, f"  says {says}; {found}", f"  → {verdict}") for claim, says, found, verdict in self.rows()]
        return "\n".join(wrapped(line) for entry in lines for line in entry)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        head = ["claim | the source says | found | verdict", "--- | ---: | --- | ---"]
        rows = [(claim, says, found.replace("; ", "<br>"), f"**{v}**") for claim, says, found, v in self.rows()]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
        return "\n".join(f"| {line} |" for line in head + lines)


def shown(value: float | bool | Interval, unit: str) -> str:
    """A figure of the ledger with its unit; "yes" and "no" for claims without one."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Interval):
        return f"{value.low:,.0f} to {value.high:,.0f} {unit}"
    text = f"{value:,.0f}" if unit == "MiB" else f"{value:,.3f}" if unit == "GiB" else f"{value:,.4g}"
    return f"{text} {unit}".strip()


@cache
def experiments(chapter: str) -> Mapping[str, Callable[..., Finding]]:
    """The experiments of one chapter by name; {} when it has none."""
    module = f"{__package__}.chapters.claims_{chapter}"
    try:
        names = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return {}
    return {name: f for name, f in names.items() if getattr(f, "__annotations__", {}).get("return") is Finding}


def load_claims(chapter: str | None = None, path: str | Path | None = None) -> dict[str, Claim]:
    """The claims of the ledger by name, in its order; of one chapter when it is given.

    Raises ClaimError: a claim without an experiment, with an unknown field (a verdict is never stored), or twice the
    same name.
    """
    claims: dict[str, Claim] = {}
    for entry in json.loads(Path(path or data_path("claims.json")).read_text(encoding="utf-8"))["claims"]:
        try:
            claim = Claim(**entry)
        except TypeError as error:  # a field too many or too few
            raise ClaimError(f"claim {entry.get('name')!r}: {error}.") from None
        if claim.name in claims:
            raise ClaimError(f"claim {claim.name!r} stands twice in the ledger.")
        claims[claim.name] = claim
    return {name: claim for name, claim in claims.items() if chapter in (None, claim.chapter)}


def judge(claim: Claim) -> Verdict:
    """Run a claim's experiment in each of its cases."""
    experiment = experiments(claim.chapter)[claim.experiment]
    findings: dict[str, Finding | None] = {}
    missing: dict[str, str] = {}
    for case, arguments in claim.cases.items():
        try:
            findings[case] = experiment(**arguments)
        except RecordError as error:
            findings[case], missing[case] = None, str(error)
    return Verdict(claim, findings, missing)


def ledger(chapter: str) -> Ledger:
    """The verdicts on all claims that a chapter tests, computed now."""
    return Ledger(judge(claim) for claim in load_claims(chapter).values())
