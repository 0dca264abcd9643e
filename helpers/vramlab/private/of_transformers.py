"""Private parts of transformers and accelerate."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

# Of `GenerationMixin`.
HAS_UNFINISHED = "_has_unfinished_sequences"
PREPARE_CACHE = "_prepare_cache_for_generation"
UPDATE_ARGUMENTS = "_update_model_kwargs_for_generation"
# Of `PreTrainedModel` and of `modeling_flash_attention_utils`.
CAN_DISPATCH_FLASH = "_flash_attn_can_dispatch"
LAZY_IMPORTS = "_lazy_imports"
LOADED_IMPLEMENTATION = "_loaded_implementation"
# Of `integrations.moe`.
CAN_GROUP_PRODUCTS = "_can_use_grouped_mm"
# Of `Trainer`.
MOVE_MODEL = "_move_model_to_device"
# Of accelerate's states.
SHARED_STATE = "_shared_state"


def load_modeling() -> None:
    """Load `transformers.modeling_utils`, for which the files of all models are read once.

    transformers reads them as it is loaded and again for `transformers.models`: of 480 folders its
    cache keeps the last 128, and the one that has them all (0.2 s).
    """
    import transformers
    from transformers.utils import import_utils

    from .patched import replaced  # which needs torch

    models = Path(transformers.__file__).parent / "models"
    name = "create_import_structure_from_path"  # says what the files in a folder define
    scan: Any = getattr(import_utils, name, None)

    def scanned(path: str) -> Any:
        # of a file it is what the folder's is
        return scan(models if Path(path) == models / "__init__.py" else path)

    with replaced(import_utils, name, scanned):
        import transformers.modeling_utils


def takes_sdpa(model: Any) -> bool:
    """Tell whether a model takes fused attention by itself."""
    return getattr(model, "_supports_sdpa", True)


def takes_flash(model: Any) -> bool:
    """Tell whether a model takes flash attention."""
    return model._supports_flash_attn


def undivided_kinds(model: Any) -> tuple[str, ...]:
    """Return the names of the classes that stay in one piece: the layers."""
    return tuple(getattr(model, "_no_split_modules", None) or ())


def kept_in_fp32(model: Any) -> list[str]:
    """Return patterns of names of weights that are in fp32 where the model is in fp16."""
    return list(getattr(model, "_keep_in_fp32_modules", None) or ())


def always_kept_in_fp32(model: Any) -> list[str]:
    """Return patterns of names of weights that are in fp32 in any model of half precision."""
    return list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def start_values(model: Any, module: Any) -> None:
    """Give a module of `model` the values that it starts with."""
    model._init_weights(module)


def padding_functions(utils: Any) -> tuple[Callable, Callable]:
    """Return transformers' own functions for flash attention that pad and unpad rows."""
    return utils._pad_input, utils._unpad_input


def drop_masks(model: Any) -> None:
    """Let attention drop its mask, as `Accelerator._prepare_cp` does."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model)


def divide_batch(
    kind: Any, trainer: Any, model: Any, batch: dict[str, Any]
) -> tuple[Callable, Any]:
    """Return what a Trainer of that `kind` makes of a batch for context parallel.

    That is a context, and a part.
    """
    return kind._prepare_context_parallel_inputs(trainer, model, batch)


def prepare_evaluation(
    trainer: Any, model: Any, wrap: Callable, generation: dict[str, Any]
) -> None:
    """Let a Trainer evaluate `model`, which is there, wrapped by `wrap`.

    `generation` is what `Seq2SeqTrainer.evaluate` sets. The model is one that accelerate has
    prepared.
    """
    trainer._gen_kwargs = generation
    trainer._wrap_model = wrap
    trainer.accelerator._models.append(model)


def all_attention() -> dict[str, Callable]:
    """Return the table of attention's functions by name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return type(ALL_ATTENTION_FUNCTIONS)._global_mapping


def take_attention(name: str) -> Callable:
    """Return what was put into the place of an attention's function, which is there again."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS._local_mapping.pop(name)


@cache
def counting_module(name: str) -> ModuleType:
    """Return a module of transformers for what it counts, also where torchvision is missing.

    Some modules that process images or videos import torchvision for what they do to pixels. It
    is empty then, as long as they are imported.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
    # these ask whether torchvision is there, and must not find what is empty
    import_module("transformers.video_processing_utils")
    used = ("torchvision", "transforms", "v2", "functional")
    empty: dict[str, ModuleType] = {}
    for path in accumulate(used, "{}.{}".format):
        empty[path] = ModuleType(path)
        parent, _, last = path.rpartition(".")
        if parent:
            setattr(empty[parent], last, empty[path])
    sys.modules.update(empty)
    try:
        return import_module(name)
    finally:
        for path in (*empty, name):  # whoever imports it later is told that torchvision is missing
            sys.modules.pop(path, None)
