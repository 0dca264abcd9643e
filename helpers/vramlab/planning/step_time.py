"""How long a training step takes, by roofline: what has to be computed, moved and launched, each over its rate.

    seconds = operations / (U × peak) + 3 × bytes written / (V × bandwidth) + kernels × τ       for each micro-batch
            + bytes of the optimizer / (V × bandwidth) + links + host                          (`step_traffic.py`)

Kernels run one after the other, so the parts add up (within one kernel it is the larger of two, Williams et al. 2009).
The bytes written and the kernels are those of `predict`'s ledger.

U, V and τ are the least-squares fit (`benchmarks/step_times.py`) to 35 published runs on a T4 with step times
(`data/published_runs.json`: LoRA and QLoRA with checkpointing, 0.1 to 7 billion parameters). For another card the same
shares of its peak and bandwidth are an assumption, and the interval is wide: whole training steps reach 38 to 52 % of
the peak on A100, H100 and TPUs (Narayanan et al. 2021, table 1; Chowdhery et al. 2022, table 3; Dubey et al. 2024,
table 4).
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
from .step_traffic import optimizer_traffic, waits

TRANSFERS = 3  # of each byte that an operator writes: it reads about two to write one
UTILISATION, BANDWIDTH, LAUNCH = 0.425, 0.922, 13.35e-6  # of the peak, of the bandwidth, seconds a kernel
# Measured over estimated seconds, (likely, least, most): the extremes when each model is left out of the fit in turn.
FITTED_ON, FITTED = "T4", (1, 0.79, 1.54)
# Elsewhere, for the likely, the least and the most seconds: share of the peak, of the bandwidth, seconds a kernel.
SHARES = {"matmuls": (UTILISATION, 0.70, 0.30), "memory": (BANDWIDTH, 1.0, 0.6), "launches": (LAUNCH, 5e-6, 25e-6)}
HIDDEN = (0.5, 1.0, 0.0)  # what part of the computing time hides communication, likewise
WAITS = ("links", "host")
FEW = 5  # records, below which their spread says little
ASSUMED = (
    f"uncalibrated: {UTILISATION:.0%} of the card's peak, {BANDWIDTH:.0%} of its bandwidth and {LAUNCH * 1e6:.0f} µs "
    "a kernel, as fitted to published runs on a T4; the interval takes 30 to 70 %, 60 to 100 % and 5 to 25 µs"
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, most likely `seconds`, between `low` and `high`."""

    seconds: float
    low: float
    high: float
    parts: dict[str, float]  # "matmuls", "memory", "launches", "optimizer", "links" that are not hidden, "host"
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
    parts, basis = [estimate(recipe, card, link, which) for which in range(3)], ASSUMED
    largest = max(likely := parts[0], key=parts[0].get)
    if found := calibration(card.name, largest):  # of the likely parts; it does not see links and host
        factors, basis = found
        for i, factor in enumerate(factors):
            parts[i] = {name: parts[i][name] if name in WAITS else factor * n for name, n in likely.items()}
    if waiting := [name for name in WAITS if name in parts[0]]:
        basis += f"; {' and '.join(waiting)}: assumed, 30 to 90 % of the datasheet's rates"
    seconds = (sum(each.values()) for each in parts)
    ranks = recipe.sharding.world_size if recipe.sharding else 1
    return StepTime(*seconds, parts[0], recipe.tokens * ranks, basis)


def estimate(recipe: Recipe, card: Gpu, link: float | None = None, which: int = 0) -> dict[str, float]:
    """Part of the step to seconds, uncalibrated: the likely (`which` 0), the least (1) or the most (2) figures."""
    peak, memory, launch = (SHARES[name][which] for name in ("matmuls", "memory", "launches"))
    times, bandwidth = recipe.gradient_accumulation_steps, memory * _known(card, "bandwidth", card.bandwidth)
    walked = walk(recipe, card.chip)
    products = operations(recipe, walked).items()
    parts = {
        "matmuls": times * sum(n / (peak * _known(card, form, card.flops(form))) for form, n in products),
        "memory": times * TRANSFERS * walked.written / bandwidth,
        "launches": times * walked.kernels * launch,
    }
    computing = sum(parts.values())
    parts["optimizer"] = optimizer_traffic(recipe) / bandwidth
    for name, seconds in waits(recipe, card, link).items():
        hidden = min(seconds[which], computing) * HIDDEN[which] if name == "links" else 0.0
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
    body, head, channels = _sizes(shape)
    tokens = recipe.tokens // recipe.gradient_accumulation_steps
    mixed, half = recipe.precision.endswith("-mixed"), recipe.precision[:4] in ("fp16", "bf16")
    form = base = recipe.precision[:4] if half else recipe.precision
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
    causal = walked.fused and not walked.masked and "lm" in shape.task and shape.task != "masked-lm"
    scores = int(4 * _pairs(recipe) * channels * (3 + again + more) * (0.5 if causal else 1))
    # sdpa without a fused kernel ("math") computes in fp32
    found[form if walked.fused or recipe.attn_implementation == "eager" else "fp32"] += scores
    return {name: n for name, n in found.items() if n}


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
    size = account.m.rewritten + sum(times * entry.size for times, entry in rows)
    count = sum(times for times, _ in rows)
    fused = any(entry.op.endswith("_attention") for _, entry in rows)
    masked = any(entry.op == "mask" for _, entry in rows)
    return Walk(size, account.phases[2]["activations"], count, fused, masked)


def _known(card: Gpu, what: str, rate: float | None) -> float:
    if not rate:
        raise GpuError(f"The table has no {what} rate of {card.name}, so no time can be estimated: name a card it has.")
    return rate


def calibration(name: str, largest: str) -> tuple[tuple[float, float, float], str] | None:
    """((likely, least, most) measured over estimated seconds, what that rests on) for a card; None if nothing does.

    Our own records of that card come first, those whose `largest` part is the same before all; then the published runs
    that the constants were fitted to.
    """
    factors, by = (FITTED, f"fitted to 35 published runs on a {name}") if name == FITTED_ON else (None, "")
    alike = [ratio for part, ratio in _ratios(name) if part == largest]
    ratios = sorted(alike if len(alike) >= FEW else [ratio for _, ratio in _ratios(name)])
    if len(ratios) >= FEW:
        out = len(ratios) // 20  # on both sides
        factors, by = (median(ratios), ratios[out], ratios[-1 - out]), f"calibrated by {len(ratios)} records of {name}"
        by += f", where {largest} take longest" if len(alike) >= FEW else ""
    return factors and (factors, f"{by}: measured {factors[1]:.2f} to {factors[2]:.2f} times the estimate")


@lru_cache(maxsize=64)
def _ratios(name: str) -> list[tuple[str, float]]:
    """(largest part, measured over estimated seconds) of each record of a card that ran on one, not compiled."""
    found, card = [], find_gpu(name)
    for path in sorted(measurements_folder().glob("*.json")):
        with contextlib.suppress(GpuError):  # of a card that the table does not know
            reports = load(path).values() if find_gpu(path.stem.partition("-torch")[0]) == card else ()
            timed = [(Recipe(**report.recipe), report.speed.median) for report in reports if report.speed]
            for recipe, seconds in timed:
                if not recipe.torch_compile and (recipe.sharding is None or recipe.sharding.world_size == 1):
                    with contextlib.suppress(RecipeError):  # predict does not know its model
                        parts = estimate(recipe, card)
                        found.append((max(parts, key=parts.get), seconds / sum(parts.values())))
    return found
