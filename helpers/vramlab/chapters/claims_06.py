"""The experiments that test what source B says about QLoRA (its section 5.5, and its table of LoRA and QLoRA).

B loads polyglot-ko-1.3b in 4 bits with double quantization, prepares it with PEFT, which casts what is not quantized to
fp32 and turns checkpointing on, and trains its adapters at batch 16 and 256 tokens. Its readings begin at 0.945: a cell
before had loaded the same model in 4 bits and nobody deleted it. What was alive is derived from the tensors of
transformers 4.40, as in chapter 02; nothing is fitted.
"""

import json
from contextlib import suppress
from functools import cache
from math import ceil
from statistics import NormalDist

from ..allocator import Allocator
from ..claims import Finding
from ..data import data_path
from ..errors import RecordError
from ..gpu import find_gpu
from ..overhead import cublas_workspace
from ..predict import predict
from ..recipe import Quantization, Recipe
from ..records import find_record
from ..report import GiB, format_bytes
from .claims_02 import T4, lecture, old_buffers, witness
from .claims_05 import ADAPTERS, trained

NF4 = Quantization("nf4", double=True)
OFFSET = (1 - 1 / 30 + 1 - 1 / 32) / 2  # the outermost probability, bitsandbytes' 0.9677083 (`create_normal_map`)
SEEN_AS_EQUAL = 0.01  # of bits per byte: what passes for "similar quality"


def prepared(gradient_checkpointing: bool = True, **changes) -> Recipe:
    """B's QLoRA recipe, as far as today's libraries can do it."""
    fields = dict(lora=ADAPTERS, quantization=NF4, gradient_checkpointing=gradient_checkpointing)
    return lecture(16, **{**fields, **changes})


# --- the format ---------------------------------------------------------------------------------------------------


def quantile_levels() -> list[float]:
    """NF4's sixteen numbers from quantiles of the normal distribution: eight above zero, seven below, and zero.

    Dettmers et al. 2023, section 3; evenly spaced probabilities between one half and `OFFSET` on each side, scaled to 1.
    """

    def side(count: int) -> list[float]:
        steps = [OFFSET + (0.5 - OFFSET) * i / count for i in range(count)]
        return [NormalDist().inv_cdf(p) for p in steps]

    above, below = side(8), side(7)
    return [number / above[0] for number in (*(-x for x in below), 0.0, *reversed(above))]


def quantiles() -> Finding:
    """Whether the levels of bitsandbytes' NF4 are those quantiles."""
    from bitsandbytes.functional import get_4bit_type

    table = get_4bit_type("nf4", device="cpu").tolist()
    apart = max(abs(a - b) for a, b in zip(table, quantile_levels(), strict=True))
    return Finding(apart < 1e-4, "derived", f"bitsandbytes' table and the quantiles are {apart:.1g} apart at most")


def kept_beside(statistic: str) -> Finding:
    """Whether bitsandbytes keeps this statistic of each block of 64 weights beside the codes."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    blocks = weights.reshape(-1, 64)
    of = {"standard deviation": blocks.std(1), "largest magnitude": blocks.abs().amax(1)}[statistic]
    scales = quantize_4bit(weights, quant_type="nf4")[1].absmax
    return Finding(bool(torch.allclose(of, scales)), "measured", "bitsandbytes.functional.quantize_4bit, 64 blocks")


def unpacked_when_needed() -> Finding:
    """Whether a 4-bit layer keeps no unpacked weight after its forward pass, and unpacks it anew to go back."""
    import bitsandbytes as bnb
    import torch

    from ..watch import watch

    layer = bnb.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    x = torch.randn(8, 256, requires_grad=True)
    with watch(layer, batch=[x]) as watcher:
        layer(x).sum().backward()
    whole = 4 * 256 * 256
    forward, backward = (watcher.report().phases[phase] for phase in ("forward", "backward"))
    again = any(operator == "dequantize_4bit" for _, _, operator in watcher.history.log)
    value = forward.end.total < whole < backward.peak.temporaries + 1 and again
    return Finding(value, "measured", "bitsandbytes.nn.Linear4bit, 256 × 256, on a CPU")


def in_eight_bits(part: str) -> Finding:
    """Whether double quantization stores the "weights" or their "scales" as one byte a number."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(64, 64), compress_statistics=True, quant_type="nf4")
    stored, numbers = {"weights": (packed, 64 * 64), "scales": (state.absmax, 64)}[part]
    return Finding(stored.nbytes == numbers, "measured", f"{stored.nbytes:,} bytes for {numbers:,} {part}")


def base_bits(part: str, quantized: bool = True) -> Finding:
    """Bits for each weight of B's base: of its quantized "matrices", or of "all" weights once it is prepared."""
    recipe = prepared(quantization=NF4 if quantized else None)
    if not quantized:
        loaded = predict(recipe, gpu=T4).phases["load"].end.parameters - 4 * trained(recipe)
        return Finding(8 * loaded / recipe.shape.num_parameters, "predicted", str(recipe))
    matrices, others = _weights(recipe)
    size = sum(sum(four_bits(n)) for n in matrices)
    if part == "matrices":
        return Finding(8 * size / sum(matrices), "derived", f"{sum(matrices):,} weights in {len(matrices)} matrices")
    size += sum(4 * n for n in others)
    return Finding(8 * size / recipe.shape.num_parameters, "derived", f"{recipe}, the rest in fp32")


def _weights(recipe: Recipe) -> tuple[list[int], list[int]]:
    """Numbers in each matrix that bitsandbytes quantizes (every linear layer but the head), and in every other weight."""
    kinds: tuple[list[int], list[int]] = [], []
    for weight in recipe.shape.weights():
        four = weight.kind == "linear" and weight.name != f"{recipe.shape.head}.weight"
        kinds[not four].append(weight.size)
    return kinds


def four_bits(numbers: int) -> list[int]:
    """Bytes of the blocks of a matrix in 4 bits with double quantization: codes; scales, their scales and offset, in
    blocks of 64 and 256; the scales' 256 levels and the weights' 16."""
    scales = ceil(numbers / 64)
    return [ceil(numbers / 2), scales, 4 * ceil(scales / 256), 4, 4 * 256, 4 * 16]


# --- B's run ------------------------------------------------------------------------------------------------------


def loaded_bytes(width: int, adapters: bool) -> int:
    """Bytes allocated by loading B's model in 4 bits with transformers 4.40; `width` is that of all else.

    Beside each tensor as large as the embedding the allocator keeps what it does not split off.
    """
    recipe, allocator = prepared(), Allocator()
    matrices, others = _weights(recipe)
    sizes = [size for n in matrices for size in four_bits(n)] + [width * n for n in others] + old_buffers(recipe)
    if adapters:
        r = recipe.lora.r
        targets = recipe.shape.lora_targets(recipe.lora.target_modules)
        sizes += [4 * r * n for _, inside, out in targets for n in (inside, out)]
    for size in sizes:
        allocator.malloc(size)
    return allocator.allocated


def step_bytes() -> dict[str, int]:
    """What B's step leaves behind, part by part, while its loop still refers to the outputs and the loss.

    The head is fp32, so the logits are. `enable_input_require_grads` makes the embedding's result a leaf of the graph: the
    loss holds the graph, the graph's end (`AccumulateGrad`) holds that leaf, and the leaf holds its gradient.
    """
    recipe = prepared()
    tokens = recipe.batch_size * recipe.seq_len
    return {
        "logits in fp32": 4 * tokens * recipe.shape.vocab_size,
        "the embedding's result": 4 * tokens * recipe.shape.hidden_size,
        "and its gradient": 4 * tokens * recipe.shape.hidden_size,
        "adapters' gradients and states": 3 * 4 * trained(recipe),
        "the batch": 2 * 8 * tokens,
    }


def reading(moment: str, leak: bool) -> Finding:
    """GiB that B read "before" loading, once it was "loaded" and after the first "step", with or without what an earlier
    cell had left: the same model in 4 bits, not prepared."""
    total = 2 * cublas_workspace(find_gpu(T4).compute_capability) + (loaded_bytes(2, adapters=False) if leak else 0)
    if moment != "before":
        total += loaded_bytes(4, adapters=True)
    if moment == "step":
        total += sum(step_bytes().values())
    return Finding(total / GiB, "derived", f"{prepared()}, with transformers 4.40's tensors")


def part(which: str) -> Finding:
    """GiB of the adapters' "gradients" or AdamW "optimizer_states", in fp32."""
    report = witness(prepared(), T4)
    return Finding(getattr(report.phases["step"].end, which) / GiB, report.source, str(prepared()))


def trained_share() -> Finding:
    """Per cent of all parameters that B's QLoRA trains."""
    few = trained(prepared())
    share = 100 * few / (few + prepared().shape.num_parameters)
    return Finding(share, "derived", f"{few:,} of {few + prepared().shape.num_parameters:,}")


def peak_ratio(lora: bool, qlora: bool) -> Finding:
    """QLoRA's peak over LoRA's in B's run; each argument says whether that one is checkpointed."""
    recipes = [prepared(qlora), prepared(lora, quantization=None)]
    four, half = (witness(recipe, T4, simulated=True) for recipe in recipes)
    sizes = " and ".join(format_bytes(report.peak.total) for report in (four, half))
    return Finding(four.peak.total / half.peak.total, four.source, f"peaks {sizes}: {recipes[0]}, {recipes[1]}")


# --- who needs it -------------------------------------------------------------------------------------------------


def needs_less(**recipe) -> Finding:
    """Whether a recipe's peak is lower with its base in 4 bits, prepared, than with the same base in half precision."""
    half = Recipe(**{"lora": {"r": 8}, "precision": "bf16-true", **recipe})
    sizes = [predict(half.replace(quantization=q)).peak.total for q in (NF4, None)]
    text = f"{' and '.join(map(format_bytes, sizes))}: {half}"
    return Finding(sizes[0] < sizes[1], "predicted", text)


def runs_on(gpu: str, **recipe) -> Finding:
    """Whether QLoRA of a model fits a card while LoRA of the same model does not."""
    card = find_gpu(gpu)
    half = Recipe(**{"lora": {"r": 8}, "precision": "fp16-true", "gradient_checkpointing": True, **recipe})
    reports = [witness(half.replace(quantization=q), gpu) for q in (NF4, None)]
    needs = [getattr(report.process, "value", report.process) or report.peak.total for report in reports]
    text = (
        f"QLoRA {format_bytes(needs[0])}, LoRA {format_bytes(needs[1])}, {card.name} {format_bytes(card.total)}: {half}"
    )
    return Finding(needs[0] <= card.total < needs[1], reports[0].source, text)


def computes_in(gpu: str, precision: str) -> Finding:
    """Whether a card computes in a format without emulating it."""
    card = find_gpu(gpu)
    return Finding(card.supports(precision), "derived", f"{card.name}: {card.source}")


def pages(**changes) -> Finding:
    """Whether a paged optimizer keeps any of its states outside the allocator's memory, in B's run with `changes`."""
    recipe = prepared(**changes)
    paged = predict(recipe.replace(optim="paged_adamw_32bit"), gpu=T4).phases["step"].end.optimizer_states
    plain = predict(recipe.replace(optim="adamw_torch", precision="fp32"), gpu=T4).phases["step"].end.optimizer_states
    text = f"{format_bytes(paged, 'MiB')} of {format_bytes(plain, 'MiB')} in the allocator: {recipe}"
    return Finding(paged < plain, "predicted", text)


def overflows_and_lives(**recipe) -> Finding:
    """Whether a run whose states do not fit beside the rest went on with a paged optimizer; only a record can say.

    Raises:
        RecordError: there is no record of it.
    """
    paged = Recipe(**{"optim": "paged_adamw_32bit", **recipe})
    report = find_record(paged, T4)
    needed = predict(paged.replace(optim="adamw_torch"), gpu=T4).process.low
    return Finding(report.status == "ok" and needed > find_gpu(T4).total, report.source, str(paged))


@cache
def recorded_quality() -> dict:
    """LoRA and QLoRA of the base model, as `data/base_model/quality_4bit.py` recorded them.

    Raises:
        RecordError: it has not been run.
    """
    with suppress(FileNotFoundError):
        return json.loads(data_path("base_model", "quality_4bit.json").read_text(encoding="utf-8"))
    raise RecordError("quality_4bit.json is missing: run data/base_model/quality_4bit.py, which takes some minutes.")


def similar_quality(base: str) -> Finding:
    """Whether adapters on a base in 4 bits end within one part in a hundred of those on the whole base, in bits per byte
    on held-out text."""
    facts = recorded_quality()
    whole, four = facts["runs"]["fp32"]["after"], facts["runs"][base]["after"]
    text = f"{whole:.3f} and {four:.3f} bits per byte; {facts['recipe']}, on {facts['hardware']}, {facts['date']}"
    return Finding(abs(four / whole - 1) < SEEN_AS_EQUAL, "recorded", text)
