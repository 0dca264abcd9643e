"""ZeRO stages 2 and 3 by FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al. 2023)."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ...private import of_distributed
from ...private.of_torch import parameters_of
from ...private.of_transformers import undivided_kinds
from ...private.patched import replaced
from ...recipe.options import Sharding
from ...recipe.recipe import Recipe
from ..engine import AUTOCAST, Model, ShardedEngine, Training, makes_fakes
from ..models import real_tensors


class FSDP(ShardedEngine):
    """Gather each unit of `units` when it is needed, and reduce-scatter its gradients.

    Stage 3 frees a unit after its forward pass (`reshard_after_forward`), stage 2 after its
    backward pass. A "-mixed" precision is FSDP's own policy, as accelerate sets it
    (`FullyShardedDataParallelPlugin.set_mixed_precision`): fp32 shards are gathered in half
    precision, gradients are summed in it, and outputs, the loss among them, are cast to it.
    """

    autocasts = False

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        # With offloading the stand-in for the GPU must be another device than the host.
        self.fake_gpu = "cpu:0" if self.sharding.offload else "cpu"
        self.divide: Callable | None = None  # a micro-batch, among the ranks of a ring

    def wrap(self, model: Model) -> Model:
        """Return `model`, whose parameters are divided among the ranks."""
        as_accelerate = self.recipe.loop.name == "trainer"
        mesh = None
        if self.sharding.dp_replicate_size > 1 or self.sharding.cp_size > 1:
            mesh, ring = _meshes(model.device.type, self.sharding)
        if self.sharding.cp_size > 1:
            from . import context_parallel  # with the Trainer, whose import takes seconds

            context_parallel.attach(model)
            self.divide = partial(context_parallel.divided, ring)
        return shard(
            model,
            units(model, self.sharding.wrap, as_accelerate, self.sharding.reshard_root),
            reshard_after_forward=self.sharding.stage == 3,
            half=AUTOCAST.get(self.recipe.precision),
            offload=self.sharding.offload is not None,
            mesh=mesh,
        )

    def part_of(
        self,
        training: Training,
        batch: Any,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the batch, or of context parallel this rank's part of it."""
        if self.divide is None:
            return super().part_of(training, batch)
        return self.divide(training.model, batch)

    def micro_batch(self, training: Training, last: bool) -> contextlib.AbstractContextManager:
        """Reduce gradients after the last micro-batch only."""
        training.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class Unit(NamedTuple):
    """Modules that are gathered together; `keep` them until their backward pass even at stage 3."""

    modules: tuple[torch.nn.Module, ...]
    keep: bool = False


def units(
    model: Model,
    wrap: str = "layers",
    as_accelerate: bool = True,
    reshard_root: bool = False,
) -> list[Unit]:
    """Return the units of a transformer, in the order in which to make them.

    The last is the root and has the rest. Each transformer layer (`_no_split_modules`) is a unit,
    with `wrap="model"` none; `as_accelerate` also makes one of the input embedding, and one of the
    last norm and the head, with the embedding if tied, and keeps this
    (`accelerate.utils.fsdp_utils.fsdp2_prepare_model`). The root is kept, as by `fully_shard`'s
    default, unless `reshard_root`: `fully_shard(model, reshard_after_forward=True)`, as accelerate
    said before 1.14, without those units.
    """
    root = Unit((model,), keep=not reshard_root)
    if wrap == "model":
        return [Unit((model,))]
    shared = _owners_of_shared(model)
    layers = _layers(model, shared)
    parts = [Unit((layer,)) for layer in layers]
    if as_accelerate and not reshard_root:
        taken: set[torch.nn.Module] = set()
        for layer in layers:
            taken.update(layer.modules())
        parts += _ends(model, shared, taken)
    return [*parts, root]


def _owners_of_shared(model: Model) -> list[torch.nn.Module]:
    """Return the modules that have a parameter with others, which have to be in one unit."""
    owners = []
    for module in model.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None:
                owners.append((id(parameter), module))
    times = Counter(parameter for parameter, _ in owners)
    shared = [module for parameter, module in owners if times[parameter] > 1]
    return list(dict.fromkeys(shared))


def _layers(model: Model, shared: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the transformer layers, but those which have some of the `shared` and not all."""
    kinds = undivided_kinds(model)
    layers = []
    for module in model.modules():
        if type(module).__name__ not in kinds:
            continue
        inner = set(module.modules())
        is_inside = {each in inner for each in shared}
        # All of the shared ones are in the layer, or none of them.
        if len(is_inside) < 2:
            layers.append(module)
    return layers


def _ends(model: Model, shared: list[torch.nn.Module], taken: set[torch.nn.Module]) -> list[Unit]:
    """Return the units of the input embedding, and of the last norm and the head."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    ends = []
    # BERT's is in a unit already
    if embedding is not None and embedding not in {*shared, *taken}:
        ends.append(Unit((embedding,)))
    # What shares the head's weight has to be gathered with it.
    tied = [module for module in shared if module is not head]
    tied.sort(key=lambda module: module is not embedding)  # the embedding first
    tail = [_last_norm(model), *tied, head]
    tail_modules = tuple(each for each in tail if each is not None and each not in taken)
    if tail_modules:
        ends.append(Unit(tail_modules, keep=True))
    return ends


def _last_norm(model: Model) -> torch.nn.Module | None:
    """Return the last norm among the base model's own modules.

    `accelerate.utils.fsdp_utils._find_final_norm` finds it so.
    """
    prefix = model.base_model_prefix
    base = getattr(model, prefix, None) if prefix else model
    if base is None:
        return None
    norms = [module for module in base.children() if "Norm" in type(module).__name__]
    return norms[-1] if norms else None


def shard(
    model: Model,
    parts: Sequence[Unit],
    reshard_after_forward: bool = True,
    half: str | None = None,
    offload: bool = False,
    mesh: DeviceMesh | None = None,
) -> Model:
    """Divide the parameters of `model`, any module, among the ranks, in place.

    Args:
        parts: the units; each takes what no earlier one has, so the last is the model itself.
        reshard_after_forward: free a unit after its forward pass, and gather it again for its
            backward pass.
        half: "float16" or "bfloat16": gather and reduce in it, and cast outputs to it.
        offload: keep shards, gradients and the optimizer on the host.
        mesh: of the ranks that divide the model, or with two dimensions of copies of it and of the
            ranks that divide one; None: of all ranks.
    """
    device = next(model.parameters()).device
    dtype = getattr(torch, half) if half else None
    if mesh is None:
        # A mesh keeps its ranks in a tensor, which must have values where the model's have none.
        with real_tensors():
            mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = OffloadPolicy()
    if offload:
        # Only CUDA copies from pinned memory.
        policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=dtype,
            output_dtype=dtype,
        ),
        "offload_policy": policy,
    }
    with _of_fake_tensors(model, device) if makes_fakes() else contextlib.nullcontext():
        for modules, keep in parts:
            # `fully_shard` makes one unit of a list of modules.
            unit: Any = modules[0] if len(modules) == 1 else list(modules)
            reshard = reshard_after_forward and not keep
            fully_shard(unit, reshard_after_forward=reshard, **options)
    return model


def _meshes(device_type: str, sharding: Sharding) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh that FSDP divides by, and that of the ring, as accelerate makes them."""
    from accelerate.parallelism_config import ParallelismConfig

    config = ParallelismConfig(**sharding.parallelism)
    with real_tensors():
        mesh: Any = config.build_device_mesh(device_type)
    ring = mesh["cp"] if sharding.cp_size > 1 else None
    return mesh[tuple(config.fsdp_dim_names)], ring


class _Chunks:
    """The chunks of a parameter, each made when it is asked for.

    FSDP makes all, but uses the first and this rank's.
    """

    def __init__(self, tensor: torch.Tensor, parts: int, dim: int) -> None:
        self.tensor = tensor
        self.dim = dim
        self.total = tensor.size(dim)
        # As `torch.chunk`: rounded up, so the last ranks may get less, or nothing.
        self.length = -(-self.total // parts)

    def __getitem__(self, rank: int) -> torch.Tensor:
        start = min(rank * self.length, self.total)
        length = min(self.length, self.total - start)
        return self.tensor.narrow(self.dim, start, length)


@contextlib.contextmanager
def _of_fake_tensors(model: Model, device: torch.device) -> Iterator[None]:
    """Shard fake tensors of `device` with the same allocations, without a thousand fake chunks."""
    of_parameter, of_unit = of_distributed.fsdp_modules()
    with (
        replaced(of_parameter, of_distributed.CHUNKS, _Chunks),
        replaced(of_unit, of_distributed.DEVICE_OF_MESH, lambda mesh: device),
    ):
        yield
    for module in model.modules():
        if isinstance(module, FSDPModule):
            of_distributed.keep_shards(module)
