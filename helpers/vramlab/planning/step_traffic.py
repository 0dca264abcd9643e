"""Bytes that a training step moves besides activations: of the optimizer, between GPUs, to the host and back.

Bytes that one rank sends in a step, for N ranks, W bytes of weights, G of gradients, A micro-batches and f = (N − 1)/N,
the share of the whole that a ring sends in each round (Patarasuk and Yuan 2009):

    ddp                    2 f G              an all-reduce, once a step: `no_sync` holds it back while accumulating
    deepspeed stage 1      f (G + W)          once a step
    deepspeed stage 2      f (A G + W)        gradients are reduced to shards after each micro-batch
    fsdp stage 2           A f (W + G)        weights are gathered once a micro-batch, for forward and backward
    stage 3                A f (2 W + G)      weights are gathered twice (Rajbhandari et al. 2020, section 7)
"""

from math import prod

from ..formulas import model_states
from ..formulas.model_states import parameter_table
from ..formulas.predict import predict
from ..formulas.tensor_sizes import SMALLEST_PAGED
from ..hardware.gpu import Gpu
from ..hardware.links import NETWORK_SHARE, NVLINK_SHARE, PCIE_SHARE, THROUGH_HOST_SHARE, pcie_bandwidth
from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe

# Passes over what is updated, each a read or a write of a tensor of the weight's size, without states (torch/optim/*.py):
# gradient read, weight read and written; the foreach AdamW's eight kernels also make and read √v.
FUSED, FOREACH, CLIPPING = 3, {"adamw_torch": 12, "rmsprop": 9, "adagrad": 12, "adafactor": 14}, 3
HOST_BANDWIDTH, HOST_RANGE = 40e9, (200e9, 15e9)  # of the host's memory: two channels of DDR4-3200 have 51 GB/s
CPU_ADAM = 28  # bytes a number that DeepSpeed's CPU Adam reads and writes: fp32 weight, two states, gradient


def optimizer_traffic(recipe: Recipe) -> float:
    """Bytes that clipping and the update read and write on one rank's GPU in a step."""
    sharding = recipe.sharding
    if sharding and sharding.offload:
        return 0
    rows = [row for row in parameter_table(recipe) if row.trained]
    weights = sum(row.count * row.size for row in rows)
    passes = FOREACH.get(recipe.optim, FUSED) + (CLIPPING if recipe.loop.max_grad_norm is not None else 0)
    states = sum(row.count * sum(row.states) for row in rows)
    again = 4 if recipe.optim in FOREACH else 2  # a foreach update reads and writes its states several times
    return (passes * weights + again * states) * (1 / sharding.world_size if sharding and sharding.stage else 1)


def waiting_tensors(recipe: Recipe) -> int:
    """Tensors after each of which bitsandbytes' optimizers wait for one rank's GPU, in a step; 0 for other optimizers."""
    sharding = recipe.sharding
    if MODELLED[recipe.optim].library != "bitsandbytes" or (sharding and sharding.offload):
        return 0
    return sum(row.count for row in parameter_table(recipe) if row.trained)


def sent(recipe: Recipe) -> float:
    """Bytes that one rank sends, and receives, in a step: the module's table."""
    sharding = recipe.sharding
    if sharding is None or sharding.world_size == 1:
        return 0.0
    # the trained weights, gathered after the update, have their gradients' size
    weights, gradients = model_states.parameter_bytes(recipe), model_states.gradient_bytes(recipe)
    times, f = recipe.gradient_accumulation_steps, 1 - 1 / sharding.world_size
    if sharding.stage == 3:
        return times * f * (2 * weights + gradients)
    if sharding.engine == "fsdp":
        return times * f * (weights + gradients)
    return f * {0: 2 * gradients, 1: 2 * gradients, 2: (times + 1) * gradients}[sharding.stage]


def to_host(recipe: Recipe) -> tuple[float, float]:
    """(bytes of one rank over PCIe, bytes of all ranks through the host's memory) in a step.

    With an offloaded optimizer gradients go down, the CPU updates, weights come back. Offloaded parameters also come up
    twice a micro-batch.
    """
    sharding = recipe.sharding
    if not (sharding and sharding.offload):
        return 0.0, 0.0
    numbers = sum(row.count * prod(row.shape) for row in parameter_table(recipe) if row.trained)
    if sharding.engine == "deepspeed":  # whose device has half-precision weights in "-mixed"
        recipe = model_states.compute_recipe(recipe)
    crossing = 2 * model_states.gradient_bytes(recipe) / sharding.world_size
    if sharding.offload == "parameters":
        times = 2 * recipe.gradient_accumulation_steps
        crossing += times * model_states.parameter_bytes(recipe) / sharding.world_size
    return crossing, CPU_ADAM * numbers


def paged_bytes(recipe: Recipe) -> int:
    """Bytes of the states that a paged optimizer keeps in unified memory."""
    if not recipe.optim.startswith("paged"):
        return 0
    optimizer = MODELLED[recipe.optim]
    large = (row for row in parameter_table(recipe) if row.trained and prod(row.shape) >= SMALLEST_PAGED)
    return sum(sum(optimizer.states) * optimizer.width * row.count * prod(row.shape) for row in large)


def moved_pages(recipe: Recipe, card: Gpu) -> tuple[float, float, float]:
    """(likely, least, most) bytes over PCIe in a step of states in unified memory: out of the card and in again, as far as
    the process does not fit it with them. A card with room keeps them: 14 steps with paged states on an H100 took 0.75 to
    1.25 times the estimate without a transfer."""
    paged = paged_bytes(recipe)
    if not paged:
        return 0.0, 0.0, 0.0
    process = predict(recipe, card).process
    beyond = (end + paged - card.total for end in (process.value, process.low, process.high))
    likely, least, most = (2.0 * min(paged, max(0, size)) for size in beyond)
    return likely, least, most


def waits(recipe: Recipe, card: Gpu, link: float | None) -> dict[str, tuple[float, float, float]]:
    """ "links" and "host" to (likely, least, most) seconds, none hidden behind computation."""
    crossing, through = to_host(recipe)
    found = {}
    if moved := sent(recipe):
        rate, shares = link_of(card, link)
        found["links"] = tuple(moved / (rate * share) for share in shares)
    pages = moved_pages(recipe, card)
    if crossing or through or any(pages):
        pcie = pcie_bandwidth(card.pcie)
        rates = zip(pages, PCIE_SHARE, (HOST_BANDWIDTH, *HOST_RANGE), strict=True)
        found["host"] = tuple((crossing + paged) / (pcie * share) + through / memory for paged, share, memory in rates)
    return found


def link_of(card: Gpu, link: float | None = None) -> tuple[float, tuple[float, float, float]]:
    """Bytes a second in one direction from card to card by the datasheet, or `link`; (likely, best, worst) share of it."""
    if link:
        return link, NETWORK_SHARE
    if card.nvlink:
        return card.nvlink / 2, NVLINK_SHARE  # the datasheet adds both directions
    return pcie_bandwidth(card.pcie), PCIE_SHARE if card.peer_to_peer else THROUGH_HOST_SHARE
