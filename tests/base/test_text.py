"""Text tables: what stands in a cell, and how numbers are written."""

import pytest
from vramlab.base.text import text_table


def test_numbers_are_written_and_text_stands_as_it_is():
    rows = [("run", "GiB", "tokens", "fits"), ("one", 1.25, 2048, True), ("two", "–", 12, False)]
    assert text_table(rows, form=".2f").splitlines() == [
        "run   GiB  tokens   fits",
        "───  ────  ──────  ─────",
        "one  1.25   2,048   True",
        "two     –      12  False",
    ]


def test_each_column_has_a_form_of_its_own():
    rows = [("run", "GiB", "share"), ("one", 1.25, 0.5)]
    assert text_table(rows, form=(".2f", ".0%")).splitlines()[-1] == "one  1.25    50%"
    with pytest.raises(ValueError):
        text_table(rows, form=(".2f",))
