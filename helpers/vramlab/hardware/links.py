"""Bandwidth of PCIe links."""

import re

from ..report.errors import VramLabError

# Generation to transfers per second of one lane, and the share that is data: 8b/10b, then 128b/130b (PCI-SIG).
PCIE = {1: (2.5e9, 8 / 10), 2: (5e9, 8 / 10), 3: (8e9, 128 / 130), 4: (16e9, 128 / 130), 5: (32e9, 128 / 130)}


class TopologyError(VramLabError, ValueError):
    """A matrix that cannot be read, or a machine that has none."""


def pcie_bandwidth(link: str) -> float:
    """Return bytes per second in one direction of a PCIe link such as "4.0 x16", without packet headers."""
    found = re.fullmatch(r"(\d)(?:\.0)? ?x(1|2|4|8|16)", link.strip()) if isinstance(link, str) else None
    if not found or int(found[1]) not in PCIE:
        raise TopologyError(f"PCIe link {link!r} is not understood: write it like '4.0 x16', generations 1 to 5.")
    transfers, data = PCIE[int(found[1])]
    return transfers * data / 8 * int(found[2])
