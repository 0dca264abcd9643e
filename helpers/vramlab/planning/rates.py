"""What whole training steps reach of a card's rates; `step_time.py` says how they were fitted."""

from typing import NamedTuple


class Rates(NamedTuple):
    """What whole training steps reach on a card."""

    matmuls: float  # share of the peak, U
    attention: float  # share of the peak in a fused kernel, W
    memory: float  # share of the bandwidth, V
    issue: float  # seconds that the host takes for a call, τ
    # These two are an H100's, and assumed of other cards.
    waiting: float = 67.2e-6  # seconds that bitsandbytes' optimizers wait after a tensor, σ
    # Operations at the peak in fp32 that take as long as the search of an 8-bit state's code, ρ: an
    # H100 updates 36 billion numbers with two such states in a second.
    searching: float = 941.0


RATES = {
    "T4": Rates(0.417, 0.0574, 0.884, 19.6e-6),
    "H100 SXM": Rates(0.831, 0.2, 0.678, 17.5e-6),
    "H200": Rates(0.83, 0.688, 0.587, 15.8e-6),
}
# For other cards, the geometric mean of what a T4 and an H100 reach.
USUAL = Rates(0.589, 0.107, 0.774, 18.5e-6)
# Measured over estimated seconds of nine tenths of the runs, (least, most): each model left out of
# the fit in turn; for other cards each of the two cards by the other's rates.
SPREAD = {"T4": (0.79, 1.19), "H100 SXM": (0.78, 1.34), "H200": (0.71, 1.39)}
SPREAD_ELSEWHERE = (0.56, 1.35)
BASIS = {
    "T4": "fitted to 61 published runs on a T4",
    "H100 SXM": "fitted to our records of an H100",
    "H200": "fitted to our records of an H200",
}
_MIDDLE = "the middle of what a T4 and an H100 reach"
ASSUMED = f"uncalibrated: {_MIDDLE}; the interval is that of each by the other"
