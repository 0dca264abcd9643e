"""How right the tiers are: safe, likely and tight against what real processes took.

    # Published runs, the records, and PyTorch's own allocator on the stand-in: 6 minutes.
    python benchmarks/tiers.py
    # How often a reading lies below the likely context, and above the high one.
    python benchmarks/tiers.py contexts
    # Random plans that `plan_tasks.py run` trained on the stand-in.
    python benchmarks/tiers.py plans TASKS.json

A row is a run whose process, or whose segments and card, are known. Cards are drawn for it: of as
many bytes as lie between the ends of its interval, evenly. On a card where the answer is *safe* it
is right if the process fits, on those where it is *likely* too, and of those where it is *tight* at
least half should be too small. Widths are those of the interval over the process.
"""

import contextlib
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from vramlab import MiB, Recipe, RecipeError, find_gpu, predict, simulate
from vramlab.hardware.contexts import LESS, context_on, readings
from vramlab.hardware.gpu import gpu_names
from vramlab.hardware.overhead import rules_of
from vramlab.interfaces.measure_and_record import card_of
from vramlab.measurement.records import load, measurements_folder
from vramlab.report.report import TIERS, Interval, Report
from vramlab_course import published

ROOT = Path(__file__).parent.parent
STAND_IN = {
    "h200": "H200",
    "h100": "H100 SXM",
    "rtx-3090": "RTX 3090",
    "rtx-4090": "RTX 4090",
    "t4": "T4",
}
DRAWS = 200  # cards for a row
Row = tuple[Interval, int]  # what was said of the process, and what it took


def of_published(witness: str) -> Iterator[Row]:
    """Yield what a witness says of published runs, and what they reserved.

    Runs that do not say what they reserved are left out.

    Simulations are those that `benchmarks/published_runs.py --write` stored.
    """
    for run, stored in zip(
        published.runs(), published.json_of("published_results")["runs"], strict=True
    ):
        if run.reserved is None or (witness == "predict" and run.as_run):
            continue
        said = (
            Interval(*stored["reserved"])
            if witness == "simulate"
            else predict(run.recipe, gpu=run.gpu).reserved
        )
        yield said, run.reserved


def of_records(witness: Callable[..., Report]) -> Iterator[Row]:
    """Yield the records of GPUs, whose processes NVML measured."""
    for path in sorted(measurements_folder().glob("*.json")):
        for report in load(path).values():
            if report.status != "ok" or not report.process or report.recipe["torch_compile"]:
                continue
            card = card_of(report.environment)
            with rules_of(report.environment["torch"]), contextlib.suppress(RecipeError):
                yield witness(Recipe(**report.recipe), gpu=card).process, report.process


def of_stand_in() -> Iterator[Row]:
    """Yield predictions against what PyTorch's own allocator reserved without a limit.

    They are those of `tests/stand_in`.
    """
    for name, card in STAND_IN.items():
        for run in json.loads((ROOT / "tests" / "stand_in" / f"{name}.json").read_text())["runs"]:
            if run.get("reserved") and "evaluation" not in run:
                with contextlib.suppress(RecipeError):
                    yield predict(Recipe(**run["recipe"]), gpu=card).reserved, run["reserved"]


def judge(name: str, rows: list[Row], seed: int = 0) -> dict[str, float]:
    """Print how right each tier is over cards drawn for each row, and the intervals' widths.

    Return by tier the share of cards on which the process fits.
    """
    rng = random.Random(seed)
    said: dict[str, list[bool]] = {tier: [] for tier in TIERS}
    for needs, took in rows:
        for _ in range(DRAWS):
            # Up to a tenth above the interval, or "safe" would hardly ever be said.
            card = rng.uniform(needs.low, 1.1 * needs.high)
            said[needs.tier(int(card))].append(took <= card)
    low = sum(needs.value < took for needs, took in rows)
    above = sum(needs.high < took for needs, took in rows)
    width = statistics.median((needs.high - needs.low) / took for needs, took in rows)
    print(
        f"{name}: {len(rows)} runs; likely is low in {low}, at most in {above}; width "
        f"{width:.0%} (median)"
    )
    shares = {}
    for tier, right in said.items():
        shares[tier] = sum(right) / len(right)
        print(f"    {tier}: fits on {shares[tier]:.1%} of {len(right)} cards")
    return shares


def contexts() -> None:
    """Print how each reading lies in the interval of its card.

    The interval is from all readings, the reading itself among them.
    """
    # The others load less than a training step, or kernels that few models have.
    usual = [one for one in readings() if one.loaded not in (*LESS, "convolutions")]
    held = [
        (one, context_on(find_gpu(one.gpu), one.loaded, one.ranks))
        for one in usual
        if one.gpu in gpu_names()
    ]
    alone = [pair for pair in held if pair[0].ranks == 1]
    # Ranks that talk have buffers of NCCL beside the context.
    for name, pairs in (
        ("one rank", alone),
        ("several", [pair for pair in held if pair not in alone]),
    ):
        low = sum(needs.value < one.size for one, needs in pairs)
        above = sum(needs.high < one.size for one, needs in pairs)
        widths = [(needs.high - needs.low) / MiB for _, needs in pairs]
        print(f"{name}: {len(pairs)} readings; likely is low in {low}, high in {above}", end="; ")
        print(f"width {statistics.median(widths):.0f} MiB (median)")


def plans(path: Path) -> None:
    """Print of each tier how many random plans PyTorch's allocator held.

    It did so on a card with a context drawn from the table.
    """
    tasks = [task for task in json.loads(path.read_text()) if "allocated" in task]
    for tier in TIERS:
        of_tier = [task for task in tasks if task["tier"] == tier]
        died = sum(not task["allocated"] for task in of_tier)
        print(f"{tier}: {len(of_tier)} plans, {died} out of memory")


SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "predict, PyTorch's allocator on the stand-in": of_stand_in,
    "predict, records": partial(of_records, predict),
    "predict, published": partial(of_published, "predict"),
    "simulate, records": partial(of_records, simulate),
    "simulate, published": partial(of_published, "simulate"),
}


def main() -> None:
    contexts()
    for name, rows in SOURCES.items():
        judge(name, list(rows()))


if __name__ == "__main__":
    mode, *rest = sys.argv[1:] or ["main"]
    {"main": main, "contexts": contexts, "plans": plans}[mode](*map(Path, rest))
