"""What whole training steps reach of a card's rates; `step_time.py` says how they were fitted."""

from typing import NamedTuple


class Rates(NamedTuple):
    """What whole training steps reach on a card."""

    matmuls: float  # share of the peak, U
    attention: float  # share of the peak in a fused kernel, W
    memory: float  # share of the bandwidth, V
    issue: float  # seconds that the host takes for an operator, τ


RATES = {
    "T4": Rates(0.417, 0.0574, 0.884, 47.7e-6),
    "H100 SXM": Rates(0.849, 0.164, 0.651, 42e-6),
}
USUAL = Rates(0.595, 0.0971, 0.759, 44.8e-6)  # the geometric mean of both, for other cards
# Measured over estimated seconds of nine tenths of the runs, (least, most): each model left out of
# the fit in turn; for other cards each of the two cards by the other's rates.
SPREAD = {"T4": (0.79, 1.19), "H100 SXM": (0.72, 1.42)}
SPREAD_ELSEWHERE = (0.55, 1.36)
BASIS = {
    "T4": "fitted to 61 published runs on a T4",
    "H100 SXM": "fitted to our records of an H100",
}
_MIDDLE = "the middle of what a T4 and an H100 reach"
ASSUMED = f"uncalibrated: {_MIDDLE}; the interval is that of each by the other"
