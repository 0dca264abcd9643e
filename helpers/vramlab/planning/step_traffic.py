"""Bytes that a training step moves besides activations.

They are the optimizer's, those between GPUs, and those to the host and back.

Bytes that one rank sends in a step, for N ranks, W bytes of weights, G of gradients, A
micro-batches and f = (N − 1)/N, the share of the whole that a ring sends in each round (Patarasuk
and Yuan 2009):

    ddp                    2 f G          an all-reduce, once a step: `no_sync` holds it back while
                                          accumulating
    ddp stage 1            f (2 G + W)    DDP's all-reduce, then a broadcast from each rank of the
                                          weights that it updated (`ZeroRedundancyOptimizer`)
    deepspeed stage 1      f (2 G + W)    gradients are all-reduced in buckets, of which a rank
                                          keeps its part (`use_multi_rank_bucket_allreduce`, on
                                          by default; zero/stage_1_and_2.py, `average_tensor`)
    deepspeed stage 2      f (2 A G + W)  the same, after each micro-batch
    fsdp stage 2           A f (W + G)    weights are gathered once a micro-batch, for forward and
                                          backward
    stage 3                A f (2 W + G)  weights are gathered twice (Rajbhandari et al. 2020,
                                          section 7)
    C copies of the model  + 2 G (C − 1) / (C N)    N ranks divide one, whose shards of gradients
                                          are all-reduced over the copies, once a step
    a ring of R ranks      + A (R − 1) K for each pass through a layer, backward too, and
                           + A R K₃₂       K bytes of its own keys and values (K₃₂ in fp32), whose
                                          gradients go around (torch's `_templated_ring_attention`)
    R ranks by Ulysses     + A (R − 1)/R Q for each pass through a layer, backward too, of Q bytes
                                          of its own tokens' queries, keys, values and results
                                          (DeepSpeed's `UlyssesSPAttentionHF`)
"""

from math import prod

from ..formulas import model_states
from ..formulas.model_states import ParameterRow, parameter_table
from ..formulas.predict import predict
from ..formulas.tensor_sizes import FP32, SMALLEST_PAGED, state_width
from ..hardware.gpu import Gpu
from ..hardware.links import (
    NETWORK_SHARE,
    NVLINK_SHARE,
    PCIE_SHARE,
    THROUGH_HOST_SHARE,
    pcie_bandwidth,
)
from ..recipe.optimizers import MODELLED
from ..recipe.options import HALF, Sharding
from ..recipe.recipe import Recipe
from ..report.report import Interval

Range = tuple[float, float, float]  # likely, least, most

# Passes over what is updated, each a read or a write of a tensor of the weight's size, without
# states (torch/optim/*.py): gradient read, weight read and written; the foreach AdamW's eight
# kernels also make and read √v.
FUSED = 3
FOREACH = {"adamw_torch": 12, "rmsprop": 9, "adagrad": 12, "adafactor": 14}
CLIPPING = 3
# Operators for each tensor (transformers/optimization.py, `Adafactor.step`).
ADAFACTOR_CALLS = 20
# Bytes a second of the host's memory: two channels of DDR4-3200 have 51 GB/s.
HOST_BANDWIDTH = 40e9
HOST_RANGE = (200e9, 15e9)
# Bytes a number that DeepSpeed's CPU Adam reads and writes: fp32 weight, two states, gradient.
CPU_ADAM = 28


def optimizer_traffic(recipe: Recipe) -> float:
    """Return the bytes that clipping and the update read and write on one rank's GPU in a step."""
    sharding = recipe.group
    if sharding.offload:
        return 0
    rows = _trained(recipe)
    weights = sum(row.count * row.size for row in rows)
    passes = FOREACH.get(recipe.optim, FUSED)
    if recipe.loop.max_grad_norm is not None:
        passes += CLIPPING
    # Those in unified memory, too: a card with room keeps them.
    states = paged_bytes(recipe) + sum(row.count * sum(row.states) for row in rows)
    # A foreach update reads and writes its states several times.
    state_passes = 4 if recipe.optim in FOREACH else 2
    share = 1 / sharding.shards if sharding.stage else 1
    return (passes * weights + state_passes * states) * share


def waiting_tensors(recipe: Recipe) -> int:
    """Return the tensors after each of which bitsandbytes' optimizers wait for one rank's GPU.

    That is in a step; 0 for other optimizers.
    """
    if MODELLED[recipe.optim].library != "bitsandbytes" or recipe.group.offload:
        return 0
    return sum(row.count for row in _trained(recipe))


def searched_states(recipe: Recipe) -> int:
    """Return the states in 8 bits whose code bitsandbytes searches on one rank's GPU in a step.

    `kOptimizerStatic8bit2StateBlockwise` and its siblings (csrc/kernels.cu) find each new state
    between its neighbours in a table of 256 by halves (`quantize_2D`), a step after the other.
    """
    optimizer = MODELLED[recipe.optim]
    sharding = recipe.group
    if optimizer.width != 1 or sharding.offload:
        return 0
    # Tensors too small for 8 bits are too small to count.
    numbers = sum(row.count * prod(row.shape) for row in _trained(recipe))
    shards = sharding.shards if sharding.stage else 1
    return sum(optimizer.states) * numbers // shards


def updating_calls(recipe: Recipe) -> int:
    """Return the calls of the host for an update of one tensor after the other.

    Those of several tensors at once are few, and bitsandbytes' are in what it waits.
    """
    if recipe.optim != "adafactor":
        return 0
    return ADAFACTOR_CALLS * sum(row.count for row in _trained(recipe))


def sent(recipe: Recipe) -> float:
    """Return the bytes that one rank sends, and receives, in a step: the module's table."""
    sharding = recipe.group
    if sharding.world_size == 1:
        return 0.0
    return _sent_of_states(recipe, sharding) + _sent_of_tokens(recipe, sharding)


def _sent_of_states(recipe: Recipe, sharding: Sharding) -> float:
    """Return the bytes of weights and gradients that one rank sends in a step."""
    # What FSDP and DeepSpeed send has the format in which they compute (accelerate's
    # `set_mixed_precision`). The trained weights, gathered after the update, have their gradients'
    # size.
    computed = model_states.compute_recipe(recipe)
    weights = model_states.parameter_bytes(computed)
    gradients = model_states.gradient_bytes(computed)
    times = recipe.gradient_accumulation_steps
    share = 1 - 1 / sharding.shards
    copies = sharding.dp_replicate_size
    # 0 with one copy of the model.
    averaged = 2 * (1 - 1 / copies) * gradients / sharding.shards
    if sharding.stage == 3 or sharding.engine == "fsdp":
        gathers = sharding.stage - 1
        return times * share * (gathers * weights + gradients) + averaged
    reductions = times if sharding.stage == 2 else 1
    gathered = gradients if sharding.stage else 0
    return share * (2 * reductions * gradients + gathered)


def _sent_of_tokens(recipe: Recipe, sharding: Sharding) -> float:
    """Return the bytes of its own tokens' keys and values that one rank sends in a step."""
    ranks = recipe.ranks_of_sample
    if ranks == 1:
        return 0.0
    shape = recipe.shape
    channels = recipe.tokens // ranks * shape.head_dim * shape.num_layers  # of all micro-batches
    # Bytes of a number in the format of attention's inputs.
    size = 2 if recipe.precision[:4] in HALF else 4
    # Forward, backward, and forward again under checkpointing.
    passes = 2 + int(recipe.gradient_checkpointing)
    if sharding.sp_size > 1:
        keys = max(ranks, shape.num_kv_heads)  # repeated where ranks are more
        heads = 2 * shape.num_heads + 2 * keys
        return channels * heads * size * passes * (1 - 1 / ranks)
    # Keys' and values' gradients go around in fp32, once for each rank.
    gradients = ranks * 4
    return 2 * channels * shape.num_kv_heads * (passes * (ranks - 1) * size + gradients)


def to_host(recipe: Recipe) -> tuple[float, float]:
    """Return (bytes of one rank over PCIe, bytes of all ranks through the host's memory) in a step.

    The CPU updates. Offloaded parameters come up twice a micro-batch, and their new values when
    they are next gathered; others come up once they are updated.
    """
    sharding = recipe.group
    if not sharding.offload:
        return 0.0, 0.0
    numbers = sum(row.count * prod(row.shape) for row in _trained(recipe))
    times = recipe.gradient_accumulation_steps
    crossing, sums = 0, times  # torch adds gradients up on the host (`foreach_reduce`)
    if sharding.engine == "deepspeed":
        # Its device has half-precision weights in "-mixed".
        recipe = model_states.compute_recipe(recipe)
        crossing, sums = FP32 * numbers, _ways_of_sum(sharding.stage, times)
    gradients = model_states.gradient_bytes(recipe)
    crossing += sums * gradients
    if sharding.offload == "parameters":
        crossing += 2 * times * model_states.parameter_bytes(recipe)
    else:
        crossing += gradients  # weights of their size
    return crossing / sharding.world_size, CPU_ADAM * numbers


def _ways_of_sum(stage: int, times: int) -> int:
    """Return how often DeepSpeed 0.19.8 moves gradients until a step's are summed.

    The sum lies on the host between micro-batches and the device adds to it. It goes down once
    more, in fp32, when it is complete. Stage 3 brings it up even after the first micro-batch
    (zero/stage3.py, `partition_grads`). Stage 2 does not, nor moves it if there is one
    micro-batch only; stage 1 reduces after the last (zero/stage_1_and_2.py,
    `copy_grads_in_partition` and `async_accumulate_grad_in_cpu_via_gpu`).
    """
    if stage == 3:
        return 2 * times
    if times == 1:
        return 0
    return 2 * times - 1 if stage == 2 else 2


def paged_bytes(recipe: Recipe) -> int:
    """Return the bytes of the states that a paged optimizer keeps in unified memory."""
    if not recipe.optim.startswith("paged"):
        return 0
    total = 0
    for row in _trained(recipe):
        numbers = prod(row.shape)
        if numbers >= SMALLEST_PAGED:
            is_trainer = recipe.loop.name == "trainer"
            width = state_width(numbers, row.kind, recipe.optim, is_trainer)
            total += row.count * numbers * width
    return total * sum(MODELLED[recipe.optim].states)


def _trained(recipe: Recipe) -> list[ParameterRow]:
    """Return the parameters that are trained."""
    return [row for row in parameter_table(recipe) if row.trained]


def moved_pages(recipe: Recipe, card: Gpu) -> Range:
    """Return the bytes over PCIe in a step of states in unified memory: likely, least, most.

    They go out of the card and in again, as far as the process does not fit it with them. A card
    with room keeps them: 14 steps with paged states on an H100 took 0.90 to 1.40 times the estimate
    without a transfer.
    """
    paged = paged_bytes(recipe)
    if not paged:
        return 0.0, 0.0, 0.0
    # Without the states, which are no tensors of the device's allocator.
    needed = predict(recipe, card).process
    assert needed is not None  # predict gives it always
    process = Interval.of(needed)
    moved = []
    for end in (process.value, process.low, process.high):
        # Only what does not fit beside the process has to leave the card.
        beyond = max(0, end + paged - card.total)
        moved.append(2.0 * min(paged, beyond))
    likely, least, most = moved
    return likely, least, most


def waits(
    recipe: Recipe,
    card: Gpu,
    link: float | None,
    pages: bool = True,
) -> dict[str, Range]:
    """Return "links" and "host" with their seconds, none hidden behind computation.

    `pages`: with those of a paged optimizer's states, which take a prediction.
    """
    seconds = {}
    moved = sent(recipe)
    if moved:
        rate, shares = link_of(card, link)
        likely, least, most = (moved / (rate * share) for share in shares)
        seconds["links"] = (likely, least, most)
    crossing, through = to_host(recipe)
    paging = moved_pages(recipe, card) if pages else (0.0, 0.0, 0.0)
    if crossing or through or any(paging):
        pcie = pcie_bandwidth(card.pcie)
        each = []
        rates = zip(paging, PCIE_SHARE, (HOST_BANDWIDTH, *HOST_RANGE), strict=True)
        for paged, share, memory in rates:
            each.append((crossing + paged) / (pcie * share) + through / memory)
        likely, least, most = each
        seconds["host"] = (likely, least, most)
    return seconds


def link_of(
    card: Gpu,
    link: float | None = None,
) -> tuple[float, Range]:
    """Return bytes a second from card to card, and the (likely, best, worst) share of them.

    The bytes are those in one direction by the datasheet, or `link`.
    """
    if link:
        return link, NETWORK_SHARE
    if card.nvlink:
        return card.nvlink / 2, NVLINK_SHARE  # the datasheet adds both directions
    shares = PCIE_SHARE if card.peer_to_peer else THROUGH_HOST_SHARE
    return pcie_bandwidth(card.pcie), shares
