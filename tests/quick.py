"""Tables of cases, of which `make test` runs a few and `make test-all` also the slow ones."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def params(values: Iterable[Any], quick: Collection[Any]) -> list:
    """`values` as parameters of a test, a tuple's items as several; what is not among `quick` is
    marked slow.
    """
    marks = {True: [], False: [pytest.mark.slow]}
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks[v in quick])
        for v in values
    ]
