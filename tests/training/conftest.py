"""Fixtures of the tests that run a library's own Trainer."""

import io
from contextlib import redirect_stdout

import pytest
import transformers


@pytest.fixture
def quiet():
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with redirect_stdout(io.StringIO()):
        yield
    transformers.logging.set_verbosity(verbosity)
