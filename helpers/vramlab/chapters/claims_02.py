"""The experiments that test what the sources say about memory decomposition (chapter 02).

B's lecture trains polyglot-ko-1.3b in fp16 at 256 tokens on a 16 GB T4 and prints `torch.cuda.memory_allocated()` after
the first optimizer step, with transformers 4.40. C's notebook fine-tunes bert-large at 512 tokens in fp32 with the
Trainer and prints what NVML says of the whole card. Where today's libraries keep other tensors than theirs did, the
difference is derived from the older source and added; it is never fitted.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from math import prod
from typing import Any

from ..allocator import Allocator
from ..claims import Finding
from ..errors import RecordError
from ..gpu import find_gpu
from ..overhead import CONTEXT, ROUND_LARGE, cublas_workspace
from ..predict import predict
from ..recipe import Loop, Recipe
from ..records import find_record
from ..report import GiB, Interval, MiB, Report, format_bytes
from ..simulate import simulate

T4 = "T4"
SAMPLES, SECONDS, READ = (
    512,
    111.7234,
    12183,
)  # of C's training: the data set, train_runtime, MiB that NVML showed after it
OLD_CONTEXT = CONTEXT.low  # the bare context; nothing but weights had been loaded when C read 2,116 MB
SCALARS_PER_LAYER = 2 + 4 * 32  # `masked_bias`, fp16, and `inv_freq`, fp32 of half the rotated channels, in bytes


def lecture(batch_size: int, **changes: Any) -> Recipe:
    """B's recipe, as far as today's libraries can do it.

    Its loop keeps the outputs of the last forward pass, with keys and values (`use_cache` was on except under
    checkpointing), does not clip, and takes transformers' own AdamW of the time, which went tensor by tensor.
    """
    loop = Loop.named("plain", use_cache=not changes.get("gradient_checkpointing", False), foreach=False)
    base = dict(batch_size=batch_size, seq_len=256, precision="fp16-true", loop=loop)
    return Recipe("polyglot-ko-1.3b", **{**base, **changes})


def witness(recipe: Recipe, gpu: str | None = None, simulated: bool = False) -> Report:
    """The strongest report there is of `recipe`: a record (on `gpu`, when given), else a simulation or a prediction."""
    with suppress(RecordError):
        report = find_record(recipe, gpu)
        if report.status == "ok":
            return report
    return simulation(recipe, gpu) if simulated else predict(recipe, gpu=gpu)


@cache
def simulation(recipe: Recipe, gpu: str | None) -> Report:
    """`simulate`, once for each recipe."""
    return simulate(recipe, gpu=gpu)


def part_bytes(report: Report, parts: list[str], phase: str, moment: str) -> int:
    """The bytes of some categories ("total" for all) at a phase's peak or end."""
    split = getattr(report.phases[phase], moment)
    return sum(getattr(split, part) for part in parts)


# --- arithmetic of bytes ------------------------------------------------------------------------------------------


def per_parameter(recipe: Mapping, parts: list[str], phase: str = "step", moment: str = "end") -> Finding:
    """Bytes of `parts` for each parameter of the model."""
    of = Recipe(**recipe)
    report = witness(of)
    return Finding(part_bytes(report, parts, phase, moment) / of.shape.num_parameters, report.source, str(of))


def per_weight_byte(recipe: Mapping, parts: list[str], phase: str = "step", moment: str = "end") -> Finding:
    """Bytes of `parts` relative to those of the weights: B's N is 1."""
    of = Recipe(**recipe)
    report = witness(of)
    value = part_bytes(report, parts, phase, moment) / part_bytes(report, ["parameters"], "load", "end")
    return Finding(value, report.source, str(of))


def growth(recipe: Mapping, changes: Mapping, part: str = "activations", phase: str = "forward") -> Finding:
    """How many times as much of `part` there is at a phase's end after the recipe is changed."""
    before, after = Recipe(**recipe), Recipe(**{**recipe, **changes})
    reports = witness(before), witness(after)
    sizes = [part_bytes(report, [part], phase, "end") for report in reports]
    return Finding(sizes[1] / sizes[0], reports[0].source, f"{before} → {after}")


def all_kinds(recipe: Mapping, parts: list[str]) -> Finding:
    """Whether each of `parts` takes memory in some phase."""
    of = Recipe(**recipe)
    report = witness(of)
    kinds = all(any(getattr(phase.peak, part) for phase in report.phases.values()) for part in parts)
    return Finding(kinds, report.source, str(of))


def card_memory(gpu: str) -> Finding:
    """Gigabytes on a card's box, from the GPU table."""
    card = find_gpu(gpu)
    return Finding(float(card.memory_gb), "derived", f"{card.name}: {card.source}")


# Streaming multiprocessors (product page, 2023) and CUDA cores in each (NVIDIA Ada whitepaper V2, appendix A).
CORES = {"RTX 4070": (46, 128)}
BASE_CLOCK, PINS = {"RTX 4070": 1.92}, {"RTX 4070": 192}  # GHz, bits of the memory interface; the same page


def cuda_cores(gpu: str) -> Finding:
    """CUDA cores of a card."""
    processors, each = CORES[gpu]
    return Finding(float(processors * each), "derived", f"{gpu}: {processors} multiprocessors of {each}")


def boost_clock(gpu: str) -> Finding:
    """GHz at which a card's cores reach its fp32 peak, at two operations a cycle and core."""
    card, (processors, each) = find_gpu(gpu), CORES[gpu]
    text = f"{card.name}: {card.peak['fp32'] / 1e12:g} TFLOP/s in fp32, {processors * each:,} cores"
    return Finding(card.peak["fp32"] / (2 * processors * each) / 1e9, "derived", text)


def base_clock(gpu: str) -> Finding:
    """GHz of a card's base clock."""
    return Finding(BASE_CLOCK[gpu], "derived", f"{gpu}: NVIDIA's product page")


def memory_is_gddr6x(gpu: str, gigabytes: float | None = None) -> Finding:
    """Whether a card's memory moves more than 20 Gbit/s a pin: as the GPU table has it, or at so many GB/s."""
    rate = gigabytes or find_gpu(gpu).bandwidth / 1e9
    each = 8 * rate / PINS[gpu]
    return Finding(each > 20, "derived", f"{gpu}: {rate:g} GB/s over {PINS[gpu]} pins are {each:.1f} Gbit/s each")


def subtracts_the_gradient(optimizer: str, **options: float) -> Finding:
    """Whether one step of an optimizer of torch.optim takes exactly the gradient off a weight."""
    import torch

    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    before = weight.detach().clone()
    weight.grad = torch.tensor([0.25, -0.5])
    getattr(torch.optim, optimizer)([weight], **options).step()
    taken = before - weight.detach()
    text = f"{optimizer}: a gradient of {weight.grad[0].item():g} changes the weight by {taken[0].item():.2g}"
    return Finding(torch.equal(taken, weight.grad), "measured", text)


# --- B's experiment -----------------------------------------------------------------------------------------------


def workspaces() -> Finding:
    """GiB of the two cuBLAS workspaces that a process keeps once it has trained: `overhead.cublas_workspace`."""
    size = 2 * cublas_workspace(find_gpu(T4).compute_capability)
    return Finding(size / GiB, "derived", f"2 × {format_bytes(size // 2, 'MiB')}, a T4")


def old_buffers(recipe: Recipe) -> list[int]:
    """Bytes of each buffer that GPT-NeoX kept in transformers 4.40 and no longer keeps, layer by layer.

    `modeling_gpt_neox.py` of 4.40: a causal mask of bool for every pair of positions, cosines and sines of every
    position in fp32, and two that are tiny (`inv_freq`, `masked_bias`).
    """
    shape = recipe.shape
    table = 4 * shape.max_positions * shape.rotary_dim
    return [shape.max_positions**2, table, table, SCALARS_PER_LAYER] * shape.num_layers


def lecture_loaded(old: bool, workspace: bool = True) -> Finding:
    """GiB allocated once the model is loaded, by replaying the loading through the allocator's rules."""
    recipe, allocator = lecture(4), Allocator()
    sizes = [2 * weight.size for weight in recipe.shape.weights()] + (old_buffers(recipe) if old else [])
    for size in sizes:
        allocator.malloc(size)
    total = allocator.allocated + (2 * cublas_workspace(find_gpu(T4).compute_capability) if workspace else 0)
    return Finding(total / GiB, "derived", f"{len(sizes)} tensors, asked for {format_bytes(sum(sizes))}")


def lecture_after_step(batch_size: int, **changes: Any) -> int:
    """Bytes allocated where B read them, after the step, with transformers 4.40.

    Weights, gradients and two states; the batch; and the outputs, still referenced: logits and, with `use_cache`, keys
    in fp32 (the rotation's tables were fp32, so the result was) and values as a *view* of the fused projection, which
    pins queries and keys too: 4 + 3 × 2 bytes a channel, where today's cache holds copies of 2 + 2. Beside each of the
    eight tensors as large as the embedding the allocator keeps what is left of a segment of whole 2 MiB, since it does
    not split off less than 1 MiB. Of accumulated micro-batches only the last one's outputs are there.
    """
    recipe = lecture(batch_size, **changes)
    shape, tokens = recipe.shape, batch_size * recipe.seq_len
    embedding = 2 * shape.vocab_size * shape.hidden_size
    cache = (4 + 3 * 2) * shape.num_layers * tokens * shape.hidden_size if recipe.loop.use_cache else 0
    outputs = 2 * tokens * shape.vocab_size + cache
    held = 4 * 2 * shape.num_parameters + 2 * 8 * tokens + 8 * (-embedding % ROUND_LARGE)
    workspace = 2 * cublas_workspace(find_gpu(T4).compute_capability)
    return held + outputs + sum(old_buffers(recipe)) + workspace


def lecture_reading(batch_size: int, at: str, **changes: Any) -> Finding:
    """GiB of B's run: `at` "reading" (allocated after the step, where B's code prints it) or at the "peak"."""
    recipe = lecture(batch_size, **changes)
    report = witness(recipe, T4)
    if at == "peak":
        return Finding(report.peak.total / GiB, report.source, f"{recipe}, peak in {report.peak_phase}")
    return Finding(
        lecture_after_step(batch_size, **changes) / GiB, "derived", f"{recipe}, with transformers 4.40's tensors"
    )


def lecture_part(part: str, unit: int = GiB) -> Finding:
    """Gradients or states of B's run, in GiB or in units of `unit` bytes."""
    recipe = lecture(4)
    report = witness(recipe, T4)
    return Finding(part_bytes(report, [part], "step", "end") / unit, report.source, str(recipe))


def same_at_all_batches(parts: list[str], batches: list[int]) -> Finding:
    """Whether `parts` take the same bytes in B's run at every batch size."""
    sizes = {part_bytes(witness(lecture(batch), T4), parts, "step", "end") for batch in batches}
    return Finding(
        len(sizes) == 1, witness(lecture(batches[0]), T4).source, f"{lecture(batches[0])}, batches {batches}"
    )


def reading_grows_by(part: str, batches: list[int]) -> Finding:
    """Whether the growth of B's reading between two batch sizes is that of `part` at the end of the forward pass."""
    read = lecture_after_step(batches[1]) - lecture_after_step(batches[0])
    small, large = (witness(lecture(batch), T4) for batch in batches)
    grown = [part_bytes(r, [part], "forward", "end") for r in (small, large)]
    text = f"reading +{format_bytes(read)}, {part} +{format_bytes(grown[1] - grown[0])}"
    return Finding(abs(read - (grown[1] - grown[0])) < 0.05 * read, small.source, text)


def accumulation_is_free(at: str) -> Finding:
    """Whether four micro-batches of four take what one of four does, after the step or at the peak, to 1 %."""
    sizes = [witness(lecture(4, gradient_accumulation_steps=n), T4) for n in (1, 4)]
    once, four = [r.peak.total if at == "peak" else r.phases["step"].end.total for r in sizes]
    return Finding(abs(four / once - 1) < 0.01, sizes[0].source, f"{format_bytes(once)} and {format_bytes(four)}")


def checkpointing_saves(at: str) -> Finding:
    """Whether B's run at batch 16 takes less with checkpointing."""
    with_, without = (witness(lecture(16, gradient_checkpointing=on), T4) for on in (True, False))
    sizes = [r.peak.total if at == "peak" else r.phases["step"].end.total for r in (with_, without)]
    return Finding(sizes[0] < sizes[1], with_.source, " and ".join(map(format_bytes, sizes)))


def lecture_does_not_fit(batch_size: int, **changes: Any) -> Finding:
    """Whether B's run ends out of a T4's memory: recorded, or because the least it can need is more than there is."""
    recipe, card = lecture(batch_size, **changes), find_gpu(T4)
    with suppress(RecordError):
        return Finding(find_record(recipe, T4).status == "oom", "recorded", f"{recipe} on {card.name}")
    report = witness(recipe, T4)
    text = f"{recipe}: at least {format_bytes(report.process.low)} of {format_bytes(card.total)} on {card.name}"
    return Finding(report.process.low > card.total, report.source, text)


def tensor_mib(shape: list[int], width: int) -> Finding:
    """MiB of a tensor."""
    return Finding(prod(shape) * width / MiB, "derived", f"{'×'.join(map(str, shape))} numbers of {width} bytes")


# --- C's experiment -----------------------------------------------------------------------------------------------


def bert(attn_implementation: str = "eager") -> Recipe:
    """C's recipe: the Trainer's defaults, batch 4, 512 tokens, a head with two labels."""
    model = dict(task="sequence-classification", attn_implementation=attn_implementation)
    return Recipe("bert-large", batch_size=4, seq_len=512, precision="fp32", **model)


def bert_loaded(context: bool) -> Finding:
    """MiB that loading adds to what NVML says: the weights' segments, and the context if it is made then."""
    recipe, allocator = bert(), Allocator()
    for weight in recipe.shape.weights():
        allocator.malloc(4 * weight.size)
    size = allocator.reserved + (OLD_CONTEXT if context else 0)
    text = f"{format_bytes(allocator.reserved, 'MiB')} reserved" + (
        f" + {format_bytes(OLD_CONTEXT, 'MiB')}" if context else ""
    )
    return Finding(size / MiB, "derived", text)


def weights_file(unit: int) -> Finding:
    """Size of C's model in a file of fp32 weights, in units of so many bytes."""
    count = bert().shape.num_parameters
    return Finding(4 * count / unit, "derived", f"{count:,} parameters of 4 bytes, over {unit:,}")


def values_drawn(high: int) -> Finding:
    """How many different labels are among 512 that numpy draws from 0 to `high`, which it leaves out."""
    import numpy as np

    found = np.unique(np.random.default_rng(0).integers(0, high, SAMPLES))
    return Finding(
        float(len(found)), "measured", f"labels {', '.join(map(str, found))}: np.random.randint(0, {high}, {SAMPLES})"
    )


def bert_trained(attn_implementation: str) -> Finding:
    """MiB of the process after training, as NVML sees it."""
    recipe = bert(attn_implementation)
    report = witness(recipe, None, simulated=True)
    reserved = report.reserved if isinstance(report.reserved, Interval) else Interval(*[report.reserved] * 3)
    ends = [(getattr(reserved, end) + getattr(CONTEXT, end)) // MiB for end in ("low", "value", "high")]
    return Finding(Interval(*ends), report.source, f"{recipe}, reserved and a context")


def card_filled(gigabytes: int) -> Finding:
    """Per cent of a card's memory that C's reading after training is."""
    return Finding(100 * READ / (gigabytes * 1024), "derived", f"{READ:,} MiB of {gigabytes:,} GiB")


def by_the_log(batch: int) -> Finding:
    """Batches a second by the samples and the seconds of C's log."""
    return Finding(SAMPLES / batch / SECONDS, "derived", f"{SAMPLES // batch} in {SECONDS} s")


def samples_per_second(attn_implementation: str) -> Finding:
    """Samples a second of C's run; only a record can say. Raises RecordError when there is none."""
    recipe = bert(attn_implementation)
    report = find_record(recipe)
    if report.speed is None:
        raise RecordError("the record has no speed")
    return Finding(
        recipe.batch_size / report.speed.median, report.source, f"{recipe} on {report.environment.get('gpu')}"
    )


def intensity(group: str, below: str, recipe: Mapping) -> Finding:
    """Whether one group of a BERT layer's operators does fewer operations for each byte it moves than another.

    Operations: 2 for each multiply-add; softmax 5 an element (maximum, difference, exponential, sum, division), a layer
    norm 7, GELU 5, dropout 2, a sum 1. Bytes: every operand read and every result written once, in fp32.
    """
    of = Recipe(**recipe)
    shape, tokens = of.shape, of.batch_size * of.seq_len
    h, m, scores = shape.hidden_size, shape.intermediate_size, of.batch_size * shape.num_heads * of.seq_len**2
    linear = [(h, h)] * 4 + [(h, m), (m, h)]
    groups = {
        "contractions": (
            sum(2 * tokens * a * b for a, b in linear) + 4 * scores * shape.head_dim,
            sum(tokens * (a + b) + a * b for a, b in linear) + 2 * (scores + 3 * tokens * h),
        ),
        "normalizations": (5 * scores + 2 * 7 * tokens * h, 2 * scores + 2 * 2 * tokens * h),
        "element-wise": (
            5 * tokens * m + 2 * (scores + 2 * tokens * h) + 2 * tokens * h + tokens * (5 * h + m),
            2 * tokens * m + 2 * (scores + 2 * tokens * h) + 2 * 3 * tokens * h + 2 * tokens * (5 * h + m),
        ),
    }
    each = {name: operations / (4 * numbers) for name, (operations, numbers) in groups.items()}
    text = ", ".join(f"{name} {value:.3g}" for name, value in each.items())
    return Finding(each[group] < each[below], "derived", f"operations a byte in a layer of {of}: {text}")
