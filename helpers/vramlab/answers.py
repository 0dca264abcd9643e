"""Checks of answers: against a computed reference, with a sentence of its own for each mistake that it recognises."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from .near_misses import MOST_TOLERANT, as_number, called, kind, listed, off, recognise, same


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and the sentence that says so to the reader."""

    right: bool
    text: str

    def __str__(self) -> str:
        return self.text


NOT_ANSWERED = Verdict(False, "not answered yet")


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that somebody would give, and what to tell them; `wrong` is computed like the reference."""

    wrong: Any
    text: str


class Check:
    """A check is called with any answer at all and returns a Verdict; it does not raise because of the answer."""

    def __call__(self, answer: Any) -> Verdict:
        raise NotImplementedError

    def problems(self) -> list[str]:
        """What is wrong with the check itself: a reference it rejects, a mistake it accepts or takes for another."""
        raise NotImplementedError


@dataclass(frozen=True)
class Number(Check):
    """One number.

    Attributes:
        reference: the right number, or a function without arguments that computes it.
        unit: what it counts. A size ("B", "KiB", "MiB", "GiB") is also recognised in another unit and in bits; any
            other word ("parameters", "%") only keeps that from being tried.
        tolerance: how far an answer may be off, relative to the reference; 0.02 at most, or kB would pass for KiB.
        mistakes: wrong answers with a sentence of their own; they come before what is recognised anyway.
        right: what to tell a reader whose answer is right.
    """

    reference: Real | Callable[[], Real]
    unit: str = "B"
    tolerance: float = 0.005
    mistakes: Sequence[Mistake] = ()
    right: str = ""

    def __post_init__(self):
        _check_tolerance(self.tolerance)

    def __call__(self, answer: Any) -> Verdict:
        number, reference = as_number(answer), _value(self.reference)
        if isinstance(number, str):
            return Verdict(False, number)
        wrongs = [(mistake.text, [_value(mistake.wrong)]) for mistake in self.mistakes]
        return _judge(self, [number], [reference], wrongs) or Verdict(False, f"Not right: {off(number, reference)}.")

    def problems(self) -> list[str]:
        found = [] if self(_value(self.reference)).right else ["the check rejects its own reference"]
        return found + _confused(self, [(mistake, _value(mistake.wrong)) for mistake in self.mistakes])


@dataclass(frozen=True)
class Table(Check):
    """A number for each of several names, answered as a dictionary.

    Attributes:
        reference: the right dictionary, or a function that computes it.
        unit, tolerance, right: as for `Number`.
        mistakes: `wrong` holds the entries that are wrong, and may leave out the others.
    """

    reference: Mapping[Any, Real] | Callable[[], Mapping[Any, Real]]
    unit: str = "B"
    tolerance: float = 0.005
    mistakes: Sequence[Mistake] = ()
    right: str = ""

    def __post_init__(self):
        _check_tolerance(self.tolerance)

    def __call__(self, answer: Any) -> Verdict:
        if not isinstance(answer, Mapping):
            return Verdict(False, f"A dictionary was expected, not {kind(answer)}.")
        reference = _value(self.reference)
        missing = [name for name in reference if name not in answer or answer[name] is None or answer[name] is ...]
        if len(missing) == len(reference):
            return NOT_ANSWERED
        if missing:
            return Verdict(False, f"Not answered yet for {listed(missing)}.")
        numbers = {name: as_number(answer[name]) for name in reference}
        for name, number in numbers.items():
            if isinstance(number, str):
                return Verdict(False, f"{name}: {number}")
        for mistake in self.mistakes:
            wrong = _value(mistake.wrong)
            if same([numbers[name] for name in wrong], list(wrong.values()), self.tolerance):
                return Verdict(False, mistake.text)
        if verdict := _judge(self, list(numbers.values()), list(reference.values())):
            return verdict
        wrong = [name for name in reference if not same([numbers[name]], [reference[name]], self.tolerance)]
        first = wrong[0]
        why = recognise([numbers[first]], [reference[first]], self.unit, self.tolerance)
        said = why or f"{off(numbers[first], reference[first])}."
        return Verdict(False, f"{len(reference) - len(wrong)} of {len(reference)} are right. {first}: {said}")

    def problems(self) -> list[str]:
        reference = _value(self.reference)
        if unknown := [name for mistake in self.mistakes for name in _value(mistake.wrong) if name not in reference]:
            return [f"a mistake speaks of {listed(unknown)}, which the reference does not have"]
        found = [] if self(dict(reference)).right else ["the check rejects its own reference"]
        return found + _confused(self, [(m, {**reference, **_value(m.wrong)}) for m in self.mistakes])


@dataclass(frozen=True)
class Function(Check):
    """A function of the reader's, called with several configurations and compared with a reference function.

    Attributes:
        reference: takes what the reader's function takes and returns the right number.
        cases: the configurations, a dictionary of keyword arguments each; enough that no other formula fits by chance.
        unit, tolerance, right: as for `Number`.
        mistakes: `wrong` is a function that makes the mistake.
    """

    reference: Callable[..., Real]
    cases: Sequence[Mapping[str, Any]]
    unit: str = "B"
    tolerance: float = 0.005
    mistakes: Sequence[Mistake] = ()
    right: str = ""

    def __post_init__(self):
        _check_tolerance(self.tolerance)
        if len(self.cases) < 3:
            raise ValueError("a function is checked over three configurations or more, or a constant could be right.")

    def __call__(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"A function was expected, not {kind(answer)}.")
        results = []
        for case in self.cases:
            try:
                results.append(answer(**case))
            except Exception as error:
                return Verdict(False, f"Your function fails for {called(case)} with {type(error).__name__}: {error}.")
        if all(result is None or result is ... for result in results):
            return NOT_ANSWERED
        numbers = [as_number(result) for result in results]
        for case, number in zip(self.cases, numbers, strict=True):
            if isinstance(number, str):
                return Verdict(False, f"For {called(case)}: {number}")
        references = [self.reference(**case) for case in self.cases]
        wrongs = [(mistake.text, [mistake.wrong(**case) for case in self.cases]) for mistake in self.mistakes]
        if verdict := _judge(self, numbers, references, wrongs):
            return verdict
        rights = [same([a], [b], self.tolerance) for a, b in zip(numbers, references, strict=True)]
        first = rights.index(False)
        said = off(numbers[first], references[first])
        return Verdict(False, f"Right for {sum(rights)} of {len(rights)}. For {called(self.cases[first])} {said}.")

    def problems(self) -> list[str]:
        found = [] if self(self.reference).right else ["the check rejects its own reference"]
        if len({self.reference(**case) for case in self.cases}) == 1:
            found.append("the reference is the same for all cases, so a constant would be right")
        return found + _confused(self, [(mistake, mistake.wrong) for mistake in self.mistakes])


@dataclass(frozen=True)
class Choice(Check):
    """One of several options.

    Attributes:
        reference: the right option, or a function that computes it.
        options: each option, and what to tell a reader who chose it: why it is right or wrong.
    """

    reference: str | Callable[[], str]
    options: Mapping[str, str]

    def __call__(self, answer: Any) -> Verdict:
        named = {option.lower(): option for option in self.options}
        option = named.get(answer.strip().lower()) if isinstance(answer, str) else None
        if option is None:
            return Verdict(False, f"Choose one of {listed(list(self.options))}.")
        right = option == _value(self.reference)
        return Verdict(right, f"{'Right' if right else 'Not right'}: {self.options[option]}")

    def problems(self) -> list[str]:
        reference = _value(self.reference)
        if reference not in self.options:
            return [f"the reference {reference!r} is none of the options"]
        return [] if len(self.options) > 1 else ["there is only one option to choose"]


@dataclass(frozen=True)
class Judge(Check):
    """Anything else, for example a recipe that has to fit a card.

    Attributes:
        judge: a function from the answer to a Verdict.
        rights: answers that have to be accepted, or a function that makes them.
        wrongs: two or more answers that have to be rejected, likewise.
    """

    judge: Callable[[Any], Verdict]
    rights: Sequence[Any] | Callable[[], Sequence[Any]]
    wrongs: Sequence[Any] | Callable[[], Sequence[Any]]

    def __call__(self, answer: Any) -> Verdict:
        try:
            return self.judge(answer)
        except Exception as error:  # written for one kind of answer, given another
            return Verdict(False, f"This answer cannot be checked ({type(error).__name__}: {error}).")

    def problems(self) -> list[str]:
        rights, wrongs = _value(self.rights), _value(self.wrongs)
        found = [] if rights and len(wrongs) > 1 else ["it needs an answer to accept and two to reject"]
        found += [f"the check rejects {answer!r}: {self(answer)}" for answer in rights if not self(answer).right]
        return found + [f"the check accepts {answer!r}" for answer in wrongs if self(answer).right]


def _judge(
    check: Number | Table | Function, numbers, references, wrongs: Sequence[tuple[str, list]] = ()
) -> Verdict | None:
    """The verdict where all the numbers together are right, or wrong in a way that is known."""
    if same(numbers, references, check.tolerance):
        return Verdict(True, f"Right: {check.right}" if check.right else "Right.")
    known = (text for text, values in wrongs if same(numbers, values, check.tolerance))
    text = next(known, "") or recognise(numbers, references, check.unit, check.tolerance)
    return Verdict(False, text) if text else None


def _confused(check: Check, mistakes: Sequence[tuple[Mistake, Any]]) -> list[str]:
    """The mistakes that a check accepts, or takes for others."""
    found = []
    for mistake, answer in mistakes:
        verdict = check(answer)
        if verdict.right:
            found.append(f"the check accepts the mistake {mistake.text!r}")
        elif verdict.text != mistake.text:
            found.append(f"the mistake {mistake.text!r} is taken for {verdict.text!r}")
    return found


def _check_tolerance(tolerance: float) -> None:
    if not 0 <= tolerance <= MOST_TOLERANT:
        raise ValueError(
            f"tolerance is {tolerance!r}, but allowed is 0 to {MOST_TOLERANT}: past that kB passes for KiB."
        )


def _value(thing: Any) -> Any:
    return thing() if callable(thing) else thing
