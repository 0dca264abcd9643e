"""The ledger of claims: each is an entry of `data/claims.json`.

Its verdict is computed from an experiment.

An entry names one of the generic experiments of `experiments.py`, gives it arguments case by case,
and says by an expression which value of what was found is held against the quoted figure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vramlab.base.errors import MissingExtra, RecordError, VramLabError
from vramlab.report.report import Interval

from .expressions import evaluate, stored

HOLDS = "holds"
UNDER = "holds under"
NOT = "does not hold"
WAS = "was so until"
WAITS = "waits for a GPU record"
UNSEEN = "not seen here"  # of "can be so": cases in which it is not so do not refute it
RULES = ("equals", "at least", "within", "is")
OWN = ("quoted", "until", "value")  # what a case may say otherwise than its claim
ON_A_PAGE = 8  # claims that a chapter shows at most


class ClaimError(VramLabError, ValueError):
    """A claim that cannot be tested as it stands in the ledger."""


@dataclass(frozen=True)
class Finding:
    """What an experiment found in one case.

    Attributes:
        value: a number in the claim's unit, an Interval, or True or False.
        witness: "derived" (arithmetic), "predicted", "simulated", "recorded" or "measured".
        configuration: what the value depends on: the recipe, or the terms of the sum.
    """

    value: float | bool | Interval
    witness: str
    configuration: str


@dataclass(frozen=True)
class Case:
    """One condition under which a claim is tested.

    It has arguments, and says what is compared with the quoted figure.
    """

    arguments: Mapping[str, Any]
    quoted: float | bool
    value: str
    until: str


@dataclass(frozen=True)
class Claim:
    """One claim of a source, or of several that say the same.

    Attributes:
        name: unique, beginning with a source: "lecture-sgd".
        chapter: the chapter that tests it, "02".
        place: where in the source it stands.
        claim: what is claimed, in one sentence of our own.
        quoted: the source's figure, or True or False for a claim without one.
        experiment: the name of a function of `experiments.py`, and `value`, an expression over what
            it finds.
        cases: name of a condition to arguments; a case may have a `quoted`, `value` and `until` of
            its own.
        given: arguments that all cases share.
        unit: of the figure.
        rule: "equals" (within the relative `tolerance`), "at least", "within" (the found interval),
            "is".
        also: further sources that say so.
        condition, qualifier: what the source presupposes ("small batches"), and its "may", "about",
            "some".
        some: the source speaks of some cases only: one in which it is so is enough.
        until: the version up to which it was so, for what newer libraries changed.
        chapter_page: whether the chapter shows it.
    Raises:
        ClaimError: a field that is missing, unknown or out of its range.
    """

    name: str
    chapter: str
    place: str
    claim: str
    quoted: float | bool
    experiment: str
    cases: Mapping[str, Mapping[str, Any]]
    value: str = "value"
    given: Mapping[str, Any] = field(default_factory=dict)
    unit: str = ""
    rule: str = "is"
    tolerance: float = 0.0
    condition: str = ""
    qualifier: str = ""
    also: tuple[str, ...] = ()
    some: bool = False
    until: str = ""
    chapter_page: bool = False

    def __post_init__(self):
        from .experiments import EXPERIMENTS

        matches = re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", self.name)
        if self.source not in stored("sources") or not matches:
            raise ClaimError(
                f"claim {self.name!r}: a name is a source and words, like 'lecture-sgd'."
            )
        are_mappings = all(isinstance(case, Mapping) for case in self.cases.values())
        if not self.cases or not are_mappings:
            raise ClaimError(
                f"claim {self.name}: it needs a case or more, each with its experiment's arguments."
            )
        # True and false have no tolerance, and a number is never `is` another.
        if self.rule not in RULES or any(
            (self.rule == "is") is not isinstance(c.quoted, bool) for c in self.each.values()
        ):
            raise ClaimError(
                f"claim {self.name}: rules are {', '.join(RULES)}; 'is' goes with true or false "
                f"only."
            )
        # A wider one would let a claim agree with figures that the source does not mean.
        if not 0 <= self.tolerance <= 0.05:
            raise ClaimError(
                f"claim {self.name}: tolerance is {self.tolerance}, but allowed is 0 to 0.05."
            )
        if self.experiment not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise ClaimError(
                f"claim {self.name}: no experiment {self.experiment!r}; there are {known}."
            )

    @property
    def source(self) -> str:
        """The source's name, "lecture"."""
        return self.name.partition("-")[0]

    @property
    def by(self) -> str:
        """Who says so, "the guide and the notebook"."""
        sources = stored("sources")
        names = [sources[key]["name"] for key in (self.source, *self.also)]
        return " and ".join(names)

    @property
    def each(self) -> dict[str, Case]:
        """The cases by name, with what they share filled in."""
        cases = {}
        for name, case in self.cases.items():
            # What is left are the experiment's arguments.
            own = {key: value for key, value in case.items() if key not in OWN}
            cases[name] = Case(
                {**self.given, **own},
                case.get("quoted", self.quoted),
                case.get("value", self.value),
                case.get("until", self.until),
            )
        return cases

    @property
    def said(self) -> str:
        """The claim with the condition and the qualifier that its source gives."""
        more = [f"on condition: {self.condition}"] if self.condition else []
        if self.qualifier:
            more += [f'the source says "{self.qualifier}"']
        return f"{self.claim} ({'; '.join(more)})" if more else self.claim

    def agrees(self, case: str, value: float | bool | Interval) -> bool:
        """Whether what was found in a case is what the source says, by the claim's rule."""
        quoted = self.each[case].quoted
        if self.rule == "is":
            # By identity: 1 and 1.0 equal True, and would agree with a claim that is no number.
            return value is quoted
        if self.rule == "within":
            return value.low <= quoted <= value.high
        if self.rule == "at least":
            return value >= quoted * (1 - self.tolerance)
        # Relative to the source's figure, not to ours.
        return abs(value - quoted) <= self.tolerance * abs(quoted)


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: the finding of each case.

    A finding is None where a record or package is missing, and `missing` says which.
    """

    claim: Claim
    findings: Mapping[str, Finding | None]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def holding(self) -> list[str]:
        """The cases in which the claim holds."""
        return [
            case
            for case, found in self.findings.items()
            if found and self.claim.agrees(case, found.value)
        ]

    @property
    def outdated(self) -> dict[str, str]:
        """The cases in which it does not hold any more, and until when it did."""
        failed = [
            case for case, found in self.findings.items() if found and case not in self.holding
        ]
        # Failed cases whose claim says up to which version it was so.
        return {case: until for case in failed if (until := self.claim.each[case].until)}

    @property
    def outcome(self) -> str:
        """One of HOLDS, UNDER (conditions), NOT, UNSEEN (of some cases), WAS (so until a version)
        and WAITS.
        """
        # One case in which it holds is an answer, even while others wait for a record.
        if self.holding:
            is_enough = self.claim.some or len(self.holding) == len(self.findings)
            return HOLDS if is_enough else UNDER
        if None in self.findings.values():
            return WAITS
        if len(self.outdated) == len(self.findings):
            return WAS
        return UNSEEN if self.claim.some else NOT

    @property
    def text(self) -> str:
        """The outcome with its conditions."""
        if self.outcome == WAS:
            return f"{WAS} {'; '.join(dict.fromkeys(self.outdated.values()))}"
        if len(self.holding) in (0, len(self.findings)):
            return self.outcome
        start = UNDER if self.outcome == UNDER else f"{HOLDS}, for instance under"
        cases_of: dict[str, list[str]] = {}
        for case, until in self.outdated.items():
            cases_of.setdefault(until, []).append(case)
        was = ""
        for until, cases in cases_of.items():
            was += f"; {', '.join(cases)}: {WAS} {until}"
        return f"{start} {'; '.join(self.holding)}{was}"

    def waits_for(self, case: str) -> str:
        """What a case without a finding waits for.

        That is the hardware that its experiment names, a GPU with CUDA, or a package.
        """
        # Both sentences that come here say it: a RecordError's "Waits for …" and a MissingExtra's
        # "… needs …".
        said = re.fullmatch(r"(?:Waits for|.+ needs) (.+?)\.?", self.missing.get(case, ""))
        return said[1] if said else "a record of a GPU"


class Ledger(tuple):
    """Verdicts as a table in Markdown."""

    def rows(self) -> list[tuple[str, str, list[str]]]:
        """Each claim, whether it holds, and its cases: ✓ where it does, ✗ where not."""
        rows = []
        for verdict in self:
            cases = []
            for case, finding in verdict.findings.items():
                mark = "✓" if case in verdict.holding else "✗"
                if finding is None:
                    cases.append(f"{case}: waits for {verdict.waits_for(case)}")
                elif isinstance(finding.value, bool):
                    cases.append(f"{mark} {case}")
                else:
                    cases.append(f"{mark} {case}: {shown(finding.value, verdict.claim.unit)}")
            outcome = "in part" if verdict.outcome == UNDER else verdict.outcome
            rows.append((verdict.claim.said, outcome, cases))
        return rows

    def __repr__(self) -> str:
        head = ["what they say | verdict | where: ✓ it holds, ✗ it does not", "--- | --- | ---"]
        lines = []
        for claim, outcome, cases in self.rows():
            # A cell of Markdown has no lines, and a bar would end it.
            cells = (claim, f"**{outcome}**", "<br>".join(cases))
            lines.append(" | ".join(cell.replace("|", "\\|") for cell in cells))
        return "\n".join(f"| {line} |" for line in head + lines)

    _repr_markdown_ = __repr__


def quoted(claim: Claim) -> str:
    """The figures that a claim quotes, with their unit."""
    figures = [shown(case.quoted, claim.unit) for case in claim.each.values()]
    # Cases may quote one figure, which is said once.
    return "; ".join(dict.fromkeys(figures))


def shown(value: float | bool | Interval, unit: str) -> str:
    """A figure of the ledger with its unit; "yes" and "no" for claims without one."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Interval):
        return f"{value.low:,.0f} to {value.high:,.0f} {unit}"
    if unit == "MiB":
        text = f"{value:,.0f}"
    elif unit == "GiB":
        text = f"{value:,.3f}"
    else:
        text = f"{value:,.4g}"
    return f"{text} {unit}".strip()


def load_claims(chapter: str | None = None, path: Any = None) -> dict[str, Claim]:
    """The claims of the ledger by name, in its order; of one chapter when it is given.

    Raises ClaimError: a claim without an experiment, with an unknown field (a verdict is never
    stored), or twice the same name.
    """
    claims: dict[str, Claim] = {}
    entries = stored("claims", path)
    for entry in entries:
        try:
            claim = Claim(**entry)
        except TypeError as error:  # a field too many or too few
            raise ClaimError(f"claim {entry.get('name')!r}: {error}.") from None
        if claim.name in claims:
            raise ClaimError(f"claim {claim.name!r} stands twice in the ledger.")
        claims[claim.name] = claim
    # All are read in any case, so that a name that stands twice is found.
    return {name: claim for name, claim in claims.items() if chapter in (None, claim.chapter)}


def judge(claim: Claim) -> Verdict:
    """Run a claim's experiment in each of its cases.

    Raises ClaimError where its expression asks for what the experiment does not find.
    """
    from .experiments import EXPERIMENTS

    findings: dict[str, Finding | None] = {}
    missing: dict[str, str] = {}
    for name, case in claim.each.items():
        try:
            facts = EXPERIMENTS[claim.experiment](**case.arguments)
            value = (
                _interval(case.value, facts.names)
                if claim.rule == "within"
                else evaluate(case.value, facts.names)
            )
            findings[name] = Finding(value, facts.witness, facts.configuration)
        except (RecordError, MissingExtra) as error:
            findings[name] = None
            missing[name] = str(error)
        except (VramLabError, TypeError) as error:
            raise ClaimError(f"claim {claim.name}, {name}: {error}") from error
    return Verdict(claim, findings, missing)


def _interval(text: str, names: Mapping[str, Any]) -> Interval:
    """The interval of "low .. high", two expressions."""
    low, high = (evaluate(end, names) for end in text.split(" .. "))
    # Only the ends are compared; an Interval also wants a likely value.
    return Interval(low, (low + high) / 2, high)


def chapter_page(chapter: str) -> Ledger:
    """The verdicts that a chapter shows, computed now."""
    return Ledger(judge(claim) for claim in load_claims(chapter).values() if claim.chapter_page)
