"""Watch a function of another library: run something after it."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def afterwards(owner: Any, name: str, call: Callable[..., Any]) -> AbstractContextManager:
    """While entered, `owner`'s function of that name is followed by `call(result, *its arguments)`."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def function(*args: Any, **options: Any) -> Any:
        result = plain(*args, **options)
        call(result, *args, **options)
        return result

    return patch.object(owner, name, function)
