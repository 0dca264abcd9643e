"""`transformers`' own `generate`, made to give a fixed number of tokens.

`run_generation` is what `simulate_generation` and `measure_generation` run. A bigger step that
calls `generate` itself, as TRL's GRPO does, enters `fixed_length` around it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..private import of_transformers
from ..private.patched import afterwards, replaced
from ..recipe.generation import Generation
from ..recipe.recipe import Recipe
from .engine import Model, makes_fakes
from .models import build_model, weight_dtype
from .quiet import unlogged

# Names under which models hand on their cache (`transformers.generation.utils.ALL_CACHE_NAMES`);
# the first since transformers 5.24, the others until then.
CACHES = ("cache", "past_key_values", "cache_params")
PARTS = ("self_attention_cache", "cross_attention_cache")
OnStep = Callable[[int, Any], None]


def _ignore_step(made: int, cache: Any) -> None:
    """Stand for who does not ask when a token was made."""


@contextlib.contextmanager
def fixed_length(new_tokens: int | None, on_step: OnStep = _ignore_step) -> Iterator[None]:
    """While entered, each `generate` of this thread stops after `new_tokens`, whatever they are.

    Use it around any call of a model's `generate`, with fake or real tensors, under a tracker that
    runs already. All else is `generate`'s own code. What the loop's end depends on is still
    computed, and not read.

    Args:
        new_tokens: None makes as many as `max_length` leaves an encoder-decoder, whose answer
            begins with a token of its own.
        on_step: called with the number of tokens made so far and the cache (None where there is
            none) before each iteration of the loop: with 0 when the prompt's forward pass has run,
            and with `new_tokens` before the cache is freed.
    """
    from transformers.generation import GenerationMixin

    made = 0
    most = new_tokens or 0
    newest: Callable[[], Any] = _no_cache

    def keep(result: Any, model: Any, config: Any, inputs: dict, *others: Any, **more: Any) -> None:
        nonlocal made, most, newest
        # `generate` makes its cache once, as it begins; a step may call it several times.
        made = 0
        if new_tokens is None:
            # The first position is the decoder's start token.
            most = config.max_length - 1
        cache = next((inputs[name] for name in CACHES if inputs.get(name) is not None), None)
        # By weak reference: the loop's cache must be freed when the loop lets go of it.
        newest = _no_cache if cache is None else weakref.ref(cache)

    def has_unfinished(model: Any, *unused: Any, **more: Any) -> bool:
        nonlocal made
        # The loop asks here before each iteration, so nothing was made before the first call.
        on_step(made, newest())
        made += 1
        return made <= most

    # it takes values that a fake lacks for bad arguments
    quiet = unlogged("transformers.generation.utils") if makes_fakes() else contextlib.nullcontext()
    with (
        quiet,
        afterwards(GenerationMixin, of_transformers.PREPARE_CACHE, keep),
        replaced(GenerationMixin, of_transformers.HAS_UNFINISHED, has_unfinished),
    ):
        yield


def _no_cache() -> None:
    return None


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a transformers cache, which hold its tensors; [] of None.

    An encoder-decoder's has two caches, of itself and of the encoder's keys.
    """
    parts = [getattr(cache, name, None) for name in PARTS]
    # Only an encoder-decoder's cache has parts, each a cache of its own.
    if any(parts):
        return [layer for part in parts for layer in layers_of(part)]
    return list(getattr(cache, "layers", ()))


def run_generation(
    model: Model,
    inputs: Mapping[str, Any],
    new_tokens: int,
    on_step: OnStep = _ignore_step,
    **options: Any,
) -> Any:
    """Return what `model.generate(**inputs, max_new_tokens=new_tokens, **options)` returns.

    It makes `new_tokens` tokens and reads none. Call it as it is from inside a bigger step: the
    model may be fake or real, in training mode or not, and a tracker may run already
    (`tracking.tracked.claim_cache` in `on_step` tells it what the cache holds).

    Args:
        inputs: what `generate` is given of the batch, such as `input_ids` and `attention_mask`.
        options: more arguments of `generate`, such as `do_sample` and `cache_implementation`.
    """
    with fixed_length(new_tokens, on_step), torch.no_grad():
        generate: Any = model.generate
        return generate(**inputs, max_new_tokens=new_tokens, **options)


@dataclass
class Started:
    """A model and its prompts, ready to generate.

    `inputs` are those of the whole generation. Where tokens are skipped, as if they had been made
    already, `generate` is given `longer` ones.
    """

    model: Model
    device: torch.device
    inputs: dict[str, torch.Tensor]
    longer: dict[str, torch.Tensor]
    new_tokens: int  # still to be made
    arguments: dict[str, Any]

    def run(self, made: int, on_step: OnStep) -> None:
        """Make `made` tokens of all."""
        with fixed_length(made, on_step), torch.no_grad():
            self.model.generate(
                **{**self.inputs, **self.longer},
                max_new_tokens=self.new_tokens,
                **self.arguments,
            )


def build_generation(
    recipe: Recipe,
    generation: Generation,
    skipped: int = 0,
    device: str = "cpu",
) -> Started:
    """Return the model of `recipe` on `device` and its prompts; fake under a FakeTensorMode."""
    model = build_model(recipe, device).eval()
    vocabulary = recipe.shape.vocab_size

    def ids(length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (recipe.batch_size, length), device=device)

    def prompts(length: int) -> dict[str, torch.Tensor]:
        made = ids(length)
        return {"input_ids": made, "attention_mask": torch.ones_like(made)}

    longer = {}
    if recipe.shape.features:
        name, sizes = recipe.shape.features
        features = torch.rand(recipe.batch_size, *sizes, device=device).to(weight_dtype(recipe))
        inputs = {name: features}
    else:
        inputs = prompts(generation.prompt)
    if skipped and recipe.shape.task == "causal-lm":
        # Tokens that count as made already are a longer prompt of a decoder-only model.
        longer = prompts(generation.prompt + skipped)
    elif skipped:
        # An encoder-decoder reads the prompt in its encoder, so they are its decoder's.
        longer = {"decoder_input_ids": ids(skipped)}
    return Started(
        model=model,
        device=torch.device(device),
        inputs=inputs,
        longer=longer,
        new_tokens=generation.new_tokens - skipped,
        arguments=generation.arguments,
    )
