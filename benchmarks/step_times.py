"""The estimate of a step's seconds against measured step times, and the fit of its constants.

    python benchmarks/step_times.py

61 published runs on a T4 (those of `data/published_runs.json` that state seconds and ran as
`predict` describes them, 26 of them with repeated keys) and our records of an H100
(`data/measurements`: on one card, not compiled) give for each card U, the share of the peak that
matrix products reach, W, that in a fused kernel of attention, V, that of the bandwidth, and τ, the
seconds that the host takes for an operator; the H100 also σ, what bitsandbytes' optimizers wait for
each tensor: least squares of the logarithm of estimated over measured seconds. To see what a fit is
worth on a model that it has not seen, it is repeated without each model in turn.
"""

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


def summary(found: Sequence[float]) -> str:
    """Mean and worst error of the estimate, relative to the measured seconds.

    With them comes the spread of nine tenths.
    """
    # Ratios are measured over estimated, and the error is the estimate's.
    off = [abs(1 / ratio - 1) for ratio in found]
    least, most = spread(found)
    return (
        f"{len(found)} runs, off by {statistics.mean(off):.1%} on average, {max(off):.0%} at "
        f"worst; "
        f"nine tenths measured {least:.2f} to {most:.2f} times the estimate"
    )


def main() -> None:
    for card in CARDS:
        # What the data say now beside what step_time.py has, so that a drift is seen.
        for label, (u, w, v, issue, waiting) in (
            ("fitted", fit(chosen(card))),
            ("in use", in_use(card)),
        ):
            shares = f"U = {u:.3f}, W = {w:.4f}, V = {v:.3f}"
            print(
                f"{card}, {label}: {shares}, τ = {issue * 1e6:.1f} µs, σ = {waiting * 1e6:.0f} µs"
            )
        print(f"{card}, fitted: {summary(ratios(chosen(card), fit(chosen(card))))}")
        print(f"{card}, model held out: {summary([ratio for _, ratio in held_out(card)])}")
    print(f"card held out: {summary(elsewhere())}")


if __name__ == "__main__":
    main()
