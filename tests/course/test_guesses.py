"""Guesses: the reader's number stands beside what was found, and without one nothing differs from
run to run.
"""

from itertools import pairwise

import nbformat
import pytest
from settings import all_notebooks
from vramlab_course import guesses
from vramlab_course.guesses import guess, score
from vramlab_course.session import Session


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(guesses, "SESSION", Session())


def compared(mine, found, capsys, **options) -> str:
    made = guess("How much?", "GiB", mine=mine)
    capsys.readouterr()
    made.compare(found, **options)
    return capsys.readouterr().out


def test_the_question_asks_for_a_number_until_there_is_one(capsys):
    guess("How much?", "GiB")
    guess("How much?", "GiB", mine=12.5)
    asked, given = capsys.readouterr().out.splitlines()
    assert (
        asked == "How much? Your guess in GiB: none yet."
        and given == "How much? Your guess in GiB: 12.5."
    )


@pytest.mark.parametrize("mine", ["12", True, [12]])
def test_what_is_no_number_is_none(mine, capsys):
    made = guess("How much?", "GiB", mine=mine)
    assert made.mine is None and "A guess is a number of GiB or None" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mine", "found", "said"),
    [
        (None, 11.18, "found 11.2 GiB · your guess: none"),
        (12, 11.18, "found 11.2 GiB · your guess: 12 GiB, which is close"),
        (14, 11.18, "found 11.2 GiB · your guess: 14 GiB, 1.3 times too high"),
        (30, 11.18, "found 11.2 GiB · your guess: 30 GiB, 2.7 times too high"),
        (2, 11.18, "found 11.2 GiB · your guess: 2 GiB, 5.6 times too low"),
        (0, 11.18, "found 11.2 GiB · your guess: 0 GiB, which is off"),
        (-3, 11.18, "found 11.2 GiB · your guess: -3 GiB, which is off"),
        (0, 0, "found 0 GiB · your guess: 0 GiB, which is close"),
        (1000, 1234.5, "found 1.23e+03 GiB · your guess: 1,000 GiB, which is close"),
    ],
)
def test_what_was_found_stands_beside_the_guess(mine, found, said, capsys):
    assert compared(mine, found, capsys) == said + "\n"


def test_a_time_is_tagged_as_one_of_this_run(capsys):
    assert (
        compared(None, 1234.5, capsys, form=",.0f", of_this_run=True)
        == "live: found 1,234 GiB · your guess: none\n"
    )


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would display."""
    import IPython

    displays = []
    monkeypatch.setattr(IPython, "get_ipython", object)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: displays.append(data))
    return displays


def test_without_a_guess_a_notebook_folds_all_that_gives_it_away(shown, capsys):
    assert compared(None, 11.18, capsys, form=".1f") == ""
    made = guess("How much?", "GiB")
    made.compare(11.18, "size < 12", ["a row"], form=".1f")
    text = "size < 12\n['a row']\nfound 11.2 GiB · your guess: none"
    assert [data["text/plain"] for data in shown] == ["found 11.2 GiB · your guess: none", text]
    html = text.replace("<", "&lt;")
    summary = "<summary>Show what was found</summary>"
    assert shown[1]["text/html"] == f"<details>{summary}<pre>\n{html}\n</pre></details>"


def test_with_a_guess_a_notebook_prints_it(shown, capsys):
    made = guess("How much?", "GiB", mine=12)
    capsys.readouterr()
    made.compare(11.18, "a table", form=".1f")
    said = "a table\nfound 11.2 GiB · your guess: 12 GiB, which is close\n"
    assert not shown and capsys.readouterr().out == said


def test_what_is_folded_of_this_run_is_tagged_in_both_forms(shown):
    guess("How much?", "s").compare(1.5, "two\nlines", of_this_run=True)
    (data,) = shown
    assert data["text/plain"] == "live: two\nlive: lines\nlive: found 1.5 s · your guess: none"
    assert f"\n{data['text/plain']}\n" in data["text/html"]


def test_the_score_counts_how_many_are_close():
    for number, mine in enumerate((None, 10, 11, 18, 50, 1)):
        guess(f"Question {number}?", "GiB", mine=mine).compare(10)
    guess("Not compared yet?", "GiB", mine=3)
    said = " ".join(score().split())
    assert said == (
        "You guessed 5 of the 6 numbers: 2 within a quarter, 1 more within a factor of two, 2 "
        "further off. "
        "3 of them were too high."
    )


def test_the_score_without_guesses_is_the_same_in_every_run():
    guess("Question?", "GiB").compare(10)
    assert (
        score()
        == "You guessed none of the 1 numbers. Put yours in place of None, and run the cells again."
    )


def test_a_cell_that_runs_again_replaces_its_guess():
    for mine in (1, 10):
        guess("Question?", "GiB", mine=mine).compare(10)
    assert "You guessed 1 of the 1 numbers: 1 within a quarter" in score()


@pytest.mark.parametrize("path", all_notebooks(), ids=lambda path: path.stem)
def test_a_text_and_no_fold_comes_before_a_guess(path):
    cells = nbformat.read(path, as_version=4).cells
    for text, code in pairwise(cells):
        if code.cell_type == "code" and "mine=None" in code.source:
            assert not text.source.endswith("</details>"), code.id
