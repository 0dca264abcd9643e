"""A deep model's history from two shallow ones, to the byte.

A transformer is the same layer again and again, so between two depths the step's sequence of operators differs only by
repeated blocks. Align the two sequences: at each pair of moments the bytes alive are affine in the number of layers
(each layer adds its parameters, its gradients, its states, what it keeps for backward), so they are known at any depth.
Between the aligned moments lie the layers in the middle, whose bytes run affinely from the first to the last,
so no peak hides there. If the sequences do not align, there is no answer and the caller runs the full depth.
"""

from dataclasses import dataclass

import numpy as np

from .history import INDEX, History, largest, merge, to_bytes
from .report import Bytes, Moment, Phase, Tensor

WINDOW = 16


class NotAffine(Exception):
    """The two histories do not differ by repeated blocks alone."""


@dataclass
class Slots:
    """One stretch of a history, an operator call a slot: positions of its highest moment and its end."""

    signatures: list[tuple]
    tops: list[int]
    ends: list[int]


def slots(history: History, start: int, end: int, calls: list[tuple[int, tuple]]) -> Slots:
    """The stretch start…end cut at operator calls; what precedes the first call is a slot of its own."""
    cuts = [start, *(position for position, _ in calls), end]
    signatures = [("begin",), *(signature for _, signature in calls)]
    tops = [history.highest(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    return Slots(signatures, tops, cuts[1:])


def align(short: list[tuple], long: list[tuple]) -> list[tuple[int, int]]:
    """Pairs of equal moments of two sequences, `long` being `short` with some of its blocks repeated more often.

    A block's last repetitions are paired twice, counted from its beginning and from its end. Raises NotAffine.
    """
    pairs, i, j = [], 0, 0
    while i < len(short):
        if j < len(long) and short[i] == long[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        gap = _gap(short, long, i, j)
        back = 1
        while i - back >= 0 and short[i - back] == long[j + gap - back]:
            pairs.append((i - back, j + gap - back))
            back += 1
        j += gap
    if j != len(long):
        pairs += _tail(short, long)
    return pairs


def _gap(short: list[tuple], long: list[tuple], i: int, j: int) -> int:
    """How many further entries the repeated block takes in `long` before the sequences agree again."""
    window = short[i : i + WINDOW]
    for gap in range(1, len(long) - len(short) + 1):
        if long[j + gap : j + gap + len(window)] == window:
            return gap
    raise NotAffine(f"the sequences part at {short[i]} and do not meet again")


def _tail(short: list[tuple], long: list[tuple]) -> list[tuple[int, int]]:
    """The repeated block is the last thing in both: pair from the end."""
    extra, back = len(long) - len(short), 1
    pairs = []
    while back <= len(short) and short[-back] == long[-back]:
        pairs.append((len(short) - back, len(long) - back))
        back += 1
    if extra <= 0 or not pairs:
        raise NotAffine("the sequences end differently")
    return pairs


@dataclass
class Deep:
    """A history at a depth that was not run. Same questions as `History`, answered from two that were."""

    phases: dict[str, Phase]
    peak: Bytes
    peak_phase: str
    largest: list[Tensor]
    timeline: list[Moment]


def extrapolate(short: History, long: History, depths: tuple[int, int], depth: int, unit: int = 1) -> Deep:
    """What a history at `depth` layers would say, from those at `depths`. Raises NotAffine.

    `unit` is what the allocator rounds to, in bytes.
    """
    step = depths[1] - depths[0]
    ahead = depth - depths[0]
    if [s[0] for s in short.stretches] != [s[0] for s in long.stretches] or ahead % step:
        raise NotAffine("the phases differ")
    factor = ahead // step

    def at(a, b):
        return a + (b - a) * factor

    def split(p: int, q: int) -> np.ndarray:
        """The bytes at a pair of positions; a vector with one entry a parameter is rounded after, not before."""
        row = at(short.splits[p], long.splits[q])
        taken, asked = at(short.ragged[p], long.ragged[q])
        if asked:
            row[INDEX["temporaries"]] += -(-asked // unit) * unit - taken
        return row

    cut = [_calls_by_stretch(h) for h in (short, long)]
    stretches, timeline, best = [], [], None
    offset = 0
    first_of_last = len(short.stretches) - len(short.last_step)
    for index, ((name, s0, s1), (_, l0, l1)) in enumerate(zip(short.stretches, long.stretches, strict=True)):
        a, b = slots(short, s0, s1, cut[0][index]), slots(long, l0, l1, cut[1][index])
        pairs = align(a.signatures, b.signatures)
        tops = np.array([split(a.tops[i], b.tops[j]) for i, j in pairs])
        top = int(np.argmax(tops.sum(axis=1)))
        end = split(s1, l1)
        stretches.append((name, to_bytes(tops[top]), to_bytes(end)))
        if best is None or stretches[-1][1].total > best[0].total:
            i, j = pairs[top]
            best = (stretches[-1][1], name, a.tops[i], b.tops[j])
        if index >= first_of_last:
            moments = {}
            for (i, j), row in zip(pairs, tops, strict=True):
                moments[offset + at(a.tops[i] - s0, b.tops[j] - l0)] = row
                moments[offset + at(a.ends[i] - s0, b.ends[j] - l0)] = split(a.ends[i], b.ends[j])
            timeline += [Moment(x, name, to_bytes(moments[x])) for x in sorted(moments)]
            offset += at(s1 - s0, l1 - l0)
    load = stretches[0][2]
    phases = {"load": Phase(load, load), **merge(stretches[first_of_last:])}
    tensors = _largest(short.groups(best[2]), long.groups(best[3]), at)
    return Deep(phases, best[0], best[1], tensors, _thin(timeline))


def _calls_by_stretch(history: History) -> list[list[tuple[int, tuple]]]:
    result: list[list] = [[] for _ in history.stretches]
    for position, signature, stretch in history.calls:
        result[stretch].append((position, signature))
    return result


def _largest(short: dict[tuple, list], long: dict[tuple, list], at) -> list[Tensor]:
    keys = dict.fromkeys([*long, *short])
    counted = {k: (at(len(short.get(k, [])), len(long.get(k, []))), (short.get(k) or long[k])[0].where) for k in keys}
    return largest(counted)


def _thin(moments: list[Moment], points: int = 400) -> list[Moment]:
    """About `points` of the moments: the highest and lowest of each window, and the ends."""
    if len(moments) <= points:
        return moments
    width = len(moments) * 2 // points
    chosen = {0, len(moments) - 1}
    for left in range(0, len(moments), width):
        window = range(left, min(left + width, len(moments)))
        chosen |= {max(window, key=lambda i: moments[i].bytes.total), min(window, key=lambda i: moments[i].bytes.total)}
    return [moments[i] for i in sorted(chosen)]
