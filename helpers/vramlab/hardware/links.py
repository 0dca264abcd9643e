"""Bandwidth of links, and what of it is reached.

Shares are (likely, best, worst) of the line rate of one direction.
"""

# Transfers per second of one lane; 128 of 130 bits are data (PCI-SIG).
PCIE = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}


def pcie_bandwidth(link: str) -> float:
    """Return bytes per second in one direction of a PCIe link such as "4.0 x16".

    The headers of packets are not taken off.
    """
    generation, lanes = link.split(" x")
    return PCIE[generation] * (128 / 130) / 8 * int(lanes)


# NCCL reckons with 12 of the 15.75 GB/s of PCIe 3.0 x16 (src/graph/topo.h, PCI_BW). Measured were
# 56.6 of 63 GB/s (5.0 x16, p2pBandwidthLatencyTest on RTX PRO 6000) and 20.7 of 31.5 (4.0 x16,
# tinygrad/open-gpu-kernel-modules, issue 6).
PCIE_SHARE = (0.76, 0.89, 0.66)
# Three stock RTX 4090 on 4.0 x16: 25.8 GB/s of both directions together, so 12.9 of 31.5 in one
# (the same issue, "P2P=Disabled"). The best is with a driver that allows peer access, the worst
# 5.7 GB/s on RTX 3090 (issue 3).
THROUGH_HOST_SHARE = (0.41, 0.66, 0.18)
# NCCL reckons with 20 to 20.6 of the 25 GB/s of a link (topo.h, SM80 and SM90); all-reduces on
# eight H100 reach 360 of 450 GB/s (NVIDIA/nccl-tests, issue 312).
NVLINK_SHARE = (0.8, 0.9, 0.6)
NETWORK_SHARE = (0.75, 0.9, 0.3)  # assumed
