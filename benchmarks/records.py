"""simulate and predict against the records of real GPUs in `data/measurements/`.

    python benchmarks/records.py [EVERY]

With EVERY, one record in so many. A line for each figure: what the allocator counted on the card,
and how far off the witnesses are. Torch's version decides what cuBLAS's workspaces take, so each
figure stands twice: by the rules of the torch that the record names, and by those of the installed
one. Compiled steps are apart: simulate describes the eager one.
"""

import contextlib
import sys

from error_summary import summary
from vramlab import Recipe, RecipeError, predict, simulate
from vramlab.hardware.overhead import rules_of
from vramlab.interfaces.measure_and_record import card_of
from vramlab.measurement.records import load, measurements_folder
from vramlab.report.report import Report, environment


def errors(report: Report, torch: str) -> dict[str, float]:
    """The relative error of each figure by the rules of a version of torch.

    Those that a witness refuses are left out.
    """
    recipe = Recipe(**report.recipe)
    card = card_of(report.environment)
    with rules_of(torch):
        said = simulate(recipe, gpu=card)
        figures = {
            "simulate, asked for": (said.requested, report.requested),
            "simulate, allocated": (said.allocated, report.allocated),
            "simulate, reserved": (said.reserved.value, report.reserved),
            "simulate, the whole process": (said.process.value, report.process),
        }
        # predict refuses what has no formula, such as a model that it does not know.
        with contextlib.suppress(RecipeError):
            figures["predict, allocated"] = (predict(recipe, gpu=card).peak.total, report.allocated)
    # Not every record has each figure: without NVML there is no process.
    return {name: a / b - 1 for name, (a, b) in figures.items() if b}


def by_card() -> dict[str, list[Report]]:
    """Return all reports by their card and versions, of whichever file."""
    found: dict[str, list[Report]] = {}
    for path in sorted(measurements_folder().glob("*.json")):
        for report in load(path).values():
            held = report.environment
            card = f"{held['gpu']}, torch {held['torch']}, driver {held['driver']}"
            found.setdefault(card, []).append(report)
    return found


def main(every: int = 1) -> None:
    for card, reports in by_card().items():
        print(card)
        # Out of memory has no peak to compare.
        measured = [report for report in reports if report.status == "ok"][::every]
        own = reports[0].environment["torch"]
        # Once where both are the same version.
        for torch in dict.fromkeys((own, environment()["torch"])):
            groups: dict[str, list[tuple[float, str]]] = {}
            for report in measured:
                kind = "compiled: " if report.recipe["torch_compile"] else ""
                for name, error in errors(report, torch).items():
                    groups.setdefault(kind + name, []).append((error, report.title))
            print(f"  by the rules of torch {torch}")
            for name, found in groups.items():
                print(f"    {name}: {summary(found)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
