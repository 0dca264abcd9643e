"""How two GPUs of a machine are connected, and how many bytes a step sends between them."""

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
