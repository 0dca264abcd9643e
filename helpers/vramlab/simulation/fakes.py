"""Fake tensors that libraries treat as real ones."""

import contextlib
import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..hardware.gpu import DEFAULT_CHIP, Gpu
from ..training.models import restore_after_liger
from .cuda import CudaKernels, cuda_kernels
from .flash_attn import flash_attention
from .operators import fake_operators
from .triton_kernels import fused_head, unlaunched

lock = threading.RLock()  # what is put in place below is the process's, so one simulation runs at a time

aten = torch.ops.aten
# Of this process, by target: torch's entries by operator and arguments, None where it makes none.
CACHED: dict[str, dict[tuple, Any]] = {"cuda": {}, "cpu": {}}
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode that caches results for `target` by a shorter key than torch's, which took 40 % of a simulation."""

    _should_skip_dynamo = staticmethod(lambda: False)  # no guard against torch.compile around each operator

    def __init__(self, target: str):
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled, self._entries = False, CACHED[target]
        empty = torch.empty(0, device="meta")
        self._attributes = functools.cache(lambda device: vars(FakeTensor(self, empty, device)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._unsafe_view.default:
            func = aten.view.default  # which torch caches
        try:
            key = func, torch.get_default_dtype(), _described(args), _described(kwargs.items())
            entry = self._entries.get(key)
        except TypeError:  # for torch to judge
            return self.dispatch(func, types, args, kwargs)
        if entry:
            return self._output_from_cache_entry(None, entry, None, func, args)
        result = self.dispatch(func, types, args, kwargs)
        if key not in self._entries:
            self._entries[key] = None
            if isinstance(result, torch.Tensor | tuple):
                with contextlib.suppress(fake_tensor._BypassDispatchCache):
                    state = fake_tensor._CacheKeyState()
                    self._entries[key] = self._make_cache_entry(state, None, func, args, kwargs, result)
        return result

    def _get_output_tensor_from_cache_entry(self, state, entry, key, func, args):
        """As torch's own, of which `FakeTensor()` and guards take most of the time."""
        made = entry.metadata
        if made is None or made.is_conj or made.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if func.is_view:
            meta.set_(args[entry.view_idx].untyped_storage(), made.storage_offset, made.shape, made.stride)
        keys = {"dispatch_device": True, "device_for_backend_keys": made.device}
        fake = torch.Tensor._make_subclass(FakeTensor, meta, made.requires_grad, **keys)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes(made.device))
        return fake

    def _validate_cache_key(self, func, args, kwargs):
        if getattr(func, "namespace", "") != "bitsandbytes":  # torch caches its own operators only
            super()._validate_cache_key(func, args, kwargs)


def _described(values: Any) -> tuple:
    """What of an operator's arguments decides its fake result. Raises TypeError where that is not all to be seen here."""
    found = []
    for value in values:
        if isinstance(value, FakeTensor) and value.constant is None and value.layout is torch.strided:
            sizes = value.shape, value.stride(), value.storage_offset()
            found.append((*sizes, value.dtype, value.fake_device, value.requires_grad, value.is_conj(), value.is_neg()))
        elif isinstance(value, list | tuple):
            found.append((type(value), _described(value)))
        elif isinstance(value, PLAIN):
            found.append((type(value), value))
        else:
            raise TypeError
    return tuple(found)


@contextlib.contextmanager
def fake_world(target: str, card: Gpu | None = None) -> Iterator[tuple[FakeTensorMode, CudaKernels | None]]:
    """A FakeTensorMode with the kernels of `target` in place, in which models take the branches of real tensors.

    Libraries that are slow to load (bitsandbytes, TRL, Liger, …) are changed only if they were imported before.
    """
    with lock, contextlib.ExitStack() as stack:
        stack.callback(restore_after_liger)
        for context in (*_real_branches(), fake_operators(target)):
            stack.enter_context(context)
        mode, kernels, chip = stack.enter_context(QuickFakeMode(target)), None, None
        if target == "cuda":
            capability, chip = (card.compute_capability, card.chip) if card else ((8, 0), DEFAULT_CHIP)
            kernels = stack.enter_context(cuda_kernels(capability))
            for context in _cuda_branches(capability, kernels):
                stack.enter_context(context)
        for context in unlaunched(chip):
            stack.enter_context(context)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        warnings.filterwarnings("ignore", "`gradient_checkpointing_", FutureWarning)  # TRL calls it by its old name
        yield mode, kernels


def _cuda_branches(capability: tuple[int, int], kernels: CudaKernels) -> Iterator[contextlib.AbstractContextManager]:
    """Contexts in which libraries do what they do on a GPU of `capability`."""
    from transformers.integrations import hub_kernels, moe

    def warn(text: str, *args: Any) -> None:  # where a kernel's package is missing (Gated DeltaNet, Mamba)
        if "falling back" in text:
            kernels.note(text)

    yield flash_attention(capability)
    yield from fused_head()
    yield patch.object(hub_kernels.logger, "warning_once", warn)
    if capability < (8, 0):  # experts are multiplied one by one, with a gradient for frozen weights too
        yield patch.object(moe, "_can_use_grouped_mm", lambda *args: False)


def _real_branches() -> Iterator[contextlib.AbstractContextManager]:
    """Contexts in which libraries do with fake tensors what they do with real ones."""
    from torch.nn.parallel import distributed
    from transformers.utils import import_utils

    # transformers takes a fake tensor for a sign of tracing and then builds causal masks that it skips otherwise
    # (`masking_utils._ignore_causal_mask_sdpa`), which changes the attention kernel too
    yield patch.object(import_utils, "is_fake_tensor", lambda tensor: False)
    # DistributedDataParallel sends shapes and values of the parameters around, and leaves no storage behind
    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        yield patch.object(distributed, name, lambda *args, **kwargs: None)
    if sys.modules.get("bitsandbytes"):
        from bitsandbytes.nn import modules

        yield patch.object(modules, "fix_4bit_weight_quant_state_from_module", _give_statistics_back)
    if "torch._dynamo" in sys.modules:  # functions that a module has compiled run as they are written
        yield torch.compiler.set_stance("force_eager")
    # it prints a traceback of what a sentence says later
    yield patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


def _give_statistics_back(module: torch.nn.Module) -> None:
    """What bitsandbytes does to 4-bit weights that FSDP has gathered, but they stay plain parameters, as fake ones are."""
    if getattr(module.weight, "quant_state", None) is None:
        module.weight.quant_state = module.quant_state


def compiled_late() -> contextlib.AbstractContextManager:
    """While entered, a compiled function loads Inductor, half a second, when it is first called: bitsandbytes has some."""

    def late(function: Callable | None = None, **options: Any) -> Callable:
        if not inspect.isfunction(function):
            return compiled(function, **options)
        made = functools.cache(lambda: compiled(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: made()(*args, **kwargs))

    compiled = torch.compile
    return patch.object(torch, "compile", late)
