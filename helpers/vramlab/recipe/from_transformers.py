"""Weights and buffers of any architecture, read off its transformers model on the meta device.

It has shapes and no storage.
"""

import re
from functools import lru_cache
from typing import Any

from ..base.errors import RecipeError
from ..private.of_transformers import takes_sdpa
from .configuration import READERS, reason
from .families import FAMILIES, TASKS
from .model_sizes import Sizes

Row = tuple[str, tuple[int, ...], str, int | None]  # the fields of a `Weight`
Buffer = tuple[str, tuple[int, ...], str]  # name, shape, dtype


@lru_cache(maxsize=32)
def read_off(sizes: Sizes) -> tuple[tuple[Row, ...], tuple[Buffer, ...]]:
    """Return the fields of every `Weight`, and every buffer. Raises RecipeError as `build` does."""
    model = build(sizes)
    owners = _owners(model)
    weights = []
    # layers are the language model's where there is a tower too
    layers = r"language_model\..*?\.(\d+)\." if sizes.family in READERS else r"\.(\d+)\."
    for name, parameter in model.named_parameters():
        number = re.search(layers, name)
        layer = int(number.group(1)) if number else None
        kind = _kind(name, parameter, owners[id(parameter)])
        weights.append((name, tuple(parameter.shape), kind, layer))
    buffers = []
    for name, buffer in model.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        buffers.append((name, tuple(buffer.shape), dtype))
    return tuple(weights), tuple(buffers)


def _owners(model: Any) -> dict[int, Any]:
    """Return the module of each parameter by its id: of a shared one the embedding."""
    import torch

    owners = {}
    # the last one counts
    for module in sorted(model.modules(), key=lambda each: isinstance(each, torch.nn.Embedding)):
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = module
    return owners


def describe(sizes: Sizes) -> dict[str, Any]:
    """Return the fields of `Shape` that only the model shows. Raises RecipeError as `read_off`."""
    weights, _ = read_off(sizes)
    model = build(sizes)
    fields: dict[str, Any] = {
        "attention": "sdpa" if takes_sdpa(model) else "eager",
        "head": _head(model, sizes.head),
    }
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if "position_embedding" in name and padding is not None:
            # RoBERTa counts positions from the one after the padding's
            fields["max_positions"] = module.num_embeddings - padding - 1
    if sizes.image_tokens:
        # some models have more tokens than patches and a class
        tokens = sizes.image_tokens
        for name, shape, _, _ in reversed(weights):
            if "position_embedding" in name and len(shape) > 1:
                tokens = shape[-2]
        fields["image_tokens"] = tokens
        fields["max_positions"] = tokens
    return fields


def _head(model: Any, usual: str) -> str:
    """Return the name of the output module."""
    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is output or name in ("score", "classifier"):
            return name
    return usual


@lru_cache(maxsize=4)
def build(sizes: Sizes) -> Any:
    """Return the transformers model in fp32 on the meta device, one for all who ask.

    Raises RecipeError as `make` does.
    """
    import torch

    return make(sizes, dtype=torch.float32)


def _fused(sizes: Sizes) -> str | dict[str, str]:
    """Return the attention that a model takes where fused kernels are asked for.

    A tower takes them beside a language model that cannot (Gemma 2's soft caps), or beside a tower
    for sound that has none (Gemma 4's), as transformers chooses by itself.
    """
    language = sizes.config.get("text_config", {}).get("model_type")
    eager = {}
    if language in FAMILIES and not FAMILIES[language].sdpa:
        eager["text_config"] = "eager"
    if sizes.config.get("audio_config"):
        eager["audio_config"] = "eager"
    return eager or "sdpa"


def make(sizes: Sizes, **options: Any) -> Any:
    """Return a new transformers model on the meta device (`from_config`).

    Raises RecipeError if it fails.
    """
    import torch
    import transformers
    from transformers import modeling_utils

    from ..private.patched import replaced  # which needs torch

    try:
        config = transformers.AutoConfig.for_model(**sizes.config)
        has_start = getattr(config, "decoder_start_token_id", None) is not None
        if "seq2seq" in sizes.task and not has_start:
            config.decoder_start_token_id = config.pad_token_id or 0
        if options.get("attn_implementation") == "sdpa":
            options["attn_implementation"] = _fused(sizes)
        auto_class = getattr(transformers, TASKS[sizes.task].auto_class)
        # TrainingArguments with DeepSpeed's stage 3 make every model of the process a divided one.
        whole = replaced(modeling_utils, "is_deepspeed_zero3_enabled", lambda: False)
        # Parameters have shapes and no storage, so the largest model is built in seconds.
        with torch.device("meta"), whole:
            return auto_class.from_config(config, **options)
    except RecipeError:  # ours, of the attention that the model cannot have
        raise
    except Exception as error:  # each model class has its own ways to refuse
        rest = f"transformers cannot build it for {sizes.task}: {reason(error)}"
        raise RecipeError("model", sizes.name, rest) from error


# A weight's kind by the name of its module's class, or of one of that's bases.
KINDS = {
    "Embedding": "embedding",
    "Linear": "linear",
    "_ConvNd": "conv",
    "Conv1D": "conv1d",
}


def _kind(name: str, parameter: Any, module: Any) -> str:
    if "Norm" in type(module).__name__:
        return "norm"
    if name.endswith("bias"):
        return "bias"
    for base in type(module).__mro__:
        if base.__name__ in KINDS:
            return KINDS[base.__name__]
    return "expert" if parameter.dim() == 3 and "expert" in name else "other"
