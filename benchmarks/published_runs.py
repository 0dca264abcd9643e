"""simulate and predict against training runs on real GPUs that others measured and published.

    python benchmarks/published_runs.py            # each with what its script, or its
                                                   # transformers, did differently
    python benchmarks/published_runs.py --plainly  # all as the installed transformers runs them
    python benchmarks/published_runs.py --write    # store both in data/, for the site's page of
                                                   # accuracy and the picture

One line a run: the peak of `torch.cuda.max_memory_allocated()`, how far simulate and predict are
off, and the same of reserved segments. predict describes plain runs only, so it is left out where a
script or an older library differed.
"""

import argparse
import json
import statistics
from importlib.metadata import version

from vramlab import predict, simulate
from vramlab.base.data import data_path
from vramlab.report.report import GiB, text_table
from vramlab.simulation.as_run import simulate_as_run
from vramlab_course.published import runs


def main(plainly: bool) -> None:
    rows = [("run", "allocated", "simulate", "predict", "reserved", "simulate")]
    errors = {"simulate, allocated": [], "predict, allocated": [], "simulate, reserved": []}
    found = runs()
    for run in found:
        as_run = None if plainly else run.as_run
        simulated = simulate_as_run(run.recipe, as_run, run.use_reentrant, gpu=run.gpu)
        row = [
            f"{run.gpu}: {run.recipe}" + (f" · {as_run}" if as_run else ""),
            f"{run.allocated / GiB:.3f} GiB",
        ]
        row.append(note(errors["simulate, allocated"], simulated.peak.total / run.allocated - 1))
        plain = predict(run.recipe, gpu=run.gpu).peak.total / run.allocated - 1
        row.append("" if run.as_run else note(errors["predict, allocated"], plain))
        row.append(f"{run.reserved / GiB:.3f} GiB" if run.reserved else "")
        # Not every source says what was reserved.
        off = simulated.reserved.value / run.reserved - 1 if run.reserved else 0.0
        row.append(note(errors["simulate, reserved"], off) if run.reserved else "")
        rows.append(tuple(row))
    print(text_table(rows))
    differed = sum(bool(run.as_run) for run in found)
    print(
        f"{differed} of {len(found)} runs differed from a plain one:",
        "left out" if plainly else "put in place by as_run",
    )
    for name, all_of in errors.items():
        sizes = [abs(error) for error in all_of]
        print(
            f"{name}: {len(sizes)} runs, mean {statistics.mean(sizes):.3%}, median "
            f"{statistics.median(sizes):.3%}, "
            f"worst {max(sizes):.2%}, under by more than 1 % in "
            f"{sum(error < -0.01 for error in all_of)}"
        )
    print(*sorted({run.made_with for run in found}), sep="\n")


def write() -> None:
    """Store every run's bytes by each witness in `data/published_results.json`.

    With them come the versions that said them.
    """
    found = []
    for run in runs():
        simulated = simulate_as_run(run.recipe, run.as_run, run.use_reentrant, gpu=run.gpu)
        # Without `as_run` both are the same simulation, which takes seconds.
        plain = simulate(run.recipe, gpu=run.gpu) if run.as_run else simulated
        found.append(
            {
                "simulated": simulated.peak.total,
                "reserved": [
                    simulated.reserved.low,
                    simulated.reserved.value,
                    simulated.reserved.high,
                ],
                "plainly": plain.peak.total,
                "reserved_plainly": plain.reserved.value,
                "predicted": predict(run.recipe, gpu=run.gpu).peak.total,
            }
        )
    versions = {
        name: version(name).partition("+")[0]
        for name in ("torch", "transformers", "peft", "bitsandbytes")
    }
    # A line for each run, so that a change of one is a change of one line.
    lines = ",\n".join(json.dumps(entry) for entry in found)
    text = f'{{"made_with": {json.dumps(versions)},\n"runs": [\n{lines}\n]}}\n'
    data_path("published_results.json").write_text(text, encoding="utf-8")


def note(errors: list[float], error: float) -> str:
    """Remember the error, and how it is written."""
    errors.append(error)
    return f"{error:+.2%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--plainly",
        action="store_true",
        help="leave out what a script or an older library differed in",
    )
    parser.add_argument(
        "--write", action="store_true", help="store all results in data/published_results.json"
    )
    given = parser.parse_args()
    if given.write:
        write()
    else:
        main(given.plainly)
