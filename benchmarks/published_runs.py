"""simulate and predict against training runs on real GPUs that others measured and published.

    python benchmarks/published_runs.py            # each with what its script or its transformers did differently
    python benchmarks/published_runs.py --plainly  # all as the installed transformers would run them

One line a run: the peak of `torch.cuda.max_memory_allocated()`, how far simulate and predict are off, and the same of
reserved segments. predict describes plain runs only, so it is left out where a script or an older library differed.
"""

import argparse
import statistics

from vramlab import predict, simulate
from vramlab.report.report import GiB, text_table
from vramlab_course.published import runs


def main(plainly: bool) -> None:
    rows = [("run", "allocated", "simulate", "predict", "reserved", "simulate")]
    errors = {"simulate, allocated": [], "predict, allocated": [], "simulate, reserved": []}
    found = runs()
    for run in found:
        as_run = None if plainly else run.as_run
        simulated = simulate(run.recipe, gpu=run.gpu, as_run=as_run)
        row = [f"{run.gpu}: {run.recipe}" + (f" · {as_run}" if as_run else ""), f"{run.allocated / GiB:.3f} GiB"]
        row.append(note(errors["simulate, allocated"], simulated.peak.total / run.allocated - 1))
        plain = predict(run.recipe, gpu=run.gpu).peak.total / run.allocated - 1
        row.append("" if run.as_run else note(errors["predict, allocated"], plain))
        row.append(f"{run.reserved / GiB:.3f} GiB" if run.reserved else "")
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
            f"{name}: {len(sizes)} runs, mean {statistics.mean(sizes):.3%}, median {statistics.median(sizes):.3%}, "
            f"worst {max(sizes):.2%}, under by more than 1 % in {sum(error < -0.01 for error in all_of)}"
        )
    print(*sorted({run.made_with for run in found}), sep="\n")


def note(errors: list[float], error: float) -> str:
    """Remember the error, and how it is written."""
    errors.append(error)
    return f"{error:+.2%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--plainly", action="store_true", help="leave out what a script or an older library differed in"
    )
    main(parser.parse_args().plainly)
