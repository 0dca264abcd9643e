"""`transformers`' own `generate`, made to give a fixed number of tokens.

`run_generation` is what `simulate_generation` and `measure_generation` run. A bigger step that
calls `generate` itself, as TRL's GRPO does, enters `fixed_length` around it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from .patched import afterwards, replaced

# Names under which models hand on their cache (`transformers.generation.utils.ALL_CACHE_NAMES`).
CACHES = ("past_key_values", "cache_params")
PARTS = ("self_attention_cache", "cross_attention_cache")
OnStep = Callable[[int, Any], None]


def _ignore_step(made: int, cache: Any) -> None:
    """Stand for who does not ask when a token was made."""


@contextlib.contextmanager
def fixed_length(new_tokens: int, on_step: OnStep = _ignore_step) -> Iterator[None]:
    """While entered, each `generate` of this thread stops after `new_tokens`, whatever they are.

    Use it around any call of a model's `generate`, with fake or real tensors, under a tracker that
    runs already. All else is `generate`'s own code. What the loop's end depends on is still
    computed, and not read.

    Args:
        on_step: called with the number of tokens made so far and the cache (None where there is
            none) before each iteration of the loop: with 0 when the prompt's forward pass has run,
            and with `new_tokens` before the cache is freed.
    """
    from transformers.generation import GenerationMixin

    made = 0
    newest: Callable[[], Any] = _no_cache

    def keep(result: Any, model: Any, config: Any, inputs: dict, *others: Any, **more: Any) -> None:
        nonlocal made, newest
        made = 0
        cache = next((inputs[name] for name in CACHES if inputs.get(name) is not None), None)
        newest = _no_cache if cache is None else weakref.ref(cache)

    def has_unfinished(model: Any, *unused: Any, **more: Any) -> bool:
        nonlocal made
        on_step(made, newest())
        made += 1
        return made <= new_tokens

    with (
        afterwards(GenerationMixin, "_prepare_cache_for_generation", keep),
        replaced(GenerationMixin, "_has_unfinished_sequences", has_unfinished),
    ):
        yield


def _no_cache() -> None:
    return None


def layers_of(cache: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each layer of a transformers cache, and the values that it holds.

    An encoder-decoder's has two caches, of itself and of the encoder's keys.
    """
    parts = [getattr(cache, name, None) for name in PARTS]
    for part in filter(None, parts):
        yield from layers_of(part)
    if not any(parts):
        for number, layer in enumerate(getattr(cache, "layers", ())):
            yield f"layers.{number}", list(vars(layer).values())


def run_generation(
    model: Module | Any,
    inputs: Mapping[str, Any],
    new_tokens: int,
    on_step: OnStep = _ignore_step,
    **options: Any,
) -> Any:
    """Return what `model.generate(**inputs, max_new_tokens=new_tokens, **options)` returns.

    It makes `new_tokens` tokens and reads none. Call it as it is from inside a bigger step: the
    model may be fake or real, in training mode or not, and a tracker may run already (its
    `tracking.tracked.claim_cache` is an `on_step`).

    Args:
        inputs: what `generate` is given of the batch: `input_ids`, with or without
            `attention_mask`, or a speech model's `input_features`.
        options: more arguments of `generate`, such as `do_sample` and `cache_implementation`.
    """
    with fixed_length(new_tokens, on_step), torch.no_grad():
        generate: Any = model.generate
        return generate(**inputs, max_new_tokens=new_tokens, **options)
