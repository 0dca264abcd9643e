"""How long a training step takes, by roofline: what is computed, moved or issued, over its rate.

    passes  = A × (operations / (U × peak) + attention's / (W × peak)
                   + 3 × bytes written / (V × bandwidth))
    update  = bytes of the optimizer / (V × bandwidth)
    issuing = A × calls × τ
    seconds = max(passes, issuing) + max(update, calls of the update × τ)
            + tensors × σ + states in 8 bits × ρ / peak in fp32
            + links + host                                       (`step_traffic.py`)

for A micro-batches. Kernels run one after the other, so their times add up (within one kernel it is
the larger of two, Williams et al. 2009), while the host issues the next ones: the longer of both
counts, and no update runs before the last gradient has been issued. The bytes written and the calls
(`formulas/calls.py`) are those of `predict`'s ledger. bitsandbytes' optimizers wait for the GPU
after each tensor (`optim/optimizer.py`, `sync_gpu`), which takes σ, and search the code of each
state in 8 bits, for which the card could do ρ operations in fp32. A fused kernel of attention has a
share W of its own: the memory-efficient one reaches little on a T4.

U, W, V and τ are least-squares fits (`benchmarks/step_times.py`): to 61 published runs on a T4
with step times (`data/published_runs.json`: LoRA and QLoRA with checkpointing, 0.1 to 7 billion
parameters, 26 with repeated keys) and to our records of an H100 and of an H200
(`data/measurements`). σ and ρ are of 13 pairs of an H100's records that differ in the optimizer
alone, and are assumed of other cards. How far off the estimate is of a model that the fit has not
seen is its interval. For another card the middle of a T4 and an H100 is an assumption, and the
interval is that of each of these cards' runs by the other's rates: whole training steps reach 38 to
52 % of the peak on A100, H100 and TPUs (Narayanan et al. 2021, table 1; Chowdhery et al. 2022,
table 3; Dubey et al. 2024, table 4).
"""

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from ..base.errors import RecipeError
from ..hardware.gpu import Gpu, GpuError, find_gpu
from ..hardware.links import PCIE_SHARE, pcie_bandwidth
from ..measurement.records import load, measurements_folder
from ..recipe.knobs import unchecked
from ..recipe.optimizers import SIMULATED
from ..recipe.options import FUSED, LoRA
from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from .rates import ASSUMED, BASIS, RATES, SPREAD, SPREAD_ELSEWHERE, USUAL
from .step_traffic import (
    optimizer_traffic,
    searched_states,
    updating_calls,
    waiting_tensors,
    waits,
)
from .step_walk import Walk, walk

Range = tuple[float, float, float]  # likely, least, most

TRANSFERS = 3  # of each byte that an operator writes: it reads about two to write one

# The part of the computing time that hides communication, for the likely, the least and the most.
HIDDEN = (0.5, 1.0, 0.0)
HIDES = ("links", "copies")  # on a stream of their own
WAITS = (*HIDES, "host")
FEW = 5  # records, below which their spread says little
FORMS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, most likely `seconds`, between `low` and `high`.

    Attributes:
        parts: "matmuls", "attention" (in a fused kernel), "memory", "launches" (what issuing takes
            longer than computing), "optimizer", "links" and "copies" of activations that are not
            hidden, "host".
        tokens: that all ranks together read in the step.
        basis: what the figure rests on, one sentence.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    tokens: int
    basis: str

    @property
    def tokens_per_second(self) -> float:
        """At the likely time, over all ranks."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        least = self.tokens / self.high
        most = self.tokens / self.low
        rate = f"{self.tokens_per_second:,.0f} tokens/s ({least:,.0f} to {most:,.0f})"
        return f"{self.seconds:.3g} s a step, {rate}"


def step_time(
    recipe: Recipe,
    gpu: str | Gpu,
    link: float | None = None,
) -> StepTime:
    """Estimate how long one optimizer step of `recipe` takes on `gpu`, accumulation included.

    Args:
        link: bytes per second that one GPU sends to the others; None takes NVLink's or PCIe's from
            the table.
    Raises:
        GpuError: no such card, or one whose rates are unknown.
        RecipeError: the card does not compute in the recipe's precision, or an optimizer whose
            update no estimate knows.
    """
    card = find_gpu(gpu)
    card.require(recipe.precision)
    factors, basis = calibration(card.name)
    computed = _computed(recipe, card)
    waited = _waited(recipe, card, link)
    parts = []
    for which, factor in enumerate(factors):
        parts.append(_with_waits(computed, waited, which, factor))
    # A wait rests on rates that others measured, which the basis has to say.
    waiting = [name for name in WAITS if name in parts[0]]
    if waiting:
        basis += f"; {' and '.join(waiting)}: at shares of the line rate that others measured"
    likely, least, most = (sum(each.values()) for each in parts)
    ranks = recipe.group.world_size
    return StepTime(
        likely,
        least,
        most,
        parts[0],
        recipe.tokens * ranks // recipe.ranks_of_sample,
        basis,
    )


def estimate(
    recipe: Recipe,
    card: Gpu,
    link: float | None = None,
    pages: bool = True,
) -> dict[str, float]:
    """Return the parts of the step with their likely seconds, whatever a card's records say.

    Without `pages` of a paged optimizer it is a lower bound, and needs no prediction.
    """
    return _with_waits(
        _computed(recipe, card),
        _waited(recipe, card, link, pages),
        0,
        1.0,
    )


def _computed(
    recipe: Recipe,
    card: Gpu,
) -> dict[str, float]:
    """Return the parts of the step with their seconds, without links and host."""
    if recipe.optim in SIMULATED:
        rest = "no estimate knows how long its update takes: simulate says its memory, measure both"
        raise RecipeError("optim", recipe.optim, rest)
    rates = RATES.get(card.name, USUAL)
    times = recipe.gradient_accumulation_steps
    bandwidth = rates.memory * _known(card, "bandwidth", card.bandwidth)
    walked = walk(recipe, card.chip)
    at_peak = []
    for form, count in operations(recipe, walked).items():
        # Seconds by format, since a card's peak rate depends on it.
        at_peak.append(count / _known(card, form, card.flops(form)))
    fused = 0.0
    if walked.fused:
        form = form_of(recipe)
        rate = _known(card, form, card.flops(form))
        fused = attention_operations(recipe, walked) / rate
    parts = {
        "matmuls": times * (sum(at_peak) - fused) / rates.matmuls,
        "attention": times * fused / rates.attention,
        "memory": times * TRANSFERS * walked.written / bandwidth,
        "optimizer": optimizer_traffic(recipe) / bandwidth,
    }
    # The host issues kernels while others run, so only what takes it longer counts.
    update = parts["optimizer"]
    computing = sum(parts.values())
    issued = issuing(recipe, card)
    updating = max(update, rates.issue * updating_calls(recipe))
    passes = computing - update
    parts["launches"] = max(passes, issued) + updating - computing
    parts["optimizer"] += rates.waiting * waiting_tensors(recipe)
    searched = searched_states(recipe)
    if searched:
        peak = _known(card, "fp32", card.flops("fp32"))
        parts["optimizer"] += rates.searching * searched / peak
    return parts


def _waited(
    recipe: Recipe,
    card: Gpu,
    link: float | None,
    pages: bool = True,
) -> dict[str, Range]:
    """Return the seconds by what is waited for: `waits`, and offloaded activations' "copies".

    Those go to the host in forward and come back in backward.
    """
    seconds = waits(unchecked(recipe, activation_offloading=False), card, link, pages)
    if recipe.activation_offloading:
        # Once out in forward and once back in backward, for each micro-batch.
        moved = 2 * recipe.gradient_accumulation_steps * walk(recipe, card.chip).kept
        pcie = pcie_bandwidth(card.pcie)
        likely, least, most = (moved / (pcie * share) for share in PCIE_SHARE)
        seconds["copies"] = (likely, least, most)
    return seconds


def issuing(recipe: Recipe, card: Gpu) -> float:
    """Return the seconds in which the host issues a step's passes, however wide rows are."""
    rates = RATES.get(card.name, USUAL)
    return recipe.gradient_accumulation_steps * walk(recipe, card.chip).calls * rates.issue


def _with_waits(
    computed: dict[str, float],
    waited: dict[str, Range],
    which: int,
    factor: float,
) -> dict[str, float]:
    """Return all parts, those computed times `factor`.

    `which`: the likely (0), the least (1) or the most (2) figures.
    """
    # A calibration is of computing: no record has links or an offload.
    parts = {name: factor * seconds for name, seconds in computed.items()}
    # Behind computing alone: the optimizer waits for the last gradients.
    hides = HIDDEN[which] * (sum(parts.values()) - parts["optimizer"])
    for name, seconds in waited.items():
        hidden = min(seconds[which], hides) if name in HIDES else 0.0
        parts[name] = seconds[which] - hidden
    return parts


def operations(
    recipe: Recipe,
    walked: Walk,
) -> dict[str, int]:
    """Return by format the floating-point operations of one micro-batch's matrix products.

    2 per weight and token (Kaplan et al. 2020, sec. 2.1) for each of: forward, backward to the
    input, backward to a trained weight, and recomputation: under checkpointing, and of TRL's fused
    head; and for passes without gradients. Attention has 4 · tokens² per channel, of which a fused
    causal kernel does half where no mask is given to it. With a 4-bit base the head and the
    adapters compute in fp32 unless autocast is on.
    """
    shape = recipe.shape
    lora = recipe.lora
    quantization = recipe.quantization
    # Weights that a token meets, of the layers and of the head.
    body, head, _ = _sizes(shape)
    tokens = recipe.tokens // recipe.gradient_accumulation_steps // recipe.ranks_of_sample
    is_mixed = recipe.precision.endswith("-mixed")
    again = int(recipe.gradient_checkpointing)
    passes = 2 + recipe.passes_without_gradients
    if lora is None:
        # Of full training also backward to the weights, which frozen ones do not have.
        passes += 1

    form = form_of(recipe)
    base_form = form
    if quantization and quantization.compute_dtype and not is_mixed:
        base_form = FORMS[quantization.compute_dtype]
    prepared = quantization and quantization.prepare and not is_mixed
    head_form = "fp32" if prepared else form
    # sdpa without a fused kernel ("math") computes in fp32
    is_fp32 = not walked.fused and recipe.attn_implementation != "eager"
    attention_form = "fp32" if is_fp32 else form

    counts = dict.fromkeys((form, "fp32", base_form), 0)
    counts[base_form] += 2 * tokens * body * (passes + again)
    counts[head_form] += 2 * tokens * head * (passes + (recipe.trainer in FUSED))
    if lora:
        is_wide = not is_mixed and (lora.autocast_adapter_dtype or quantization)
        adapters_form = "fp32" if is_wide else form
        counts[adapters_form] += 2 * tokens * _adapters(shape, lora) * (3 + again)
        if lora.use_dora:
            counts[adapters_form] += 2 * _products_of_adapters(shape, lora) * (1 + again)
    counts[attention_form] += attention_operations(recipe, walked)
    return {name: count for name, count in counts.items() if count}


def attention_operations(recipe: Recipe, walked: Walk) -> int:
    """Return those of `operations` that are attention's products with pairs of tokens."""
    *_, channels = _sizes(recipe.shape)
    task = recipe.shape.task
    # An encoder sees all tokens, a causal kernel skips the half above the diagonal.
    is_causal = "lm" in task and task != "masked-lm"
    share = 1.0
    if is_causal and walked.fused and not walked.masked:
        share = 0.5
    passes = 3 + int(recipe.gradient_checkpointing) + recipe.passes_without_gradients
    return int(4 * _pairs(recipe) * channels * passes * share)


def form_of(recipe: Recipe) -> str:
    """Return the format that matrix products of what is not quantized compute in."""
    form = recipe.precision[:4]
    return form if form in ("fp16", "bf16") else recipe.precision


def _pairs(recipe: Recipe) -> int:
    """Return the pairs of tokens of a micro-batch that attention compares.

    They are those of each row, or of each sample where FlashAttention is given their ends. Ranks
    that have one sample's tokens together compare equally many.
    """
    if recipe.attn_implementation == "flash_attention_2" and recipe.is_ragged:
        return sum(length**2 for length in recipe.samples)
    rows, width = recipe.rows
    return rows * recipe.sequences // recipe.batch_size * width**2 // recipe.ranks_of_sample


@lru_cache(maxsize=512)
def _sizes(shape: Shape) -> tuple[int, int, int]:
    """Return weights of the layers that each token meets, of the head, and attention's channels.

    The channels are those of all layers together.
    """
    body = 0
    head = 0
    for weight in shape.weights():
        if weight.name == f"{shape.head}.weight":
            head += weight.size
        elif weight.kind in ("linear", "conv1d", "conv"):
            body += weight.size
        elif weight.kind == "expert":
            # A token meets only those experts that it is sent to.
            body += weight.size * shape.experts_per_token // shape.num_experts
    if not head and "classification" not in shape.task:
        head = shape.vocab_size * shape.hidden_size  # the embedding serves as the head
    # A decoder's layers have attention of their own and attention to the encoder.
    layers = shape.num_layers + 2 * shape.num_decoder_layers
    return body, head, layers * shape.num_heads * shape.head_dim


@lru_cache(maxsize=512)
def _adapters(shape: Shape, lora: LoRA) -> int:
    """Return the weights of all adapters."""
    targets = shape.lora_targets(lora.target_modules)
    return sum(lora.r * (inside + outside) for _, inside, outside in targets)


@lru_cache(maxsize=512)
def _products_of_adapters(shape: Shape, lora: LoRA) -> int:
    """Return the pairs of numbers that DoRA multiplies for B A, a unit matrix through both."""
    targets = shape.lora_targets(lora.target_modules)
    return sum(lora.r * inside * (inside + outside) for _, inside, outside in targets)


def _known(
    card: Gpu,
    name: str,
    rate: float | None,
) -> float:
    """Return a card's rate. Raises GpuError where the table has none."""
    if not rate:
        missing = f"The table has no {name} rate of {card.name}"
        raise GpuError(f"{missing}, so no time can be estimated: name a card it has.")
    return rate


def calibration(name: str) -> tuple[Range, str]:
    """Return a card's measured over estimated seconds, and what that rests on.

    It is that of the fit where the card has one, else of its own records if there are a few.
    """
    ratios = [] if name in RATES else sorted(_ratios(name))
    if len(ratios) >= FEW:
        # Nine tenths of the records lie between.
        out = len(ratios) // 20  # on both sides
        factors = (median(ratios), ratios[out], ratios[-1 - out])
        basis = f"calibrated by {len(ratios)} records of {name}"
    else:
        factors = (1.0, *SPREAD.get(name, SPREAD_ELSEWHERE))
        basis = BASIS.get(name, ASSUMED)
    _, least, most = factors
    return factors, f"{basis}: measured {least:.2f} to {most:.2f} times the estimate"


@lru_cache(maxsize=64)
def _ratios(name: str) -> list[float]:
    """Return measured over estimated seconds of each record of a card.

    No states were paged out: none was full.
    """
    card = find_gpu(name)
    ratios = []
    for recipe, seconds in timed_records(name):
        ratios.append(seconds / sum(_computed(recipe, card).values()))
    return ratios


def timed_records(name: str) -> list[tuple[Recipe, float]]:
    """Return (recipe, seconds of a step) of each record of a card that can be held against it.

    It ran on one card, was not compiled and offloaded nothing, and `predict` knows its recipe.
    """
    card = find_gpu(name)
    timed = []
    for path in sorted(measurements_folder().glob("*.json")):
        with contextlib.suppress(GpuError):  # of a card that the table does not know
            if find_gpu(path.stem.partition("-torch")[0]) != card:
                continue
            for report in load(path).values():
                if report.recipe is None or report.speed is None:
                    continue
                recipe = Recipe(**report.recipe)
                if recipe.torch_compile or recipe.sharding or recipe.activation_offloading:
                    continue
                with contextlib.suppress(RecipeError):  # predict does not know its model
                    walk(recipe, card.chip)
                    timed.append((recipe, report.speed.median))
    return timed
