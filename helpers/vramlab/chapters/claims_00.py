"""The experiments that test what source E says about hardware, and source D about containers (chapter 00).

E's run: gpt2 with `run_clm.py` and DDP on two TITAN RTX (NV2), 4 sequences a GPU, 200 steps, fp32, once as it is and
once with NCCL_P2P_DISABLE=1. What E printed is a constant here; everything else is derived from specifications.
"""

from importlib import metadata
from itertools import combinations, pairwise
from math import ceil, exp

from ..claims import Finding
from ..errors import RecordError
from ..gpu import find_gpu
from ..nvml import nvml_snapshot
from ..recipe import Recipe
from ..report import Interval
from ..topology import NVLINK, bytes_sent, parse_topology, pcie_bandwidth, run_seconds

STEPS, WORLD, BATCH = 200, 2, 4
RUNTIME = {"NVLink": 101.9003, "no P2P": 131.4367}  # seconds, E's `train_runtime`
CONTINUED = {"NVLink": (True, True, True), "no P2P": (True, True, False)}  # a backslash at the end of all lines but one
HEADS = "GPU0 GPU1 CPU Affinity NUMA Affinity\n"
MATRICES = {
    "NVLink": HEADS + "GPU0 X NV2 0-23 N/A\nGPU1 NV2 X 0-23 N/A",
    "no NVLink": HEADS + "GPU0 X PHB 0-11 N/A\nGPU1 PHB X 0-11 N/A",
}
# Watts, by PCI-SIG's PCI Express Card Electromechanical Specification (3.0; 5.1 for 16 pins, 12 of them for power).
# What a 16-pin cable may carry is coded by its two sense pins.
SLOT = 75
CONNECTORS = {"6-pin": 75, "8-pin": 150, "16-pin, coded 600 W": 600, "16-pin, coded 450 W": 450}
# °C in published outputs of `nvidia-smi -q`: the target that the driver lowers clocks to keep, and the maximum that the
# card is made for, at which it throttles too; further up it shuts down (NVIDIA support, answer 2752). 280 W card of
# github.com/microsoft/WSL issue 7852; RTX 3090, driver 535; github.com/NVIDIA/open-gpu-kernel-modules issue 1083;
# github.com/intel/thermal_daemon issue 300.
THRESHOLDS = {
    "TITAN RTX": {"target": 84, "maximum": 89, "shutdown": 94},
    "RTX 3090": {"target": 83, "maximum": 93},
    "RTX 2070 in a laptop, driver 595": {"target": 75},
    "MX330 in a laptop": {"shutdown": 102},
}
BOLTZMANN = 8.617e-5  # electronvolts a kelvin
ACTIVATION = {"aluminium": 0.5, "copper": 0.9}  # electronvolts, of electromigration
# Bytes a second in one direction while both are in use, between two cards at PHB on PCIe 3.0 x16: half of the
# bidirectional readings (4.88 and 7.50 GB/s, two settings of one board) in forum.level1techs.com, thread 185531.
HOST_PATH = (4.88e9 / 2, 7.50e9 / 2)
WORDS = 2_088_628  # wikitext-2, training part: Merity et al. 2016, table 1
TOKENS_PER_WORD = (1.0, 4 / 3)  # a word is a token at least; 4/3 is OpenAI's rule of thumb for English
BRIDGE_LINKS = {"RTX 3090": 4}  # NVIDIA's NVLink bridge for the RTX 30 series carries 112.5 GB/s, all that GA102 has
P2P = {"NVLink": "P2P", "PCIe": "P2P", "host memory": "SHM"}  # which of NCCL's transports takes a path (its user guide)
# What each way of fixing an environment fixes; a container runs on the host's kernel and driver (NVIDIA Container
# Toolkit, architecture overview).
FIXES = {
    "environment": ("Python packages",),
    "image": ("Python packages", "Python", "system libraries"),
}
# Contents of NVIDIA's container image for PyTorch by its release notes, release 19.11.
IMAGE = ("PyTorch", "CUDA", "cuDNN", "NCCL", "Apex", "JupyterLab", "TensorBoard", "TensorRT", "DALI")


def gradient_bytes() -> int:
    """Bytes that DDP averages in a step of E's run: an fp32 gradient for each parameter of gpt2."""
    return 4 * Recipe("gpt2").shape.num_parameters


def compute_seconds() -> float:
    """Seconds of a step of E's faster run that are no communication, if none is hidden."""
    return RUNTIME["NVLink"] / STEPS - bytes_sent("DDP", gradient_bytes(), WORLD) / one_way("TITAN RTX")


def one_way(card: str) -> float:
    """Bytes a second of all NVLinks of a card in one direction."""
    _, links, each = NVLINK[card]
    return links * each


# --- power and cooling --------------------------------------------------------------------------------------------


def card_gigabytes(card: str) -> Finding:
    """Gigabytes on a card's box, from the GPU table."""
    gpu = find_gpu(card)
    return Finding(float(gpu.memory_gb), "derived", f"{gpu.name}: {gpu.source}")


def rated(connector: str) -> Finding:
    """Watts of a power connector."""
    return Finding(CONNECTORS[connector], "derived", "PCI Express Card Electromechanical Specification")


def eight_pins(card: str) -> int:
    """8-pin cables that a card's power asks for beside the slot's 75 W."""
    return max(0, ceil((find_gpu(card).tdp - SLOT) / CONNECTORS["8-pin"]))


def two_or_three(card: str) -> Finding:
    """Whether a card needs two or three 8-pin cables."""
    count = eight_pins(card)
    return Finding(count in (2, 3), "derived", f"{card}: {find_gpu(card).tdp} W are the slot and {count} cables")


def one_cable_falls_short(card: str) -> Finding:
    """Whether one 8-pin cable, split at its end, is rated for less than the card draws through its sockets."""
    drawn = find_gpu(card).tdp - SLOT
    return Finding(drawn > CONNECTORS["8-pin"], "derived", f"{card}: {drawn} W beside the slot")


def throttles_at(card: str | None = None, threshold: str = "slowdown", low: int = 84, high: int = 90) -> Finding:
    """Whether a card's threshold lies between two temperatures, give or take a degree; without a name this machine's."""
    if card:
        found = THRESHOLDS[card][threshold]
        return Finding(low - 1 <= found <= high + 1, "derived", f"{card}: {found} °C by its nvidia-smi -q")
    seen = nvml_snapshot()
    if seen.slowdown_temperature is None:
        raise RecordError("No sensor of this machine says from which temperature its GPU slows down.")
    found = seen.slowdown_temperature
    return Finding(low - 1 <= found <= high + 1, "measured", f"{seen.name}: {found} °C by NVML")


def keeps_its_clocks(degrees: int, card: str | None = None) -> Finding:
    """Whether a temperature is below the one from which a card lowers its clocks; without a name this machine's."""
    if card:
        found = THRESHOLDS[card]["target"]
        return Finding(degrees < found, "derived", f"{card}: {found} °C by its nvidia-smi -q")
    seen = nvml_snapshot()
    if seen.slowdown_temperature is None:
        raise RecordError("No sensor of this machine says from which temperature its GPU slows down.")
    found = seen.slowdown_temperature
    return Finding(degrees < found, "measured", f"{seen.name}: {found} °C by NVML")


def shuts_down(card: str | None = None) -> Finding:
    """Whether a card has a temperature at which it shuts down, above that at which it throttles; without a name this
    machine's. Raises RecordError where no sensor says."""
    if card:
        known = THRESHOLDS[card]
        found = known.get("shutdown", 0)
        return Finding(found > known.get("maximum", 0), "derived", f"{card}: {found} °C by its nvidia-smi -q")
    found = nvml_snapshot().shutdown_temperature
    if found is None:
        raise RecordError("No sensor of this machine says at which temperature its GPU shuts down.")
    return Finding(found > 0, "measured", f"{found} °C by NVML")


def wears(metal: str, cool: int = 70, hot: int = 90) -> Finding:
    """How many times as fast a chip's wires wear out at one temperature as at another, at the same current: Black's
    equation (Proceedings of the IEEE, 1969), by which their life is proportional to exp(E / kT)."""
    energy = ACTIVATION[metal]
    value = exp(energy / BOLTZMANN * (1 / (cool + 273.15) - 1 / (hot + 273.15)))
    return Finding(value, "derived", f"electromigration in {metal}, {energy} eV, {hot} °C against {cool} °C")


# --- how GPUs are joined ------------------------------------------------------------------------------------------


def links(matrix: str) -> Finding:
    """NVLinks between the two GPUs of one of E's matrices."""
    return Finding(parse_topology(MATRICES[matrix]).nvlinks("GPU0", "GPU1"), "derived", f"E's matrix, {matrix}")


def sends_more_than_ddp(method: str) -> Finding:
    """Whether a GPU sends more a step than with DDP."""
    ratio = bytes_sent(method, 12, 4) / bytes_sent("DDP", 12, 4)
    return Finding(ratio > 1, "derived", f"{method}: {ratio:g} times DDP's bytes")


def slow_link_costs_little(accumulated: int, share: float = 0.05) -> Finding:
    """Whether E's slow path lengthens a run by `share` or less, with DDP and `accumulated` micro-batches a step."""
    extra = (RUNTIME["no P2P"] - RUNTIME["NVLink"]) / STEPS / accumulated
    more = extra / (RUNTIME["NVLink"] / STEPS)
    return Finding(more <= share, "derived", f"{more:.1%} longer, gradients sent every {accumulated} micro-batches")


def newer_is_faster(cards: list[str], per: str) -> Finding:
    """Whether bandwidth grows from each card to the next, per "GPU" or per "link"."""
    rates = [NVLINK[card][2] * (NVLINK[card][1] if per == "GPU" else 1) for card in cards]
    rising = all(a < b for a, b in pairwise(rates))
    said = (f"{card} {rate / 1e9:g} GB/s" for card, rate in zip(cards, rates, strict=True))
    return Finding(rising, "derived", ", ".join(said))


def nvlink_gigabytes(card: str, directions: int, per: str = "GPU") -> Finding:
    """GB/s of a card over all its NVLinks, or over one "link", in one direction or both."""
    rate = one_way(card) if per == "GPU" else NVLINK[card][2]
    return Finding(directions * rate / 1e9, "derived", f"{card}: {NVLINK[card][1]} links")


def nvlinks(card: str) -> Finding:
    """NVLinks that a card has."""
    generation, count, _ = NVLINK[card]
    return Finding(float(count), "derived", f"{card}: generation {generation}")


def nvlink_generation(card: str) -> Finding:
    """The generation of a card's NVLink."""
    return Finding(float(NVLINK[card][0]), "derived", f"{card}: generation {NVLINK[card][0]}")


def cards_joined(card: str) -> Finding:
    """Cards that can be joined, each to each: a bridge takes BRIDGE_LINKS of a card's links to one other card."""
    links = NVLINK[card][1]
    return Finding(
        1.0 + links // BRIDGE_LINKS[card], "derived", f"{card}: {links} links, {BRIDGE_LINKS[card]} a bridge"
    )


def slower_than_nvlink(card: str, path: str) -> Finding:
    """Whether a path through a host bridge carries less in one direction than a card's NVLinks: the "measured" path of
    HOST_PATH, or PCIe at its line rate."""
    rate = max(HOST_PATH) if path == "measured" else pcie_bandwidth(path)
    text = f"{rate / 1e9:.2f} GB/s, and {one_way(card) / 1e9:g} by the NVLinks of {card}"
    return Finding(rate < one_way(card), "derived", text)


def links_order_bandwidth(generation: int | None = None) -> Finding:
    """Whether the number of links alone says which of two cards has more bandwidth, within a generation or across."""
    cards = {card: entry for card, entry in NVLINK.items() if generation in (None, entry[0])}
    pairs = combinations(cards, 2)

    def order(a: float, b: float) -> int:
        return (a > b) - (a < b)

    wrong = [(a, b) for a, b in pairs if order(cards[a][1], cards[b][1]) != order(one_way(a), one_way(b))]
    return Finding(not wrong, "derived", f"{len(cards)} cards; not so for {wrong or 'none'}")


# --- E's two runs -------------------------------------------------------------------------------------------------


def runtime(run: str, how: str) -> Finding:
    """Whole seconds of one of the runs by E's own log, "rounded" or "cut" off."""
    whole = round(RUNTIME[run]) if how == "rounded" else int(RUNTIME[run])
    return Finding(float(whole), "derived", f"train_runtime in E's log: {RUNTIME[run]} s")


def gain(of: str) -> Finding:
    """Per cent by which NVLink is better: "time" saved, or "speed" gained."""
    fast, slow = RUNTIME["NVLink"], RUNTIME["no P2P"]
    return Finding(100 * (1 - fast / slow if of == "time" else slow / fast - 1), "derived", f"{slow} s and {fast} s")


def per_second(samples_a_step: int, run: str = "NVLink") -> Finding:
    """What one of E's runs does a second."""
    return Finding(STEPS * samples_a_step / RUNTIME[run], "derived", f"{STEPS} steps, {samples_a_step} each")


def epochs(block: int) -> Finding:
    """Per cent of an epoch in E's steps if a sample has `block` tokens, between few and many tokens a word."""
    most, least = (100 * STEPS * WORLD * BATCH / (WORDS * ratio / block) for ratio in TOKENS_PER_WORD)
    return Finding(Interval(least, (least + most) / 2, most), "derived", f"{WORDS:,} words, {block:,} tokens a sample")


def seconds_without_nvlink(path: str) -> Finding:
    """Seconds of E's slower run, predicted from the faster one: the same bytes at another bandwidth, none hidden."""
    slow, fast = HOST_PATH if path == "host" else (pcie_bandwidth("3.0 x8"), pcie_bandwidth("3.0 x16"))
    sent = bytes_sent("DDP", gradient_bytes(), WORLD)
    low, high = (run_seconds(STEPS, compute_seconds(), sent, bandwidth) for bandwidth in (fast, slow))
    rates = f"{slow / 1e9:.2f} to {fast / 1e9:.2f} GB/s"
    return Finding(Interval(low, (low + high) / 2, high), "predicted", f"{sent / 1e6:.1f} MB a step at {rates}")


def left_alone(path: str) -> Finding:
    """Whether NCCL_P2P_DISABLE=1 leaves a path in use."""
    return Finding(P2P[path] != "P2P", "derived", f"NCCL takes {path} by its {P2P[path]} transport")


def one_command(run: str) -> Finding:
    """Whether the lines of one of E's commands are one command to the shell."""
    return Finding(all(CONTINUED[run]), "derived", "a backslash at the end of every line but the last")


# --- D's containers -----------------------------------------------------------------------------------------------


def fixes(tool: str, part: str) -> Finding:
    """Whether an "environment" with fixed versions, or an "image", fixes a part of what a run depends on."""
    return Finding(part in FIXES[tool], "derived", f"{tool}: {', '.join(FIXES[tool])}")


def image_has(part: str) -> Finding:
    """Whether a part is in NVIDIA's image for PyTorch, by its release notes."""
    return Finding(part in IMAGE, "derived", f"release 19.11: {', '.join(IMAGE)}")


# --- C's libraries ------------------------------------------------------------------------------------------------


def pynvml_reads(card: bool) -> Finding:
    """Whether pynvml has the calls of C's listing, or reads with them what is in use of this machine's `card`.

    Raises RecordError without a GPU and its driver.
    """
    import pynvml

    if not card:
        calls = ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo")
        return Finding(all(hasattr(pynvml, call) for call in calls), "measured", ", ".join(calls))
    used = nvml_snapshot().used
    if used is None:
        raise RecordError("Waits for a GPU with NVIDIA's driver.")
    return Finding(used > 0, "measured", f"{used / 2**20:,.0f} MiB in use")


def pynvml_comes_from(package: str) -> Finding:
    """Whether the module pynvml that is installed here belongs to a package."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return Finding(False, "measured", f"{package} is not installed")
    found = any(str(file) == "pynvml.py" for file in files)
    return Finding(found, "measured", f"{package} {metadata.version(package)}")
