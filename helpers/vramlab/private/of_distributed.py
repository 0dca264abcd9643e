"""Private parts of torch.distributed: process groups, FSDP, DTensor, context and pipeline parallel.

It loads none of them: what a run has not imported it does not use, and imports take seconds.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

# Of `distributed_c10d`.
WORLD = "_world"
UNREGISTER_ALL = "_unregister_all_process_groups"
# Of `torch.nn.parallel.distributed`: DDP's exchange of shapes and values.
EXCHANGES = ("_verify_param_shape_across_processes", "_sync_module_states")
# Of DTensor's propagator.
PROPAGATE_SHAPES = "_propagate_tensor_meta_non_cached"
# Of FSDP.
CHUNKS = "_chunk_with_empty"
DEVICE_OF_MESH = "_get_device_from_mesh"
# Of context parallel's attention.
WAIT = "_maybe_wait"


def unique_ids() -> tuple[ModuleType, str]:
    """Return where the works of a fake group get their numbers: a module, and a name in it."""
    from torch.distributed import _meta_registrations

    return _meta_registrations, "generate_unique_id"


def collectives_on_meta() -> dict[Any, Callable]:
    """Return by operator of a process group what torch makes of it on meta tensors: a fake work."""
    from torch.distributed import _meta_registrations

    kernels = getattr(_meta_registrations, "_META_FUNCTIONS", {})
    return {getattr(torch.ops.c10d, name).default: kernel for name, kernel in kernels.items()}


def fake_store() -> Any:
    """Return a store for torch's fake process group, of its own tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def unregister(groups: Iterable[str]) -> None:
    """Forget process groups by their names."""
    c10d: Any = torch._C._distributed_c10d
    for name in groups:
        c10d._unregister_process_group(name)


def group_by_name(name: str) -> Any:
    """Return the process group of that name."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


def is_boxed_group(value: Any) -> bool:
    """Tell whether `value` is a process group as TorchScript hands it on."""
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def one_thread(gloo: Any, timeout: Any) -> Any:
    """Return options of gloo's group with one thread, for ranks that are all on this host.

    Raises AttributeError or TypeError where a release has others.
    """
    options = gloo._Options()
    options._threads = 1
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return options


def forget_dtensor_shards() -> None:
    """Clear DTensor's caches, of Python and (in newer releases) of C++, if it was imported."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def dtensor_propagator() -> Any:
    """Return the class that finds out DTensor's shapes; None if DTensor was not imported."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    return module and module.ShardingPropagator


def rebuild_buckets(reducer: Any) -> bool:
    """Let DDP's reducer make its buckets anew, in the order in which gradients came."""
    return reducer._rebuild_buckets()


def fsdp_modules() -> tuple[ModuleType, ModuleType]:
    """Return FSDP's modules of one parameter and of `fully_shard`."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard

    return _fsdp_param, _fully_shard


def fsdp_classes() -> tuple[Any, Any]:
    """Return FSDP's classes of one parameter and of a unit's parameters."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParam, FSDPParamGroup


def name_of(parameter: Any) -> str:
    """Return the name of one of FSDP's parameters in its model."""
    return parameter._param_fqn or ""


def gathered_parameter(parameter: Any) -> Any:
    """Return what FSDP gathered of a parameter; None before it did."""
    return getattr(parameter, "_unsharded_param", None)


def keep_shards(module: Any) -> None:
    """Let an FSDP unit keep its shards.

    It pads them again if their address is another than at first, and fake storages have none.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group:
        group._reset_sharded_params = True


def ring_attention() -> Any:
    """Return the module of context parallel's attention."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def static_inference() -> Any:
    """Return the mode of a pipeline's stage whose inputs are described beforehand."""
    from torch.distributed.pipelining import _utils

    return _utils.InferenceMode.STATIC
