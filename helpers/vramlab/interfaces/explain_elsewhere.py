"""What a model takes where something else than a training step asked for the memory.

That is vLLM, DeepSpeed while it makes its optimizer, or the Trainer's evaluation.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

from ..base.errors import RecipeError
from ..formulas.predict import predict
from ..planning.question import RANK
from ..recipe.recipe import Recipe
from ..simulation.colocated import bytes_of_token
from .explain_message import sized
from .explain_recipe import is_request
from .messages import Message

AS_IT_RAN = (
    "say --engine deepspeed, --stage, --world-size and --precision as it ran: then what a rank "
    "keeps follows"
)
EVALUATE = (
    "vramlab evaluate {} with the options of before, --samples, --eval-batch-size and "
    "--compute-metrics as they were, and --gpu CARD says what of these fits"
)
FEWER_KEYS = "some layers of {} keep less than the keys and values of every token"


def of_model(message: Message, recipe: Recipe) -> Iterator[str]:
    """Yield what a message that is of no training step is about, computed from its model."""
    if message.kind == "share":
        return _of_vllm(message, recipe)
    return _of_engine(recipe) if message.frames == "engine" else _of_evaluation(message, recipe)


def _of_vllm(message: Message, recipe: Recipe) -> Iterator[str]:
    """Yield the bytes of keys and values, for which vLLM keeps what its weights leave."""
    shape = recipe.shape
    other_layers = set(shape.settings.get("layer_types") or ()) - {"full_attention"}
    if other_layers or shape.sliding_window or shape.settings.get("kv_lora_rank"):
        yield FEWER_KEYS.format(recipe.name)
        return
    one = bytes_of_token(shape)
    by = f"2 × {shape.num_layers} layers × {shape.num_kv_heads} heads × {shape.head_dim} × 2 bytes"
    yield f"{recipe.name} keeps {sized(one)} of keys and values a token: {by}"
    longest = message.tokens.get("longest", 0)
    room = message.tokens.get("room", 0)
    if longest and room:
        yield (
            f"{longest:,} tokens take {sized(longest * one)}, the {room:,} that have room "
            f"{sized(room * one)}: {sized((longest - room) * one)} more would do"
        )
    elif longest:
        yield f"{longest:,} tokens take {sized(longest * one)}"


def _of_engine(recipe: Recipe) -> Iterator[str]:
    """Yield what a rank keeps between steps, as it ran and with what makes room there."""
    sharding = recipe.sharding
    if sharding is None or sharding.engine != "deepspeed":
        yield AS_IT_RAN
        return
    ranks = 2 * sharding.world_size
    offloaded = dataclasses.replace(sharding, offload=sharding.offload or "optimizer")
    tries = {
        f"as it ran ({recipe})": recipe,
        "with offload_optimizer": recipe.replace(sharding=offloaded),
        f"with {ranks} ranks": recipe.replace(
            sharding=dataclasses.replace(sharding, world_size=ranks)
        ),
        "with LoRA r=16": recipe.replace(lora=recipe.lora or RANK),
    }
    for words, changed in tries.items():
        # Formulas do not know every recipe.
        with contextlib.suppress(RecipeError):
            kept = predict(changed).phases["between_steps"].end
            yield f"{words} a rank keeps {sized(kept.total)} between two steps"


def _of_evaluation(message: Message, recipe: Recipe) -> Iterator[str]:
    """Yield the bytes of a sample's logits, and the command that simulates the evaluation."""
    # Accelerate returns a model's outputs in fp32 where autocast computed them.
    width = 2 if recipe.precision.endswith("-true") else 4
    words = recipe.shape.vocab_size
    one = recipe.seq_len * words * width
    if one:
        text = f"the logits of a sample take {sized(one)}: {recipe.seq_len:,} tokens × {words:,} × "
        text += f"{width} bytes"
        samples = round(message.bytes["asked"] / one)
        if samples and is_request(message, samples * one):
            text += f"; the request is those of {samples}"
        yield text
    yield EVALUATE.format(recipe.name)
