"""Bandwidth of PCIe links."""

# Generation to transfers per second of one lane, and the share that is data: 8b/10b, then 128b/130b (PCI-SIG).
PCIE = {1: (2.5e9, 8 / 10), 2: (5e9, 8 / 10), 3: (8e9, 128 / 130), 4: (16e9, 128 / 130), 5: (32e9, 128 / 130)}


def pcie_bandwidth(link: str) -> float:
    """Return bytes per second in one direction of a PCIe link such as "4.0 x16", without packet headers."""
    generation, lanes = link.split(" x")
    transfers, data = PCIE[int(float(generation))]
    return transfers * data / 8 * int(lanes)
