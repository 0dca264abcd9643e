"""Weights and buffers of any architecture, read off its transformers model on the meta device: shapes, no storage."""

import re
from functools import lru_cache
from typing import Any

from ..report.errors import RecipeError
from .configuration import reason
from .families import TASKS


@lru_cache(maxsize=32)
def read_off(s: Any) -> tuple[tuple, tuple]:
    """Return the fields of every `Weight`, and every buffer as (name, shape, dtype). Raises RecipeError as `build` does."""
    import torch

    model = build(s)
    modules = sorted(model.modules(), key=lambda module: isinstance(module, torch.nn.Embedding))
    owner = {id(p): module for module in modules for p in module.parameters(recurse=False)}  # if shared, the embedding
    weights = []
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        kind = _kind(name, parameter, owner[id(parameter)])
        weights.append((name, tuple(parameter.shape), kind, int(layer.group(1)) if layer else None))
    buffers = ((name, tuple(b.shape), str(b.dtype).removeprefix("torch.")) for name, b in model.named_buffers())
    return tuple(weights), tuple(buffers)


def describe(s: Any) -> dict[str, object]:
    """Return the fields of `Shape` that only the model shows. Raises RecipeError as `read_off` does."""
    weights, _ = read_off(s)
    model = build(s)
    found = {"attention": "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"}
    output = model.get_output_embeddings()
    heads = (name for name, module in model.named_modules() if module is output or name in ("score", "classifier"))
    found["head"] = next(heads, s.head)
    for name, module in model.named_modules():
        if "position_embedding" in name and getattr(module, "padding_idx", None) is not None:
            # RoBERTa counts positions from the one after the padding's
            found["max_positions"] = module.num_embeddings - module.padding_idx - 1
    if s.image_tokens:  # some models have more tokens than patches and a class
        tables = [shape[-2] for name, shape, _, _ in weights if "position_embedding" in name and len(shape) > 1]
        found["image_tokens"] = found["max_positions"] = tables[0] if tables else s.image_tokens
    return found


@lru_cache(maxsize=4)
def build(s: Any) -> Any:
    """Return the transformers model of `s` in fp32 on the meta device, for all who ask. Raises RecipeError as `make` does."""
    import torch

    return make(s, dtype=torch.float32)


def make(s: Any, **options: Any) -> Any:
    """Return a new transformers model of `s` on the meta device (`from_config`). Raises RecipeError if it fails."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.for_model(**s.config)
        if "seq2seq" in s.task and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id or 0
        with torch.device("meta"):
            return getattr(transformers, TASKS[s.task].auto_class).from_config(config, **options)
    except Exception as error:  # each model class has its own ways to refuse
        raise RecipeError("model", s.name, f"transformers cannot build it for {s.task}: {reason(error)}") from error


KINDS = {"Embedding": "embedding", "Linear": "linear", "_ConvNd": "conv", "Conv1D": "conv1d"}  # by a base's name


def _kind(name: str, parameter: Any, module: Any) -> str:
    if "Norm" in type(module).__name__:
        return "norm"
    if name.endswith("bias"):
        return "bias"
    known = (KINDS[base.__name__] for base in type(module).__mro__ if base.__name__ in KINDS)
    return next(known, "expert" if parameter.dim() == 3 and "expert" in name else "other")
