"""What a training step moves besides activations: the optimizer's bytes, between GPUs, and to the host and back.

Bytes of one rank. For N ranks, W bytes of weights, G of gradients and f = (N − 1)/N, a ring sends in each round f of the
whole (Patarasuk and Yuan 2009; `vramlab_course.topology.bytes_sent`):

    ddp                    2 f G              an all-reduce, once a step: `no_sync` holds it back while accumulating
    deepspeed stage 1      f (G + W)          once a step
    deepspeed stage 2      f (A G + W)        gradients are divided after each of A micro-batches
    fsdp stage 2           A f (W + G)        weights are gathered once a micro-batch and kept to the end of backward
    stage 3                A f (2 W + G)      and twice: for forward and for backward (Rajbhandari et al. 2020, section 7)
"""

from math import prod

from ..formulas import model_states as stored
from ..hardware.gpu import Gpu
from ..hardware.links import pcie_bandwidth
from ..recipe.recipe import Recipe

# Passes over memory of what is updated, each a read or a write of a tensor of the weight's width, states apart
# (torch/optim/*.py): gradient read, weight read and written; the foreach AdamW's eight kernels also make and read √v.
FUSED, FOREACH, CLIPPING = 3, {"adamw_torch": 12, "rmsprop": 9, "adagrad": 12, "adafactor": 14}, 3
LINK, LINK_RANGE = 0.75, (0.9, 0.3)  # of a link's rate; least where GeForce cards go through host memory
HOST_BANDWIDTH, HOST_RANGE = 40e9, (200e9, 15e9)  # of the host's memory: two channels of DDR4-3200 have 51 GB/s
CPU_ADAM = 28  # bytes a number that DeepSpeed's CPU Adam reads and writes: fp32 weight, two states, gradient


def optimizer_traffic(recipe: Recipe) -> int:
    """Bytes that clipping and the update read and write on the GPU, once a step; all ranks' share of it together."""
    rows = [row for row in stored.held(recipe) if row.trained]
    weights = sum(row.count * row.size for row in rows)
    passes = FOREACH.get(recipe.optim, FUSED) + (CLIPPING if recipe.loop.max_grad_norm is not None else 0)
    states = sum(row.count * sum(row.states) for row in rows)
    foreach = recipe.optim in FOREACH  # reads and writes its states several times
    return passes * weights + (4 if foreach else 2) * states


def optimizer_share(recipe: Recipe) -> float:
    """What part of the update one rank does on its GPU."""
    sharding = recipe.sharding
    if sharding is None:
        return 1.0
    return 0.0 if sharding.offload else 1 / sharding.world_size if sharding.stage else 1.0


def sent(recipe: Recipe) -> float:
    """Bytes that one rank sends (and receives) in a step; see the module's table."""
    sharding = recipe.sharding
    if sharding is None or sharding.world_size == 1:
        return 0.0
    weights, gradients = stored.parameter_bytes(recipe), stored.gradient_bytes(recipe)
    trained = gradients  # what is gathered after the update: the trained weights, in their own width
    times, f = recipe.gradient_accumulation_steps, 1 - 1 / sharding.world_size
    if sharding.stage == 3:
        return times * f * (2 * weights + gradients)
    if sharding.engine == "fsdp":
        return times * f * (weights + gradients)
    return f * {0: 2 * gradients, 1: gradients + trained, 2: times * gradients + trained}[sharding.stage]


def to_host(recipe: Recipe) -> tuple[float, float]:
    """(bytes of one rank over PCIe, bytes of all ranks through the host's memory) in a step.

    Paged states are taken to move in and out at each step, as they do when the card is full. Offloaded optimizer:
    gradients go down, weights come back, the CPU updates. Offloaded parameters also come up twice a micro-batch.
    """
    crossing = host = 0.0
    if recipe.optim.startswith("paged"):
        crossing += 2 * paged_bytes(recipe)
    sharding = recipe.sharding
    if sharding and sharding.offload:
        gradients = stored.gradient_bytes(recipe)
        numbers = sum(row.count * prod(row.shape) for row in stored.held(recipe) if row.trained)
        crossing += 2 * gradients / sharding.world_size
        host += CPU_ADAM * numbers
        if sharding.offload == "parameters":
            times = 2 * recipe.gradient_accumulation_steps
            crossing += times * stored.parameter_bytes(recipe) / sharding.world_size
    return crossing, host


def paged_bytes(recipe: Recipe) -> int:
    """Bytes of the states that a paged optimizer keeps in unified memory."""
    if not recipe.optim.startswith("paged"):
        return 0
    width = 1 if "8bit" in recipe.optim else stored.FP32
    count = stored.STATES[recipe.optim][0]
    large = (row for row in stored.held(recipe) if row.trained and prod(row.shape) >= stored.SMALLEST_PAGED)
    return sum(count * width * row.count * prod(row.shape) for row in large)


def link_rate(card: Gpu) -> float:
    """Bytes a second that one GPU can send to its neighbours: half of what NVLink's datasheet adds up, or PCIe's."""
    return card.nvlink / 2 if card.nvlink else pcie_bandwidth(card.pcie)


def waits(recipe: Recipe, card: Gpu, link: float | None) -> dict[str, tuple[float, float, float]]:
    """ "links" and "host" to (likely, least, most) seconds, nothing hidden."""
    crossing, through = to_host(recipe)
    found = {}
    if moved := sent(recipe):
        rate = link or link_rate(card)
        found["links"] = tuple(moved / (rate * share) for share in (LINK, *LINK_RANGE))
    if crossing or through:
        pcie = pcie_bandwidth(card.pcie)
        rates = zip((LINK, *LINK_RANGE), (HOST_BANDWIDTH, *HOST_RANGE), strict=True)
        found["host"] = tuple(crossing / (pcie * share) + through / memory for share, memory in rates)
    return found
