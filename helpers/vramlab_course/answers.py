"""Checks of answers: right or wrong, with a sentence for each mistake that a check recognises.

A wrong number that no mistake lists is compared with the right one in other units, in bits, doubled
and halved; else the reader is told how far off it is.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from vramlab.report.report import GiB, KiB, MiB

# Bytes of each unit, with the decimal units that readers confuse with binary ones.
UNITS = {
    "B": 1,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
BITS = {
    8: "That is the number of bits: 8 bits are one byte.",
    1 / 8: "That is an eighth of the right amount: these are bytes already.",
}
# These are tried for any unit, those of BITS for sizes alone.
FACTORS = {
    2: "That is twice the right amount: is something counted two times?",
    1 / 2: "That is half the right amount: is there a second copy of something?",
    -1: "The amount is right, the sign is not.",
}
# kB and KiB differ by 2.4 %: a larger tolerance could not tell them apart.
MOST_TOLERANT = 0.02


@dataclass(frozen=True)
class Feedback:
    """Whether an answer is right, and what the reader is told."""

    right: bool
    text: str

    def __str__(self) -> str:
        return self.text


NOT_ANSWERED = Feedback(False, "not answered yet")


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer, and what to tell its author.

    It is a value, or a function like the reference.
    """

    wrong: Any
    text: str


class Numbers(dict):
    """An answer as numbers by name."""


class Unclear(Exception):
    """An answer of the wrong kind; the message says why."""


class BrokenPiece(Unclear):
    """A piece of the reader's that fails or returns nothing.

    That is so whatever a condition asks of its result.
    """


class Check:
    """Takes any answer and returns a Feedback; no answer makes it raise.

    `problems()` tests the check itself, for example for a reference that it rejects or a mistake
    that it accepts.
    """

    def __call__(self, answer: Any) -> Feedback:
        try:
            return self.feedback(answer)
        except Unclear as error:
            return Feedback(False, str(error))
        except Exception as error:  # the answer is of another kind
            return Feedback(
                False,
                f"This answer cannot be checked ({type(error).__name__}: {error}).",
            )

    def feedback(self, answer: Any) -> Feedback:
        """The feedback; may raise where the answer is of another kind."""
        raise NotImplementedError


@dataclass(frozen=True)
class Number(Check):
    """One number.

    Attributes:
        reference: the right number, or a function without arguments that computes it.
        unit: of the answer. Answers in other units are recognised for sizes ("B", "KiB", "MiB",
            "GiB") only.
        tolerance: relative to the reference, MOST_TOLERANT at most.
        mistakes: wrong answers with a sentence of their own, tried before units and factors.
        right: what to tell a reader whose answer is right.
    """

    reference: Real | Callable[[], Real]
    unit: str = "B"
    tolerance: float = 0.005
    mistakes: Sequence[Mistake] = ()
    right: str = ""

    def __post_init__(self):
        if not 0 <= self.tolerance <= MOST_TOLERANT:
            allowed = f"0 to {MOST_TOLERANT}: past that kB passes for KiB"
            raise ValueError(f"tolerance is {self.tolerance!r}, but allowed is {allowed}.")

    def expand(self, thing: Any) -> Numbers:
        """The reference or a mistake as numbers by name."""
        return Numbers({"": _value(thing)})

    def read(self, answer: Any) -> Mapping[str, Any]:
        """The reader's answer as values by name. Raises Unclear."""
        return {"": answer}

    def feedback(self, answer: Any) -> Feedback:
        """Compare with the reference, each mistake, other units and factors, in this order."""
        references = self.expand(self.reference)
        # `problems` hands over numbers by name, which need no reading.
        given = answer if isinstance(answer, Numbers) else self.read(answer)
        # The dots of an answer cell count as no answer, as None does.
        missing = [name for name in references if _is_missing(given.get(name))]
        if missing:
            partly = Feedback(False, f"Not answered yet for {', '.join(missing)}.")
            # With nothing at all it is simply not answered, however many entries there are.
            return partly if len(missing) < len(references) else NOT_ANSWERED
        numbers = _numbers(given, references)

        # With a factor it asks whether the answer is so many times the reference.
        def same(others: Mapping[str, float], factor: float = 1) -> bool:
            return all(
                math.isclose(numbers[n], factor * other, rel_tol=self.tolerance)
                for n, other in others.items()
            )

        def recognised(some: Mapping[str, float]) -> str:
            # All factors fit where every reference is 0.
            if not any(some.values()):
                return ""
            for factor, text in _factors(self.unit).items():
                if same(some, factor):
                    return text
            return ""

        if same(references):
            return Feedback(True, f"Right: {self.right}" if self.right else "Right.")
        # Before units and factors: a typical mistake may happen to be off by a factor of two.
        mistakes = (mistake.text for mistake in self.mistakes if same(self.expand(mistake.wrong)))
        text = next(mistakes, "") or recognised(references)
        if text:
            return Feedback(False, text)
        wrong = [name for name, reference in references.items() if not same({name: reference})]
        # Of a table only the first wrong entry is discussed, so that the reader mends one thing at
        # a time.
        first = wrong[0]
        reference = references[first]
        said = recognised({first: reference}) or f"{_off(numbers[first], reference)}."
        if len(references) == 1:
            return Feedback(False, f"Not right: {said}")
        right = len(references) - len(wrong)
        return Feedback(False, f"{right} of {len(references)} are right. {first}: {said}")

    def problems(self) -> list[str]:
        """Say where the check rejects its reference, or tells a mistake another sentence."""
        references = self.expand(self.reference)
        complaints = [] if self(references).right else ["the check rejects its own reference"]
        for mistake in self.mistakes:
            wrong = self.expand(mistake.wrong)
            unknown = wrong.keys() - references
            if unknown:
                complaints.append(
                    f"a mistake speaks of {', '.join(unknown)}, which the reference does not have"
                )
                continue
            # A mistake of some entries has the right values elsewhere.
            verdict = self(Numbers({**references, **wrong}))
            if verdict.right:
                complaints.append(f"the check accepts the mistake {mistake.text!r}")
            # Two mistakes with one value, or a factor that is tried before: the sentence would
            # never be seen.
            elif verdict.text != mistake.text:
                complaints.append(f"the mistake {mistake.text!r} is taken for {verdict.text!r}")
        return complaints


@dataclass(frozen=True)
class Table(Number):
    """A dictionary of numbers; fields as in `Number`.

    A mistake may leave out the entries that are right.
    """

    reference: Mapping[Any, Real] | Callable[[], Mapping[Any, Real]]

    def expand(self, thing: Any) -> Numbers:
        """The table as numbers by name."""
        return Numbers(_value(thing))

    def read(self, answer: Any) -> Mapping[str, Any]:
        """The reader's dictionary. Raises Unclear for anything else."""
        if not isinstance(answer, Mapping):
            raise Unclear(f"A dictionary was expected, not {kind_of(answer)}.")
        return answer


@dataclass(frozen=True)
class Function(Number):
    """A function that the reader writes, called in several cases; other fields as in `Number`.

    Attributes:
        reference: a function of the same arguments that returns the right number; so is a mistake's
            `wrong`.
        cases: keyword arguments of each call, enough that no other formula fits by chance.
    """

    reference: Callable[..., Real]
    cases: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self):
        super().__post_init__()
        if len(self.cases) < 3:
            raise ValueError(
                "a function is checked over three configurations or more, or a constant could be "
                "right."
            )

    def expand(self, thing: Any) -> Numbers:
        """What a function gives in each case, by the case's arguments."""
        numbers = Numbers()
        for case in self.cases:
            # The case stands in the feedback, so that the reader can call the function with it.
            words = [f"{name}={value!r}" for name, value in case.items()]
            numbers[", ".join(words)] = thing(**case)
        return numbers

    def read(self, answer: Any) -> Mapping[str, Any]:
        """What the reader's function gives in each case. Raises Unclear where it fails."""
        if not callable(answer):
            raise Unclear(f"A function was expected, not {kind_of(answer)}.")
        try:
            return self.expand(answer)
        except Exception as error:
            raise Unclear(f"Your function fails with {type(error).__name__}: {error}.") from None

    def problems(self) -> list[str]:
        """As a number's; also a reference that is the same in all cases."""
        constant = len(set(self.expand(self.reference).values())) == 1
        return (
            super().problems()
            + ["the reference is constant, so a constant would be right"] * constant
        )


@dataclass(frozen=True)
class Choice(Check):
    """One of several options.

    Attributes:
        reference: the right option, or a function that computes it.
        options: each option, and what to tell a reader who chose it: why it is right or wrong.
    """

    reference: str | Callable[[], str]
    options: Mapping[str, str]

    def feedback(self, answer: Any) -> Feedback:
        """Say why the option that was chosen is right or wrong."""
        # Upper and lower case do not matter.
        named = {option.lower(): option for option in self.options}
        option = named.get(answer.strip().lower()) if isinstance(answer, str) else None
        if option is None:
            return Feedback(False, f"Choose one of {', '.join(self.options)}.")
        right = option == _value(self.reference)
        return Feedback(right, f"{'Right' if right else 'Not right'}: {self.options[option]}")

    def problems(self) -> list[str]:
        """Say where the right option is none of those to choose from, or the only one."""
        reference = _value(self.reference)
        complaints = (
            []
            if reference in self.options
            else [f"the reference {reference!r} is none of the options"]
        )
        return complaints + ["there is only one option to choose"] * (len(self.options) < 2)


@dataclass(frozen=True)
class Judge(Check):
    """An answer that a function judges, for example a recipe that has to fit a card.

    Attributes:
        judge: a function from the answer to a Feedback.
        rights: answers that have to be accepted, or a function that makes them.
        wrongs: two or more answers that have to be rejected, likewise.
        reasons: parts of the judge's sentences; each has to be told to one of the wrong answers.
    """

    judge: Callable[[Any], Feedback]
    rights: Sequence[Any] | Callable[[], Sequence[Any]]
    wrongs: Sequence[Any] | Callable[[], Sequence[Any]]
    reasons: Sequence[str] = ()

    def feedback(self, answer: Any) -> Feedback:
        """What the judge says of the answer."""
        return self.judge(answer)

    def problems(self) -> list[str]:
        """Say which answers are judged wrongly, and which sentence is never said."""
        rights = _value(self.rights)
        wrongs = _value(self.wrongs)
        complaints = []
        # A judge of the reader's own machine may have no examples at all.
        has_enough = rights and len(wrongs) > 1
        if not has_enough and (rights or wrongs):
            complaints.append("it needs an answer to accept and two to reject")
        for answer in rights:
            verdict = self(answer)
            if not verdict.right:
                complaints.append(f"the check rejects {answer!r}: {verdict}")
        said = []
        for answer in wrongs:
            verdict = self(answer)
            said.append(verdict.text)
            if verdict.right:
                complaints.append(f"the check accepts {answer!r}")
        for reason in self.reasons:
            # A sentence that no example provokes may be out of date without anybody noticing.
            if not any(reason in text for text in said):
                complaints.append(f"no wrong answer is told {reason!r}")
        return complaints


def _value(thing: Any) -> Any:
    return thing() if callable(thing) else thing


def _number(answer: Any, before: str) -> float:
    """An answer as a number, also numpy's and one-element tensors. Raises Unclear."""
    # The likeliest slip in this course: the whole report in place of one of its numbers.
    if hasattr(answer, "peak"):
        raise Unclear(
            f"{before}A number was expected, not a whole report: take for example "
            f"report.peak.total."
        )
    try:
        # float() would take True and the text "3" for numbers.
        if isinstance(answer, bool | str | bytes) or callable(answer):
            raise TypeError
        number = float(answer.item() if hasattr(answer, "item") else answer)
    except Exception:  # an object's __float__ may raise anything
        raise Unclear(f"{before}A number was expected, not {kind_of(answer)}.") from None
    if not math.isfinite(number):
        raise Unclear(f"{before}A number was expected, and {number} is none.")
    return number


def _is_missing(value: Any) -> bool:
    # By identity: an array compares with None entry by entry.
    return value is None or value is ...


def _numbers(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Each named value as a finite float. Raises Unclear, which begins with the name."""
    numbers = {}
    for name in names:
        before = f"{name}: " if name else ""
        numbers[name] = _number(given[name], before)
    return numbers


def _factors(unit: str) -> dict[float, str]:
    """Factors between a wrong answer and the reference, and what to tell the reader."""
    # Seconds, shares and counts have no other units that could be mistaken for them.
    if unit not in UNITS:
        return FACTORS
    long = {name: f"{name} ({size:,} bytes)" for name, size in UNITS.items()}
    long["B"] = "bytes"
    text = "The amount is right, but it is in {}: the answer is wanted in {}."
    # The answer over the reference, had the reader used the other unit.
    units = {
        UNITS[unit] / size: text.format(long[name], long[unit])
        for name, size in UNITS.items()
        if name != unit
    }
    return {**units, **BITS, **FACTORS}


def _off(number: float, reference: float) -> str:
    """How far a number is from its reference."""
    ratio = number / reference if reference else 0
    far = ""
    if 0.5 <= ratio <= 2:
        far = f"{abs(ratio - 1):.1%} "
    elif ratio > 0:
        far = f"{max(ratio, 1 / ratio):,.3g} times "
    side = "high" if number > reference else "low"
    return f"{number:,.6g} is {far}too {side}"


def kind_of(answer: Any) -> str:
    """What an answer is, in words."""
    name = type(answer).__name__
    known = {"str": "text", "bool": "True or False", "function": "a function"}
    return known.get(name, f"{'an' if name[0] in 'aeio' else 'a'} {name}")
