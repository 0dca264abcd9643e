"""Bandwidth of PCIe links."""

PCIE = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}  # transfers per second of one lane; 128 of 130 bits are data (PCI-SIG)


def pcie_bandwidth(link: str) -> float:
    """Return bytes per second in one direction of a PCIe link such as "4.0 x16", without packet headers."""
    generation, lanes = link.split(" x")
    return PCIE[generation] * (128 / 130) / 8 * int(lanes)
