"""The table that ends `make course`: all witnesses on a line, another target named, gaps shown as
gaps.
"""

import dataclasses

import pytest
import witnesses
from tiny_models import config
from vramlab import MeasurementError, Recipe, simulate

RECIPE = Recipe(config("gpt2"), batch_size=1, seq_len=16, precision="fp32", num_layers=2)


def lines(run) -> list[list[str]]:
    """The table's lines below its head, cut into cells."""
    cells = [line.split("  ") for line in witnesses.table([RECIPE], run).splitlines()[2:]]
    return [[cell.strip() for cell in line if cell.strip()] for line in cells]


def as_measured(source, target, **changes):
    """A measured report of RECIPE: the simulated one under another name."""
    return dataclasses.replace(simulate(RECIPE, target=target), source=source, **changes)


def test_a_step_that_runs_here_equals_its_simulation(monkeypatch):
    """In this process: tests/measurement/test_measure.py has the one of its own."""
    from vramlab.measurement import worker

    monkeypatch.setattr(
        "vramlab.measurement.measure.run_here", lambda order, *_: worker.run(**order)
    )
    (cpu,) = lines(witnesses.measure_once)
    assert cpu[1] == "cpu" and cpu[2].endswith("GiB (for cuda)") and cpu[3] == cpu[4]
    assert cpu[5].endswith("%") and cpu[6] == "+0.00%"


def test_a_gpu_gives_one_line_with_all_three():
    (line,) = lines(lambda recipe: as_measured("measured", "cuda"))
    assert (
        line[1] == "cuda" and line[3] == line[4] and line[6] == "+0.00%" and line[5].endswith("%")
    )


def test_a_record_is_called_one():
    def run(recipe, recorded=None):
        return as_measured("recorded", "cuda") if recorded else as_measured("measured", "cpu")

    cuda, cpu = lines(run)
    assert cuda[4] == f"{cuda[3]} (recorded)" and "recorded" not in " ".join(cpu)


def test_no_measurement_leaves_gaps():
    def run(recipe):
        raise MeasurementError("no GPU, no record")

    (line,) = lines(run)
    assert line[4:] == ["–", "–", "–"] and line[3].endswith("GiB")


@pytest.mark.parametrize("status", ["oom", "error"])
def test_a_run_without_figures_says_why(status):
    (line,) = lines(lambda recipe: as_measured("measured", "cuda", status=status))
    assert line[4:] == [status, "–", "–"]
