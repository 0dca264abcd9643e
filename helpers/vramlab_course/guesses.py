"""Guesses: the reader names a number before the chapter shows it.

    # The reader's number takes the place of None.
    cost = guess("How much worse does the model get in 4 bits?", "%", mine=None)
    cost.compare(11.2)      # found 11.2 % · your guess: 30 %, 2.7 times too high
    print(score())          # at the chapter's end: how many were close

The question stands in a cell of its own, after the text that says what exactly is asked. Whatever
else gives the number away goes through `compare`, so that it is folded with it:

    cost.compare(11.2, text_table(rows), form=".1f")    # instead of print(text_table(rows))

Without a guess a notebook folds all this under "Show what was found" (`<details>`: JupyterLab,
Colab, GitHub and the site open it at a click), so nobody reads an answer by scrolling. With a guess
it is printed. A figure cannot be folded: draw one that shows the number in the next cell.

Left at None a guess changes nothing, so that a chapter prints the same for everybody who does not
guess. The gate (`tests/tools/hands.py`) refuses a chapter that gives the number away above the cell
that compares, or beside the fold.
"""

import math
from dataclasses import dataclass
from html import escape
from numbers import Real

from .exercises import wrapped
from .live import tagged
from .session import SESSION

# Factors between a guess and what was found.
CLOSE = 1.25
NEAR = 2.0


@dataclass
class Guess:
    """A question, the reader's number, None without one, and what was found, None before."""

    question: str
    unit: str
    mine: float | None
    found: float | None = None

    def compare(
        self, found: float, *beside: object, form: str = ",.3g", of_this_run: bool = False
    ) -> None:
        """Show `beside`, each as print does, and what was found beside the guess.

        Without a guess all of it is folded.

        `form` formats numbers; `of_this_run`: all of it differs from run to run, as times do.
        """
        self.found = float(found)
        said = "none"
        if self.mine is not None:
            said = f"{self._shown(self.mine, ',g')}, {self.verdict()}"
        line = f"found {self._shown(self.found, form)} · your guess: {said}"
        text = "\n".join(map(str, [*beside, line]))
        # Marked line by line, so that the comparison of notebooks leaves them out.
        if of_this_run:
            text = tagged(text)
        if self.mine is None:
            _fold(text)
        else:
            print(text)

    @property
    def factor(self) -> float:
        """How many times too high the guess is, under 1 if too low.

        It is infinite where one of the two is zero.
        """
        # Two zeros too, for which a ratio has no value.
        if self.mine == self.found:
            return 1.0
        if self.mine * self.found > 0:
            return self.mine / self.found
        return math.inf

    def verdict(self) -> str:
        """How far off the guess is, in words."""
        # Too high or too low by a factor are equally far off.
        off = max(self.factor, 1 / self.factor)
        if off <= CLOSE:
            return "which is close"
        if math.isinf(off):
            return "which is off"
        return f"{off:,.2g} times too {'high' if self.mine > self.found else 'low'}"

    def _shown(self, number: float, form: str) -> str:
        return f"{number:{form}} {self.unit}".strip()


def _fold(text: str) -> None:
    """Show `text` at a click in a notebook, and print it elsewhere."""
    from IPython import display, get_ipython  # not needed by who only computes with guesses

    if get_ipython() is None:
        print(text)
        return
    # Lines keep their beginnings, by which nbval knows those of this run.
    folded = f"<pre>\n{escape(text, quote=False)}\n</pre>"
    html = f"<details><summary>Show what was found</summary>{folded}</details>"
    display.display({"text/plain": text, "text/html": html}, raw=True)


def guess(question: str, unit: str, mine: float | None = None) -> Guess:
    """Keep the reader's number `mine`, and print the question."""
    # True is a number to Python, and nobody's guess.
    if mine is not None and (isinstance(mine, bool) or not isinstance(mine, Real)):
        print(wrapped(f"A guess is a number of {unit} or None, not {mine!r}."))
        mine = None
    print(
        wrapped(f"{question} Your guess in {unit}: {'none yet' if mine is None else f'{mine:,g}'}.")
    )
    made = Guess(question, unit, mine)
    # By its question: running the cell again replaces the guess.
    SESSION.guesses[question] = made
    return made


def score() -> str:
    """How well the reader guessed in this session, in a sentence or two."""
    asked = [each for each in SESSION.guesses.values() if each.found is not None]
    made = [each for each in asked if each.mine is not None]
    if not made:
        return (
            f"You guessed none of the {len(asked)} numbers. Put yours in place of None, and "
            f"run the cells again."
        )
    factors = [max(each.factor, 1 / each.factor) for each in made]
    close = sum(factor <= CLOSE for factor in factors)
    near = sum(CLOSE < factor <= NEAR for factor in factors)
    high = sum(each.mine > each.found for each in made)
    return wrapped(
        f"You guessed {len(made)} of the {len(asked)} numbers: {close} within a quarter, {near} "
        f"more within a factor of two, "
        f"{len(made) - close - near} further off. {high} of them were too high."
    )
