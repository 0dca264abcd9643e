"""The notebooks' exercises: a question, two hints, and a check that says what looks wrong.

    exercises.ask("02.1")               # the question in a box
    answer = 16 * 124_439_808
    exercises.check("02.1", answer)     # prints "Right: …" or what is wrong, returns True or
                                        # False, never raises
    exercises.hint("02.1")              # the first hint; called again, the second

The exercises of chapter 02 are the file `data/exercises/02.toml`; `exercise_data.py` says how it is
written.
"""

import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

from vramlab.base.data import data_path
from vramlab.base.errors import VramLabError

from .answers import NOT_ANSWERED, Check, Feedback
from .exercise_data import read_exercises
from .session import SESSION

WIDTH = 88


class ExerciseError(VramLabError, LookupError):
    """An exercise that does not exist."""


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: chapter and number, "02.1".
        question: what is asked, with the unit of the answer.
        difficulty: 1 (read it off) to 5 (an afternoon's thought).
        minutes: what it should take.
        hints: two: where to look, then how to begin.
        check: one of `answers.py`'s checks.
    """

    name: str
    question: str
    difficulty: int
    minutes: int
    hints: tuple[str, str]
    check: Check

    def __post_init__(self):
        is_named = re.fullmatch(r"\d\d\.[1-9]\d?", self.name)
        is_rated = self.difficulty in range(1, 6) and self.minutes > 0
        has_hints = len(self.hints) == 2 and all(self.hints)
        if not (is_named and is_rated and self.question.strip() and has_hints):
            needs = "a name like '02.1', a question, a difficulty of 1 to 5, minutes, and two hints"
            raise ValueError(f"exercise {self.name!r} needs {needs}.")

    def __str__(self) -> str:
        """The question in a box, with difficulty and minutes."""
        dots = "●" * self.difficulty + "○" * (5 - self.difficulty)
        head = f" Exercise {self.name} · difficulty {dots} · {self.minutes} min "
        return _boxed(head, self.question)


@cache
def chapter(number: str) -> dict[str, Exercise]:
    """The exercises of one chapter ("02") by name.

    Raises ExerciseError when the chapter has none.
    """
    path = data_path("exercises", f"{number}.toml")
    if not path.exists():
        raise ExerciseError(f"Chapter {number} has no exercises.")
    exercises = {}
    for name, entry in read_exercises(path).items():
        exercises[name] = Exercise(name, **entry)
    # Or a copied file's exercises would pass for another chapter's.
    stray = [name for name in exercises if not name.startswith(number + ".")]
    if stray:
        raise ValueError(
            f"{path.name}: the names of its exercises start with {number + '.'!r}, not "
            f"{stray[0]!r}."
        )
    return exercises


def find(name: str) -> Exercise:
    """The exercise called `name`, "02.1". Raises ExerciseError with the names that exist."""
    if not isinstance(name, str) or not re.fullmatch(r"\d\d\.\d+", name):
        raise ExerciseError(
            f"An exercise is named by chapter and number, like '02.1', not {name!r}."
        )
    exercises = chapter(name.split(".")[0])
    if name not in exercises:
        raise ExerciseError(
            f"There is no exercise {name}: this chapter has {', '.join(exercises)}."
        )
    return exercises[name]


def ask(name: str) -> None:
    """Print the question in a box."""
    print(find(name))


def check(name: str, answer: Any = None) -> bool:
    """Print whether `answer` is right, or what kind of mistake it looks like.

    Return True only when it is right.

    `...`, None and a function whose body is `...` are "not answered yet". No answer raises. Raises
    ExerciseError for an unknown exercise.
    """
    feedback = judge(find(name), answer)
    print(wrapped(f"{name}: {feedback}"))
    return feedback.right


def hint(name: str) -> None:
    """Print the first hint; called again the second; after that, where the solution is."""
    exercise = find(name)
    given = SESSION.next_hint(name)
    if given <= 2:
        print(wrapped(f"{name}, hint {given} of 2: {exercise.hints[given - 1]}"))
    else:
        where = f"notebooks/solutions, chapter {name.split('.')[0]}"
        print(wrapped(f"{name}: those were both hints. The solution is in {where}."))


def judge(exercise: Exercise, answer: Any) -> Feedback:
    """What `check` prints, as a value."""
    return (
        NOT_ANSWERED
        if answer is None or answer is ... or is_empty(answer)
        else exercise.check(answer)
    )


def is_empty(answer: Any) -> bool:
    """Whether `answer` is a function that does nothing, as the notebooks start with one."""

    def empty(): ...

    def described():
        """The text is the first constant of the code."""

    # torch wraps each `__torch_dispatch__`
    answer = inspect.unwrap(answer)
    code = getattr(answer, "__code__", None)
    if code is None:
        return False
    # Compared with the code that Python makes of an empty body, with or without a docstring: the
    # bytes differ between versions.
    like = described.__code__ if answer.__doc__ else empty.__code__
    constants = (answer.__doc__, *like.co_consts[1:]) if answer.__doc__ else like.co_consts
    return (code.co_code, code.co_consts) == (like.co_code, constants)


def _boxed(head: str, text: str) -> str:
    inside = WIDTH - 4
    body = []
    for part in text.splitlines():
        # An empty line stays one.
        lines = textwrap.wrap(part, inside) or [""]
        body += [f"│ {line.ljust(inside)} │" for line in lines]
    rest = "─" * (WIDTH - 3 - len(head))
    top = f"╭─{head}{rest}╮"
    bottom = f"╰{'─' * (WIDTH - 2)}╯"
    return "\n".join([top, *body, bottom])


def wrapped(text: str) -> str:
    """`text` in lines of at most WIDTH characters."""
    return "\n".join(textwrap.fill(line, WIDTH) for line in text.splitlines())
