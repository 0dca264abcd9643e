"""`simulate` against torch's own MemTracker on the same models: seconds, their ratio, and peaks.

    python benchmarks/simulate_vs_memtracker.py           # minutes, most of them MemTracker's
    python benchmarks/simulate_vs_memtracker.py --quick   # without Llama 3.1 8B

Both run the same `train_step` on fake tensors, twice, with multi-tensor AdamW. MemTracker's step
runs on fake CPU tensors, so it describes CPU kernels without rounding: its peak has to be held
against "peak (cpu)", which is `simulate(target="cpu")` with the same optimizer; "peak (cuda)" is
what a GPU would hold.
"""

import argparse
import dataclasses
import gc
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from vramlab import Recipe, simulate
from vramlab.report.report import format_bytes, text_table
from vramlab.training.training import build, train_step

RECIPES = [
    Recipe("gpt2", batch_size=4, seq_len=512),
    Recipe("polyglot-ko-1.3b", batch_size=4, seq_len=256, precision="fp16-true"),
    Recipe("llama-3.1-8b", batch_size=1, seq_len=1024, precision="bf16-true"),
]


def by_memtracker(recipe: Recipe, steps: int = 2) -> int:
    """The peak in bytes that `MemTracker` finds for `steps` optimizer steps of `recipe`."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        training = build(recipe, "cpu", target="cuda")
        tracker = MemTracker()
        # What exists before the tracker is entered has to be named.
        tracker.track_external(training.model, training.optimizer)
        with tracker:
            for _ in range(steps):
                train_step(training)
                tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    return peak[torch.device("cpu")]["Total"]


def timed(function, *args, **options):
    """(seconds, result) of one call, garbage of earlier ones collected before."""
    gc.collect()
    started = time.perf_counter()
    result = function(*args, **options)
    return time.perf_counter() - started, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the largest model")
    recipes = RECIPES[: -1 if parser.parse_args().quick else None]
    simulate(Recipe("gpt2", seq_len=8, num_layers=1))  # imports are nobody's time
    rows = [
        ("recipe", "simulate", "MemTracker", "ratio", "peak (cuda)", "peak (cpu)", "MemTracker")
    ]
    for recipe in recipes:
        seconds, report = timed(simulate, recipe)
        # On a CPU AdamW goes through its tensors one by one unless it is told otherwise, and
        # MemTracker's was built as for CUDA.
        same_loop = recipe.replace(loop=dataclasses.replace(recipe.loop, foreach=True))
        on_cpu = simulate(same_loop, "cpu").peak.total
        theirs, peak = timed(by_memtracker, recipe)
        rows.append(
            (
                str(recipe),
                f"{seconds:.2f} s",
                f"{theirs:.1f} s",
                f"{theirs / seconds:.0f}×",
                format_bytes(report.peak.total),
                format_bytes(on_cpu),
                format_bytes(peak),
            )
        )
        # As each is done, since the last one takes minutes.
        print(text_table([rows[0], rows[-1]]), flush=True)
    print()
    print(text_table(rows))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
