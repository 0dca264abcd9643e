"""Experiments that run PyTorch here.

They try profiler's labels, the data loader, the compiler, attention, 4-bit layers, and two real
ranks.

None rests on a time that a busy machine could spoil: they count, or compare waits and costs that
are far apart.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from vramlab.hardware.gpu import find_gpu
from vramlab.measurement.launch import Launcher
from vramlab.recipe.recipe import Recipe
from vramlab.simulation.cuda import attention_kernel

from vramlab_course.chapters import fsdp_units
from vramlab_course.quantizers import normal_float

from ..chapters.chapter_03 import saved_bytes
from ..memory_history import record
from .expressions import Facts

UNITS = fsdp_units.__name__


def _versions() -> str:
    return f"torch {torch.__version__.split('+')[0]}"


# --- labels and data


def labelled(times: int = 2000) -> Facts:
    """`cost`: how many times as long a profiler's label takes as an empty context manager.

    It is measured while no profiler runs.
    """

    def seconds(make: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(times):
            with make():
                pass
        return time.perf_counter() - start

    label = partial(torch.profiler.record_function, "forward_pass")
    empty = contextlib.nullcontext
    # The least of five: other programs can only make a round longer.
    with_label = min(seconds(label) for _ in range(5))
    without = min(seconds(empty) for _ in range(5))
    return Facts(
        {"cost": with_label / without},
        "measured",
        f"{times:,} labels, the quickest of five rounds, {_versions()}",
    )


class Slow:
    """Samples that take 15 ms each, as from a slow disk."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        time.sleep(0.015)
        return os.getpid()


class Stream(IterableDataset):
    """A stream of numbers; `sharded` deals them out to the workers by `get_worker_info`."""

    def __init__(self, samples: int, sharded: bool):
        self.samples = samples
        self.sharded = sharded

    def __iter__(self):
        # None in the main process, and where the stream does not ask.
        info = get_worker_info() if self.sharded else None
        return iter(
            range(self.samples)[info.id :: info.num_workers] if info else range(self.samples)
        )


def waited(workers: int, step: float = 0.09) -> tuple[float, set[int]]:
    """Seconds that a loop of eight steps waits for its batches; and who loaded them.

    The first and the last batch are left out.
    """
    # Forked, so that a worker starts at once and does not import torch again.
    loader = DataLoader(
        Slow(),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    total = 0.0
    owners = set()
    batches = iter(loader)
    for number in range(8):
        start = time.perf_counter()
        owners |= set(next(batches).tolist())
        # The first batch waits for the workers to start.
        if 0 < number < 7:
            total += time.perf_counter() - start
        time.sleep(step)  # what a GPU's step would take
    return total, owners


def loaded(samples: int = 0, sharded: bool = False) -> Facts:
    """Two workers of a DataLoader.

    With `samples`, `times`: how often each sample of an IterableDataset comes, 0 if some are
    missing; else `hidden`: whether the wait for data falls to less than half, and `processes`, who
    loads.

    A busy machine can only lengthen waits, so one of three tries is enough.
    """
    if samples:
        stream = Stream(samples, sharded)
        loader = DataLoader(
            stream,
            batch_size=None,
            num_workers=2,
            multiprocessing_context="fork",
        )
        seen = [int(n) for n in loader]
        times = 0.0
        # Workers that do not divide the stream each yield all of it.
        if set(seen) == set(range(samples)):
            times = len(seen) / samples
        return Facts({"times": times}, "measured", f"{samples} samples, 2 workers")
    alone, _ = waited(0)
    # A generator: the second and third are only made if needed.
    tries = (waited(2) for _ in range(3))
    seconds, owners = next(
        (found for found in tries if found[0] < alone / 2),
        (alone, {os.getpid()}),
    )
    names = {
        "hidden": seconds < alone / 2,
        "processes": len(owners) == 2 and os.getpid() not in owners,
    }
    return Facts(names, "measured", "8 batches, 60 ms to load and 90 ms to train each")


# --- compiler and attention


@cache
def compiled(layers: int = 4) -> Facts:
    """torch.compile on linear layers.

    `graphs` traced after the call, the `first` and the third forward pass; `calls`, the part of
    Python calls that is left; `kept`, the part of the bytes that is kept for the backward pass
    (aot_eager).
    """
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable:
        graphs.append(graph)
        return graph.forward

    # Graphs of claims before this one would otherwise be found again.
    torch.compiler.reset()
    network = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    x = torch.zeros(1, 8)
    counts = []
    wrapped_network = torch.compile(network, backend=backend)
    for _ in range(3):
        counts.append(len(graphs))
        wrapped_network(x)
    calls = python_calls(wrapped_network, x) / python_calls(network, x)
    names = {
        "at_once": counts[0],
        "first": counts[1],
        "third": len(graphs),
        "calls": calls,
        "kept": _kept("aot_eager"),
    }
    torch.compiler.reset()
    return Facts(names, "measured", f"{layers} linear layers, {_versions()}")


def _kept(backend: str) -> float:
    """Bytes that a compiled transformer layer keeps for the backward pass.

    They are relative to those of the eager one.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 2, 256, batch_first=True, activation="gelu")
    own = list(layer.parameters())
    x = torch.randn(2, 64, 64)
    eager, small = (
        saved_bytes(lambda m=m: m(x).sum(), own)[0]
        for m in (layer, torch.compile(layer, backend=backend))
    )
    return small / eager


def python_calls(function: Callable[[Any], Any], x: Any) -> int:
    """Calls of Python functions while `function(x)` runs for the second time."""
    calls = []
    # The first call may compile or fill caches.
    function(x)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(1) if event == "call" else None)
    try:
        function(x)
    finally:
        sys.setprofile(before)
    return len(calls)


def attention(dtype: str = "", gpu: str = "A100", masked: bool = False) -> Facts:
    """With a `dtype`, `kernel`: which one SDPA takes on a card for heads of 64.

    It goes by the rules of `sdp_utils.cpp`.

    Else, of 512 tokens on this CPU: `kept`, how many times as much attention written out keeps as
    the flash kernel; `asked_for`, whether flash has to be named; `weights`, whether a model with it
    still gives its attention weights.
    """
    if dtype:
        capability = find_gpu(gpu).compute_capability
        kernel = attention_kernel(
            getattr(torch, dtype),
            64,
            64,
            masked=masked,
            capability=capability,
        )
        return Facts(
            {"kernel": kernel},
            "derived",
            f"{dtype} on {gpu}{', padded' if masked else ''}: {kernel}",
        )
    q = torch.zeros(1, 4, 512, 32)
    # The rule that scaled_dot_product_attention itself asks, with causal attention and no dropout.
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True))
    names = {
        "kept": _attended("MATH") / _attended("FLASH_ATTENTION"),
        "asked_for": chosen != SDPBackend.FLASH_ATTENTION,
        "weights": _gives_weights(),
    }
    return Facts(
        names,
        "measured",
        f"fp32, 512 tokens, 4 heads of 32, this machine's CPU; without a name: {chosen.name}",
    )


def _attended(backend: str) -> int:
    """Bytes alive after causal attention by one of PyTorch's kernels."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 4, 512, 32, generator=generator, requires_grad=True) for _ in range(3)
    )
    # Only this kernel is allowed, so another one cannot take its place.
    with sdpa_kernel(getattr(SDPBackend, backend)), record("cpu") as memory:
        result = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert result.shape == q.shape  # and what it keeps is alive when the recording ends
    return sum(block.size for block in memory.snapshot.alive(len(memory.snapshot.events)))


@cache
def _gives_weights() -> bool:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        n_layer=1,
        n_embd=32,
        n_head=2,
        vocab_size=100,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    # transformers gives an empty result where its kernel has no weights to give.
    return bool(model(torch.ones(1, 8, dtype=torch.long), output_attentions=True).attentions)


# --- 4 bits


def four_bits() -> Facts:
    """bitsandbytes' NF4: `apart`, its levels from quantiles of the normal distribution.

    Also whether each block keeps its standard `deviation`; and bytes of each number of doubly
    quantized `codes` and `scales`.
    """
    from bitsandbytes.functional import get_4bit_type, quantize_4bit

    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    blocks = weights.reshape(-1, 64)
    # Element 1 is the state; absmax, the largest magnitude of each block, is its scale.
    scales = quantize_4bit(weights, quant_type="nf4")[1].absmax
    # The same with double quantization, for the bytes.
    packed, state = quantize_4bit(weights, compress_statistics=True, quant_type="nf4")
    names = {
        "apart": float((get_4bit_type("nf4", device="cpu") - normal_float()).abs().max()),
        "deviation": bool(torch.allclose(blocks.std(1), scales)),
        "codes": packed.nbytes / weights.numel(),
        "scales": state.absmax.nbytes / len(blocks),
    }
    return Facts(names, "measured", "bitsandbytes' quantize_4bit on a CPU, blocks of 64")


# --- real ranks


@cache
def _launcher() -> Launcher:
    """One for all experiments; it ends with this process."""
    launcher = Launcher().start()
    atexit.register(launcher.end)
    return launcher


def _on_two_ranks(function: str, **arguments: Any) -> dict[str, Any]:
    """What the first rank finds."""
    ranks = _launcher().run(f"{UNITS}:{function}", arguments, preload=f"{UNITS}:preload")
    return ranks[0]


@cache
def sent(recipe: Recipe) -> dict[str, Any]:
    """What one of two real ranks sends in a step, in units of the parameters' bytes.

    Phase to kind, and `ring`, what a ring carries of it (an all-reduce is a reduce-scatter and an
    all-gather); `ring` and `all` of the whole step.
    """
    # The rank's result is by phase and kind, in bytes.
    phases = _on_two_ranks("by_phase", recipe=recipe.to_dict())
    # Four bytes a parameter: these recipes are in fp32.
    psi = 4 * recipe.shape.num_parameters
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    names = ("forward", "backward", "step", *phases)
    multiples: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        sizes = phases.get(name, {})
        phase = {kind: sizes.get(kind, 0) / psi for kind in kinds}
        phase["ring"] = sum(phase.values()) + phase["all_reduce"]
        multiples[name] = phase
    multiples["ring"] = sum(phase["ring"] for phase in multiples.values())
    everything = sum(sum(sizes.values()) for sizes in phases.values())
    multiples["all"] = everything / psi
    return multiples


@cache
def wrapped(wrapping: str) -> dict[str, Any]:
    """A hundred linear layers under FSDP on two ranks: what is gathered, and the peak.

    What is gathered at a time is in units of the parameters' bytes, the peak in units of all that
    an unsharded step holds of weights, gradients and AdamW's states.
    """
    found = _on_two_ranks("hundred", wrapping=wrapping, layers=fsdp_units.LAYERS)
    # Bytes of all weights in fp32.
    whole = fsdp_units.LAYERS * fsdp_units.WIDTH**2 * 4
    # Weights, gradients and AdamW's two states are four times the weights.
    return {
        "gathered": found["gathered"] / whole,
        "peak": found["peak"] / (4 * whole),
    }
