"""One class per kind of error; each message is one sentence that says what was wrong and what is allowed."""

import contextlib
from collections.abc import Callable, Iterator


class VramLabError(Exception):
    """Base class of every error this package raises on purpose."""


class RecipeError(VramLabError, ValueError):
    """A recipe that cannot be trained, found before anything was allocated.

    `field` and `value` say what was wrong, `allowed` what would have been right.
    """

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"Recipe field '{field}' is {_shown(value)}, but {allowed}.")

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed)


def _shown(value: object) -> str:
    """`repr(value)` in one line of at most 120 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python writes no whole numbers of over 4,300 digits, and any object has a repr of its own
        text = f"a value of {type(value).__name__}"
    return text if len(text) <= 120 else text[:117] + "..."


class MeasurementError(VramLabError, RuntimeError):
    """A measurement that could not be made: the child process died, or the machine lacks what the recipe needs."""


class RecordError(VramLabError, LookupError):
    """A recorded measurement that does not exist, or a record file that cannot be read or written."""


class ReportError(VramLabError, ValueError):
    """Something that is not a report of this package: a field is missing, unknown or has an impossible value."""


class RankError(MeasurementError):
    """A rank that failed. `rank` says which, `code` how it ended, `traceback` is its own, in one piece.

    `code` is its exit status, negative for the signal that killed it, or None where only its exception is known;
    `oom` says what was asked for if memory ran out.
    """

    def __init__(self, message: str, rank: int, code: int | None = None, traceback: str = "", oom: str = ""):
        self.rank, self.code, self.traceback, self.oom = rank, code, traceback, oom
        super().__init__(message + (f"\n\n{traceback.rstrip()}" if traceback else ""))


# The extra of pyproject.toml that brings each module which a plain install lacks.
EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "peft", "accelerate", "numpy", "safetensors", "psutil"), "simulate"),
    **dict.fromkeys(("filelock", "pynvml"), "simulate"),
    "bitsandbytes": "quantization",
    "deepspeed": "deepspeed",
    "matplotlib": "plot",
    **dict.fromkeys(("IPython", "ipywidgets", "latex2mathml"), "lab"),
}


class MissingExtra(VramLabError, ImportError):
    """Something that a plain install cannot do; the message says which extra can."""


@contextlib.contextmanager
def needing(what: str | Callable[[], str]) -> Iterator[None]:
    """Raises MissingExtra in place of the ModuleNotFoundError of a package in EXTRAS: `what` needs it. Decorates too."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        name = what if isinstance(what, str) else what()
        raise MissingExtra(f"{name} needs {package}: pip install 'vramlab[{EXTRAS[package]}]'", name=package) from error
