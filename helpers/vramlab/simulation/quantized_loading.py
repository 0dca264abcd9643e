"""What the device holds while a quantized base is loaded.

transformers' own loader and PEFT's casts run on fake tensors. `from_pretrained` moves one tensor of
the checkpoint to the device, keeps its codes and frees it; experts that the checkpoint has one by
one are there twice while they are merged; a tied head that the checkpoint has too is there until it
equals the embedding. Then `prepare_model_for_kbit_training` copies what is left to fp32.

Deep models are loaded shallow, and the log is deepened. Unquantized models are loaded in host
memory and moved tensor by tensor: the device never holds more than the result, unless FSDP shards
it later.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from ..hardware.overhead import UNIT, rounded
from ..private.patched import replaced
from ..recipe import lora_modules
from ..recipe.configuration import READERS
from ..recipe.options import LoRA
from ..recipe.process_context import loads_on_host, loads_whole
from ..recipe.recipe import Recipe
from ..report.report import Bytes
from ..tracking.fake_tracker import FakeTracker
from ..tracking.history import History, Log
from ..tracking.tracked import claim_model
from ..tracking.tracker import Event, Storage
from ..training import models
from ..training.int8 import INT8_CLASS, int8_parameter
from .deepen import deepen
from .fakes import fake_world
from .repetition import NotRegular, Repetition, cut, find
from .shallow import names_a_layer

TRUE_PRECISION = {"float16": "fp16-true", "bfloat16": "bf16-true"}


class FileSlice:
    """A tensor in a checkpoint's file, of host memory until it is moved; `begun` is called then."""

    def __init__(self, like: torch.Tensor, begun: Callable[[], None]) -> None:
        self.like = like
        self.begun = begun

    def __getitem__(self, whole: Any) -> "FileSlice":
        return self

    def to(self, device: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor on the device.

        Dtypes are converted on the host (`Copy.cu`, blocking copies).
        """
        self.begun()
        return torch.empty(self.like.shape, dtype=dtype, device=device)


def loading_peak(recipe: Recipe, target: str) -> Bytes | None:
    """Return the split at the highest moment while the base is loaded, whole on every rank.

    It is None where no moment is above the end.
    """
    if loads_whole(recipe):
        return _whole(recipe, UNIT if target == "cuda" else 1)
    if recipe.quantization is None or loads_on_host(recipe):
        return None
    return _of(recipe, target)[0]


def unused_after_loading(recipe: Recipe, target: str) -> int:
    """Return the bytes of segments that loading a quantized base leaves and no tensor holds."""
    if recipe.quantization is None or target != "cuda":
        return 0
    if loads_whole(recipe) or loads_on_host(recipe):
        return 0
    return _of(recipe, target)[1]


def _of(recipe: Recipe, target: str) -> tuple[Bytes, int]:
    # any adapters will do, for they are made later; a recipe asks for some
    name, *_ = lora_modules.adapted(recipe.shape, LoRA(target_modules="all-linear"))[0]
    base = Recipe(
        recipe.shape.config,
        quantization=recipe.quantization,
        task=recipe.shape.task,
        dtype=recipe.weights_dtype,
        precision=TRUE_PRECISION.get(recipe.weights_dtype, "fp32"),
        lora=LoRA(target_modules=(name,)),
    )
    return _highest(base, target, recipe.shape.stores_tied_head)


def _whole(recipe: Recipe, unit: int) -> Bytes:
    """Return the split before the model is sharded; its tensors take multiples of `unit` bytes."""
    with fake_world("cpu"):
        model = models.build_model(recipe.replace(sharding=None), "cpu")
    sizes = []
    for tensors in (model.parameters(), model.buffers()):
        sizes.append(sum(-(-tensor.nbytes // unit) * unit for tensor in tensors))
    return Bytes(parameters=sizes[0], buffers=sizes[1])


@lru_cache(maxsize=64)
def _highest(base: Recipe, target: str, stores_tied_head: bool) -> tuple[Bytes, int]:
    """Return the split at the highest moment of loading, and what its segments have free after."""
    log: Log | list[Event]
    try:
        if names_a_layer(base) or base.shape.family in READERS:
            raise NotRegular("a layer is named, or a tower is loaded between layers")
        layers = find(base.shape)
        shallow = cut(base.shape, layers.kept())
        recipe = base.replace(model=shallow.config, task=shallow.task)
        tracker, pool = _load(recipe, target, stores_tied_head)
        log, _ = deepen(tracker, layers, layers.more)
        expected = _expected(pool, layers)
    except NotRegular:
        tracker, pool = _load(base, target, stores_tied_head)
        log = tracker.log
        expected = sum(pool.values())
    if target == "cuda" and not _packs_in_turn(base):
        # `caching_allocator_warmup` takes one segment for all of it, and frees it to the allocator
        asked = int(expected)
        segment = Storage(rounded(asked), asked, None, "empty")
        warm_up: list[Event] = [(segment.size, segment, "empty"), (-segment.size, segment, "free")]
        log = [*warm_up, *log]
    history = History(log, [], allocator=target == "cuda")
    free = history.replayed.reserved - int(history.live[-1]) if history.replayed else 0
    return history.split(history.highest()), free


def _packs_in_turn(base: Recipe) -> bool:
    """Tell whether each expert is packed as it is loaded; who does it warms no allocator up."""
    return base.quantization is not None and base.quantization.experts == "loading"


def _expected(pool: Mapping[str, float], layers: Repetition) -> float:
    """Return the bytes that transformers expects of the whole model, from a shallow one's."""
    missing = 0.0
    for name, size in pool.items():
        if layers.group(name) == layers.middle:
            missing += size * layers.more
    return missing + sum(pool.values())


def _load(
    base: Recipe,
    target: str,
    stores_tied_head: bool,
) -> tuple[FakeTracker, dict[str, float]]:
    """Return the tracker of `from_pretrained`, and the bytes that each tensor is expected to take.

    `prepare_model_for_kbit_training` is run too, if the recipe says so.
    """
    # before any tensor is fake: PEFT's import makes some
    from peft import prepare_model_for_kbit_training
    from transformers import core_model_loading as loader

    models.make_code_table()
    tracker = FakeTracker()
    tracker.round_to = UNIT if target == "cuda" else 1
    model = models.meta_model(base)
    tied = model.all_tied_weights_keys
    files = _files(model, tracker, absent=() if stores_tied_head else tied)
    state, options = _quantized_state(model, base)
    pool = _expected_sizes(model, state, options.hf_quantizer)
    kept = replaced(model, "state_dict", lambda: state)
    packing = _packing(loader, base) if _packs_in_turn(base) else contextlib.nullcontext()
    with kept, packing, fake_world(target), _quantizing(loader, target), tracker:
        # up to 5.15 a plan has to be given
        loader.convert_and_load_state_dict_in_model(model, files, options, None)
        # a head's bias is tied before its weight, for which transformers pads it
        model.all_tied_weights_keys = dict(reversed(tied.items()))
        tracker.name_module("")
        if stores_tied_head:
            # buffers come before the comparison
            models.materialise(model, torch.device("cpu"))
        # An empty set says that both matrices are there, and then transformers compares them
        # before it ties them; None skips that.
        missing: set[str] | None = set() if stores_tied_head else None
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        models.materialise(model, torch.device("cpu"))  # buffers
        claim_model(tracker, model)
        if base.quantization and base.quantization.experts == "loaded":
            tracker.begin("experts")
            for name in models.quantize_experts(model, base.quantization):
                tracker.name_module(name)
            claim_model(tracker, model)
        # a walk over the layers of its own
        tracker.begin("prepare")
        if base.quantization and base.quantization.prepare:
            with replaced(model, "parameters", lambda: _named_in_turn(model, tracker)):
                prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            claim_model(tracker, model)
        return tracker.finish(), pool


def _files(model: Any, tracker: FakeTracker, absent: Any) -> dict[str, FileSlice]:
    """Return the checkpoint's tensors by name, but those that are `absent`."""
    from transformers import core_model_loading as loader

    stored = loader.revert_weight_conversion(model, model.state_dict())
    files = {}
    for name, like in stored.items():
        if name not in absent:
            files[name] = FileSlice(like, partial(tracker.name_module, name))
    return files


def _quantized_state(model: Any, base: Recipe) -> tuple[dict[str, torch.Tensor], Any]:
    """Quantize `model`'s layers; return its state and the options of transformers' loader."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    mapping: Any = get_model_conversion_mapping(model)
    models.quantize_layers(model, base)
    config = model.config.quantization_config
    options = LoadStateDictConfig(
        device_map={"": "cpu"},
        dtype=models.weight_dtype(base),
        hf_quantizer=AutoHfQuantizer.from_config(config, pre_quantized=False),
        weight_mapping=mapping,
    )
    # torch 2.11 refuses it among fake tensors
    return model.state_dict(), options


def _expected_sizes(
    model: Any,
    state: Mapping[str, torch.Tensor],
    quantizer: Any,
) -> dict[str, float]:
    """Return the bytes that transformers expects of each tensor but tied ones."""
    sizes = {}
    for name, tensor in state.items():
        if name not in model.all_tied_weights_keys:
            width = quantizer.param_element_size(model, name, tensor)
            sizes[name] = tensor.numel() * width
    return sizes


def _named_in_turn(model: Any, tracker: FakeTracker) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters; what is made while one is used has its name."""
    for name, parameter in model.named_parameters():
        tracker.name_module(name)
        yield parameter


@contextlib.contextmanager
def _packing(loader: Any, base: Recipe) -> Iterator[None]:
    """While entered, transformers' loader packs each fused expert that it has loaded.

    Source: axolotl 0.19, monkeypatch/moe_quant.py.
    """
    quantization = base.quantization
    assert quantization is not None  # the caller has asked
    load = loader.set_param_for_module

    def load_and_pack(model: Any, name: str, value: torch.Tensor, *others: Any) -> None:
        load(model, name, value, *others)
        if models.is_fused_expert(name, value):
            module, _, own = name.rpartition(".")
            models.quantize_expert(model.get_submodule(module), own, quantization)
            # the loader still holds it
            value.untyped_storage().resize_(0)

    with replaced(loader, "set_param_for_module", load_and_pack):
        yield


@contextlib.contextmanager
def _quantizing(loader: Any, target: str) -> Iterator[None]:
    """While entered, transformers' loader quantizes and compares fake tensors like real ones.

    Progress is not shown.
    """
    from transformers.integrations import bitsandbytes as bnb
    from transformers.pytorch_utils import Conv1D

    def convert(operation: Any, input_dict: dict, model: Any, **unused: Any) -> dict:
        quantized = {}
        for name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            meta = model.get_parameter_or_buffer(name)
            module = model.get_submodule(name.rpartition(".")[0])
            if issubclass(module.source_cls, Conv1D):
                value = value.T
            value = value.contiguous()
            if type(meta).__name__ == INT8_CLASS:
                # through the host, and back in fp16 (`Bnb8bitQuantize`, `Int8Params._quantize`)
                half = value.to(torch.float16, copy=target == "cuda")
                quantized[name] = int8_parameter(half)
            else:
                quantized[name] = models.quantized_parameter(meta, value)
        return quantized

    def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
        if target == "cuda":
            # as `ReduceOps.cpp`, cuda_equal; a CPU takes no memory for it
            (first == second).all()
        return True

    with (
        replaced(torch, "equal", equal),
        replaced(bnb.Bnb4bitQuantize, "convert", convert),
        replaced(bnb.Bnb8bitQuantize, "convert", convert),
        replaced(loader, "tqdm", lambda items, **_: items),
    ):
        yield
