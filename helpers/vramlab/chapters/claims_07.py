"""The experiments that test what source D says about profiling, data loading, the allocator and kernels (chapter 07).

D names few figures, so most experiments return whether something is so. None rests on a time that a busy machine could
spoil: they count (calls, segments, samples, graphs, bytes), or wait for a wait that was planted. What only a GPU shows
waits for its record.
"""

import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from ..claims import Finding
from ..errors import RecordError
from ..fragmentation import Followed, Requests, follow, requests_of
from ..gpu import find_gpu
from ..lengths import find_lengths
from ..recipe import Recipe
from ..records import find_record
from ..report import format_bytes

RECIPE = Recipe("gpt2", batch_size=8, seq_len=1024, precision="fp16-mixed", num_layers=6)
BUCKETS = (256, 512, 1024)
CARD = "T4"


def draw_lengths(count: int = 24) -> list[int]:
    """Lengths as texts have them: log-normal around 365 tokens, in whole 64s up to 1,024; always the same."""
    rng = random.Random(0)
    return [min(1024, max(64, 64 * round(rng.lognormvariate(5.9, 0.6) / 64))) for _ in range(count)]


LENGTHS = draw_lengths()


def room() -> int:
    """Bytes of segments that a T4 has room for: its memory without CUDA's context."""
    card = find_gpu(CARD)
    return card.total - card.context_interval.value


@cache
def requests() -> Requests:
    """What RECIPE asks for at every length that the chapter looks at."""
    return requests_of(RECIPE, [*LENGTHS, *BUCKETS])


@cache
def run(cure: str) -> Followed:
    """The 24 lengths on a T4, by the allocator's model, with one of D's cures ("none" is without)."""
    from ..allocator import Allocator
    from ..expandable import ExpandableAllocator

    lengths = {
        "fixed": [512] * len(LENGTHS),
        "padding": [max(LENGTHS)] * len(LENGTHS),
        "bucketing": [min(bucket for bucket in BUCKETS if bucket >= n) for n in LENGTHS],
        "warm-up": [max(LENGTHS), *LENGTHS],
    }.get(cure, LENGTHS)
    kind = ExpandableAllocator if cure == "expandable segments" else Allocator
    return follow(requests(), lengths, kind(limit=room()))


def _about(cure: str) -> str:
    return f"{RECIPE}, {len(LENGTHS)} lengths from {min(LENGTHS)} to {max(LENGTHS)}, {cure}, {CARD}"


# --- the profiler ------------------------------------------------------------------------------------------------


def module_takes_activities(module: str) -> Finding:
    """Whether `profile` of torch.autograd.profiler or torch.profiler takes the arguments that D's listing gives it."""
    import torch

    kind = {"torch.autograd.profiler": torch.autograd.profiler.profile, "torch.profiler": torch.profiler.profile}[
        module
    ]
    try:
        kind(activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=None)
    except TypeError:
        return Finding(False, "measured", f"torch {torch.__version__.split('+')[0]}")
    return Finding(True, "measured", f"torch {torch.__version__.split('+')[0]}")


def _traced(step: Callable[[], Any], **options: Any):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        step()
    return profiler


def _small():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return model, torch.randn(32, 64)


def label_is_kept() -> Finding:
    """Whether `record_function` inside a profiler leaves a region in the trace."""
    return Finding("forward_pass" in _labels(profiled=True), "measured", "a label inside a profiler")


def label_without_profiler_is_lost() -> Finding:
    """Whether nothing is kept of a label that is passed while no profiler runs."""
    return Finding("forward_pass" not in _labels(profiled=False), "measured", "a label after a profiler's block")


def _labels(profiled: bool) -> dict[str, Any]:
    """The regions of a trace of one forward pass that is labelled inside the profiler's block, or after it."""
    import torch

    from ..trace import Trace

    model, x = _small()

    def labelled() -> None:
        with torch.profiler.record_function("forward_pass"):
            model(x)

    profiler = _traced(labelled if profiled else lambda: model(x))
    labelled()
    return Trace.of(profiler).regions()


def more_options_write_more() -> Finding:
    """Whether switching on shapes, memory and stacks makes the profiler write more bytes for the same step."""
    import os
    import tempfile

    model, x = _small()
    sizes = []
    for options in ({}, {"record_shapes": True, "profile_memory": True, "with_stack": True}):
        profiler = _traced(lambda: model(x).sum().backward(), **options)
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(os.path.join(folder, "trace.json"))
            sizes.append(os.path.getsize(os.path.join(folder, "trace.json")))
    return Finding(sizes[1] > sizes[0], "measured", "a step of two linear layers")


def backward_has_its_own_thread(device: str) -> Finding:
    """Whether autograd's operators run on another thread than forward's."""
    import torch

    from ..trace import Trace

    if device == "cuda" and not torch.cuda.is_available():
        raise RecordError("needs a GPU")
    model, x = _small()
    model, x = model.to(device), x.to(device)

    def step():
        with torch.profiler.record_function("forward_pass"):
            loss = model(x).sum()
        loss.backward()

    trace = Trace.of(_traced(step))
    operators = [event for event in trace.events if event.kind == "cpu_op"]
    backward = {event.thread for event in operators if "Backward" in event.name}
    forward = {event.thread for event in trace.labelled if event.name == "forward_pass"}
    return Finding(backward.isdisjoint(forward), "measured", device)


def profiler_records(what: str) -> Finding:
    """Whether a profile holds the times of CPU "operators", those of CUDA "kernels", or the history of "memory"."""
    import torch

    if what == "kernels":
        if not torch.cuda.is_available():
            raise RecordError("needs a GPU")
        model, x = _small()
        model, x = model.cuda(), x.cuda()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            model(x)
        return Finding(any(event.device_time > 0 for event in profiler.key_averages()), "measured", "two linear layers")
    model, x = _small()
    averages = _traced(lambda: model(x), profile_memory=what == "memory").key_averages()
    found = any((event.cpu_memory_usage if what == "memory" else event.cpu_time) > 0 for event in averages)
    return Finding(found, "measured", "two linear layers")


def history_call(name: str, **arguments: Any) -> Finding:
    """Whether a function of torch.cuda.memory takes these arguments."""
    import inspect

    import torch

    try:
        inspect.signature(getattr(torch.cuda.memory, name)).bind(**arguments)
    except (AttributeError, TypeError) as error:
        return Finding(False, "measured", f"{name}: {error}; torch {torch.__version__.split('+')[0]}")
    return Finding(True, "measured", f"{name}, torch {torch.__version__.split('+')[0]}")


def trace_needs_a_plugin(viewer: str) -> Finding:
    """Whether a trace says nothing without torch-tb-profiler: "TensorBoard" itself reads event files only, and `Trace`
    reads plain "JSON"."""
    import tempfile
    from pathlib import Path

    import torch

    from ..trace import Trace

    model, x = _small()
    with tempfile.TemporaryDirectory() as folder:
        _traced(lambda: model(x), on_trace_ready=torch.profiler.tensorboard_trace_handler(folder))
        (path,) = Path(folder).iterdir()
        read = [event for event in Trace.load(path).events if event.kind == "cpu_op"] if viewer == "JSON" else []
    kind = "".join(path.suffixes[-3:])
    needed = ".tfevents." not in path.name if viewer == "TensorBoard" else not read
    return Finding(needed, "measured", f"a file {kind}, {len(read)} operators read from it")


# --- data --------------------------------------------------------------------------------------------------------


def workers_hide_the_wait() -> Finding:
    """Whether two workers take away at least half of a planted wait of 60 ms a batch.

    A busy machine can only lengthen the waits, so one of three tries is enough.
    """
    found = any(_waited(workers=2) < _waited(workers=0) / 2 for _ in range(3))
    return Finding(found, "measured", "8 batches, 60 ms to load and 90 ms to train each")


def _waited(workers: int) -> float:
    """Seconds that the loop waits for its batches, without the first wait, which starts the workers, and the last, which
    stops them."""
    import torch

    from ..trace import Trace

    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = torch.utils.data.DataLoader(_Slow(), batch_size=4, **options)

    def step() -> None:
        for _ in loader:
            time.sleep(0.09)  # what a GPU's step would take

    return sum(Trace.of(_traced(step)).waiting()[1:-1])


class _Slow:
    """32 samples that take 15 ms each, as from a slow disk."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        import torch

        if not 0 <= index < len(self):
            raise IndexError(index)
        time.sleep(0.015)
        return torch.zeros(8).add_(index)  # an operator, so that the trace has work


def times_each_sample_comes(sharded: bool, samples: int = 12, workers: int = 2) -> Finding:
    """How often each sample of an IterableDataset comes with several workers; 0 where some are missing."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Stream(IterableDataset):
        def __iter__(self):
            info = get_worker_info() if sharded else None
            return iter(range(samples)[info.id :: info.num_workers] if info else range(samples))

    loader = DataLoader(Stream(), batch_size=None, num_workers=workers, multiprocessing_context="fork")
    seen = [int(n) for n in loader]
    complete = set(seen) == set(range(samples))
    return Finding(len(seen) / samples if complete else 0, "measured", f"{samples} samples, {workers} workers")


def workers_are_processes() -> Finding:
    """Whether a DataLoader's workers run in processes of their own, each with its own interpreter lock."""
    import os

    from torch.utils.data import DataLoader

    class Numbers:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return os.getpid()

    loader = DataLoader(Numbers(), batch_size=1, num_workers=2, multiprocessing_context="fork")
    owners = {int(batch) for batch in loader}
    return Finding(len(owners) == 2 and os.getpid() not in owners, "measured", "2 workers")


# --- the allocator -----------------------------------------------------------------------------------------------


def calls_after_the_first(shapes: str) -> Finding:
    """Calls to cudaMalloc in all steps after the first."""
    found = run(shapes)
    return Finding(sum(found.mallocs[1:]), "simulated", _about(shapes))


def malloc_is_expensive() -> Finding:
    """Whether a tensor takes ten times as long with cudaMalloc as from the cache. Raises RecordError without a GPU."""
    import statistics

    import torch

    if not torch.cuda.is_available():
        raise RecordError("Waits for a GPU, where cudaMalloc takes its time.")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(20):
        torch.cuda.empty_cache()
        for fresh in (True, False):  # the second finds what the first left in the cache
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
            seconds[fresh].append(time.perf_counter() - start)
    fresh, cached = (statistics.median(seconds[kind]) for kind in (True, False))
    return Finding(fresh >= 10 * cached, "measured", f"256 MiB: {fresh * 1e6:.0f} µs and {cached * 1e6:.1f} µs")


def expandable_still_fails(spare: float | None = None) -> Finding:
    """Whether expandable segments give cached memory back over the lengths, but not over batches as long as the longest.

    On a card that has room for `spare` more than is allocated at the peak (0.1: ten per cent), or on a T4. Running out of
    memory counts as giving back.
    """
    from ..allocator import AllocatorError
    from ..expandable import ExpandableAllocator

    most = follow(requests(), LENGTHS, ExpandableAllocator()).peak_allocated
    limit = room() if spare is None else int((1 + spare) * most)

    def gives_back_over(lengths: list[int]) -> bool:
        try:
            return sum(follow(requests(), lengths, ExpandableAllocator(limit=limit)).given_back) > 0
        except AllocatorError:
            return True

    found = [gives_back_over(lengths) for lengths in (LENGTHS, [max(LENGTHS)] * len(LENGTHS))]
    said = "; equal sizes do so too" if found[1] else ""
    text = f"{_about('expandable segments')}, room for {format_bytes(limit)}{said}"
    return Finding(found[0] and not found[1], "simulated", text)


def torch_reads_variable(name: str) -> Finding:
    """Whether the installed torch's core library knows an environment variable."""
    from pathlib import Path

    import torch

    libraries = (Path(torch.__file__).parent / "lib").glob("*c10*")
    found = any(name.encode() in path.read_bytes() for path in libraries if path.is_file())
    return Finding(found, "measured", f"torch {torch.__version__.split('+')[0]}")


def gives_back(shapes: str, limit: bool = True) -> Finding:
    """Whether cached segments are given back (cudaFree), on a T4 or on a card without end."""
    found = run(shapes) if limit else follow(requests(), LENGTHS)
    return Finding(sum(found.given_back) > 0, "simulated", _about(shapes))


def reserved_is_flat(cure: str) -> Finding:
    """Whether `reserved` stays as it is from the second step on: D's flat red line."""
    found = run(cure)
    ends = [found.reserved[end - 1] for end in found.ends]
    return Finding(len(set(ends[2:])) == 1, "simulated", _about(cure))


def cure_lowers_the_overhead(cure: str) -> Finding:
    """Whether a cure brings what is reserved beyond what is allocated, at their peaks, under half of that without it."""
    before, after = (run(name) for name in ("none", cure))
    return Finding(after.overhead < before.overhead / 2, "simulated", _about(cure))


def cure_on_a_gpu() -> Finding:
    """Whether a GPU reserved less with expandable segments than without, over the same lengths."""
    found = [find_lengths(RECIPE, LENGTHS, settings) for settings in ("", "expandable_segments:True")]
    return Finding(max(found[1]["reserved"]) < max(found[0]["reserved"]), "recorded", found[0]["gpu"])


def gradients_left_raise_forward() -> Finding:
    """Whether a loop that clears gradients only before the next backward has a higher peak in forward."""
    from ..predict import predict

    recipe = RECIPE.replace(seq_len=256)
    cleared, left = (predict(recipe.replace(loop=_loop(when))) for when in ("end", "before_backward"))
    peaks = [report.phases["forward"].peak.total for report in (cleared, left)]
    return Finding(peaks[1] > peaks[0], "predicted", f"{recipe}: {', '.join(map(format_bytes, peaks))}")


def _loop(zero_grad: str):
    from ..recipe import Loop

    return Loop.named("plain", zero_grad=zero_grad)


# --- attention and torch.compile ---------------------------------------------------------------------------------


def _attention(backend: str):
    """Result of causal attention over 512 tokens by one of PyTorch's kernels, and the bytes that it keeps."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from ..snapshot import record

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 512, 32, generator=generator, requires_grad=True) for _ in range(3))
    with sdpa_kernel(getattr(SDPBackend, backend)), record("cpu") as memory:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return out, sum(block.size for block in memory.snapshot.alive(len(memory.snapshot.events)))


def attention_is_exact() -> Finding:
    """Whether the flash kernel's result is that of attention written out, to fp32's rounding."""
    import torch

    flash, math = _attention("FLASH_ATTENTION")[0], _attention("MATH")[0]
    return Finding(torch.allclose(flash, math, atol=1e-5), "measured", "fp32, 512 tokens, this machine's CPU kernels")


def attention_keeps() -> Finding:
    """How many times as much attention written out keeps for the backward pass as the flash kernel."""
    flash, math = _attention("FLASH_ATTENTION")[1], _attention("MATH")[1]
    return Finding(math / flash, "measured", "fp32, 512 tokens, 4 heads of 32, this machine's CPU kernels")


def flash_has_to_be_asked_for() -> Finding:
    """Whether SDPA leaves the flash kernel out unless a context manager names it, on this machine's CPU."""
    import torch
    from torch.nn.attention import SDPBackend

    q = torch.zeros(1, 4, 512, 32)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True))
    return Finding(chosen != SDPBackend.FLASH_ATTENTION, "measured", f"without one: {chosen.name}")


def fused_attention_gives(what: str) -> Finding:
    """Whether a model with fused attention still gives its "loss", or its attention "weights" when they are asked for."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens = torch.ones(1, 8, dtype=torch.long)
    output = model(tokens, labels=tokens, output_attentions=what == "weights")
    found = bool(output.attentions) if what == "weights" else bool(torch.isfinite(output.loss))
    return Finding(found, "measured", "gpt2 of one layer, sdpa")


def attention_speed() -> Finding:
    """How many times as fast a step is with fused attention as with attention written out, by records of a GPU."""
    recipe = Recipe("gpt2", batch_size=8, seq_len=512, precision="bf16-mixed")
    written, fused = (find_record(recipe.replace(attn_implementation=how)) for how in ("eager", "sdpa"))
    if not written.speed or not fused.speed:
        raise RecordError("the records have no speed")
    return Finding(fused.speed.tokens_per_second / written.speed.tokens_per_second, "recorded", str(recipe))


def few_python_calls_left(layers: int, part: float = 0.1) -> Finding:
    """Whether a compiled forward pass, once it is traced, makes under `part` of the Python calls of an eager one."""
    import torch

    network = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    torch.compiler.reset()
    x = torch.zeros(1, 8)
    counts = [_python_calls(run, x) for run in (network, torch.compile(network, backend="eager"))]
    torch.compiler.reset()
    text = f"{layers} linear layers: {counts[0]} calls of Python functions, and {counts[1]}"
    return Finding(counts[1] < part * counts[0], "measured", text)


def _python_calls(function: Callable[[Any], Any], x: Any) -> int:
    """Calls of Python functions while `function(x)` runs for the second time."""
    import sys

    calls = []
    function(x)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(1) if event == "call" else None)
    try:
        function(x)
    finally:
        sys.setprofile(before)
    return len(calls)


def graphs_made(calls: int) -> Finding:
    """How many graphs torch.compile has traced after so many forward passes."""
    import torch

    graphs = []

    def backend(graph: Any, inputs: Any) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model, x = _small()
    compiled = torch.compile(model, backend=backend)
    for _ in range(calls):
        compiled(x)
    return Finding(float(len(graphs)), "measured", f"{calls} forward passes of two linear layers")


def compiled_speed() -> Finding:
    """How many times as fast the compiled step is, by records of a GPU."""
    recipe = Recipe("gpt2", batch_size=8, seq_len=1024, precision="bf16-mixed")
    eager, compiled = (find_record(recipe.replace(torch_compile=on)) for on in (False, True))
    if not eager.speed or not compiled.speed:
        raise RecordError("the records have no speed")
    return Finding(compiled.speed.tokens_per_second / eager.speed.tokens_per_second, "recorded", str(recipe))
