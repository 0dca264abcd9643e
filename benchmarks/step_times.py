"""The estimate of a step's seconds against measured step times, and the fit of its constants.

    python benchmarks/step_times.py

61 published runs on a T4 (those of `data/published_runs.json` that state seconds and ran as
`predict` describes them, 26 of them with repeated keys) and our records of an H100 and an H200
(`data/measurements`: on one card, not compiled, nothing offloaded) give for each card U, the share
of the peak that matrix products reach, W, that in a fused kernel of attention, V, that of the
bandwidth, and τ, the seconds that the host takes for a call: least squares of the logarithm of
estimated over measured seconds. Pairs of an H100's records that differ in the optimizer alone give
σ, what bitsandbytes' optimizers wait for each tensor, and ρ, what they search for each 8-bit state.
To see what a fit is worth on a model that it has not seen, it is repeated without each model in
turn. Runs that differ in one switch say what an estimate of that switch is worth.
"""

import itertools
import statistics
from collections.abc import Sequence

from vramlab_course.step_times import (
    CARDS,
    chosen,
    elsewhere,
    fit,
    held_out,
    in_use,
    ratios,
    spread,
)

# A switch to the fields of a recipe that it turns.
SWITCHES = {
    "4 bits": ("quantization", "dtype"),
    "checkpointing": ("gradient_checkpointing",),
    "optimizer": ("optim",),
    "precision": ("precision", "dtype"),
    "attention": ("attn_implementation",),
}


def summary(found: Sequence[float]) -> str:
    """Median, mean and worst error of the estimate, relative to the measured seconds.

    With them come what nine tenths do not exceed, and the spread of nine tenths.
    """
    # Ratios are measured over estimated, and the error is the estimate's.
    off = sorted(abs(1 / ratio - 1) for ratio in found)
    least, most = spread(found)
    return (
        f"{len(off)} runs, off by {statistics.median(off):.1%} (median), "
        f"{statistics.mean(off):.1%} on average, {off[9 * len(off) // 10]:.0%} (nine tenths), "
        f"{off[-1]:.0%} at worst; "
        f"nine tenths measured {least:.2f} to {most:.2f} times the estimate"
    )


def in_pairs(card: str, switch: Sequence[str]) -> list[tuple[float, float]]:
    """(measured, estimated) ratio of the seconds of runs that differ in the fields `switch` alone.

    The estimates are by the rates in use.
    """
    alike: dict[str, dict[str, tuple[float, float]]] = {}
    found = chosen(card)
    for run, ratio in zip(found, ratios(found, in_use(card)), strict=True):
        fields = {name: str(value) for name, value in run.recipe.to_dict().items()}
        turned = str([fields.pop(name, "") for name in switch])
        alike.setdefault(str(fields), {})[turned] = (run.seconds, run.seconds / ratio)
    pairs = []
    for group in alike.values():
        # In the order of the words, so that a switch is turned the same way in each.
        steps = [group[turned] for turned in sorted(group)]
        for (took, said), (its, other) in itertools.combinations(steps, 2):
            pairs.append((its / took, other / said))
    return pairs


def about_pairs(card: str, switch: str) -> str:
    """How far off the estimated ratio of pairs is that differ in `switch`; "" without pairs."""
    pairs = in_pairs(card, SWITCHES[switch])
    if not pairs:
        return ""
    off = [abs(estimated / measured - 1) for measured, estimated in pairs]
    told = [(measured > 1) == (estimated > 1) for measured, estimated in pairs]
    right = f"{sum(told)} of {len(told)} pairs in the right order"
    return f"{card}, {switch}: {right}, their ratio off by {statistics.median(off):.0%} (median)"


def main() -> None:
    for card in CARDS:
        # What the data say now beside what step_time.py has, so that a drift is seen.
        for label, (u, w, v, issue, waiting, searching) in (
            ("fitted", fit(chosen(card))),
            ("in use", in_use(card)),
        ):
            shares = f"U = {u:.3f}, W = {w:.4f}, V = {v:.3f}"
            print(
                f"{card}, {label}: {shares}, τ = {issue * 1e6:.1f} µs, "
                f"σ = {waiting * 1e6:.0f} µs, ρ = {searching:.0f}"
            )
        print(f"{card}, fitted: {summary(ratios(chosen(card), fit(chosen(card))))}")
        print(f"{card}, model held out: {summary([ratio for _, ratio in held_out(card)])}")
        for switch in SWITCHES:
            if line := about_pairs(card, switch):
                print(line)
    print(f"T4 and H100, each by the other's: {summary(elsewhere())}")


if __name__ == "__main__":
    main()
