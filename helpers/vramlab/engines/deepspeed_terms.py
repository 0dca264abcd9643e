"""What a rank holds under DeepSpeed draft."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tracker import Tracker


@contextlib.contextmanager
def follow(engine: Any, tracker: "Tracker") -> Iterator[None]:
    yield
