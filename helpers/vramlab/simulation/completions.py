"""Completions that a trainer samples, on fake tensors: what TRL reads of them, and their middle."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ..private import of_transformers, of_trl
from ..private.of_fake_tensors import FakeTensor
from ..private.patched import afterwards, plain, replaced
from ..recipe.options import TRL, Rollouts
from ..recipe.recipe import Recipe
from ..recipe.rollouts import plan_of
from ..tracking.tracker import Tracker
from ..training.engine import Training
from ..training.trl_trainers import trl_class

FIRST = 2  # tokens that are sampled before some are skipped
LAST = 2  # and after
ALIKE = 2  # micro-batches after which each is as the one before
BY_TOKEN = ("attention_mask", "position_ids")  # what has an entry for each


@contextlib.contextmanager
def completions_known() -> Iterator[None]:
    """While entered, no sampled token ends a completion, and each is the same one.

    Completions are shuffled by a permutation that is known, so that masks are known behind it. No
    reward and no probability is missing.
    """
    with (
        replaced(torch, "isin", _is_never_in),
        replaced(torch, "isnan", _is_never_in),
        replaced(torch, "randperm", torch.arange),
        replaced(FakeTensor, "tolist", _ones),
    ):
        yield


def _is_never_in(elements: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.zeros(elements.shape, dtype=torch.bool, device=elements.device)


def _ones(tensor: torch.Tensor) -> Any:
    """Return the numbers of a vector, all one, without reading each."""
    return [1] * tensor.numel() if tensor.dim() == 1 else 1


@contextlib.contextmanager
def skipped(training: Training, tracker: Tracker, recipe: Recipe) -> Iterator[None]:
    """While entered, what is sampled, scored and trained on in many parts alike is so in few."""
    assert recipe.rollouts  # it samples
    training.left_out = left_out(recipe)
    score = plain(trl_class(TRL[recipe.trainer]), of_trl.SCORE)

    def score_ends(trainer: Any, model: Any, ids: torch.Tensor, *others: Any, **more: Any) -> Any:
        rows = more.get("batch_size") or len(ids)
        ends = _Ends(model, math.ceil(len(ids) / rows))
        return score(trainer, ends, ids, *others, **more)

    with (
        replaced(trl_class(TRL[recipe.trainer]), of_trl.SCORE, score_ends),
        _tokens_skipped(training, tracker, recipe.rollouts),
    ):
        yield


def left_out(recipe: Recipe) -> range:
    """Return the micro-batches of a step that need not run, for they are as the one before.

    Those of ranks exchange gradients after the last. Where a step samples more than once, all run.
    """
    steps = recipe.gradient_accumulation_steps
    if plan_of(recipe).micro_batches % steps:
        return range(0)
    return range(ALIKE, steps - bool(recipe.sharding))


class _Ends:
    """A model that scores the first and the last of `count` parts of the completions.

    For the others its outputs alone are made: the last part finds the most of them there.
    """

    def __init__(self, model: Any, count: int) -> None:
        self.model = model
        self.count = count
        self.scored = 0
        self.kept: dict[str, Callable[[], torch.Tensor]] = {}  # makes such an output again

    def __call__(self, **inputs: Any) -> Any:
        self.scored += 1
        if self.kept and self.scored < self.count:
            return SimpleNamespace(**{name: make() for name, make in self.kept.items()})
        outputs = self.model(**inputs)
        for name, value in vars(outputs).items():
            if self.scored == 1 and isinstance(value, torch.Tensor):
                self.kept[name] = _maker(value)
        return outputs


def _maker(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function to another tensor like `value`, in a storage as large, and keep neither."""
    elements = value.untyped_storage().nbytes() // value.element_size()
    form = value.size(), value.stride(), value.storage_offset()
    make = partial(torch.empty, elements, dtype=value.dtype, device=value.device)
    return lambda: make().as_strided(*form)


@contextlib.contextmanager
def _tokens_skipped(training: Training, tracker: Tracker, rollouts: Rollouts) -> Iterator[None]:
    """While entered, the model samples a completion's first and last tokens only.

    For those between them the cache grows by its own code: what else a token takes grows from token
    to token, so that the last one's is the most. A generation of its own is run again from a later
    token on, with a longer prompt (`simulate_generation.py`); one inside a step cannot, as the step
    holds what came before.
    """
    from transformers.generation import GenerationMixin

    missing = rollouts.max_completion_length - FIRST - LAST
    if missing < 1:
        yield
        return
    made = 0

    def on_token(tokens: int, cache: Any) -> None:
        nonlocal made
        made = tokens
        # Between the first tokens and the last: so the last tokens attend to a cache of full
        # length.
        if made == FIRST:
            for _ in range(missing):
                _grow(cache, tracker)

    def lengthen(arguments: dict[str, Any], *others: Any, **more: Any) -> None:
        if made == FIRST - 1:
            _lengthen(arguments, missing)

    generate = plain(GenerationMixin, "generate")

    def generate_all(model: Any, *args: Any, **more: Any) -> torch.Tensor:
        ids = generate(model, *args, **more)
        # The trainer gets completions of full length, with the skipped tokens at their end.
        return torch.cat([ids, ids.new_ones(ids.shape[0], missing)], dim=-1)

    training.most_tokens = FIRST + LAST
    training.on_token = on_token
    with (
        afterwards(GenerationMixin, of_transformers.UPDATE_ARGUMENTS, lengthen),
        replaced(GenerationMixin, "generate", generate_all),
    ):
        yield


def _grow(cache: Any, tracker: Tracker) -> None:
    """Let each layer of `cache` keep one token more.

    It is made once for all layers alike: a cache copies it, and the next layer's takes its place.
    """
    made: dict[tuple, tuple] = {}
    for layer in getattr(cache, "layers", ()):
        if getattr(layer, "keys", None) is None:  # a state that does not grow
            continue
        with tracker.inside(tracker.owner(layer.keys)):
            form = layer.keys.shape, layer.values.shape
            if form not in made:
                made[form] = _of_one_token(layer.keys), _of_one_token(layer.values)
            layer.update(*made[form])
        tracker.claim([layer.keys, layer.values], "kv_cache")


def _of_one_token(held: torch.Tensor) -> torch.Tensor:
    """Return one token's keys or values, of which a cache has `held`."""
    return held.new_empty(*held.shape[:-2], 1, held.shape[-1])


def _lengthen(arguments: dict[str, Any], missing: int) -> None:
    """Lengthen what has an entry for each token: the mask, and positions."""
    for name in BY_TOKEN:
        value = arguments.get(name)
        if value is not None:
            more = value.new_ones(*value.shape[:-1], missing)
            arguments[name] = torch.cat([value, more], dim=-1)
