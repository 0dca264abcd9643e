"""Errors: one class per kind; each message is one sentence that says what was wrong and what is allowed."""

import contextlib
from collections.abc import Callable, Iterator


class VramLabError(Exception):
    """Base class of every error this package raises on purpose."""


class RecipeError(VramLabError, ValueError):
    """A recipe that cannot be trained: `field` and `value` are wrong, `allowed` would be right."""

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        try:
            shown = " ".join(repr(value).split())
        except Exception:  # Python prints no integer of over 4,300 digits, and a repr can fail
            shown = f"a value of {type(value).__name__}"
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"Recipe field '{field}' is {shown}, but {allowed}.")

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed)


class MeasurementError(VramLabError, RuntimeError):
    """A measurement that failed: the child process died, or the machine lacks what the recipe needs."""


class RecordError(VramLabError, LookupError):
    """A missing recorded measurement, or a record file that cannot be read or written."""


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


@contextlib.contextmanager
def needing(what: str | Callable[[], str]) -> Iterator[None]:
    """Raise MissingExtra, which says that `what` needs it, where a package in EXTRAS is not installed. Decorates too."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        name = what if isinstance(what, str) else what()
        raise MissingExtra(f"{name} needs {package}: pip install 'vramlab[{EXTRAS[package]}]'", name=package) from error
