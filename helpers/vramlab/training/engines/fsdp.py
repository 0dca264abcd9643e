"""ZeRO stages 2 and 3 by FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al. 2023)."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard

from ...recipe.recipe import Recipe
from ..engine import AUTOCAST, Engine, Training, makes_fakes
from ..models import real_tensors
from ..patched import replaced


class FSDP(Engine):
    """Gather each unit of `units` when it is needed, and reduce-scatter its gradients.

    Stage 3 frees a unit after its forward pass (`reshard_after_forward`), stage 2 after its backward pass. A "-mixed"
    precision is FSDP's own policy, as accelerate sets it (`FullyShardedDataParallelPlugin.set_mixed_precision`): fp32
    shards are gathered in half precision, gradients are summed in it, and outputs, the loss among them, are cast to it.
    """

    autocasts = False

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.fake_gpu = "cpu:0" if recipe.sharding.offload else "cpu"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        sharding = self.recipe.sharding
        return shard(
            model,
            units(model, sharding.wrap, self.recipe.loop.name == "trainer", sharding.reshard_root),
            reshard_after_forward=sharding.stage == 3,
            half=AUTOCAST.get(self.recipe.precision),
            offload=sharding.offload is not None,
        )

    def micro_batch(self, training: Training, last: bool) -> contextlib.AbstractContextManager:
        training.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class Unit(NamedTuple):
    """Modules that are gathered together; `keep` them until their backward pass even at stage 3."""

    modules: tuple[torch.nn.Module, ...]
    keep: bool = False


def units(
    model: torch.nn.Module, wrap: str = "layers", as_accelerate: bool = True, reshard_root: bool = False
) -> list[Unit]:
    """The units of a transformer, in the order in which to make them; the last is the root and has the rest.

    Each transformer layer (`_no_split_modules`) is a unit, with `wrap="model"` none; `as_accelerate` also makes one of the
    input embedding, and one of the last norm and the head, with the embedding if tied, and keeps this
    (`accelerate.utils.fsdp_utils.fsdp2_prepare_model`). The root is kept, as by `fully_shard`'s default, unless
    `reshard_root`: `fully_shard(model, reshard_after_forward=True)`, as accelerate said before 1.14, without those units.
    """
    root = Unit((model,), keep=not reshard_root)
    if wrap == "model":
        return [Unit((model,))]
    owners = [(id(p), module) for module in model.modules() for p in module._parameters.values() if p is not None]
    times = Counter(parameter for parameter, _ in owners)
    shared = {module: None for parameter, module in owners if times[parameter] > 1}  # such have to be in one unit
    kinds = getattr(model, "_no_split_modules", None) or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    layers = [layer for layer in layers if len({module in set(layer.modules()) for module in shared}) < 2]
    found = [Unit((layer,)) for layer in layers]
    if as_accelerate and not reshard_root:
        taken = {inner for layer in layers for inner in layer.modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if embedding is not None and embedding not in {*shared, *taken}:  # BERT's is in a unit already
            found.append(Unit((embedding,)))
        tied = sorted((m for m in shared if m is not head), key=lambda module: module is not embedding)
        tail = tuple(m for m in (_last_norm(model), *tied, head) if m is not None and m not in taken)
        found += [Unit(tail, keep=True)] if tail else []
    return [*found, root]


def _last_norm(model: torch.nn.Module) -> torch.nn.Module | None:
    """The last norm among the base model's own modules, as `accelerate.utils.fsdp_utils._find_final_norm` finds it."""
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else model
    norms = [m for m in base.children() if "Norm" in type(m).__name__] if base is not None else []
    return norms[-1] if norms else None


def shard(
    model: torch.nn.Module,
    parts: Sequence[Unit],
    reshard_after_forward: bool = True,
    half: str | None = None,
    offload: bool = False,
) -> torch.nn.Module:
    """Divide the parameters of `model`, any module, among the ranks of the default process group, in place.

    Args:
        parts: the units; each takes what no earlier one has, so the last is the model itself.
        reshard_after_forward: free a unit after its forward pass, and gather it again for its backward pass.
        half: "float16" or "bfloat16": gather and reduce in it, and cast outputs to it.
        offload: keep shards, gradients and the optimizer on the host.
    """
    device = next(model.parameters()).device
    dtype = getattr(torch, half) if half else None
    with real_tensors():
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
    }
    with _of_fake_tensors(model, device) if makes_fakes() else contextlib.nullcontext():
        for modules, keep in parts:
            reshard = reshard_after_forward and not keep
            fully_shard(modules[0] if len(modules) == 1 else [*modules], reshard_after_forward=reshard, **options)
    return model


class _Chunks:
    """The chunks of a parameter, each made when it is asked for; FSDP makes all, but uses the first and this rank's."""

    def __init__(self, tensor: torch.Tensor, parts: int, dim: int):
        self.tensor, self.dim, self.length = tensor, dim, -(-tensor.size(dim) // parts)

    def __getitem__(self, rank: int) -> torch.Tensor:
        start = min(rank * self.length, self.tensor.size(self.dim))
        return self.tensor.narrow(self.dim, start, min(self.length, self.tensor.size(self.dim) - start))


@contextlib.contextmanager
def _of_fake_tensors(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Shard fake tensors of `device` with the same allocations, but without a thousand fake chunks."""
    with (
        replaced(_fsdp_param, "_chunk_with_empty", _Chunks),
        replaced(_fully_shard, "_get_device_from_mesh", lambda mesh: device),
    ):
        yield
    for module in model.modules():  # it would pad shards again whose address is another, and fake storages have none
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            group._reset_sharded_params = True
