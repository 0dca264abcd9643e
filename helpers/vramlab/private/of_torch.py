"""Private parts of torch that every tracked step needs: storages, modules, autograd and modes.

Many are called for each operator of a step, so they are torch's own functions under a name that
says what they do, and no wrappers around them.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "unset_fake_temporarily",
    "without_modes",
]

# The address of torch's own object, by which storages are told apart: those of fake tensors have
# no other.
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
accumulation_hooks: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
parameters_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_buffers")
submodules_of: Callable[[torch.nn.Module], dict[str, Any]] = attrgetter("_modules")
current_node: Callable[[], Any] = torch._C._current_autograd_node
next_number: Callable[[], int] = torch.autograd._get_sequence_nr
qualified_name: Callable[[OpOverload], str] = attrgetter("overloadpacket._qualified_op_name")

# Of `torch.nn.Module`: what `.to()` and casts come to.
APPLY = "_apply"
# Of `torch.nn.init`: what `trunc_normal_` comes to.
TRUNC_NORMAL = "_no_grad_trunc_normal_"


def users_of(storage: torch.UntypedStorage) -> int:
    """Return how many hold the storage, the handle that is asked among them."""
    return torch._C._storage_Use_Count(address_of(storage))


def number_of(node: Any) -> int:
    """Return autograd's number of a node: `next_number` before its operator ran."""
    return node._sequence_nr()


def is_faking() -> bool:
    """Tell whether a FakeTensorMode is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def original_of(module: torch.nn.Module) -> Any:
    """Return the module that `torch.compile` was given, where `module` is its wrapper."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether `torch.compile` runs the module, by a wrapper or in its place."""
    return hasattr(module, "_orig_mod") or bool(module._compiled_call_impl)


def compiled_call(module: torch.nn.Module) -> Any:
    """Return what runs in a compiled module's place."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Let `call` run in the module's place; None is its own code again."""
    module._compiled_call_impl = call


def convert(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace parameters and buffers of `module` by what `change` makes of them."""
    module._apply(change)


def never_skip(scaler: Any, step: Callable) -> None:
    """Let a loss scaler call `step` in the place of its own, which looks for overflows."""
    scaler._maybe_opt_step = step


def thread_value(key: str) -> Any:
    """Return what torch keeps for this thread by `key`, and hands to autograd's; None if none."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_thread_value(key: str, value: Any) -> None:
    """Let torch keep `value` for this thread."""
    torch._C._stash_obj_in_tls(key, value)


def forget_thread_value(key: str) -> bool:
    """Let torch keep nothing by `key`; False where it cannot, as in torch 2.11."""
    forget = getattr(torch._C, "_remove_obj_from_tls", None)
    if forget is not None and torch._C._is_key_in_tls(key):
        forget(key)
    return forget is not None


def set_parent_death_signal(signal: int) -> None:
    """Let the system send this process `signal` when its parent ends."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(signal)


def is_in_bad_fork() -> bool:
    """Tell whether this process was forked from one that had used CUDA, and cannot use it."""
    return torch.cuda._is_in_bad_fork()


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces; newer releases keep none between calls."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def allocator_settings() -> dict[str, Any]:
    """Return what the CUDA allocator took of its settings."""
    return torch.cuda.memory._snapshot()["allocator_settings"]


def once_cuda_is_used(call: Callable[[], None]) -> None:
    """Run `call` as soon as the process uses CUDA."""
    torch.cuda._lazy_call(call)


def record_history(most: int) -> None:
    """Record the CUDA allocator's events with Python's stacks, the newest `most` of them."""
    torch.cuda.memory._record_memory_history(max_entries=most, stacks="python")


def dump_history(path: str) -> None:
    """Write the CUDA allocator's events to a file."""
    torch.cuda.memory._dump_snapshot(path)


def replace_resets_of_peaks(wrapped: Callable[[Callable], Callable]) -> None:
    """Let the process forget the allocator's peaks by what `wrapped` makes of torch's functions."""
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        setattr(torch._C, name, wrapped(getattr(torch._C, name)))
