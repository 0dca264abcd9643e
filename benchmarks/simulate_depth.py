"""How much longer `simulate` takes for Llama 3.1 405B than for its first four layers.

It prints CPU seconds of both, by turns in one process, and their ratio.

    python benchmarks/simulate_depth.py    # some seconds

The deep model is run with three of its 126 layers, and the log of those is lengthened to 70,000
events.
"""

import gc
import time

from vramlab import Recipe, simulate

DEEP = Recipe("llama-3.1-405b", batch_size=1, seq_len=512)
MODELS = {"126 layers": DEEP, "4 layers": DEEP.replace(num_layers=4)}
ROUNDS = 9


def seconds(recipe: Recipe) -> float:
    """CPU seconds of one simulation."""
    # Or the garbage of the one before would be collected in this one's time.
    gc.collect()
    start = time.process_time()
    simulate(recipe)
    return time.process_time() - start


def main() -> None:
    for recipe in MODELS.values():
        simulate(recipe)  # loads the libraries
    rounds = [[seconds(recipe) for recipe in MODELS.values()] for _ in range(ROUNDS)]
    ratios = sorted(deep / shallow for deep, shallow in rounds)
    for name, times in zip(MODELS, zip(*rounds, strict=True), strict=True):
        print(f"{name}: {min(times):.3f} s at least")
    print(
        f"ratio: {ratios[ROUNDS // 2]:.2f} in the middle of {ROUNDS} rounds, {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}"
    )


if __name__ == "__main__":
    main()
