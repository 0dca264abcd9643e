"""The exercise machinery: what is right, what each typical mistake is told, and that no answer
stops a notebook.
"""

import dataclasses
import difflib
import itertools
import re
from fractions import Fraction
from unicodedata import numeric

import nbformat
import numpy as np
import pytest
import settings
import torch
from sample_reports import report
from vramlab.base.data import data_path
from vramlab.report.report import GiB, KiB, MiB
from vramlab_course import exercises
from vramlab_course.answers import Choice, Feedback, Function, Judge, Mistake, Number, Table
from vramlab_course.exercises import Exercise, ExerciseError
from vramlab_course.session import Session

PARAMETERS = 124_439_808  # GPT-2's, for which 16 bytes each are 1.854 GiB


def reference(batch_size, seq_len):
    return 34 * batch_size * seq_len * 768 + 5 * batch_size * 12 * seq_len**2


def without_scores(batch_size, seq_len):
    return 34 * batch_size * seq_len * 768


NUMBER = Number(
    lambda: 16 * PARAMETERS,
    mistakes=[
        Mistake(lambda: 12 * PARAMETERS, "You left out the gradients."),
        Mistake(PARAMETERS * 8, "No states."),
    ],
    right="four copies of 4 bytes each.",
)
TABLE = Table(
    lambda: {"fp32": 16, "fp16-mixed": 18, "fp16-true": 8},
    unit="bytes per parameter",
    mistakes=[Mistake({"fp16-mixed": 16}, "Mixed precision keeps a copy in half precision too.")],
    right="each for its configuration.",
)
FUNCTION = Function(
    reference,
    cases=[{"batch_size": b, "seq_len": s} for b, s in ((1, 128), (4, 256), (8, 1024))],
    mistakes=[Mistake(without_scores, "You left out the attention scores.")],
    right="linear in the batch, quadratic in the sequence.",
)
CHOICE = Choice(
    "backward",
    {"forward": "the logits come later.", "backward": "the logits' gradient is alive too."},
)


def even(n):
    return Feedback(True, "Right.") if n % 2 == 0 and 0 < n < 100 else Feedback(False, "Not even.")


JUDGE = Judge(even, rights=[2, 4], wrongs=[1, 3])
CHECKS = {"number": NUMBER, "table": TABLE, "function": FUNCTION, "choice": CHOICE, "judge": JUDGE}


def exercise(check=NUMBER, name="99.1", **changes) -> Exercise:
    values = {
        "question": "How many bytes?",
        "difficulty": 2,
        "minutes": 5,
        "hints": ("Count.", "Copies are four."),
    }
    return Exercise(name, check=check, **{**values, **changes})


@pytest.fixture
def chapter(monkeypatch):
    """A chapter 99 that exists for one test: its exercises may be added to."""
    found = {"99.1": exercise(), "99.2": exercise(FUNCTION, "99.2")}
    chapter = exercises.chapter
    monkeypatch.setattr(
        exercises, "chapter", lambda number: found if number == "99" else chapter(number)
    )
    monkeypatch.setattr(exercises, "SESSION", Session())
    return found


@pytest.fixture
def file(monkeypatch, tmp_path):
    """Writes chapter 99 as a file for one test, and reads it."""

    def write(text):
        path = tmp_path / "exercises" / "99.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return exercises.chapter.__wrapped__("99")

    monkeypatch.setattr(exercises, "data_path", tmp_path.joinpath)
    return write


ENTRY = """
["99.1"]
question = "What is {gpt2:,} and a half?"
difficulty = 1
minutes = 1
hints = ["Add.", "Add one half."]
"""


# A number


@pytest.mark.parametrize(
    "answer",
    [
        16 * PARAMETERS,
        16.0 * PARAMETERS * 1.0049,
        np.int64(16 * PARAMETERS),
        np.array([16 * PARAMETERS]),
        torch.tensor(16.0 * PARAMETERS),
        Fraction(16 * PARAMETERS),
    ],
)
def test_the_right_number_in_any_type(answer):
    assert NUMBER(answer) == Feedback(True, "Right: four copies of 4 bytes each.")


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (12 / 16, "You left out the gradients."),
        (8 / 16, "No states."),
        (1 / GiB, "it is in GiB (1,073,741,824 bytes): the answer is wanted in bytes."),
        (1 / 10**9, "it is in GB (1,000,000,000 bytes)"),
        (1 / MiB, "it is in MiB (1,048,576 bytes)"),
        (1 / 10**6, "it is in MB (1,000,000 bytes)"),
        (1 / KiB, "it is in KiB (1,024 bytes)"),
        (8, "That is the number of bits: 8 bits are one byte."),
        (1 / 8, "That is an eighth of the right amount"),
        (2, "That is twice the right amount"),
        (-1, "the sign is not"),
        (1.1, "is 10.0% too high"),
        (0.994, "is 0.6% too low"),
        (1.006, "is 0.6% too high"),
        (10, "is 10 times too high"),
        (1 / 30, "is 30 times too low"),
        (0, "0 is too low"),
        (-3, "is too low"),
    ],
)
def test_a_wrong_number_is_told_what_it_looks_like(factor, words):
    verdict = NUMBER(factor * 16 * PARAMETERS)
    assert not verdict.right and words in verdict.text
    assert f"{16 * PARAMETERS:,}" not in verdict.text, "the answer is not given away"


def test_gb_for_gib_is_told_apart_at_the_most_tolerant():
    check = Number(1.854, unit="GiB", tolerance=0.02)
    assert "it is in GB" in check(1.854 * GiB / 10**9).text
    assert (
        "it is in bytes: the answer is wanted in GiB (1,073,741,824 bytes)"
        in check(1.854 * GiB).text
    )
    assert "it is in MiB" in check(1.854 * 1024).text
    small = Number(100, unit="KiB", tolerance=0.02)
    assert "it is in kB" in small(102.4).text
    assert small(101.9).right and not small(102.1).right


def test_what_is_no_size_is_not_looked_for_in_other_units():
    check = Number(16, unit="bytes per parameter")
    assert "16" not in check(16 * 8).text and "bits" not in check(128).text
    assert check(128).text == "Not right: 128 is 8 times too high."
    assert "half" in check(8).text


def test_zero_can_be_right():
    check = Number(0, unit="B")
    assert check(0).right and check(5).text == "Not right: 5 is too high."


def test_an_exact_check_is_exact():
    check = Number(10**9, tolerance=0)
    assert check(10**9).right and not check(10**9 + 1).right


class Hostile:
    def __float__(self):
        raise RuntimeError("no")

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


ODD = [
    "16",
    True,
    b"16",
    [1, 2],
    {},
    {"a": 1},
    {1: 2},
    set(),
    object(),
    print,
    lambda **_: 1 / 0,
    lambda: 3,
    float("nan"),
    float("inf"),
    1j,
    10**400,
    np.arange(3),
    torch.zeros(3),
    report(),
    report().peak,
    Hostile(),
    Hostile,
    NotImplemented,
]


@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("index", range(len(ODD)))
def test_no_answer_stops_the_notebook(kind, index, chapter, capsys):
    chapter["99.3"] = exercise(CHECKS[kind], "99.3")
    assert exercises.check("99.3", ODD[index]) is False
    assert capsys.readouterr().out.startswith("99.3: ")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("16", "not text"),
        (True, "not True or False"),
        (float("nan"), "nan is none"),
        ([1], "not a list"),
        (report(), "report.peak.total"),
        (reference, "not a function"),
    ],
)
def test_what_is_no_number_is_said(answer, words):
    assert words in NUMBER(answer).text


# The other checks


def test_a_table_says_how_many_are_right_and_what_is_wrong_with_the_first():
    right = {"fp32": 16, "fp16-mixed": 18, "fp16-true": 8}
    assert TABLE(right) == Feedback(True, "Right: each for its configuration.")
    assert TABLE({**right, "more": 3}).right
    assert (
        TABLE({**right, "fp16-mixed": 16}).text
        == "Mixed precision keeps a copy in half precision too."
    )
    assert TABLE({**right, "fp16-true": 4}).text.startswith(
        "2 of 3 are right. fp16-true: That is half"
    )
    assert TABLE({**right, "fp32": 20}).text == "2 of 3 are right. fp32: 20 is 25.0% too high."
    assert TABLE({**right, "fp32": ...}).text == "Not answered yet for fp32."
    assert TABLE({**right, "fp32": "x"}).text == "fp32: A number was expected, not text."
    assert TABLE(dict.fromkeys(right)).text == TABLE({}).text == "not answered yet"
    assert TABLE({name: 2 * n for name, n in right.items()}).text.startswith(
        "That is twice the right amount"
    )
    sizes = Table({"a": GiB, "b": 3 * GiB})
    assert "it is in GB" in sizes({"a": GiB / 10**9, "b": 3 * GiB / 10**9}).text


def test_a_function_has_to_be_right_for_every_configuration():
    assert FUNCTION(reference).right and FUNCTION(lambda **case: reference(**case)).right
    assert FUNCTION(without_scores).text == "You left out the attention scores."
    assert "number of bits" in FUNCTION(lambda **c: 8 * reference(**c)).text
    assert "it is in GiB" in FUNCTION(lambda **c: reference(**c) / GiB).text
    first_only = lambda batch_size, seq_len: reference(1, 128) * batch_size * seq_len / 128  # noqa: E731
    verdict = FUNCTION(first_only)
    assert (
        verdict.text.startswith("1 of 3 are right. batch_size=4, seq_len=256: ")
        and "too low" in verdict.text
    )


def test_a_function_that_fails_or_is_not_written_is_said():
    assert (
        FUNCTION(lambda batch_size, seq_len: ...).text
        == FUNCTION(lambda **_: None).text
        == "not answered yet"
    )
    assert "fails with ZeroDivisionError" in FUNCTION(lambda **_: 1 / 0).text
    assert "fails with TypeError" in FUNCTION(lambda batch: 1).text
    assert (
        FUNCTION(lambda **_: "much").text
        == "batch_size=1, seq_len=128: A number was expected, not text."
    )
    assert FUNCTION(17).text == "A function was expected, not an int."


def test_a_choice_says_why():
    assert CHOICE("backward") == Feedback(True, "Right: the logits' gradient is alive too.")
    assert CHOICE(" Backward ").right
    assert CHOICE("forward") == Feedback(False, "Not right: the logits come later.")
    assert CHOICE("sideways").text == "Choose one of forward, backward."


def test_a_judge_may_be_anything():
    assert JUDGE(6).right and JUDGE(7).text == "Not even."
    assert JUDGE("x").text.startswith("This answer cannot be checked (TypeError")


# In a notebook


def test_check_prints_and_returns(chapter, capsys):
    assert exercises.check("99.1", 16 * PARAMETERS) is True
    assert exercises.check("99.1", 12 * PARAMETERS) is False
    for unanswered in (None, ...):
        assert exercises.check("99.1", unanswered) is False
    assert exercises.check("99.1") is False
    assert capsys.readouterr().out.splitlines() == [
        "99.1: Right: four copies of 4 bytes each.",
        "99.1: You left out the gradients.",
        *["99.1: not answered yet"] * 3,
    ]


def test_hints_come_one_by_one_for_each_exercise(chapter, capsys):
    for name in ("99.1", "99.1", "99.2", "99.1"):
        exercises.hint(name)
    assert capsys.readouterr().out.splitlines() == [
        "99.1, hint 1 of 2: Count.",
        "99.1, hint 2 of 2: Copies are four.",
        "99.2, hint 1 of 2: Count.",
        "99.1: those were both hints. The solution is in notebooks/solutions, chapter 99.",
    ]


def test_the_question_stands_in_a_box(chapter, capsys):
    question = "A long question. " * 20 + "\n\nAnd its unit: GiB."
    chapter["99.3"] = exercise(name="99.3", question=question, difficulty=4, minutes=15)
    exercises.ask("99.3")
    lines = capsys.readouterr().out.splitlines()
    assert {len(line) for line in lines} == {88}
    assert lines[0].startswith("╭─ Exercise 99.3 · difficulty ●●●●○ · 15 min ─")
    assert sum("long question" in line for line in lines) > 3 and "And its unit: GiB." in lines[-2]


def test_long_sentences_are_wrapped(chapter, capsys):
    chapter["99.3"] = exercise(Number(1, right="because " * 40), "99.3")
    exercises.check("99.3", 1)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 88


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("99.7", "There is no exercise 99.7: this chapter has 99.1, 99.2."),
        ("98.1", "Chapter 98 has no exercises."),
        ("2.1", "named by chapter and number"),
        (2.1, "named by chapter and number"),
        ("99.1; x", "named by chapter"),
    ],
)
def test_an_unknown_exercise_is_one_sentence(chapter, name, words):
    for call in (exercises.ask, exercises.hint, lambda n: exercises.check(n, 1)):
        with pytest.raises(ExerciseError, match=words) as caught:
            call(name)
        assert "\n" not in str(caught.value)


# Writing exercises


@pytest.mark.parametrize("kind", CHECKS)
def test_a_sound_check_has_no_problems(kind):
    assert CHECKS[kind].problems() == []


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (dataclasses.replace(NUMBER, mistakes=[Mistake(16 * PARAMETERS + 1, "Near.")]),
            "accepts the mistake 'Near.'"),
        (dataclasses.replace(NUMBER, mistakes=[Mistake(5, "A."), Mistake(5, "B.")]),
            "'B.' is taken for 'A.'"),
        (Number("x"), "rejects its own reference"),
        (Table({"a": 1}, mistakes=[Mistake({"b": 1}, "B.")]), "speaks of b"),
        (Table({"a": 1, "c": 2}, mistakes=[Mistake({"a": 1}, "A.")]), "accepts the mistake 'A.'"),
        (dataclasses.replace(FUNCTION, mistakes=[Mistake(lambda **c: reference(**c) + 1, "")]),
            "accepts the mistake"),
        (Function(lambda n: 7, cases=[{"n": 1}, {"n": 2}, {"n": 3}]), "a constant would be right"),
        (Choice("left", {"right": "", "wrong": ""}), "none of the options"),
        (Choice("right", {"right": ""}), "only one option"),
        (Judge(lambda n: Feedback(True, "Right."), rights=[1], wrongs=[2, 3]), "accepts 2"),
        (Judge(lambda n: Feedback(False, "No."), rights=[1], wrongs=[2, 3]), "rejects 1"),
        (Judge(lambda n: Feedback(n == 1, ""), rights=[1], wrongs=[2]), "two to reject"),
    ],
)  # fmt: skip
def test_a_check_that_lets_a_mistake_through_is_found(check, words):
    assert any(words in problem for problem in check.problems())


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "2.1"},
        {"name": "02.0"},
        {"difficulty": 0},
        {"difficulty": 6},
        {"minutes": 0},
        {"hints": ("one",)},
        {"hints": ("one", "")},
        {"question": " "},
    ],
)
def test_an_exercise_is_whole_or_refused(changes):
    with pytest.raises(ValueError, match="exercise"):
        exercise(**changes)


@pytest.mark.parametrize(
    "make",
    [
        Number,
        Table,
        lambda reference, tolerance: Function(len, cases=[{}] * 3, tolerance=tolerance),
    ],
)
@pytest.mark.parametrize("tolerance", [-0.1, 0.03, 1])
def test_a_tolerance_that_hides_a_unit_is_refused(make, tolerance):
    with pytest.raises(ValueError, match=r"0 to 0\.02"):
        make(1, tolerance=tolerance)


def test_a_function_is_not_checked_over_two_cases():
    with pytest.raises(ValueError, match="three configurations"):
        Function(reference, cases=[{}, {}])


def test_names_of_a_chapter_are_its_own(file):
    with pytest.raises(ValueError, match=r"start with '99\.', not '98\.1'"):
        file(
            ENTRY.replace("99.1", "98.1").replace("{gpt2:,}", "1")
            + 'kind = "choice"\nanswer = "1"\noptions = {}'
        )


def test_a_number_of_a_file_is_computed_from_its_names(file):
    found = file(
        "[names]\ngpt2 = \"read_shape('gpt2').num_parameters\"\n"
        + ENTRY
        + 'kind = "number"\nanswer = "gpt2 + 1/2"\ntolerance = 0\nmistakes = [["gpt2 * 2", "Not '
        'twice."], [1, "One."]]'
    )["99.1"]
    assert (
        found.question == f"What is {PARAMETERS:,} and a half?"
        and found.check(PARAMETERS + 0.5).right
    )
    assert found.check(2 * PARAMETERS).text == "Not twice." and found.check(1).text == "One."
    assert found.check.problems() == []


CONDITIONS = """
[imports]
fractions = ["Fraction"]
[names]
gpt2 = "1"
["99.1".names]
half = "Fraction(answer, 2)"
"""


def test_conditions_are_told_one_by_one_and_an_error_is_none(file):
    entry = (
        ENTRY
        + """
kind = "conditions"
conditions = [["half > 1", "Larger, not {half}."], ["half.denominator == 1", "Even, please."]]
right = "Right: {half}."
accepts = ["4"]
rejects = ["2"]
"""
    )
    check = file(CONDITIONS.replace('["99.1".names]', entry + '["99.1".names]'))["99.1"].check
    assert check(4) == Feedback(True, "Right: 2.")
    assert check(2).text == "Larger, not 1." and check(5).text == "Even, please."
    assert not check("x").right
    assert check.problems() == [
        "it needs an answer to accept and two to reject",
        "no wrong answer is told 'Even, please.'",
    ]


@pytest.mark.parametrize("name", ["os", "nowhere"])
def test_an_expression_has_no_other_names(file, name):
    found = file(
        ENTRY.replace("{gpt2:,}", "1") + f'kind = "number"\nanswer = "{name}"\nmistakes = []'
    )["99.1"]
    assert name in found.check(1).text and not found.check(1).right


CHAPTERS = sorted(path.stem for path in data_path("exercises").glob("*.toml"))
EVERY = {
    name: exercise for number in CHAPTERS for name, exercise in exercises.chapter(number).items()
}


def test_every_chapter_has_exercises():
    assert [path.name[:2] for path in settings.chapters() if path.name[:2].isdigit()] == CHAPTERS


@pytest.mark.parametrize(
    "name", [name for name, each in EVERY.items() if type(each.check) is Number]
)
def test_no_mistake_is_told_the_answer(name):
    check = EVERY[name].check
    answer = check.reference()
    shown = "|".join(re.escape(text) for text in {f"{answer:,.6g}", f"{answer:.3g}"})
    for mistake in check.mistakes:
        assert not re.search(rf"(?<![\d.,])({shown})(?![\d.,]*\d)", check(mistake.wrong()).text), (
            mistake.text
        )


@pytest.mark.parametrize("number", CHAPTERS)
def test_every_exercise_of_the_course_is_sound(number):
    found = exercises.chapter(number)
    assert found
    assert [problem for exercise in found.values() for problem in exercise.check.problems()] == []


@pytest.mark.parametrize("name", EVERY)
def test_nonsense_is_wrong_and_never_raises(name):
    for answer in (..., None, "", "nonsense", -1, float("nan"), [], {}, object(), lambda: 1):
        assert not exercises.judge(EVERY[name], answer).right, answer


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_chapter_begins_easy_and_ends_hard(number):
    difficulties = [exercise.difficulty for exercise in exercises.chapter(number).values()]
    assert difficulties[0] == min(difficulties) and difficulties[-1] == max(difficulties)


@pytest.mark.parametrize("path", settings.chapters(), ids=lambda path: path.stem)
def test_a_chapter_says_how_long_it_takes(path):
    """Its exercises in the line of times at its top, to five minutes; all in the README."""
    said = re.search(
        r"\*\*Time:\*\* (\d+) minutes .* and (\d+) for the exercises?",
        path.read_text(encoding="utf-8"),
    )
    minutes = sum(exercise.minutes for exercise in exercises.chapter(path.name[:2]).values())
    assert said and abs(int(said[2]) - minutes) <= 3
    readme = (settings.ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"\(notebooks/{path.name}\) \|.*\| (\d+)([¼½¾]?) \|", readme)
    hours = int(row[0]) + (numeric(row[1]) if row[1] else 0)
    assert abs(60 * hours - int(said[1]) - int(said[2])) <= 10


@pytest.mark.parametrize("name", EVERY)
def test_a_notebook_asks_the_question_of_the_file(name):
    """By `exercises.ask`, or in text that is the file's, above the cell that checks it."""
    (path,) = [path for path in settings.chapters() if path.name.startswith(name[:2])]
    above = ""
    for cell in nbformat.read(path, as_version=4).cells:
        above += cell.source
        if f'exercises.check("{name}"' in cell.source:
            break
    assert f'exercises.check("{name}"' in above
    assert f'exercises.ask("{name}")' in above or EVERY[name].question.strip() in above


def test_no_question_is_asked_twice():
    """Neither are hints: each belongs to its exercise."""
    for what in (lambda exercise: exercise.question, lambda exercise: " ".join(exercise.hints)):
        for a, b in itertools.combinations(EVERY.values(), 2):
            alike = difflib.SequenceMatcher(None, what(a), what(b), autojunk=False)
            assert alike.quick_ratio() < 0.85 or alike.ratio() < 0.8, f"{a.name} and {b.name}"
