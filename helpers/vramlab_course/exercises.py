"""The notebooks' exercises: a question, two hints, and a check that says what kind of mistake an answer looks like.

In a notebook:

    exercises.ask("02.1")               # the question in a box
    answer = 16 * 124_439_808
    exercises.check("02.1", answer)     # prints "Right: …" or what is wrong, returns True or False, never raises
    exercises.hint("02.1")              # the first hint; called again, the second

**Adding one.** The exercises of chapter 02 are the list `EXERCISES` in the module `vramlab/chapters/exercises_02.py`; nothing
else has to be told. A check is one of `answers.py`'s: `Number`, `Table`, `Function`, `Choice`, or `Judge` for all
else. Its reference is *computed*, never typed. A check's `problems()` tries it on its own reference and mistakes; a
test asks that of every exercise of every chapter, so a check that lets a wrong answer through never reaches a reader.
"""

import importlib
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from vramlab.report.errors import VramLabError

from .answers import NOT_ANSWERED, Check, Verdict

WIDTH = 88
_hints_given: dict[str, int] = {}


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
        whole = re.fullmatch(r"\d\d\.[1-9]\d?", self.name) and self.difficulty in range(1, 6) and self.minutes > 0
        if not (whole and self.question.strip() and len(self.hints) == 2 and all(self.hints)):
            needs = "a name like '02.1', a question, a difficulty of 1 to 5, minutes, and two hints"
            raise ValueError(f"exercise {self.name!r} needs {needs}.")

    def __str__(self) -> str:
        """The question in a box, with difficulty and minutes."""
        dots = "●" * self.difficulty + "○" * (5 - self.difficulty)
        head = f" Exercise {self.name} · difficulty {dots} · {self.minutes} min "
        lines = [line for part in self.question.splitlines() for line in textwrap.wrap(part, WIDTH - 4) or [""]]
        body = [f"│ {line.ljust(WIDTH - 4)} │" for line in lines]
        return "\n".join([f"╭─{head}{'─' * (WIDTH - 3 - len(head))}╮", *body, f"╰{'─' * (WIDTH - 2)}╯"])


def chapter(number: str) -> dict[str, Exercise]:
    """The exercises of one chapter ("02"), by name. Raises ExerciseError when the chapter has none."""
    module = f"{__package__}.chapters.exercises_{number}"
    try:
        found = importlib.import_module(module).EXERCISES
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ExerciseError(f"Chapter {number} has no exercises.") from None
    exercises = {exercise.name: exercise for exercise in found}
    stray = [name for name in exercises if not name.startswith(number + ".")]
    if stray or len(exercises) < len(found):
        raise ValueError(f"{module}: each exercise has a name of its own that starts with {number + '.'!r}.")
    return exercises


def find(name: str) -> Exercise:
    """The exercise called `name`, "02.1". Raises ExerciseError with the names that exist."""
    if not isinstance(name, str) or not re.fullmatch(r"\d\d\.\d+", name):
        raise ExerciseError(f"An exercise is named by chapter and number, like '02.1', not {name!r}.")
    exercises = chapter(name.split(".")[0])
    if name not in exercises:
        raise ExerciseError(f"There is no exercise {name}: this chapter has {', '.join(exercises)}.")
    return exercises[name]


def ask(name: str) -> None:
    """Prints the question in a box."""
    print(find(name))


def check(name: str, answer: Any = None) -> bool:
    """Prints whether `answer` is right, or what kind of mistake it looks like; returns True only when it is right.

    No answer is too odd to be checked: `...` and None are "not answered yet", and nothing that the answer does can
    stop the notebook. Raises ExerciseError for an unknown exercise.
    """
    verdict = judge(find(name), answer)
    print(_wrapped(f"{name}: {verdict}"))
    return verdict.right


def hint(name: str) -> None:
    """Prints the first hint; called again the second; after that, where the solution is."""
    exercise = find(name)
    given = _hints_given[name] = _hints_given.get(name, 0) + 1
    if given <= 2:
        print(_wrapped(f"{name}, hint {given} of 2: {exercise.hints[given - 1]}"))
    else:
        where = f"notebooks/solutions, chapter {name.split('.')[0]}"
        print(_wrapped(f"{name}: those were both hints. The solution is in {where}."))


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """What `check` prints, as a value."""
    return NOT_ANSWERED if answer is None or answer is ... else exercise.check(answer)


def problems(exercise: Exercise) -> list[str]:
    """What is wrong with an exercise's check, a sentence each; [] when it does what it says."""
    return [f"{exercise.name}: {problem}" for problem in exercise.check.problems()]


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, WIDTH) for line in text.splitlines())
