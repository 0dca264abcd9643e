"""How the GPUs of a machine are connected (`nvidia-smi topo -m`).

    print(read_topology())  # or parse_topology(text) of a matrix that somebody sent you

Bandwidths are bytes a second in one direction. Datasheets of NVLink add both directions: theirs are
twice ours.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import combinations

from vramlab.base.errors import VramLabError
from vramlab.report.report import text_table

# Paths by nvidia-smi's codes, best first.
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
TITLES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")  # of the columns after the devices'
# Card: NVLink generation, links, bytes a second of one link in one direction. Whitepapers of
# NVIDIA's Pascal P100 (2016), Volta V100 (2017), Turing (2018), Ampere A100 (2020) and GA102
# (2021), Hopper (2022), Blackwell HGX datasheet.
NVLINK = {
    "P100": (1, 4, 20e9),
    "V100": (2, 6, 25e9),
    "TITAN RTX": (2, 2, 25e9),
    "RTX 3090": (3, 4, 14.0625e9),
    "A100 80GB": (3, 12, 25e9),
    "H100 SXM": (4, 18, 25e9),
    "B200": (5, 18, 50e9),
}
# Rounds of a ring in a step; each sends (N − 1)/N of the gradients' bytes. An all-reduce is a
# reduce-scatter and an all-gather; stage 3 also gathers parameters, for forward and for backward
# (Rajbhandari et al. 2020, section 7).
ROUNDS = {"DDP": 2, "ZeRO-1": 2, "ZeRO-2": 2, "ZeRO-3": 3}


class TopologyError(VramLabError, ValueError):
    """A matrix that cannot be read, or a machine that has none."""


def kind(code: str) -> str:
    """The entry of PATHS for a code of the matrix: "NV" for "NV18". Raises TopologyError."""
    path = "NV" if NVLINK_CODE.fullmatch(code) else code
    if path not in PATHS or code == "NV":
        raise TopologyError(
            f"The matrix says {code!r}, but paths are X, NV#, PIX, PXB, PHB, NODE and SYS."
        )
    return path


def _rank(code: str) -> tuple[int, int]:
    """A code's place among the paths, the best first: more NVLinks before fewer."""
    return list(PATHS).index(kind(code)), -_links(code)


def _links(code: str) -> int:
    """NVLinks of a code: 18 for "NV18", 0 for a path without."""
    found = NVLINK_CODE.fullmatch(code)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Topology:
    """The matrix of one machine.

    Attributes:
        devices: GPUs and network cards, in the matrix's order.
        codes: (device, device) to the code between them, both ways round.
    """

    devices: tuple[str, ...]
    codes: dict[tuple[str, str], str]

    @property
    def gpus(self) -> list[str]:
        """The GPUs."""
        return [name for name in self.devices if re.fullmatch(r"GPU\d+", name)]

    def __str__(self) -> str:
        """Each kind of path between GPUs, how many pairs have it, and what it means."""
        codes = [self.codes[pair] for pair in combinations(self.gpus, 2)]
        rows = [("path", "pairs", "meaning")]
        for code in sorted(set(codes), key=_rank):
            meaning = PATHS[kind(code)].replace("#", str(_links(code)))
            rows.append((code, str(codes.count(code)), meaning))
        return text_table(rows) if codes else f"{len(self.gpus)} GPU: no path to speak of"


def parse_topology(text: str) -> Topology:
    """The matrix in what `nvidia-smi topo -m` printed, with or without legends, colours and tabs.

    Raises:
        TopologyError: no matrix, a missing row or entry, an unknown path, or two entries that
            disagree.
    """
    # Colours of a terminal.
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    # The line of the columns: in the row of GPU0 an X follows the name.
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*GPU0\s+(?!X\b)", line)]
    if not heads:
        raise TopologyError(
            "There is no matrix in this text: it has to have the line that begins with GPU0."
        )
    # What stands behind the devices has titles with blanks.
    columns = re.split("|".join(TITLES), lines[heads[0]])[0].split()
    rows = _rows(lines[heads[0] + 1 :], columns)
    missing = [name for name in columns if name not in rows]
    if missing:
        raise TopologyError(f"The matrix has no row for {', '.join(missing)}: it was cut off.")
    codes = {}
    for name in columns:
        # More entries are the columns of affinities.
        if len(rows[name]) < len(columns):
            raise TopologyError(
                f"The row of {name} has {len(rows[name])} entries, but {len(columns)} are needed."
            )
        for other, code in zip(columns, rows[name], strict=False):
            if (kind(code) == "X") != (name == other):
                raise TopologyError(
                    f"{name} to {other} is {code!r}, but X stands on the diagonal and nowhere else."
                )
            codes[name, other] = code
    for (a, b), code in codes.items():
        back = codes[b, a]
        if back != code:
            raise TopologyError(f"{a} to {b} is {code}, but {b} to {a} is {back}.")
    return Topology(tuple(columns), codes)


def _rows(lines: list[str], columns: list[str]) -> dict[str, list[str]]:
    """The entries in each column's row, by its name; of two matrices the first one's."""
    rows: dict[str, list[str]] = {}
    for line in lines:
        row = line.split()
        if row and row[0] in columns:
            rows.setdefault(row[0], row[1:])
    return rows


def read_topology() -> Topology:
    """The matrix of this machine. Raises TopologyError where nvidia-smi is missing or fails."""
    if not shutil.which("nvidia-smi"):
        raise TopologyError(
            "There is no nvidia-smi on this machine, so no NVIDIA driver and no matrix."
        )
    try:
        run = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TopologyError(f"nvidia-smi topo -m does not answer ({error}).") from None
    if run.returncode:
        raise TopologyError(
            f"nvidia-smi topo -m fails: {(run.stderr or run.stdout).strip().splitlines()[:1]}."
        )
    return parse_topology(run.stdout)
