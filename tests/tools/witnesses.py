"""The table that ends `make course`: a few recipes as predicted, simulated and measured.

CUDA and CPU kernels hold different bytes. Without a GPU, the steps that run here are simulated for
the CPU, and stand on one line with the formula's figure, which is for CUDA and says so; a recorded
measurement has a line of its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import track
from vramlab import LoRA, MeasurementError, Recipe, Report, compare, measure, predict, simulate
from vramlab.report.report import format_bytes, text_table

# The first three run in seconds on any machine, each with a peak made of something else; the last
# needs a GPU.
RECIPES = (
    Recipe("gpt2", batch_size=1, seq_len=64, precision="fp32"),
    Recipe(
        "gpt2", batch_size=1, seq_len=64, precision="fp32", optim="sgd", gradient_checkpointing=True
    ),
    Recipe("gpt2", batch_size=1, seq_len=64, precision="fp32", lora=LoRA(r=8)),
    Recipe("polyglot-ko-1.3b", batch_size=4, seq_len=256, precision="fp16-true"),
)
HEAD = (
    "peak of allocated memory",
    "on",
    "predicted",
    "simulated",
    "measured",
    "predicted is",
    "simulated is",
)
COLUMNS = {"predicted": 0, "simulated": 1, "emulated": 2, "measured": 2, "recorded": 2}


def measure_once(recipe: Recipe, **options) -> Report:
    """`measure` with as few steps as it takes: bytes do not depend on how often a step is timed."""
    return measure(recipe, repeats=1, **options)


def table(recipes: Sequence[Recipe] = RECIPES, run: Callable[..., Report] = measure_once) -> str:
    """Each recipe's peak by each witness, as a text table.

    It also says how far the first two are from the measured one.
    """
    watched = Console().is_terminal
    progress = track(recipes, "predict, simulate, measure", transient=True, disable=not watched)
    return text_table(
        [HEAD, *(_row(*reports) for recipe in progress for reports in _lines(recipe, run))]
    )


def _lines(recipe: Recipe, run: Callable[..., Report]) -> Iterator[list[Report]]:
    """The reports that can be held against each other, weakest first."""
    cuda = [predict(recipe), simulate(recipe)]
    try:
        measured = run(recipe)
    except MeasurementError:  # neither fits here nor was ever recorded
        yield cuda
        return
    if measured.target == "cuda":
        yield [*cuda, measured]
        return
    with contextlib.suppress(MeasurementError):
        yield [*cuda, run(recipe, recorded=True)]
    # The step ran on the CPU, so it is the CPU's simulation that has to agree with it.
    yield [cuda[0], simulate(recipe, target="cpu"), measured]


def _row(*reports: Report) -> tuple[str, ...]:
    peaks = ["–"] * 3
    apart = ["–"] * 2
    for report in reports:
        recorded = " (recorded)" if report.source == "recorded" else ""
        text = format_bytes(report.peak.total) if report.status == "ok" else report.status
        # The last report is the truth of the line; what is for another device says so.
        other = f" (for {report.target})" * (report.target != reports[-1].target)
        peaks[COLUMNS[report.source]] = text + recorded + other
    truth = reports[-1]
    if COLUMNS[truth.source] == 2 and truth.status == "ok":
        # `compare` keeps the order, so the last total is the measured one.
        totals = compare(*reports).row("peak total").values
        for report, total in zip(reports[:-1], totals, strict=False):
            apart[COLUMNS[report.source]] = f"{total / totals[-1] - 1:+.2%}"
    return (reports[0].title, truth.target, *peaks, *apart)


if __name__ == "__main__":
    print(table())
