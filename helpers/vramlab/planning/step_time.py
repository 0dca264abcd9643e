"""How long a training step takes, by roofline: what has to be computed and moved, or issued, each over its rate.

    computing = A × (operations / (U × peak) + attention's / (W × peak) + 3 × bytes written / (V × bandwidth))
              + bytes of the optimizer / (V × bandwidth)
    seconds   = max(computing, A × operators × τ) + tensors × σ + links + host          (`step_traffic.py`)

for A micro-batches. Kernels run one after the other, so their times add up (within one kernel it is the larger of two,
Williams et al. 2009), while the host issues the next ones: the longer of both counts. The bytes written and the operators
are those of `predict`'s ledger. bitsandbytes' optimizers wait for the GPU after each tensor (`optim/optimizer.py`,
`sync_gpu`), which takes σ. A fused kernel of attention has a share W of its own: the memory-efficient one reaches little
on a T4.

U, W, V, τ and σ are least-squares fits (`benchmarks/step_times.py`): to 61 published runs on a T4 with step times
(`data/published_runs.json`: LoRA and QLoRA with checkpointing, 0.1 to 7 billion parameters, 26 with repeated keys) and to
our records of an H100 (`data/measurements`). How far off the estimate is of a model that the fit has not seen is its
interval. For another card the middle of both is an assumption, and the interval is that of each card's runs by the other's
rates: whole training steps reach 38 to 52 % of the peak on A100, H100 and TPUs (Narayanan et al. 2021, table 1; Chowdhery
et al. 2022, table 3; Dubey et al. 2024, table 4).
"""

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import NamedTuple

from ..formulas.account import Account
from ..formulas.fused_head import with_its_adapters
from ..formulas.model_states import Settings
from ..hardware.gpu import Chip, Gpu, GpuError, find_gpu
from ..measurement.records import load, measurements_folder
from ..recipe import liger
from ..recipe.options import FUSED, LOOPS, LoRA
from ..recipe.recipe import LEAST_BATCH, Recipe
from ..recipe.shapes import Shape
from ..report.errors import RecipeError
from .step_traffic import optimizer_traffic, waiting_tensors, waits

TRANSFERS = 3  # of each byte that an operator writes: it reads about two to write one
WAITING_TENSOR = 160e-6  # seconds, σ


class Rates(NamedTuple):
    """What whole training steps reach on a card."""

    matmuls: float  # share of the peak, U
    attention: float  # share of the peak in a fused kernel, W
    memory: float  # share of the bandwidth, V
    issue: float  # seconds that the host takes for an operator, τ


RATES = {"T4": Rates(0.417, 0.0574, 0.884, 47.7e-6), "H100 SXM": Rates(0.849, 0.164, 0.651, 42e-6)}
USUAL = Rates(0.595, 0.0971, 0.759, 44.8e-6)  # the geometric mean of both, for other cards
# Measured over estimated seconds of nine tenths of the runs, (least, most): each model left out of the fit in turn; for
# other cards each of the two cards by the other's rates.
SPREAD = {"T4": (0.79, 1.19), "H100 SXM": (0.72, 1.42)}
SPREAD_ELSEWHERE = (0.55, 1.36)
BASIS = {"T4": "fitted to 61 published runs on a T4", "H100 SXM": "fitted to our records of an H100"}
HIDDEN = (0.5, 1.0, 0.0)  # what part of the computing time hides communication, for the likely, the least and the most
WAITS = ("links", "host")
FEW = 5  # records, below which their spread says little
ASSUMED = "uncalibrated: the middle of what a T4 and an H100 reach; the interval is that of each by the other"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, most likely `seconds`, between `low` and `high`."""

    seconds: float
    low: float
    high: float
    # "matmuls", "attention" (in a fused kernel), "memory", "launches" (what issuing takes longer than computing),
    # "optimizer", "links" that are not hidden, "host"
    parts: dict[str, float]
    tokens: int  # that all ranks together read in the step
    basis: str  # what the figure rests on, one sentence

    @property
    def tokens_per_second(self) -> float:
        """At the likely time, over all ranks."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        rate, least, most = (self.tokens / seconds for seconds in (self.seconds, self.high, self.low))
        return f"{self.seconds:.3g} s a step, {rate:,.0f} tokens/s ({least:,.0f} to {most:,.0f})"


def step_time(recipe: Recipe, gpu: str | Gpu, link: float | None = None) -> StepTime:
    """How long one optimizer step of `recipe` takes on `gpu`, accumulation included.

    Args:
        link: bytes per second that one GPU sends to the others; None takes NVLink's or PCIe's from the table.
    Raises:
        GpuError: no such card, or one whose rates are unknown.
        RecipeError: the card does not compute in the recipe's precision.
    """
    card = find_gpu(gpu)
    card.require(recipe.precision)
    factors, basis = calibration(card.name)
    computed, waited = _computed(recipe, card), waits(recipe, card, link)
    parts = [_with_waits(computed, waited, which, factor) for which, factor in enumerate(factors)]
    if waiting := [name for name in WAITS if name in parts[0]]:
        basis += f"; {' and '.join(waiting)}: at shares of the line rate that others measured"
    seconds = (sum(each.values()) for each in parts)
    ranks = recipe.sharding.world_size if recipe.sharding else 1
    return StepTime(*seconds, parts[0], recipe.tokens * ranks, basis)


def estimate(recipe: Recipe, card: Gpu, link: float | None = None) -> dict[str, float]:
    """Part of the step to its most likely seconds, whatever a card's own records say."""
    return _with_waits(_computed(recipe, card), waits(recipe, card, link), 0, 1.0)


def _computed(recipe: Recipe, card: Gpu) -> dict[str, float]:
    """Part of the step to seconds, without links and host."""
    rates, times = RATES.get(card.name, USUAL), recipe.gradient_accumulation_steps
    bandwidth = rates.memory * _known(card, "bandwidth", card.bandwidth)
    walked = walk(recipe, card.chip)
    fused = attention_operations(recipe, walked) / card.flops(form_of(recipe)) if walked.fused else 0.0
    at_peak = (n / _known(card, form, card.flops(form)) for form, n in operations(recipe, walked).items())
    parts = {
        "matmuls": times * (sum(at_peak) - fused) / rates.matmuls,
        "attention": times * fused / rates.attention,
        "memory": times * TRANSFERS * walked.written / bandwidth,
        "optimizer": optimizer_traffic(recipe) / bandwidth,
    }
    parts["launches"] = max(0.0, times * walked.kernels * rates.issue - sum(parts.values()))
    parts["optimizer"] += WAITING_TENSOR * waiting_tensors(recipe)
    return parts


def _with_waits(
    computed: dict[str, float], waited: dict[str, tuple[float, float, float]], which: int, factor: float
) -> dict[str, float]:
    """All parts, those computed times `factor`: the likely (`which` 0), the least (1) or the most (2) figures."""
    parts = {name: factor * seconds for name, seconds in computed.items()}
    hides = HIDDEN[which] * (sum(parts.values()) - parts["optimizer"])
    for name, seconds in waited.items():
        hidden = min(seconds[which], hides) if name == "links" else 0.0
        parts[name] = seconds[which] - hidden
    return parts


def operations(recipe: Recipe, walked: "Walk") -> dict[str, int]:
    """Format to floating-point operations of one micro-batch's matrix products.

    2 per weight and token (Kaplan et al. 2020, sec. 2.1) for each of: forward, backward to the input, backward to a trained
    weight, and recomputation: under checkpointing, and of TRL's fused head; and for passes without gradients. Attention
    has 4 · tokens² per channel, of which a fused causal kernel does half where no mask is given to it. With a 4-bit base
    the head and the adapters compute in fp32 unless autocast is on.
    """
    shape, lora, quantization = recipe.shape, recipe.lora, recipe.quantization
    body, head, _ = _sizes(shape)
    tokens = recipe.tokens // recipe.gradient_accumulation_steps
    mixed = recipe.precision.endswith("-mixed")
    form = base = form_of(recipe)
    again, trained, more = int(recipe.gradient_checkpointing), int(lora is None), recipe.passes_without_gradients
    if quantization and quantization.compute_dtype and not mixed:
        base = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[quantization.compute_dtype]
    found = dict.fromkeys((form, "fp32", base), 0)
    found[base] += 2 * tokens * body * (2 + trained + again + more)
    wide = quantization and quantization.prepare and not mixed
    found["fp32" if wide else form] += 2 * tokens * head * (2 + trained + (recipe.trainer in FUSED) + more)
    if lora:
        wide = not mixed and (lora.autocast_adapter_dtype or quantization)
        found["fp32" if wide else form] += 2 * tokens * _adapters(shape, lora) * (3 + again)
    # sdpa without a fused kernel ("math") computes in fp32
    found[form if walked.fused or recipe.attn_implementation == "eager" else "fp32"] += attention_operations(
        recipe, walked
    )
    return {name: n for name, n in found.items() if n}


def attention_operations(recipe: Recipe, walked: "Walk") -> int:
    """Those of `operations` that are attention's products with pairs of tokens."""
    *_, channels = _sizes(recipe.shape)
    task = recipe.shape.task
    causal = walked.fused and not walked.masked and "lm" in task and task != "masked-lm"
    passes = 3 + int(recipe.gradient_checkpointing) + recipe.passes_without_gradients
    return int(4 * _pairs(recipe) * channels * passes * (0.5 if causal else 1))


def form_of(recipe: Recipe) -> str:
    """The format that matrix products of what is not quantized compute in."""
    return recipe.precision[:4] if recipe.precision[:4] in ("fp16", "bf16") else recipe.precision


def _pairs(recipe: Recipe) -> int:
    """Pairs of tokens of a micro-batch that attention compares: of each row, or of each sample where FlashAttention is
    given their ends."""
    if recipe.attn_implementation == "flash_attention_2" and recipe.is_ragged:
        return sum(length**2 for length in recipe.samples)
    rows, width = recipe.rows
    return rows * recipe.sequences // recipe.batch_size * width**2


@lru_cache(maxsize=512)
def _sizes(shape: Shape) -> tuple[int, int, int]:
    """(weights of the layers that each token meets, of the head, channels × layers of attention)."""
    body = head = 0
    for weight in shape.weights():
        if weight.name == f"{shape.head}.weight":
            head += weight.size
        elif weight.kind in ("linear", "conv1d", "conv"):
            body += weight.size
        elif weight.kind == "expert":
            body += weight.size * shape.experts_per_token // shape.num_experts
    if not head and "classification" not in shape.task:
        head = shape.vocab_size * shape.hidden_size  # the embedding serves as the head
    layers = shape.num_layers + 2 * shape.num_decoder_layers
    return body, head, layers * shape.num_heads * shape.head_dim


@lru_cache(maxsize=512)
def _adapters(shape: Shape, lora: LoRA) -> int:
    return sum(lora.r * (inside + out) for _, inside, out in shape.lora_targets(lora.target_modules))


class Walk(NamedTuple):
    """One micro-batch in `predict`'s ledger."""

    written: int  # bytes that its operators write
    kept: int  # bytes of activations at the end of forward
    kernels: int  # how many operators there are
    fused: bool  # attention is one kernel
    masked: bool  # it is given a mask


def walk(recipe: Recipe, chip: Chip) -> Walk:
    """The walk of `recipe`, which depends on no optimizer, accumulation or sharding.

    Everything else that the account reads is read here too. Rows of one length are affine in the micro-batch (but for the
    rounding of blocks), so two walks give all sizes. Samples of several lengths are not, nor are Liger's chunks, of which
    there are about as many for a large micro-batch as for a small one: those are walked as they are.
    """
    if recipe.is_ragged or liger.kernels(recipe):
        return _walk(_walked(recipe, recipe.batch_size), chip)
    least = LEAST_BATCH.get(recipe.trainer, 1)
    one, two = (_walk(_walked(recipe, size), chip) for size in (least, least + 1))
    more = recipe.batch_size - least
    return Walk(
        written=one.written + (two.written - one.written) * more,
        kept=one.kept + (two.kept - one.kept) * more,
        kernels=one.kernels,
        fused=one.fused,
        masked=one.masked,
    )


def _walked(recipe: Recipe, batch_size: int) -> Settings:
    """`recipe` without what no walk depends on, with micro-batches of `batch_size` samples, as the key of a cache."""
    same = {"optim": "sgd", "optim_args": None, "gradient_accumulation_steps": 1, "sharding": None}
    return Settings(recipe, batch_size=batch_size, loop=LOOPS["trainer"], **same)


@lru_cache(maxsize=4096)
def _walk(settings: Settings, chip: Chip) -> Walk:
    """The ledger of one micro-batch, each layer that it writes out counted as often as there are such layers."""
    account = Account(with_its_adapters(settings.recipe), chip)
    rows = [row for row in account.births() if (row[1].op, row[1].category) != ("sum", "workspace")]  # far too large
    size = account.ledger.rewritten + sum(times * entry.size for times, entry in rows)
    count = sum(times for times, _ in rows)
    fused = any(entry.op.endswith("_attention") for _, entry in rows)
    masked = any(entry.op == "mask" for _, entry in rows)
    return Walk(size, account.phases[2]["activations"], count, fused, masked)


def _known(card: Gpu, what: str, rate: float | None) -> float:
    if not rate:
        raise GpuError(f"The table has no {what} rate of {card.name}, so no time can be estimated: name a card it has.")
    return rate


def calibration(name: str) -> tuple[tuple[float, float, float], str]:
    """((likely, least, most) measured over estimated seconds, what that rests on) for a card.

    That of the fit where the card has one, else of its own records if there are a few.
    """
    ratios = sorted(_ratios(name)) if name not in RATES else []
    if len(ratios) >= FEW:
        out = len(ratios) // 20  # on both sides
        factors = (median(ratios), ratios[out], ratios[-1 - out])
        by = f"calibrated by {len(ratios)} records of {name}"
    else:
        factors, by = (1.0, *SPREAD.get(name, SPREAD_ELSEWHERE)), BASIS.get(name, ASSUMED)
    return factors, f"{by}: measured {factors[1]:.2f} to {factors[2]:.2f} times the estimate"


@lru_cache(maxsize=64)
def _ratios(name: str) -> list[float]:
    """Measured over estimated seconds of each record of a card, where no states were paged out: none was full."""
    return [seconds / sum(_computed(recipe, find_gpu(name)).values()) for recipe, seconds in timed_records(name)]


def timed_records(name: str) -> list[tuple[Recipe, float]]:
    """(recipe, seconds of a step) of each record of a card that ran on one and was not compiled, and that `predict` knows."""
    found, card = [], find_gpu(name)
    for path in sorted(measurements_folder().glob("*.json")):
        with contextlib.suppress(GpuError):  # of a card that the table does not know
            reports = load(path).values() if find_gpu(path.stem.partition("-torch")[0]) == card else ()
            for report in reports:
                recipe = Recipe(**report.recipe) if report.speed else None
                if recipe is None or recipe.torch_compile or recipe.sharding:
                    continue
                with contextlib.suppress(RecipeError):  # predict does not know its model
                    walk(recipe, card.chip)
                    found.append((recipe, report.speed.median))
    return found
