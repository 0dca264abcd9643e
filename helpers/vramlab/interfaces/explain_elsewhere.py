"""What a model takes where something else than a training step asked for the memory.

That is vLLM, DeepSpeed while it makes its optimizer, the optimizer's update, or the Trainer's
evaluation.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from ..base.errors import RecipeError
from ..formulas.predict import predict
from ..planning.question import RANK
from ..recipe.recipe import Recipe
from ..simulation.colocated import bytes_of_token
from .explain_message import sized
from .messages import Message

AS_IT_RAN = (
    "say --engine deepspeed, --stage, --world-size and --precision as it ran: then what a rank "
    "keeps follows"
)
EVALUATE = (
    "vramlab evaluate {} with the options of before, --samples, --eval-batch-size and "
    "--compute-metrics as they were, and --gpu CARD says what of these fits"
)


def of_model(message: Message, recipe: Recipe) -> Iterator[str]:
    """Yield what a message that is of no training step is about, computed from its model."""
    if message.kind == "share":
        return _of_vllm(message.tokens, recipe)
    if message.frames == "update":
        return _of_update(recipe)
    return _of_engine(recipe) if message.frames == "engine" else _of_evaluation(message, recipe)


def _of_update(recipe: Recipe) -> Iterator[str]:
    """Yield what the update holds at its peak, as it ran and with what makes room there."""
    changes: list[dict[str, Any]] = [{}, {"optim": "adamw_bnb_8bit"}, {"lora": recipe.lora or RANK}]
    for fields in changes:
        with contextlib.suppress(RecipeError):
            changed = recipe.replace(**fields)
            peak = predict(changed).phases["step"].peak.total
            yield f"the update holds {sized(peak)}: {changed}"


def _of_vllm(tokens: dict[str, int], recipe: Recipe) -> Iterator[str]:
    """Yield the bytes of keys and values, for which vLLM keeps what its weights leave."""
    shape = recipe.shape
    others = set(shape.settings.get("layer_types", ())) - {"full_attention"}
    if others or shape.sliding_window or "kv_lora_rank" in shape.settings:
        yield f"some layers of {recipe.name} keep less than the keys and values of every token"
        return
    one = bytes_of_token(shape)
    yield (
        f"{recipe.name} keeps {sized(one)} of keys and values a token: 2 × {shape.num_layers} "
        f"layers × {shape.num_kv_heads} heads × {shape.head_dim} × 2 bytes"
    )
    for what, count in tokens.items():
        yield f"{what}: {count:,} tokens take {sized(count * one)}"


def _of_engine(recipe: Recipe) -> Iterator[str]:
    """Yield what a rank keeps between steps, as it ran and with what makes room there."""
    sharding = recipe.group
    if sharding.engine != "deepspeed":
        yield AS_IT_RAN
        return
    offloaded = dataclasses.replace(sharding, offload="optimizer")
    wider = dataclasses.replace(sharding, world_size=2 * sharding.world_size)
    for each in (sharding, offloaded, wider):
        # Formulas do not know every recipe.
        with contextlib.suppress(RecipeError):
            kept = predict(recipe.replace(sharding=each)).phases["between_steps"].end.total
            yield f"a rank keeps {sized(kept)} between two steps with {each.words()}"


def _of_evaluation(message: Message, recipe: Recipe) -> Iterator[str]:
    """Yield the bytes of a sample's logits, and the command that simulates the evaluation."""
    # Accelerate returns a model's outputs in fp32 where autocast computed them.
    width = 2 if recipe.precision.endswith("-true") else 4
    one = recipe.seq_len * recipe.shape.vocab_size * width
    if one:
        samples = message.bytes["asked"] / one
        yield f"{recipe.seq_len:,} tokens' logits take {sized(one)}: it asked for {samples:.1f}"
    yield EVALUATE.format(recipe.name)
