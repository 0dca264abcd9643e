"""What finds each kind of fact (`facts.py`), on CUDA in a process of its own.

It has not touched the card yet.
"""

import gc
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..base.errors import MeasurementError
from ..hardware.gpu import source_of
from ..hardware.nvml import Sensors, nvml_snapshot
from ..private.of_torch import allocator_settings
from ..recipe.generation import Generation
from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe
from ..report.report import MiB, format_bytes
from ..training.engine import Training
from ..training.fixed_generation import build_generation
from ..training.models import meta_model, weight_dtype
from ..training.training import build, train_step
from .facts import Fact
from .launch import RankError
from .worker import card_environment, import_libraries, out_of_memory

SAMPLED = 3.0  # seconds of steps during which sensors are read
BETWEEN = 0.1  # seconds between two readings
MOST_DOUBLINGS = 12
SIDE = 1024  # of the matrices that load a kernel


def find(kind: str, asked: dict[str, Any], scratch: str) -> Fact:
    """Return the fact of `kind` that was `asked`. Temporary files go into the folder `scratch`.

    Raises MeasurementError where this card or disk cannot tell, and RankError with `oom` where the
    card is too small.
    """
    # The folder is removed by whoever started this process, also where it is killed.
    tempfile.tempdir = scratch
    before = nvml_snapshot()
    try:
        found = WORK[kind](before, **asked)
    except RuntimeError as error:
        message = out_of_memory(error, "cuda")
        if not message:
            raise
        raise RankError(message, oom=message) from error
    return Fact(kind, asked, found, source_of("cuda"), card_environment(before))


def context(before: Sensors, loaded: str) -> dict[str, Any]:
    """What the device holds once this process has used CUDA in one way."""
    # The first tensor makes the context.
    torch.empty(1, device="cuda")
    LOADS[loaded]()
    return state(before)


def state(before: Sensors) -> dict[str, Any]:
    """Read `facts.STATE`."""
    # Kernels are loaded when they first run.
    torch.cuda.synchronize()
    now = nvml_snapshot()
    return {
        "used_before": before.used,
        "used_after": now.used,
        "smi_used": nvidia_smi(),
        "process": now.process or None,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def nvidia_smi() -> int | None:
    """Return what nvidia-smi shows as this card's memory in use.

    None where there is no such program, or it cannot tell.
    """
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    lines = (
        subprocess.run(command, capture_output=True, text=True, timeout=60)
        .stdout.strip()
        .splitlines()
    )
    # nvidia-smi numbers cards by their own order, torch by CUDA_VISIBLE_DEVICES.
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    own = [line for line in lines if len(lines) == 1 or uuid in line]
    used = own[0].split(",")[-1].strip() if own else ""
    return int(used) * MiB if used.isdigit() else None


def multiply() -> None:
    """Load a kernel of cuBLAS, and its workspace."""
    a = torch.ones(SIDE, SIDE, device="cuda", dtype=torch.float16)
    a @ a


def multiply_with_bias() -> None:
    """Load a kernel of cuBLASLt, which fuses the bias."""
    torch.nn.Linear(SIDE, SIDE, device="cuda", dtype=torch.float16)(
        torch.ones(SIDE, SIDE, device="cuda", dtype=torch.float16)
    )


def convolve() -> None:
    """Load kernels of cuDNN, forward and backward."""
    torch.nn.Conv2d(8, 8, 3, device="cuda")(
        torch.ones(4, 8, 64, 64, device="cuda")
    ).sum().backward()


def attend(kernel: str) -> None:
    """Run one kernel of attention, forward and backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.ones(2, 8, 256, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def import_bitsandbytes() -> None:
    """Load bitsandbytes' library, and none of its kernels."""
    import bitsandbytes  # noqa: F401


def quantize() -> None:
    """Load the kernels that pack and unpack 4-bit weights."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    dequantize_4bit(
        *quantize_4bit(torch.ones(SIDE, SIDE, device="cuda", dtype=torch.float16), quant_type="nf4")
    )


def step_in_8_bits() -> None:
    """Load the kernel of an 8-bit optimizer."""
    from bitsandbytes.optim import AdamW8bit

    weight = torch.nn.Parameter(torch.ones(SIDE, SIDE, device="cuda"))
    weight.grad = torch.ones_like(weight)
    AdamW8bit([weight]).step()


def compile_kernel() -> None:
    """Compile a kernel by Triton, and load it."""
    torch.compile(lambda a: a.sin() + a)(torch.ones(SIDE, device="cuda"))


def gather() -> None:
    """Make NCCL's communicator of one rank, with its buffers."""
    import torch.distributed as dist

    # A group of one rank, whose communicator takes NCCL's buffers all the same.
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(SIDE, device="cuda"))


def train() -> None:
    """Train two layers of GPT-2, as a step of the course does."""
    training = build(Recipe("gpt2", num_layers=2, seq_len=128, precision="fp16-mixed"), "cuda")
    for _ in range(2):
        train_step(training)


LOADS: dict[str, Callable[[], None]] = {
    "bare": lambda: None,
    "cuBLAS": multiply,
    "cuBLASLt": multiply_with_bias,
    "cuDNN": convolve,
    "math attention": lambda: attend("MATH"),
    "efficient attention": lambda: attend("EFFICIENT_ATTENTION"),
    "flash attention": lambda: attend("FLASH_ATTENTION"),
    "cuDNN attention": lambda: attend("CUDNN_ATTENTION"),
    "bitsandbytes imported": import_bitsandbytes,
    "bitsandbytes 4 bits": quantize,
    "bitsandbytes 8-bit optimizer": step_in_8_bits,
    "Triton": compile_kernel,
    "NCCL": gather,
    "training": train,
}


def steps(
    before: Sensors,
    recipe: dict[str, Any],
    expandable: bool,
    repeats: int,
) -> dict[str, Any]:
    """Time `repeats` steps, then read the sensors during some more.

    `expandable`: `card.py` has set the allocator so.
    """
    trained: Recipe = rebuild(Recipe, "recipe", recipe)
    # The driver of some machines cannot, and PyTorch then goes on with ordinary segments.
    if allocator_settings()["expandable_segments"] != expandable:
        raise MeasurementError("this allocator does not take expandable_segments.")
    import_libraries(trained)
    training = build(trained, "cuda")
    if trained.torch_compile:
        training.model.compile()
    torch.cuda.synchronize()
    # What building left cached would count as reserved by the steps.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # The first makes states and workspaces, the second is the first like all others.
    for _ in range(2):
        train_step(training)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        train_step(training)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    stats = torch.cuda.memory_stats()
    peaks = {
        kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested", "reserved")
    }
    return (
        state(before)
        | peaks
        | {"seconds": seconds}
        | under_load(training, statistics.median(seconds))
    )


def under_load(training: Training, seconds: float) -> dict[str, Any]:
    """Sensors read every BETWEEN seconds, for SAMPLED seconds at least.

    Meanwhile steps of so many `seconds` run.
    """
    read: list[Sensors] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(BETWEEN):
            read.append(nvml_snapshot())

    # In a thread, since the steps of the main one issue kernels and must not wait for NVML.
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(max(1, int(SAMPLED / seconds))):
            train_step(training)
        torch.cuda.synchronize()
    finally:
        done.set()
        watcher.join()
    readings: dict[str, Any] = {}
    for name in ("power", "clock", "temperature"):
        # A sensor that the driver does not tell is None.
        readings[name] = [value for sensors in read if (value := getattr(sensors, name))]
    readings["power_limit"] = nvml_snapshot().power_limit
    readings["throttle"] = sorted({reason for sensors in read for reason in sensors.throttle or ()})
    return readings


def run_out_of_memory(before: Sensors, recipe: dict[str, Any]) -> dict[str, Any]:
    """Double the recipe's batch until a step fails for want of memory.

    That gives PyTorch's own message.
    """
    trained: Recipe = rebuild(Recipe, "recipe", recipe)
    for _ in range(MOST_DOUBLINGS):
        found = failed_step(trained)
        if found:
            return found
        # A model has cycles, which would keep it beside the next one.
        gc.collect()
        torch.cuda.empty_cache()
        trained = trained.replace(batch_size=2 * trained.batch_size)
    raise MeasurementError(f"{trained} still fits this card.")


def failed_step(recipe: Recipe) -> dict[str, Any]:
    """Train two steps; return which failed, its message and the card before it.

    {} if both passed.
    """
    torch.cuda.reset_peak_memory_stats()
    facts: dict[str, Any] = {"batch_size": recipe.batch_size}
    try:
        training = build(recipe, "cuda")
        # Two steps, since optimizer states come with the first and may fill the card in the second.
        for step in (1, 2):
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            facts |= {"step": step, "free": free, "total": total}
            facts |= {
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
            }
            train_step(training)
        torch.cuda.synchronize()
    except RuntimeError as error:
        message = out_of_memory(error, "cuda")
        # Where building the model failed already, no step died.
        if not message or "step" not in facts:
            raise
        peaks = {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }
        return facts | peaks | {"message": message}
    return {}


def loading(before: Sensors, recipe: dict[str, Any]) -> dict[str, Any]:
    """Load the 4-bit base of `recipe` with `from_pretrained`.

    It is read from a checkpoint of zeros in the published layout.
    """
    trained: Recipe = rebuild(Recipe, "recipe", recipe)
    import_libraries(trained)
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = weight_dtype(trained)
    asked = trained.quantization
    assert asked is not None  # the list of pieces has none without
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=asked.quant_type,
        bnb_4bit_use_double_quant=asked.double,
        bnb_4bit_compute_dtype=dtype,
    )
    with tempfile.TemporaryDirectory(prefix="vramlab-") as folder:
        size = write_checkpoint(trained, Path(folder), dtype)
        # The context is made here, so that it is no part of the seconds.
        torch.empty(1, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=config,
            dtype=dtype,
            device_map={"": 0},
        )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    stats = torch.cuda.memory_stats()
    peaks = {
        kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested", "reserved")
    }
    kept = torch.cuda.memory_allocated()
    found = state(before) | peaks | {"kept": kept, "file": size, "seconds": seconds}
    # Kept until here, or its weights would be gone before they are counted.
    del model
    return found


def generation(
    before: Sensors,
    recipe: dict[str, Any],
    prompt: int,
    new_tokens: int,
) -> dict[str, Any]:
    """Answer a batch of prompts, of so many tokens with so many more."""
    model = rebuild(Recipe, "recipe", recipe)
    import_libraries(model)
    started = build_generation(model, Generation(prompt, new_tokens), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    peaks: list[dict[str, int]] = []

    def on_step(made: int, cache: Any) -> None:
        # Read after the prompt and at the end: the peaks of both phases.
        if made in (1, new_tokens):
            stats = torch.cuda.memory_stats()
            names = ("allocated", "requested", "reserved")
            peaks.append({name: stats[f"{name}_bytes.all.peak"] for name in names})
            torch.cuda.reset_peak_memory_stats()

    start = time.perf_counter()
    started.run(new_tokens, on_step)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    prefill, decode = peaks
    found = state(before) | {name: max(prefill[name], decode[name]) for name in prefill}
    apart = {"prefill": prefill["allocated"], "decode": decode["allocated"]}
    return found | apart | {"seconds": seconds}


def write_checkpoint(recipe: Recipe, folder: Path, dtype: torch.dtype) -> int:
    """Write zeros as the weights of the unquantized model; return their bytes.

    MeasurementError if the disk lacks room.
    """
    from huggingface_hub import save_torch_state_dict

    precision = {torch.float16: "fp16-true", torch.bfloat16: "bf16-true"}.get(dtype, "fp32")
    model = meta_model(
        recipe.replace(quantization=None, lora=None, dtype=None, precision=precision)
    )
    named = dict(model.named_parameters())  # a tied head once
    size = sum(parameter.numel() * dtype.itemsize for parameter in named.values())
    free = shutil.disk_usage(folder).free
    # A tenth of the disk stays free for what other programs write meanwhile.
    if size > 0.9 * free:
        have = format_bytes(free)
        raise MeasurementError(
            f"its checkpoint has {format_bytes(size)}, and {have} of the disk of {folder} are free."
        )
    model.config.save_pretrained(folder)
    # Zeros take no memory until they are written: the kernel maps one page for all of them.
    zeros = {name: torch.zeros(parameter.shape, dtype=dtype) for name, parameter in named.items()}
    save_torch_state_dict(zeros, folder, max_shard_size="5GB")
    return size


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "context": context,
    "steps": steps,
    "out_of_memory": run_out_of_memory,
    "loading": loading,
    "generation": generation,
}
