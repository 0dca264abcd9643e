"""Blanks: the pieces of a chapter that the reader writes where they stand.

    def gap(number, E, F):
        ...                                     # the reader's part

    gap = blank.check("01.gap", gap)            # says in a line what became of it, and returns
                                                # what the chapter uses
    blank.hint("01.gap")                        # the first hint; called again, the second
    blank.solution("01.gap")                    # the course's own piece, as source

A right piece is returned as it is. In place of one that is left blank or wrong the course's own is
returned, so the chapter runs in any case. The pieces of chapter 01 stand in
`data/exercises/01.toml`; `exercise_data.py` says how.
"""

import dis
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from vramlab.base.data import data_path

from .answers import BrokenPiece, Check, Feedback
from .exercise_data import read_blanks
from .exercises import ExerciseError, is_empty, wrapped
from .session import SESSION


@dataclass(frozen=True)
class Blank:
    """One piece.

    Attributes:
        name: chapter and piece, "01.gap".
        solution: the source of the course's own piece.
        hints: two: where to look, then how to begin.
        own: makes the course's piece.
        check: whether a piece does what it should; it is run, its text is never read.
        mistakes: makers of pieces with a typical mistake, and what each has to be told.
    """

    name: str
    solution: str
    hints: tuple[str, str]
    own: Callable[[], Any]
    check: Check
    mistakes: list[tuple[Callable[[], Any], str]]


@cache
def blanks(number: str) -> dict[str, Blank]:
    """The blanks of one chapter ("01") by their name, "01.gap".

    There are none where it has no file of exercises.
    """
    path = data_path("exercises", f"{number}.toml")
    if not path.exists():
        return {}
    return {
        f"{number}.{name}": Blank(f"{number}.{name}", **entry)
        for name, entry in read_blanks(path).items()
    }


def find(name: str) -> Blank:
    """The blank called `name`, "01.gap". Raises ExerciseError with the names that exist."""
    # The chapter's number says which file to read, so the form is checked before.
    if not isinstance(name, str) or not re.fullmatch(r"\d\d\.[A-Za-z_]\w*", name):
        raise ExerciseError(f"A blank is named by chapter and piece, like '01.gap', not {name!r}.")
    known = blanks(name[:2])
    if name not in known:
        raise ExerciseError(
            f"There is no blank {name}: this chapter has {', '.join(known) or 'none'}."
        )
    return known[name]


def check(name: str, answer: Any) -> Any:
    """Print whether the piece `answer` is right, and return it.

    Return the course's own if it is blank or wrong.

    No piece raises. Raises ExerciseError for an unknown blank.
    """
    blank = find(name)
    feedback = judge(blank, answer)
    if feedback is None:
        print(wrapped(f"{name} is blank, so the chapter goes on with the course's own."))
        return blank.own()
    if feedback.right:
        print(wrapped(f"{name}: {feedback} The chapter goes on with yours."))
        return answer
    print(
        wrapped(
            f"{name}: {feedback} Until that is mended, the chapter goes on with the course's own."
        )
    )
    return blank.own()


def hint(name: str) -> None:
    """Print the first hint; called again the second; after that, how to see the solution."""
    blank = find(name)
    given = SESSION.next_hint(name)
    if given <= 2:
        print(wrapped(f"{name}, hint {given} of 2: {blank.hints[given - 1]}"))
    else:
        print(
            wrapped(
                f'{name}: those were both hints. blank.solution("{name}") shows the course\'s own.'
            )
        )


def solution(name: str) -> None:
    """Print the source of the course's own piece."""
    print(find(name).solution)


def judge(blank: Blank, answer: Any) -> Feedback | None:
    """What is said to the piece `answer`; None where it is left blank."""
    if _is_blank(answer):
        return None
    feedback = blank.check(_guarded(answer))
    # A piece with dots left in one branch may be right already; wrong, it is unfinished and not a
    # mistake.
    return None if not feedback.right and _has_dots(answer) else feedback


def _is_blank(answer: Any) -> bool:
    """Whether nothing was written: no value, an empty function, a class with an empty method."""
    if answer is None or answer is ...:
        return True
    return any(is_empty(part) for part in _parts(answer))


def _has_dots(answer: Any) -> bool:
    """Whether a line of the answer's code still has dots to be replaced, as in `scale = ...`.

    Dots of an index, as in `codes[..., ::2]`, are the reader's own.
    """
    return any(_sets_dots(part.__code__) for part in _parts(answer) if hasattr(part, "__code__"))


def _sets_dots(code: CodeType) -> bool:
    """Whether dots are assigned to a name or an attribute, or returned."""
    steps = [*dis.get_instructions(code)]
    for at, step in enumerate(steps):
        if step.argval is not ...:
            continue
        if step.opname == "RETURN_CONST":  # of Python 3.12 and 3.13
            return True
        after, second = [*(later.opname for later in steps[at + 1 : at + 3]), ""][:2]
        # An attribute's object is loaded between the two.
        is_attribute = after.startswith("LOAD") and second == "STORE_ATTR"
        is_name = after.startswith("STORE") and after != "STORE_SUBSCR"
        if is_name or is_attribute or after == "RETURN_VALUE":
            return True
    return False


def _parts(answer: Any) -> list[Any]:
    """The answer, or what a class is made of, its static methods as functions."""
    if not isinstance(answer, type):
        return [answer]
    # staticmethod and classmethod wrap the function in __func__.
    return [getattr(part, "__func__", part) for part in vars(answer).values()]


def _guarded(answer: Any) -> Any:
    """A function that says what went wrong inside of `answer`.

    A condition takes any failure for a false result.
    """
    # A class is checked through its methods, which conditions call themselves.
    if not callable(answer) or isinstance(answer, type):
        return answer

    @functools.wraps(answer)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            returned = answer(*arguments, **named)
        except RecursionError:
            raise BrokenPiece(
                f"Your {answer.__name__} never ends (RecursionError). Does it walk into what it "
                "has just put in? Collect first, then replace."
            ) from None
        except Exception as error:
            raise BrokenPiece(
                f"Your {answer.__name__} fails with {type(error).__name__}: {error}."
            ) from None
        if returned is None:
            raise BrokenPiece(f"Your {answer.__name__} returns nothing.")
        return returned

    return call
