"""What the device holds while a quantized base is loaded: transformers' own loader and PEFT's casts on fake tensors.

`from_pretrained` moves one tensor of the checkpoint to the device, keeps its codes and frees it; experts that the checkpoint
has one by one are there twice while they are merged; a tied head that the checkpoint has too is there until it equals
the embedding. Then `prepare_model_for_kbit_training` copies what is left to fp32.
Deep models are loaded shallow, and the log is deepened. Unquantized models are loaded in host memory and moved tensor by
tensor: the device never holds more than the result, unless FSDP shards it later.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from ..hardware.overhead import UNIT, rounded
from ..recipe.process_context import loads_whole
from ..recipe.recipe import Recipe
from ..report.report import Bytes
from ..tracking.fake_tracker import FakeTracker
from ..tracking.history import History
from ..tracking.tracked import claim_model
from ..tracking.tracker import Storage
from ..training import models
from ..training.patched import replaced
from .deepen import deepen
from .fakes import fake_world
from .repetition import NotRegular, cut, find


class FileSlice:
    """A tensor in a checkpoint's file, of host memory until it is moved; `begun` is called then."""

    def __init__(self, like: torch.Tensor, begun: Callable[[], None]):
        self.like, self.begun = like, begun

    def __getitem__(self, whole: Any) -> "FileSlice":
        return self

    def to(self, device: Any, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device; dtypes are converted on the host (`Copy.cu`, blocking copies)."""
        self.begun()
        return torch.empty(self.like.shape, dtype=dtype, device=device)


def loading_peak(recipe: Recipe, target: str) -> Bytes | None:
    """The split at the highest moment while the base is loaded, whole on every rank; None: never above its end."""
    if loads_whole(recipe):
        return _whole(recipe, UNIT if target == "cuda" else 1)
    return None if recipe.quantization is None else _of(recipe, target)[0]


def unused_after_loading(recipe: Recipe, target: str) -> int:
    """Bytes of segments that loading a quantized base leaves behind and no tensor holds."""
    is_known = recipe.quantization and target == "cuda" and not loads_whole(recipe)
    return _of(recipe, target)[1] if is_known else 0


def _of(recipe: Recipe, target: str) -> tuple[Bytes, int]:
    dtype, adapters = recipe.weights_dtype, {"target_modules": "all-linear"}
    precision = {"float16": "fp16-true", "bfloat16": "bf16-true"}.get(dtype, "fp32")
    fields = {"task": recipe.shape.task, "dtype": dtype, "precision": precision, "lora": adapters}
    base = Recipe(recipe.shape.config, quantization=recipe.quantization, **fields)
    return _highest(base, target, recipe.shape.stores_tied_head)


def _whole(recipe: Recipe, unit: int) -> Bytes:
    """The split of the model before it is sharded, whose tensors take multiples of `unit` bytes."""
    with fake_world("cpu"):
        model = models.build_model(recipe.replace(sharding=None), "cpu")
    sizes = []
    for tensors in (model.parameters(), model.buffers()):
        sizes.append(sum(-(-tensor.nbytes // unit) * unit for tensor in tensors))
    return Bytes(parameters=sizes[0], buffers=sizes[1])


@lru_cache(maxsize=64)
def _highest(base: Recipe, target: str, stores_tied_head: bool) -> tuple[Bytes, int]:
    """The split at the highest moment of loading, and the bytes that its segments have free at its end."""
    try:
        layers = find(base.shape)
        shallow = cut(base.shape, layers.kept())
        tracker, pool = _load(base.replace(model=shallow.config, task=shallow.task), target, stores_tied_head)
        log, _ = deepen(tracker, layers, layers.more)
        room = sum(size * (layers.more if layers.group(name) == layers.middle else 0) for name, size in pool.items())
    except NotRegular:
        (tracker, pool), room = _load(base, target, stores_tied_head), 0
        log = tracker.log
    if target == "cuda":  # `caching_allocator_warmup` takes one segment for all of it, and frees it to the allocator
        asked = int(room + sum(pool.values()))
        segment = Storage(rounded(asked), asked, None, "empty")
        log = [(segment.size, segment, "empty"), (-segment.size, segment, "free"), *log]
    history = History(log, [], allocator=target == "cuda")
    free = history.replayed.reserved - int(history.live[-1]) if history.replayed else 0
    return history.split(history.highest()), free


def _load(base: Recipe, target: str, stores_tied_head: bool) -> tuple[FakeTracker, dict[str, float]]:
    """The tracker of `from_pretrained` and, if the recipe says so, `prepare_model_for_kbit_training`; and the bytes that
    transformers thinks each tensor will take."""
    from peft import prepare_model_for_kbit_training
    from transformers import core_model_loading as loader
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    models.make_code_table()
    tracker, dtype = FakeTracker("cpu"), models.weight_dtype(base)
    tracker.round_to = UNIT if target == "cuda" else 1
    model = models.meta_model(base)
    stored = loader.revert_weight_conversion(model, model.state_dict())

    tied = model.all_tied_weights_keys
    absent = () if stores_tied_head else tied
    files = {n: FileSlice(like, partial(tracker.name_module, n)) for n, like in stored.items() if n not in absent}
    mapping = get_model_conversion_mapping(model)
    models.quantize_layers(model, base)
    quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=False)
    state = model.state_dict()  # which torch 2.11 refuses among fake tensors
    pool = {n: t.numel() * quantizer.param_element_size(model, n, t) for n, t in state.items() if n not in tied}
    options = LoadStateDictConfig(device_map={"": "cpu"}, dtype=dtype, hf_quantizer=quantizer, weight_mapping=mapping)
    kept = replaced(model, "state_dict", lambda: state)
    with kept, fake_world(target), _quantizing(loader, target), tracker:
        loader.convert_and_load_state_dict_in_model(model, files, options, None)  # up to 5.15 a plan has to be given
        # a head's bias is tied before its weight, for which transformers pads it
        model.all_tied_weights_keys = dict(reversed(tied.items()))
        tracker.name_module("")
        if stores_tied_head:
            models.materialise(model, torch.device("cpu"))  # buffers come before the comparison
        model.tie_weights(missing_keys=set() if stores_tied_head else None, recompute_mapping=False)
        models.materialise(model, torch.device("cpu"))  # buffers
        claim_model(tracker, model)
        tracker.begin("prepare")  # a walk over the layers of its own
        if base.quantization.prepare:
            with replaced(model, "parameters", lambda: _named_in_turn(model, tracker)):
                prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            claim_model(tracker, model)
        return tracker.finish(), pool


def _named_in_turn(model: torch.nn.Module, tracker: FakeTracker) -> Iterator[torch.nn.Parameter]:
    for name, parameter in model.named_parameters():
        tracker.name_module(name)
        yield parameter


@contextlib.contextmanager
def _quantizing(loader: Any, target: str) -> Iterator[None]:
    """While entered, transformers' loader quantizes and compares fake tensors like real ones, and shows no progress."""
    from transformers.integrations import bitsandbytes as bnb
    from transformers.pytorch_utils import Conv1D

    def convert(operation: Any, input_dict: dict, model: torch.nn.Module, **unused: Any) -> dict:
        found = {}
        for name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            old = model.get_parameter_or_buffer(name)
            if issubclass(model.get_submodule(name.rpartition(".")[0]).source_cls, Conv1D):
                value = value.T
            found[name] = models.quantized_parameter(old, value.contiguous())
        return found

    def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
        if target == "cuda":
            (first == second).all()  # as `ReduceOps.cpp`, cuda_equal; a CPU takes no memory for it
        return True

    with (
        replaced(torch, "equal", equal),
        replaced(bnb.Bnb4bitQuantize, "convert", convert),
        replaced(loader, "tqdm", lambda items, **_: items),
    ):
        yield
