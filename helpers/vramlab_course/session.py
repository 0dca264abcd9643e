"""What the reader has done since the kernel started.

It is the process's on purpose: cells follow one another in one kernel, and neither a cell nor a
thread is a session of its own.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Session:
    """Hints that were given, and guesses that were asked for."""

    hints: Counter[str] = field(default_factory=Counter)
    guesses: dict[str, Any] = field(default_factory=dict)  # by question: a cell is run again

    def next_hint(self, name: str) -> int:
        """Return which hint of a piece comes next: 1, 2, and more when there are no others."""
        self.hints[name] += 1
        return self.hints[name]


# one for the process: a kernel is a session
SESSION = Session()
