"""Errors: one class per kind; each message is one sentence that says what was wrong and what is allowed."""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from .text import printable
from .versions import untested, version_trouble


class VramLabError(Exception):
    """Base class of every error this package raises on purpose; its text has nothing that a terminal obeys."""

    def __str__(self) -> str:
        return printable(super().__str__())


class RecipeError(VramLabError, ValueError):
    """A recipe that cannot be trained: `field` and `value` are wrong, `allowed` would be right."""

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        try:
            shown = " ".join(repr(value).split())
        except Exception:  # Python prints no integer of over 4,300 digits, and a repr can fail
            shown = f"a value of {type(value).__name__}"
        self.shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(self.about(f"Recipe field '{field}'"))

    def about(self, subject: str) -> str:
        """Return the sentence with what was set called `subject`, such as an option of a command line."""
        return f"{subject} is {self.shown}, but {self.allowed}."

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed)


class MeasurementError(VramLabError, RuntimeError):
    """A measurement that failed: the child process died, or the machine lacks what the recipe needs."""


class RecordError(VramLabError, LookupError):
    """A missing recorded measurement, or a record file that cannot be read or written."""


class FileError(VramLabError, OSError):
    """A file that cannot be read as what it must be, or cannot be written."""


class ReportError(VramLabError, ValueError):
    """A report with a field that is missing, unknown or has an impossible value."""


# Module that a plain install lacks, to the extra of pyproject.toml that installs it.
EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "peft", "accelerate", "numpy", "safetensors", "psutil"), "simulate"),
    **dict.fromkeys(("filelock", "jinja2", "pynvml"), "simulate"),
    "bitsandbytes": "quantization",
    **{name: name for name in ("deepspeed", "trl", "schedulefree")},
    **dict.fromkeys(("liger_kernel", "triton"), "liger"),
    "matplotlib": "plot",
    **dict.fromkeys(("IPython", "ipywidgets", "latex2mathml"), "lab"),
}


class MissingExtra(VramLabError, ImportError):
    """A package is not installed; the message names the extra that installs it."""


class UntestedVersion(VramLabError, ImportError):
    """A library lacks what is needed of it, and its version is outside the range that the message names."""


@contextlib.contextmanager
def needing(what: str | Callable[[], str]) -> Iterator[None]:
    """Say in one sentence which library `what` needs, where it is missing or its version does not fit. Decorates too.

    Raises:
        MissingExtra: a package in EXTRAS is not installed; the message names the extra.
        UntestedVersion: one is installed, but is too old, or lacks a name and is newer than what was tested.
    """
    try:
        yield
    except VramLabError:
        raise
    except (ImportError, AttributeError, RuntimeError) as raised:
        error = raised.__cause__ if isinstance(raised.__cause__, ImportError) else raised  # TRL raises a RuntimeError
        if isinstance(error, RuntimeError):
            raise
        name = what if isinstance(what, str) else what()
        package = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ImportError) else ""
        if package in EXTRAS and find_spec(package) is None:
            needed = f"{name} needs {package}: pip install 'vramlab[{EXTRAS[package]}]'"
            raise MissingExtra(needed, name=package) from error
        _refuse_versions(name, package, error)
        raise


def _refuse_versions(name: str, package: str, error: Exception) -> None:
    """Raise UntestedVersion where an old library explains `error`, or a new one an import that fails from `package`."""
    found = untested()
    old = [tested for tested, version in found.items() if tested.is_older(version)]
    if old:
        wanted = " ".join(f"'{tested.name}>={tested.floor}'" for tested in old)
        said = f"{name} needs newer libraries{version_trouble()}: pip install --upgrade {wanted}"
        raise UntestedVersion(said, name=package) from error
    new = [tested for tested in found if tested.name.replace("-", "_") == package]
    if new:
        wanted = " ".join(f"'{tested.name}<={tested.newest}'" for tested in new)
        why = " ".join(str(error).split())
        said = f"{name} does not work with these libraries ({why}){version_trouble()}: pip install {wanted}"
        raise UntestedVersion(said, name=package) from error
