"""Exercises of chapter 00, know your machine."""

from math import ceil, floor

from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import Recipe

from ..answers import Choice, Function, Mistake, Number, Table
from ..exercises import Exercise
from ..roofline import attainable
from ..topology import NVLINK, Topology, bytes_sent, parse_topology

GPT2 = Recipe("gpt2").shape.num_parameters
LLAMA = Recipe("llama-3.1-8b").shape.num_parameters
DRIVE = 7e9  # bytes a second that a fast PCIe 4.0 drive reads
BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      NV4     PHB     SYS     PHB     0-15            0
GPU1    NV4      X      PHB     SYS     PHB     0-15            0
GPU2    PHB     PHB      X      SYS     PHB     0-15            0
GPU3    SYS     SYS     SYS      X      SYS     16-31           1
NIC0    PHB     PHB     PHB     SYS      X
"""
CARDS = [find_gpu(name) for name in ("T4", "RTX 4090", "A100", "H200")]
POINTS = [
    dict(intensity=intensity, peak=card.flops("fp16"), bandwidth=card.bandwidth)
    for card in CARDS
    for intensity in (1, 1000)
]


def counted(found: Topology) -> dict[str, int]:
    """What exercise 00.3 asks of a matrix."""
    pairs = [(a, b) for i, a in enumerate(found.gpus) for b in found.gpus[i + 1 :]]
    return {
        "pairs of GPUs": len(pairs),
        "pairs with NVLink": sum(found.nvlinks(*pair) > 0 for pair in pairs),
        "pairs across NUMA nodes": sum(found.codes[pair] == "SYS" for pair in pairs),
    }


def cables(watts: int) -> int:
    """8-pin cables that a card of so many watts needs beside its slot."""
    return max(0, ceil((watts - 75) / 150))


def sent_for(choice: str) -> float:
    """Bytes that a GPU of E's run sends for each micro-batch after a change."""
    size = {"fp16 gradients": 2, "ZeRO-1": 4, "four micro-batches a step": 4}[choice] * GPT2
    method = "ZeRO-1" if choice == "ZeRO-1" else "DDP"
    return bytes_sent(method, size, 2) / (4 if choice == "four micro-batches a step" else 1)


EXERCISES = [
    Exercise(
        "00.1",
        f"GPT-2 ({GPT2:,} parameters) is trained with DDP on four GPUs, fp32 gradients. How many bytes does each GPU "
        "send in a step, if a ring averages the gradients?",
        difficulty=1,
        minutes=4,
        hints=(
            "An all-reduce is two rounds; in each a GPU sends all pieces but one.",
            "2 · (N − 1)/N times the bytes of the gradients.",
        ),
        check=Number(
            lambda: bytes_sent("DDP", 4 * GPT2, 4),
            mistakes=[
                Mistake(
                    lambda: 4 * GPT2 * 3 / 4, "That is one round: gradients are added up, but nobody has them all."
                ),
                Mistake(lambda: 2 * 4 * GPT2, "Almost: a GPU does not send the piece that it ends with itself."),
                Mistake(lambda: 4 * GPT2, "Those are the gradients' bytes; a ring of four sends more."),
                Mistake(
                    lambda: 2 * 3 * 4 * GPT2, "No GPU sends everything to every other one: that is why rings exist."
                ),
            ],
            right="however many GPUs there are, it is never more than twice the gradients.",
        ),
    ),
    Exercise(
        "00.2",
        "Two RTX 3090 show NV4 in nvidia-smi topo -m. How many GB/s (10⁹ bytes a second) can one send to the other?",
        difficulty=1,
        minutes=3,
        hints=("Section 5 has what one link of that generation carries.", "Four links of 14.0625 GB/s, one direction."),
        check=Number(
            lambda: NVLINK["RTX 3090"][1] * NVLINK["RTX 3090"][2] / 1e9,
            unit="GB/s",
            mistakes=[
                Mistake(
                    lambda: find_gpu("RTX 3090").nvlink / 1e9, "That is both directions together, as datasheets do."
                ),
                Mistake(lambda: NVLINK["RTX 3090"][2] / 1e9, "That is one link of four."),
                Mistake(100, "25 GB/s a link is what the third generation has in an A100; GA102 has less."),
            ],
            right="the same code NV4 on a P100 would be 80 GB/s: the generation counts too.",
        ),
    ),
    Exercise(
        "00.3",
        "Read this matrix and answer with a dictionary whose keys are "
        f"{', '.join(map(repr, counted(parse_topology(BRIDGED))))}."
        f"\n{BRIDGED.rstrip()}",
        difficulty=2,
        minutes=5,
        hints=(
            "Each pair stands in it twice: look above the diagonal only, and leave the network card out.",
            "Four GPUs make six pairs; SYS is the path from one NUMA node to another.",
        ),
        check=Table(
            lambda: counted(parse_topology(BRIDGED)),
            unit="pairs",
            tolerance=0.0,
            mistakes=[
                Mistake({"pairs of GPUs": 12}, "Each pair was counted twice: the matrix is symmetric."),
                Mistake({"pairs of GPUs": 10}, "The network card is no GPU."),
                Mistake({"pairs with NVLink": 4}, "NV4 is one pair with four links, not four pairs."),
                Mistake({"pairs across NUMA nodes": 4}, "The network card is no GPU."),
            ],
            right="train on GPU0 and GPU1; whoever takes all four waits for SYS.",
        ),
    ),
    Exercise(
        "00.4",
        "Write `cables(watts)`: how many 8-pin cables a card of so many watts needs, if the slot gives 75 W and each "
        "cable 150 W. A T4 has 70 W and needs none.",
        difficulty=2,
        minutes=5,
        hints=("First take away what the slot gives.", "Round up, and never go below zero: math.ceil, max."),
        check=Function(
            cables,
            cases=[dict(watts=watts) for watts in (70, 75, 200, 350, 375, 450, 575)],
            unit="cables",
            tolerance=0.0,
            mistakes=[
                Mistake(lambda watts: ceil(watts / 150), "The slot gives 75 W before any cable does."),
                Mistake(lambda watts: max(0, floor((watts - 75) / 150)), "Round up: half a cable is a cable."),
                Mistake(lambda watts: max(0, ceil((watts - 75) / 75)), "75 W is the 6-pin cable."),
            ],
            right="at 575 W it would be four: that is why such cards have the 16-pin connector.",
        ),
    ),
    Exercise(
        "00.5",
        "Write `attainable(intensity, peak, bandwidth)`: the operations a second that a roofline allows a kernel of so "
        "many operations per byte.",
        difficulty=2,
        minutes=4,
        hints=("Two things can be the limit; the lower one is.", "One of them is the peak. What does memory deliver?"),
        check=Function(
            attainable,
            cases=POINTS,
            unit="operations a second",
            mistakes=[
                Mistake(lambda intensity, peak, bandwidth: intensity * bandwidth, "Nothing is faster than the peak."),
                Mistake(lambda intensity, peak, bandwidth: peak, "Below the ridge, memory is too slow for the peak."),
                Mistake(
                    lambda intensity, peak, bandwidth: max(peak, intensity * bandwidth), "The lower of the two limits."
                ),
            ],
            right="the two meet at peak / bandwidth, the ridge.",
        ),
    ),
    Exercise(
        "00.6",
        f"AdamW's two fp32 states of Llama 3.1 8B ({LLAMA:,} parameters) lie on an NVMe drive that reads {DRIVE / 1e9:g} "
        "GB/s. How many seconds does it take to read them once?",
        difficulty=2,
        minutes=4,
        hints=("Bytes over bytes a second.", "Two numbers of 4 bytes for each parameter."),
        check=Number(
            lambda: 8 * LLAMA / DRIVE,
            unit="s",
            mistakes=[
                Mistake(lambda: 4 * LLAMA / DRIVE, "AdamW has two states."),
                Mistake(lambda: 16 * LLAMA / DRIVE, "Only the states are asked for, not weights and gradients."),
                Mistake(lambda: 8 * LLAMA / 2**30 / (DRIVE / 1e9), "GiB over GB/s: two different billions."),
            ],
            right="and they are written back as often, at every step.",
        ),
    ),
    Exercise(
        "00.7",
        "In E's run without NVLink, which change makes a GPU send the fewest bytes per micro-batch? Answer 'fp16 "
        "gradients', 'ZeRO-1' or 'four micro-batches a step'.",
        difficulty=2,
        minutes=4,
        hints=("Gradients are sent once a step.", "A step of four micro-batches sends as much as a step of one."),
        check=Choice(
            lambda: min(("fp16 gradients", "ZeRO-1", "four micro-batches a step"), key=sent_for),
            {
                "fp16 gradients": "that halves the bytes; one of the others quarters them.",
                "ZeRO-1": "it divides the states, and sends as many bytes as DDP.",
                "four micro-batches a step": "accumulated under no_sync, gradients are sent a quarter as often.",
            },
        ),
    ),
]
