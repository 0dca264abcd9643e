"""Fake tensors that libraries treat as real ones."""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..hardware.gpu import DEFAULT_CHIP, Gpu
from ..private import of_bitsandbytes, of_compiler, of_distributed, of_transformers
from ..private.patched import plain, replaced
from ..training import models
from ..training.models import restore_after_liger
from ..training.quiet import unheard, unlogged
from .adapters import adapters_on_fakes
from .cuda import AMPERE, CudaKernels, cuda_kernels
from .fake_mode import RuledFakeMode, fake_mode
from .flash_attn import flash_attention
from .triton_kernels import fused_head, unlaunched

# One simulation runs at a time, another thread's waits: they share tables, and torch has one
# describer of fake tensors. Threads that train do not wait.
lock = threading.RLock()


def _free_lock() -> None:
    """In a forked process: the thread that held the lock is not there."""
    global lock
    lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_lock)


@contextlib.contextmanager
def fake_world(
    target: str,
    card: Gpu | None = None,
) -> Iterator[tuple[RuledFakeMode, CudaKernels | None]]:
    """Yield a FakeTensorMode, and CUDA's kernels if those are the `target`'s.

    While entered models take the branches of real tensors. Libraries that are slow to load
    (bitsandbytes, TRL, Liger, …) are changed only if they were imported before.
    """
    with lock, contextlib.ExitStack() as stack:
        stack.callback(restore_after_liger)
        for context in _real_branches(target):
            stack.enter_context(context)
        mode = stack.enter_context(fake_mode(target))
        kernels = None
        chip = None
        if target == "cuda":
            chip = card.chip if card else DEFAULT_CHIP
            capability = card.compute_capability if card else AMPERE
            kernels = stack.enter_context(cuda_kernels(capability))
            for context in _cuda_branches(capability, kernels):
                stack.enter_context(context)
        for context in unlaunched(chip):
            stack.enter_context(context)
        yield mode, kernels


def _cuda_branches(
    capability: tuple[int, int],
    kernels: CudaKernels,
) -> Iterator[contextlib.AbstractContextManager]:
    """Return contexts in which libraries do what they do on a GPU of `capability`."""
    from transformers.integrations import hub_kernels, moe

    def warn(text: str, *args: Any) -> None:
        # where a kernel's package is missing (Gated DeltaNet, Mamba)
        if "falling back" in text:
            kernels.note(text)

    group_norm = plain(torch.nn.functional, "group_norm")

    def of_contiguous(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # `at::group_norm` keeps the memory format on a CPU alone (`group_norm.cpp`)
        return group_norm(input.contiguous(), *args, **kwargs)

    yield replaced(torch.nn.functional, "group_norm", of_contiguous)
    if sys.modules.get("bitsandbytes"):
        owner, product = of_bitsandbytes.int8_products()
        yield replaced(owner, of_bitsandbytes.INT8_ON_CPU, product)
        # it says at every product that the input is cast to fp16
        yield unlogged(owner.__name__)
    yield flash_attention(capability)
    yield from fused_head()
    yield replaced(hub_kernels.logger, "warning_once", warn)
    if capability < AMPERE:
        # experts are multiplied one by one, with a gradient for frozen weights too
        yield replaced(moe, of_transformers.CAN_GROUP_PRODUCTS, lambda *args: False)


def _real_branches(target: str) -> Iterator[contextlib.AbstractContextManager]:
    """Return contexts in which libraries do with fake tensors what they do with real ones."""
    from torch.nn.parallel import distributed
    from transformers.utils import import_utils

    yield replaced(torch.nn.functional, "one_hot", functools.partial(_one_hot, target))

    # transformers takes a fake tensor for a sign of tracing and then builds causal masks that it
    # skips otherwise (`masking_utils._ignore_causal_mask_sdpa`), which changes the attention kernel
    # too
    yield replaced(import_utils, "is_fake_tensor", lambda tensor: False)
    # DistributedDataParallel sends shapes and values of the parameters around, and leaves no
    # storage behind
    for name in of_distributed.EXCHANGES:
        yield replaced(distributed, name, lambda *args, **kwargs: None)
    if sys.modules.get("bitsandbytes"):
        from bitsandbytes.nn import modules

        fix = "fix_4bit_weight_quant_state_from_module"
        yield replaced(modules, fix, _give_statistics_back)
    if sys.modules.get("peft"):
        # HiRA multiplies the base's own weights, and knows packed ones by their class
        with contextlib.suppress(ImportError):  # PEFT has it, and bitsandbytes is there
            hira = importlib.import_module("peft.tuners.hira.bnb")
            own = functools.partial(_unpacked, hira.dequantize_bnb_weight)
            yield replaced(hira, "dequantize_bnb_weight", own)
    yield _eager()
    yield replaced(models, "making_adapters", adapters_on_fakes)
    # a recomputation begins with the generator of its forward pass: the generator is the process's
    for owner in (torch, torch.random):
        yield replaced(owner, "set_rng_state", lambda state: None)
    # it prints a traceback of what a sentence says later
    yield unlogged("torch._subclasses.fake_tensor")
    yield unheard("Paged optimizers are not supported on CPU")
    # TRL calls it by its old name
    yield unheard("`gradient_checkpointing_", category=FutureWarning)


def _one_hot(target: str, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return what `one_hot` does of real tensors, where it compares fake ones (`Onehot.cpp`)."""
    if num_classes < 0:  # it reads how many there are
        num_classes = int(tensor.max()) + 1
    elif target == "cpu":
        torch.aminmax(tensor)
    shape = (*tensor.shape, num_classes)
    made = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)


def _eager() -> contextlib.AbstractContextManager:
    """While entered, functions that a module has compiled run as they are written."""
    frames = of_compiler.loaded_frames()
    if frames is None:
        return contextlib.nullcontext()
    if not hasattr(frames, of_compiler.CALLBACK):  # in the whole process then
        return torch.compiler.set_stance("force_eager")
    return replaced(frames, of_compiler.CALLBACK, lambda callback: None)


def _unpacked(of_int8: Callable, weight: Any, state: Any) -> torch.Tensor:
    """Return what PEFT's `dequantize_bnb_weight` does, which `of_int8` does of 8 bits."""
    if getattr(weight, "quant_state", None) is None:
        return of_int8(weight, state=state)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def _give_statistics_back(module: Any) -> None:
    """Do what bitsandbytes does to 4-bit weights that FSDP has gathered.

    They stay plain parameters, as fake ones are.
    """
    if getattr(module.weight, "quant_state", None) is None:
        module.weight.quant_state = module.quant_state


def compiled_late() -> contextlib.AbstractContextManager:
    """While entered, let a compiled function load Inductor when it is first called.

    That takes half a second, and bitsandbytes has some such functions.
    """
    compiled = plain(torch, "compile")

    def late(function: Callable | None = None, **options: Any) -> Callable:
        if function is None or not inspect.isfunction(function):
            return compiled(function, **options)
        make = functools.cache(functools.partial(compiled, function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return make()(*args, **kwargs)

        return call

    return replaced(torch, "compile", late)
