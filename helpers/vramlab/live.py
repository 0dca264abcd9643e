"""Text that differs from one run or machine to the next, tagged so that a comparison of outputs can leave it out.

Everything else a notebook prints is the same everywhere and is compared. Tagged lines are not, so what a chapter
claims about them is an `assert` in the same cell.
"""

from .report import environment

LIVE = "⏱ "
MACHINE = "machine: "


def live(*values: object) -> None:
    """Print `values` as `print` does, each line tagged as a figure of this very run: a time, a rate, a resident set."""
    _print_tagged(LIVE, " ".join(map(str, values)))


def stamp() -> None:
    """Print what this page was run with: Python and library versions, the GPU if there is one, and the date."""
    found = environment()
    date, python = found.pop("date"), f"Python {found.pop('python')} on {found.pop('system')}"
    libraries = " · ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    _print_tagged(MACHINE, "\n".join((python, libraries, *_gpus(), date)))


def _print_tagged(tag: str, text: str) -> None:
    # A blank line is tagged too, without a blank at its end, and so is compared.
    print("\n".join((tag + line).rstrip() for line in text.split("\n")))


def _gpus() -> list[str]:
    """One line per GPU that torch can use, or one that says there is none."""
    import torch

    if not torch.cuda.is_available():
        return ["no GPU that torch can use"]
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}" for gpu in gpus]
