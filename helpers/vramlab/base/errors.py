"""Errors: one class per kind.

Each message is one sentence that says what was wrong and what is allowed.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from .text import printable
from .versions import untested, version_trouble


class VramLabError(Exception):
    """Base class of every error this package raises on purpose.

    Its text has nothing that a terminal obeys.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class RecipeError(VramLabError, ValueError):
    """A recipe that cannot be trained: `field` and `value` are wrong, `allowed` would be right."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        try:
            # A recipe's title calls its parts shorter than the call that makes them.
            called = getattr(value, "words", None)
            shown = str(called()) if called else " ".join(repr(value).split())
        except Exception:  # Python prints no integer of over 4,300 digits, and a repr can fail
            shown = f"a value of {type(value).__name__}"
        # A recipe may be given a whole model, whose repr fills pages.
        if len(shown) > 120:
            shown = shown[:117] + "..."
        self.shown = shown
        super().__init__(self.about(f"Recipe field '{field}'"))

    def about(self, subject: str) -> str:
        """Return the sentence with what was set called `subject`.

        It may be an option of a command line.
        """
        return f"{subject} is {self.shown}, but {self.allowed}."

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        # An exception is unpickled from its message, which is not what this one is made from.
        return type(self), (self.field, self.value, self.allowed)


class MeasurementError(VramLabError, RuntimeError):
    """A measurement that failed.

    The child process died, or the machine lacks what the recipe needs.
    """


class RecordError(VramLabError, LookupError):
    """A missing recorded measurement, or a record file that cannot be read or written."""


class FileError(VramLabError, OSError):
    """A file that cannot be read as what it must be, or cannot be written."""


class ReportError(VramLabError, ValueError):
    """A report with a field that is missing, unknown or has an impossible value."""


# Module that a plain install lacks, to the extra of pyproject.toml that installs it.
EXTRAS = {
    "torch": "simulate",
    "transformers": "simulate",
    "peft": "simulate",
    "accelerate": "simulate",
    "numpy": "simulate",
    "safetensors": "simulate",
    "psutil": "simulate",
    "filelock": "simulate",
    "jinja2": "simulate",
    "pynvml": "simulate",
    "bitsandbytes": "quantization",
    "deepspeed": "deepspeed",
    "diffusers": "diffusion",
    "trl": "trl",
    "schedulefree": "schedulefree",
    "torchao": "torchao",
    "liger_kernel": "liger",
    "triton": "liger",
    "matplotlib": "plot",
    "IPython": "lab",
    "ipywidgets": "lab",
    "latex2mathml": "lab",
    "anyio": "mcp",
    "mcp": "mcp",
    "mcp_types": "mcp",
}


class MissingExtra(VramLabError, ImportError):
    """A package is not installed; the message names the extra that installs it."""


class UntestedVersion(VramLabError, ImportError):
    """A library lacks what is needed of it.

    Its version is outside the range that the message names.
    """


@contextlib.contextmanager
def needing(what: str | Callable[[], str]) -> Iterator[None]:
    """Say in one sentence which library `what` needs, where it is missing or does not fit.

    Decorates too.

    Raises:
        MissingExtra: a package in EXTRAS is not installed; the message names the extra.
        UntestedVersion: one is installed, but is too old, or lacks a name and is newer than what
            was tested.
    """
    try:
        yield
    except VramLabError:
        raise  # it says what is needed already
    except (ImportError, AttributeError, RuntimeError) as raised:
        # TRL raises a RuntimeError for an import that failed
        error = raised.__cause__ if isinstance(raised.__cause__, ImportError) else raised
        if isinstance(error, RuntimeError):
            raise
        name = what if isinstance(what, str) else what()
        package = ""
        if isinstance(error, ImportError):  # an AttributeError's name is no module's
            package = (error.name or "").partition(".")[0]
        if package in EXTRAS and find_spec(package) is None:
            needed = f"{name} needs {package}: pip install 'vramlab[{EXTRAS[package]}]'"
            raise MissingExtra(needed, name=package) from error
        _refuse_versions(name, package, error)
        raise


def _refuse_versions(name: str, package: str, error: Exception) -> None:
    """Raise UntestedVersion where a library's version explains `error`.

    That is any that is too old, or a new one where an import from `package` fails.
    """
    outside = untested()
    # An old library is the likelier cause, whatever the import that failed.
    old = [tested for tested, version in outside.items() if tested.is_older(version)]
    if old:
        wanted = " ".join(f"'{tested.name}>={tested.floor}'" for tested in old)
        trouble = f"{name} needs newer libraries{version_trouble()}"
        raise UntestedVersion(f"{trouble}: pip install --upgrade {wanted}", name=package) from error
    new = [tested for tested in outside if tested.name.replace("-", "_") == package]
    if new:
        wanted = " ".join(f"'{tested.name}<={tested.newest}'" for tested in new)
        why = " ".join(str(error).split())
        trouble = f"{name} does not work with these libraries ({why}){version_trouble()}"
        raise UntestedVersion(f"{trouble}: pip install {wanted}", name=package) from error
