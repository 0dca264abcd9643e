"""The experiments that test what the sources say about training on one GPU (chapter 03).

A's and C's tables say of each trick whether it is faster and whether it saves memory. Memory is a record's, else a
simulation's, of GPT-2 on an A100; speed is a record's or nothing. What concerns PyTorch and transformers themselves
(names, kernels, gradients) is asked of the versions that are installed.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ..claims import Finding
from ..errors import RecordError
from ..gpu import find_gpu
from ..predict import predict
from ..recipe import Recipe
from ..records import find_record
from ..report import Report, format_bytes
from ..simulate import simulate
from .installed_03 import (  # noqa: F401, the chapter's experiments are all names of this module
    argument_offered,
    attention_kernels,
    backend_offered,
    backends,
    changes_argument,
    chooses_kernel,
    default_optimizer,
    effective_batch,
    inductor_takes_cuda_graphs,
    inductor_writes_triton,
    lines_for_accelerate,
    model_has,
    optimizer_offered,
    parses,
    sdpa_by_default,
    skips_padding,
    small_gpt2,
    state_is_8_bit,
    takes_fast_path,
    torch_is_new_enough,
    updates_from_dequantized,
    versions,
)
from .trained_03 import (  # noqa: F401, likewise
    adafactor_is_slower,
    keeps_the_loss,
    larger_batch_ends_lower,
    update_in_fp32_helps,
)

CARD = "A100"
BIG = Recipe("gpt2", batch_size=8, seq_len=512)
TILE = 128  # rows and columns of the output that one thread block computes, of cuBLAS's largest common tile
ENOUGH = 0.02  # what differs by less is the same


@cache
def simulation(recipe: Recipe) -> Report:
    """`simulate` on CARD, once for each recipe."""
    return simulate(recipe, gpu=CARD)


def witness(recipe: Recipe) -> Report:
    """A record of `recipe`, else its simulation."""
    with suppress(RecordError):
        report = find_record(recipe)
        if report.status == "ok":
            return report
    return simulation(recipe)


def _changed(start: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[Recipe, Recipe]:
    before = BIG.replace(**start)
    return before, before.replace(**changes)


def lowers_peak(changes: Mapping[str, Any], start: Mapping[str, Any] = {}) -> Finding:
    """Whether the peak is lower after `changes`, by more than two per cent."""
    recipes = _changed(start, changes)
    reports = [witness(recipe) for recipe in recipes]
    before, after = (report.allocated for report in reports)
    text = f"{recipes[0]}: {format_bytes(before)}; {recipes[1]}: {format_bytes(after)}"
    return Finding(after < (1 - ENOUGH) * before, reports[1].source, text)


def keeps_less(part: str, changes: Mapping[str, Any], phase: str, start: Mapping[str, Any] = {}) -> Finding:
    """Whether `changes` lower the bytes of one category at the end of a phase."""
    recipes = _changed(start, changes)
    sizes = [getattr(simulation(recipe).phases[phase].end, part) for recipe in recipes]
    text = f"{part.replace('_', ' ')}: {' and '.join(map(format_bytes, sizes))}"
    return Finding(sizes[1] < (1 - ENOUGH) * sizes[0], "simulated", f"{recipes[1]}; {text}")


def raises_peak(changes: Mapping[str, Any], start: Mapping[str, Any]) -> Finding:
    """Whether the peak is higher after `changes`, by more than two per cent."""
    recipes = _changed(start, changes)
    before, after = (predict(recipe, gpu=CARD).peak.total for recipe in recipes)
    text = f"{recipes[1]}: {format_bytes(before)} and {format_bytes(after)}"
    return Finding(after > (1 + ENOUGH) * before, "predicted", text)


def time_ratio(changes: Mapping[str, Any], start: Mapping[str, Any] = {}) -> Finding:
    """How many times as long a token takes after `changes`, on a GPU. Raises RecordError without records of both."""
    recipes = _changed(start, changes)
    reports = [find_record(recipe) for recipe in recipes]
    speeds = [report.speed.tokens_per_second for report in reports if report.speed]
    if len(speeds) < 2:
        raise RecordError("a record has no speed")
    return Finding(speeds[0] / speeds[1], "recorded", f"{recipes[1]} on {reports[1].environment.get('gpu')}")


def faster(changes: Mapping[str, Any], start: Mapping[str, Any] = {}) -> Finding:
    """Whether a token takes less time after `changes`, by more than two per cent. Raises RecordError as above."""
    ratio = time_ratio(changes, start)
    return Finding(ratio.value < 1 - ENOUGH, ratio.witness, f"{ratio.value:.2f} × the time; {ratio.configuration}")


def slower(changes: Mapping[str, Any], start: Mapping[str, Any] = {}) -> Finding:
    """Whether a token takes more time after `changes`, by more than two per cent. Raises RecordError as above."""
    ratio = time_ratio(changes, start)
    return Finding(ratio.value > 1 + ENOUGH, ratio.witness, f"{ratio.value:.2f} × the time; {ratio.configuration}")


def apex_is_fastest(against: str) -> Finding:
    """Whether NVIDIA Apex's AdamW takes less time for an update than torch's "fused" or "foreach" one.

    Raises RecordError without a GPU or without Apex built for it.
    """
    import torch

    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        FusedAdam = None
    if FusedAdam is None or not torch.cuda.is_available():
        raise RecordError("Waits for a GPU with NVIDIA Apex built for it.")
    weights = [torch.ones(1024, 1024, device="cuda", requires_grad=True) for _ in range(96)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    apex, torchs = FusedAdam(weights), torch.optim.AdamW(weights, **{against: True})
    seconds = [_seconds(optimizer.step, torch.cuda.synchronize) for optimizer in (apex, torchs)]
    text = f"96 matrices of 1,024 × 1,024: {seconds[0] * 1e3:.2f} ms and {seconds[1] * 1e3:.2f} ms"
    return Finding(seconds[0] < (1 - ENOUGH) * seconds[1], "measured", text)


def pinned_is_faster(mib: float) -> Finding:
    """Whether a copy to the GPU takes less time from pinned memory. Raises RecordError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise RecordError("Waits for a GPU.")
    usual = torch.ones(int(mib * 2**20), dtype=torch.uint8)
    there, wait = torch.empty_like(usual, device="cuda"), torch.cuda.synchronize
    seconds = [_seconds(lambda s=source: there.copy_(s), wait) for source in (usual.pin_memory(), usual)]
    text = f"{format_bytes(usual.nbytes, 'MiB')}: {seconds[0] * 1e6:.0f} µs and {seconds[1] * 1e6:.0f} µs"
    return Finding(seconds[0] < (1 - ENOUGH) * seconds[1], "measured", text)


def _seconds(call: Callable[[], Any], wait: Callable[[], Any], times: int = 20) -> float:
    """Seconds of a call and of what it starts on the GPU, the median of `times` after three to warm up."""
    import statistics
    import time

    seconds = []
    for _ in range(3 + times):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


# --- arithmetic ---------------------------------------------------------------------------------------------------


def recomputed_operations(model: str, seq_len: int) -> Finding:
    """How many times as many operations a step takes when every layer runs forward twice.

    Forward is one part, backward two; 2 operations a weight and token, attention 4 · s · h a token and layer. The head
    is not recomputed.
    """
    shape = Recipe(model, seq_len=seq_len).shape
    head = shape.vocab_size * shape.hidden_size
    tables = head + (shape.max_positions or 0) * shape.hidden_size
    layers = 2 * (shape.num_parameters - tables) + 4 * seq_len * shape.hidden_size * shape.num_layers
    forward = layers + 2 * head
    return Finding((3 * forward + layers) / (3 * forward), "derived", f"{model}, {seq_len} tokens")


def peak_rates(gpu: str, of: str, to: str) -> Finding:
    """The ratio of a card's peak rates in two formats, from its datasheet."""
    card = find_gpu(gpu)
    return Finding(card.peak[of] / card.peak[to], "derived", f"{card.name}: {of} against {to}; {card.source}")


def tile_efficiency(rows: int, tile: int = TILE) -> float:
    """The part of the computed tiles' rows that is asked for: 1 when `rows` are whole tiles."""
    return rows / (-(-rows // tile) * tile)


def wastes_tiles(batch_size: int, tokens: int = 1) -> Finding:
    """Whether a matrix product with a row for each token computes rows that nobody asked for."""
    part = tile_efficiency(batch_size * tokens)
    return Finding(part < 1, "derived", f"{batch_size * tokens:,} rows in tiles of {TILE}: {part:.1%} used")


def larger_does_more_a_byte(before: list[int], after: list[int]) -> Finding:
    """Whether a product of m × k and k × n matrices in fp16 does more operations for each byte moved when it is larger."""

    def intensity(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / (2 * (m * k + k * n + m * n))

    small, large = intensity(*before), intensity(*after)
    return Finding(large > (1 + ENOUGH) * small, "derived", f"operations a byte: {small:.3g}, then {large:.3g}")


# Bytes of a row that tensor cores take best (NVIDIA, Matrix Multiplication Background, "Requirements to use Tensor Cores").
ALIGNED = {"": 16, "A100": 128}


def numbers_aligned(format: str, card: str = "") -> Finding:
    """How many numbers of a format are in the bytes that tensor cores take best, on a card or on all others."""
    width = {"tf32": 4, "fp16": 2, "fp8": 1}[format]
    return Finding(ALIGNED[card] / width, "derived", f"{ALIGNED[card]} bytes, {width} a number")


def steps_in_epoch(samples: int, batch_size: int, drop_last: bool = False) -> Finding:
    """Batches that a DataLoader gives in one pass."""
    from torch.utils.data import DataLoader

    count = len(DataLoader(range(samples), batch_size=batch_size, drop_last=drop_last))
    return Finding(float(count), "measured", f"{samples} samples, batch {batch_size}, drop_last={drop_last}")


# --- gradients ----------------------------------------------------------------------------------------------------


def accumulated_error(lengths: list[int], by: str, parts: int = 4) -> float:
    """How far gradients accumulated over `parts` micro-batches are from those of the whole batch, relative to them.

    A linear layer guesses tokens; `lengths` are the tokens of each sequence, the rest is padding. `by` says what a
    micro-batch's loss is divided by: "micro-batches" takes the mean of means, "tokens" the tokens of the whole batch.
    """
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(lengths), max(lengths), 32, generator=generator)
    tokens = torch.randint(50, x.shape[:2], generator=generator)
    for row, length in enumerate(lengths):
        tokens[row, length:] = -100
    layer = torch.nn.Linear(32, 50)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(50, 32, generator=generator) / 8)

    def gradient(rows: list[slice], divide: bool) -> torch.Tensor:
        layer.zero_grad()
        for part in rows:
            total = F.cross_entropy(layer(x[part]).flatten(0, 1), tokens[part].flatten(), reduction="sum")
            count = (tokens[part] != -100).sum() * len(rows) if divide else (tokens != -100).sum()
            (total / count).backward()
        return layer.weight.grad.clone()

    size = len(lengths) // parts
    whole = gradient([slice(None)], divide=False)
    pieces = gradient([slice(i * size, (i + 1) * size) for i in range(parts)], divide=by == "micro-batches")
    return ((pieces - whole).norm() / whole.norm()).item()


def same_gradients(lengths: list[int], by: str) -> Finding:
    """Whether accumulating over micro-batches gives the gradients of the whole batch, to rounding (1e-5)."""
    error = accumulated_error(lengths, by)
    return Finding(error < 1e-5, "measured", f"{'equal' if len(set(lengths)) == 1 else 'different'} lengths, by {by}")


def passes_per_update(gradient_accumulation_steps: int) -> Finding:
    """How often a model runs forward for one update."""
    from ..training import build, train_step

    training = build(Recipe(small_gpt2(), seq_len=8, gradient_accumulation_steps=gradient_accumulation_steps))
    passes = []
    training.model.register_forward_hook(lambda *_: passes.append(1))
    train_step(training)
    return Finding(float(len(passes)), "measured", f"{gradient_accumulation_steps} micro-batches, {versions()}")


def statistics_differ(layer: str, parts: int = 4) -> Finding:
    """Whether a network with such a layer gets other gradients from 16 samples in `parts` than from them at once."""
    import torch

    def gradient(pieces: int) -> torch.Tensor:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(8, 8), getattr(torch.nn, layer)(8), torch.nn.Linear(8, 1))
        for piece in torch.randn(16, 8).chunk(pieces):
            (network(piece).square().mean() / pieces).backward()
        return network[0].weight.grad

    whole, pieces = gradient(1), gradient(parts)
    error = ((pieces - whole).norm() / whole.norm()).item()
    return Finding(
        error > 1e-3, "measured", f"{layer}, {parts} × {16 // parts} for 16: gradients differ by {error:.1%}"
    )


# --- Trainer arguments, data, compiling ----------------------------------------------------------------------------


def arguments_lower_peak(**arguments: Any) -> Finding:
    """Whether a Trainer with these arguments has a lower peak: they are read back into a recipe and predicted."""
    changed = Recipe.from_training_arguments(BIG.training_arguments(**arguments), "gpt2", seq_len=BIG.seq_len)
    before, after = (predict(recipe, gpu=CARD).peak.total for recipe in (BIG, changed))
    return Finding(after < (1 - ENOUGH) * before, "predicted", f"{changed}: {format_bytes(after)}")


def workers_cut_the_wait() -> Finding:
    """Whether workers at least halve the wait for data that takes as long to load as a step to compute.

    A busy machine can only lengthen the waits, so one of three tries is enough.
    """
    found = any(_waited(workers=2) < _waited(workers=0) / 2 for _ in range(3))
    return Finding(found, "measured", "a planted wait of 60 ms a sample")


def _waited(workers: int) -> float:
    """Seconds that eight steps wait for their data."""
    import time

    from torch.utils.data import DataLoader

    from .slow_rows import SlowRows

    loader = iter(DataLoader(SlowRows(12, seconds=0.06), batch_size=1, num_workers=workers))
    next(loader)  # the workers start
    waited = 0.0
    for _ in range(8):
        time.sleep(0.06)  # the step
        start = time.perf_counter()
        next(loader)
        waited += time.perf_counter() - start
    return waited


def compiled_keeps_less() -> Finding:
    """Whether a compiled model keeps fewer bytes for the backward pass than the eager one, on the CPU."""
    import torch

    from ..training import build

    training = build(Recipe(small_gpt2(), batch_size=2, seq_len=64, num_layers=1))
    torch._dynamo.reset()
    models = training.model, torch.compile(training.model, backend="aot_eager")
    own = list(training.model.parameters())
    sizes = [saved_bytes(lambda m=m: m(**training.batch, use_cache=False).loss, own)[0] for m in models]
    torch._dynamo.reset()
    text = f"{format_bytes(sizes[0], 'MiB')} and {format_bytes(sizes[1], 'MiB')}; aot_eager, {versions()}"
    return Finding(sizes[1] < (1 - ENOUGH) * sizes[0], "measured", text)


def saved_bytes(function: Callable[[], Any], own: Iterable[Any] = ()) -> tuple[int, Any]:
    """Bytes of the storages that autograd keeps for the backward pass of `function()`, without those of the tensors
    `own`; and what it returned.

    `watch` would see an eager model: under it torch.compile steps aside.
    """
    import torch

    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sum(size for pointer, size in kept.items() if pointer not in known), result


# --- the allocator, and many GPUs ---------------------------------------------------------------------------------


def emptying_lowers(what: str) -> Finding:
    """Whether `empty_cache` after every step lowers the peak of what is allocated, or reserved, or what is reserved
    between steps; by the allocator's model, over sequences of different lengths."""
    usual, emptied = replayed(False), replayed(True)
    before, after = getattr(usual, what), getattr(emptied, what)
    text = f"gpt2, {len(LENGTHS)} lengths: {format_bytes(before)} and {format_bytes(after)}"
    return Finding(after < (1 - ENOUGH) * before, "simulated", text)


LENGTHS = (320, 384, 576, 320, 832, 128, 448, 192)


@cache
def _requests():
    from ..fragmentation import requests_of

    return requests_of(Recipe("gpt2", batch_size=8, seq_len=1024, precision="fp16-mixed", num_layers=4), LENGTHS)


def emptying_saves(spare: float) -> Finding:
    """Whether a card with room for `spare` more than is allocated at the peak (0.1: ten per cent) runs out of memory over
    LENGTHS, and does not when the cache is emptied after every step."""
    limit = int((1 + spare) * replayed(False).allocated)
    out = [_runs_out(emptied, limit) for emptied in (False, True)]
    said = "; ".join("out of memory" if failed else "runs" for failed in out)
    return Finding(out[0] and not out[1], "simulated", f"gpt2, {format_bytes(limit)}: {said} with the cache emptied")


def _runs_out(emptied: bool, limit: int) -> bool:
    from ..allocator import AllocatorError

    try:
        replayed(emptied, limit)
    except AllocatorError:
        return True
    return False


class Held:
    """What the allocator held over a run: bytes at the peak and between steps, and its calls to the driver."""

    def __init__(self, allocator, between: int):
        self.allocated, self.reserved = allocator.peak_allocated, allocator.peak_reserved
        self.between, self.calls = between, allocator.mallocs + allocator.given_back


@cache
def replayed(emptied: bool, limit: int | None = None) -> Held:
    """The steps of LENGTHS through the allocator's model, with `empty_cache()` after each step or without."""
    from ..allocator import Allocator

    allocator, blocks, requests, between = Allocator(limit=limit), {}, _requests(), 0
    for log in (requests.load, *(requests.steps[length] for length in LENGTHS)):
        for size, storage, _ in log:
            if size > 0:
                blocks[id(storage)] = allocator.malloc(storage.asked)
            else:
                allocator.free(blocks.pop(id(storage)))
        if emptied:
            allocator.empty_cache()
        between = max(between, allocator.reserved)
    return Held(allocator, between)


def sharding_lowers_peak(world_size: int, stage: int = 3) -> Finding:
    """Whether ZeRO lowers the peak of one rank."""
    from ..options import Sharding

    shared = BIG.replace(sharding=Sharding(stage, world_size, "deepspeed"))
    before, after = (predict(recipe, gpu=CARD).peak.total for recipe in (BIG, shared))
    return Finding(after < (1 - ENOUGH) * before, "predicted", f"{shared}: {format_bytes(after)} a GPU")
