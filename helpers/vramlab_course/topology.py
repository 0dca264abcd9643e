"""How the GPUs of a machine are joined: `nvidia-smi topo -m` read, and what a link's bytes a second mean for training.

    print(read_topology())  # or parse_topology(text) of a matrix that somebody sent you

Bandwidths are bytes a second in one direction; datasheets add both directions of NVLink, so theirs are twice ours.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import combinations

from vramlab.hardware.links import TopologyError
from vramlab.report.report import text_table

# Best first: how nvidia-smi calls a path (its own legend), and what that means.
PATHS = {
    "X": "the device itself",
    "NV": "NVLink, # bonded together, no PCIe between",
    "PIX": "one PCIe switch between them at most",
    "PXB": "several PCIe switches, not the CPU",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "through several host bridges of one NUMA node",
    "SYS": "from one NUMA node (CPU socket) to another",
}
NVLINK_CODE = re.compile(r"NV(\d+)")
EXTRAS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
# Card family: NVLink generation, links, bytes a second of one link in one direction. Whitepapers of NVIDIA's Pascal P100
# (2016), Volta V100 (2017), Turing (2018), Ampere A100 (2020) and GA102 (2021), Hopper (2022), Blackwell HGX datasheet.
NVLINK = {
    "P100": (1, 4, 20e9),
    "V100": (2, 6, 25e9),
    "TITAN RTX": (2, 2, 25e9),
    "RTX 3090": (3, 4, 14.0625e9),
    "A100 80GB": (3, 12, 25e9),
    "H100 SXM": (4, 18, 25e9),
    "B200": (5, 18, 50e9),
}
# What each GPU sends in a step, in (N − 1)/N of the gradients' or parameters' bytes: an all-reduce is a reduce-scatter
# and an all-gather; stage 3 gathers parameters for forward and again for backward (Rajbhandari et al. 2020, section 7).
ROUNDS = {"DDP": 2, "ZeRO-1": 2, "ZeRO-2": 2, "ZeRO-3": 3}


def kind(code: str) -> str:
    """The entry of PATHS for a matrix's code: "NV" for "NV18". Raises TopologyError."""
    found = "NV" if NVLINK_CODE.fullmatch(code) else code
    if found not in PATHS or code == "NV":
        raise TopologyError(f"The matrix says {code!r}, but paths are X, NV#, PIX, PXB, PHB, NODE and SYS.")
    return found


@dataclass(frozen=True)
class Topology:
    """One machine's matrix.

    Attributes:
        devices: names in the matrix's order, GPUs and network cards.
        codes: (device, device) to the code between them, both ways round.
        extras: GPU to its other columns, {"CPU Affinity": "0-23", …}, empty where there are none.
        names: network card to what it is really called, from the second legend.
    """

    devices: tuple[str, ...]
    codes: dict[tuple[str, str], str]
    extras: dict[str, dict[str, str]]
    names: dict[str, str]

    @property
    def gpus(self) -> list[str]:
        """The GPUs."""
        return [name for name in self.devices if re.fullmatch(r"GPU\d+", name)]

    @property
    def nics(self) -> list[str]:
        """The network cards."""
        return [name for name in self.devices if name not in self.gpus]

    def nvlinks(self, a: str, b: str) -> int:
        """How many NVLinks join two devices, 0 without."""
        found = NVLINK_CODE.fullmatch(self.codes[a, b])
        return int(found[1]) if found else 0

    def slowest(self) -> tuple[str, str, str] | None:
        """(GPU, GPU, code) of the worst path, which sets a ring's pace when it has to be taken; None for one GPU."""
        pairs = list(combinations(self.gpus, 2))
        worst = max(pairs, key=lambda p: (list(PATHS).index(kind(self.codes[p])), -self.nvlinks(*p)), default=None)
        return (*worst, self.codes[worst]) if worst else None

    def islands(self) -> list[list[str]]:
        """GPUs in groups that reach each other over NVLink alone, directly or through one another."""
        left, found = self.gpus, []
        while left:
            group = [left.pop(0)]
            for member in group:
                joined = [other for other in left if self.nvlinks(member, other)]
                group += joined
                left = [other for other in left if other not in joined]
            found.append(sorted(group, key=self.devices.index))
        return found

    def nearest_nics(self, gpu: str) -> list[str]:
        """The network cards with the best path to `gpu`, all of them when several are equal."""
        order = {nic: list(PATHS).index(kind(self.codes[gpu, nic])) for nic in self.nics}
        return [nic for nic, rank in order.items() if rank == min(order.values())]

    def numa_nodes(self) -> dict[str, list[str]]:
        """NUMA node to its GPUs; {} where the matrix does not say."""
        found: dict[str, list[str]] = {}
        for gpu in self.gpus:
            node = self.extras[gpu].get("NUMA Affinity", "N/A")
            if node != "N/A":
                found.setdefault(node, []).append(gpu)
        return found

    def __str__(self) -> str:
        """Each kind of path between GPUs, how many pairs have it, and what it means."""
        pairs = [(self.codes[pair], self.nvlinks(*pair)) for pair in combinations(self.gpus, 2)]
        ranked = sorted(set(pairs), key=lambda path: (list(PATHS).index(kind(path[0])), -path[1]))
        rows = [("path", "pairs", "meaning")]
        rows += [(c, str(pairs.count((c, n))), PATHS[kind(c)].replace("#", str(n))) for c, n in ranked]
        return text_table(rows) if pairs else f"{len(self.gpus)} GPU: no path to speak of"


def parse_topology(text: str) -> Topology:
    """The matrix in what `nvidia-smi topo -m` printed, with or without legends, colours and tabs.

    Raises:
        TopologyError: no matrix, a row or an entry too few, an unknown path, or two entries that disagree.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    words = [line.split() for line in lines]
    head = next((i for i, row in enumerate(words) if row[:1] == ["GPU0"] and row[1:2] != ["X"]), None)
    if head is None:
        raise TopologyError("There is no matrix in this text: it has to have the line that begins with GPU0.")
    titles = re.search(r"((CPU Affinity|NUMA Affinity|GPU NUMA ID).*)?$", " ".join(words[head]))[0]
    columns = " ".join(words[head]).removesuffix(titles).split()
    extras_there = [title for title in EXTRAS if title in titles]
    codes, extras = {}, {}
    for row in words[head + 1 :]:
        if not row or row[0] not in columns or row[0] in extras:
            continue
        name, cells = row[0], row[1 : 1 + len(columns)]
        if len(cells) < len(columns):
            raise TopologyError(f"The row of {name} has {len(cells)} entries, but {len(columns)} are needed.")
        for other, code in zip(columns, cells, strict=True):
            if (kind(code) == "X") != (name == other):
                raise TopologyError(f"{name} to {other} is {code!r}, but X stands on the diagonal and nowhere else.")
            codes[name, other] = code
        extras[name] = dict(zip(extras_there, row[1 + len(columns) :], strict=False))
    if missing := [name for name in columns if name not in extras]:
        raise TopologyError(f"The matrix has no row for {', '.join(missing)}: it was cut off.")
    for (a, b), code in codes.items():
        if codes[b, a] != code:
            raise TopologyError(f"{a} to {b} is {code}, but {b} to {a} is {codes[b, a]}.")
    names = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    return Topology(tuple(columns), codes, extras, names)


def read_topology() -> Topology:
    """This machine's matrix. Raises TopologyError where nvidia-smi is missing or fails."""
    if not shutil.which("nvidia-smi"):
        raise TopologyError("There is no nvidia-smi on this machine, so no NVIDIA driver and no matrix.")
    try:
        run = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TopologyError(f"nvidia-smi topo -m does not answer ({error}).") from None
    if run.returncode:
        raise TopologyError(f"nvidia-smi topo -m fails: {(run.stderr or run.stdout).strip().splitlines()[:1]}.")
    return parse_topology(run.stdout)


def bytes_sent(method: str, size: int, world_size: int) -> float:
    """Bytes that each of `world_size` GPUs sends (and receives) a step; `size` bytes of gradients (ROUNDS has methods).

    A ring sends (N − 1)/N of the size in each of its rounds (Patarasuk and Yuan 2009), two rounds for an all-reduce.
    """
    if method not in ROUNDS or world_size < 1:
        raise TopologyError(f"{method!r} on {world_size} GPUs is not known: methods are {', '.join(ROUNDS)}.")
    return ROUNDS[method] * (world_size - 1) / world_size * size


def run_seconds(steps: int, compute: float, sent: float, bandwidth: float, hidden: float = 0.0) -> float:
    """Seconds of a run: each step computes for `compute` s and waits for the bytes that `hidden` s of it do not cover."""
    return steps * (compute + max(0.0, sent / bandwidth - hidden))
