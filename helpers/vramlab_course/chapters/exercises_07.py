"""Exercises of chapter 07, profiling and the allocator."""

from collections.abc import Callable, Sequence
from typing import Any

from vramlab.hardware.allocator import Allocator
from vramlab.hardware.expandable import ExpandableAllocator
from vramlab.hardware.gpu import find_gpu
from vramlab.report.report import MiB

from vramlab_course.chapters.chapter_07 import BUCKETS, LENGTHS

from ..answers import Choice, Judge, Mistake, Number, Table, Verdict
from ..exercises import Exercise

SPLITS = [(12, 1), (12, 2), (12, 3), (13, 4), (3, 5), (100, 7), (0, 2)]  # samples, workers
REQUESTS = (60, 61, 62, 63, 64)  # MiB
ORDER = (20, 44, 28, 60, 36, 52, 12, 68)  # MiB
A100 = find_gpu("A100 40GB")


def reserved_after(sizes: Sequence[int], allocator: Allocator) -> int:
    """MiB reserved after requests of `sizes` MiB, each freed before the next comes."""
    for size in sizes:
        allocator.free(allocator.malloc(size * MiB))
    return allocator.reserved // MiB


def both(sizes: Sequence[int] = REQUESTS) -> dict[str, int]:
    """The same for both kinds of segments."""
    return {name: reserved_after(sizes, kind()) for name, kind in KINDS.items()}


KINDS = {"default": Allocator, "expandable": ExpandableAllocator}


def judge_shard(answer: Callable[[list, int, int], Any]) -> Verdict:
    """Whether `answer(samples, worker, workers)` deals out every sample once."""
    if not callable(answer):
        return Verdict(False, f"A function was expected, not a {type(answer).__name__}.")
    for count, workers in SPLITS:
        samples = list(range(count))
        try:
            parts = [list(answer(list(samples), worker, workers)) for worker in range(workers)]
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return Verdict(False, f"It fails for {count} samples and {workers} workers: {said}.")
        seen = [sample for part in parts for sample in part]
        where = f"With {count} samples and {workers} workers"
        if len(seen) == count * workers and count and workers > 1:
            return Verdict(False, f"{where} every worker gives all samples: each comes {workers} times.")
        if twice := sorted({sample for sample in seen if seen.count(sample) > 1}):
            return Verdict(False, f"{where} sample {twice[0]} comes more than once.")
        if missing := sorted(set(samples) - set(seen)):
            return Verdict(False, f"{where} sample {missing[0]} never comes.")
        if max(map(len, parts)) - min(map(len, parts)) > -(-count // workers):
            return Verdict(False, f"{where} one worker does far more than another.")
    return Verdict(True, "Right: none twice, none missing, whatever the number of workers.")


def judge_order(answer: Sequence[int]) -> Verdict:
    """Whether these requests come in an order that reserves least."""
    try:
        order = [int(size) for size in answer]
    except (TypeError, ValueError):
        return Verdict(False, "A list of the eight sizes was expected.")
    if sorted(order) != sorted(ORDER):
        return Verdict(False, f"It has to be these eight sizes, each once: {', '.join(map(str, ORDER))}.")
    found, least = reserved_after(order, Allocator()), max(ORDER)
    if found == least:
        return Verdict(True, f"Right: {least} MiB reserved, what the largest needs. That is the warm-up's idea.")
    said = "A larger request never fits into the segment of a smaller one." if order[0] < least else ""
    return Verdict(False, f"{found} MiB are reserved in this order, and {least} would do. {said}".strip())


def padding_share(lengths: Sequence[int] = LENGTHS, buckets: Sequence[int] = ()) -> float:
    """Percent of the tokens that are padding, when all are padded to the longest or to the next bucket."""
    padded = [min(b for b in buckets if b >= n) if buckets else max(lengths) for n in lengths]
    return 100 * (1 - sum(lengths) / sum(padded))


def utilisation(tokens_per_second: float = 3000, weights: float = 7e9, per_weight: int = 6) -> float:
    """Percent of an A100's bf16 peak that a run's model operations are."""
    return 100 * per_weight * weights * tokens_per_second / A100.peak["bf16"]


EXERCISES = [
    Exercise(
        "07.1",
        "A training step computes for 80 ms. One process needs 200 ms to load a batch. How many DataLoader workers are "
        "the fewest with which the loop need not wait for data, once it runs?",
        difficulty=1,
        minutes=3,
        hints=(
            "In which time must one batch be ready, so that the next step can begin?",
            "w workers finish a batch every 200 / w ms. A worker is a whole process.",
        ),
        check=Number(
            3,
            unit="workers",
            mistakes=[
                Mistake(2, "Two finish a batch every 100 ms, and one is needed every 80 ms."),
                Mistake(2.5, "That is the ratio: half a worker does not exist."),
                Mistake(4, "They would do; is there a smaller number?"),
            ],
            right="three finish a batch every 67 ms.",
        ),
    ),
    Exercise(
        "07.2",
        "Write `shard(samples, worker, workers)`: the part of a list that worker number `worker` (from 0) of `workers` "
        "gives out. Together they give every sample once.",
        difficulty=2,
        minutes=6,
        hints=(
            "It must also work when the number of samples is no multiple of the number of workers.",
            "Every `workers`-th sample, beginning with a different one: a slice with a step does it.",
        ),
        check=Judge(
            judge_shard,
            rights=lambda: [
                lambda samples, worker, workers: samples[worker::workers],
                lambda samples, worker, workers: [s for i, s in enumerate(samples) if i % workers == worker],
            ],
            wrongs=lambda: [
                lambda samples, worker, workers: samples,
                lambda samples, worker, workers: samples[worker * (len(samples) // workers) :][
                    : len(samples) // workers
                ],
                lambda samples, worker, workers: samples[worker :: workers + 1],
                lambda samples, worker, workers: samples[worker:],
                "samples[worker::workers]",
            ],
        ),
    ),
    Exercise(
        "07.3",
        f"A step asks for {', '.join(map(str, REQUESTS))} MiB, each freed before the next comes. How many MiB are "
        "reserved at the end, by default and with expandable segments? Answer with a dictionary whose keys are "
        "'default' and 'expandable'.",
        difficulty=3,
        minutes=8,
        hints=(
            "By default a request of 10 MiB or more has a segment rounded up to 2 MiB. Which later one fits into it?",
            "Segments of 60, 62 and 64 MiB. Expandable: one stretch that grows in pages of 20 MiB.",
        ),
        check=Table(
            both,
            unit="MiB reserved",
            mistakes=[
                Mistake({"default": sum(REQUESTS)}, "61 MiB get a segment of 62, and the next request fits into that."),
                Mistake({"default": 64}, "A segment does not grow: 64 MiB do not fit into one of 62."),
                Mistake({"expandable": 64}, "Memory is put behind whole pages of 20 MiB."),
                Mistake({"expandable": 64 + 62 + 60}, "That is the default: here there is one stretch, and it grows."),
            ],
            right="three segments by default, four pages with expandable segments.",
        ),
    ),
    Exercise(
        "07.4",
        f"Padding this chapter's 24 lengths to the longest, how many percent of the tokens are padding? (The lengths "
        f"sum to {sum(LENGTHS):,}; the longest is {max(LENGTHS):,}.)",
        difficulty=2,
        minutes=4,
        hints=("How many tokens does the model compute in all 24 steps?", "1 − (real tokens) / (24 × longest)."),
        check=Number(
            padding_share,
            unit="%",
            mistakes=[
                Mistake(lambda: 100 - padding_share(), "That is the share of real tokens."),
                Mistake(lambda: padding_share(buckets=BUCKETS), "That is the share with buckets."),
                Mistake(lambda: padding_share() / 100, "That is the share as a fraction: percent are wanted."),
            ],
            right="memory that is flat, for operations on nothing.",
        ),
    ),
    Exercise(
        "07.5",
        "Each of these lines stands in a loop, after loss = loss_of(model, ids). Which one keeps the activations of all "
        "steps? Answer with its letter.\n"
        "a: losses.append(loss.item())\n"
        "b: loss.backward(); losses.append(loss.detach())\n"
        "c: losses.append(loss), and no backward\n"
        "d: loss.backward(); losses.append(loss)",
        difficulty=3,
        minutes=5,
        hints=(
            "What refers to the activations? When does that reference go?",
            "The graph behind the loss holds them, and backward() frees them as it goes through it.",
        ),
        check=Choice(
            "c",
            {
                "a": "a Python number knows nothing of a graph.",
                "b": "a detached tensor has no graph behind it.",
                "c": "the loss holds its graph, and the graph the activations, which backward would have freed.",
                "d": "backward freed them; the list keeps the loss and an empty graph, bytes rather than mebibytes.",
            },
        ),
    ),
    Exercise(
        "07.6",
        f"A model with 7 billion weights trains at 3,000 tokens a second on an {A100.name}, in bf16. What is its model "
        "FLOPs utilisation in percent, by 6 operations a weight and token?",
        difficulty=2,
        minutes=4,
        hints=(
            "Operations a second that the model needs, over those that the card promises (find_gpu).",
            f"6 · 7e9 · 3000 over {A100.peak['bf16']:.3g}.",
        ),
        check=Number(
            utilisation,
            unit="%",
            mistakes=[
                Mistake(lambda: utilisation(per_weight=2), "That is the forward pass alone."),
                Mistake(
                    lambda: utilisation(per_weight=8), "Eight would count a recomputation, which is not the model's."
                ),
                Mistake(lambda: utilisation() / 100, "That is the fraction: percent are wanted."),
            ],
            right="near the 46 % that PaLM's authors report.",
        ),
    ),
    Exercise(
        "07.7",
        f"Requests of {', '.join(map(str, ORDER))} MiB come one after the other, each freed before the next. Put them "
        "in an order, a list, in which the default allocator reserves least.",
        difficulty=3,
        minutes=4,
        hints=(
            "Which request can be served from a segment that is there?",
            "A segment serves everything smaller than itself.",
        ),
        check=Judge(
            judge_order,
            rights=lambda: [sorted(ORDER, reverse=True), [68, *(size for size in ORDER if size != 68)]],
            wrongs=lambda: [list(ORDER), sorted(ORDER), [68, 60], "descending"],
        ),
    ),
]
