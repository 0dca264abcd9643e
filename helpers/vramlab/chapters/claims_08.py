"""The experiments that test what the sources say about fitting a model to a card at all, by searching recipes.

A: most of the time its features are combined; accumulation helps where a model does not fit a GPU. C: the batch should
follow the model's needs, not the card's. E: three ways lead to a larger model: a bigger GPU, more GPUs, or offload.
"""

from functools import cache
from typing import Any

from ..claims import Finding
from ..plan import Plan, plan
from ..predict import predict
from ..recipe import Recipe
from ..report import format_bytes
from ..search import Search
from ..space import Question, micro_batches, with_micro_batch

SINGLE = {  # A's switches that save memory, each alone on top of a plain fp16 run; batch 16 is what is wanted
    "micro-batches of 1": dict(batch_size=1, gradient_accumulation_steps=16),
    "checkpointing": dict(gradient_checkpointing=True),
    "an 8-bit optimizer": dict(optim="adamw_bnb_8bit"),
    "a fused kernel for attention": dict(attn_implementation="sdpa"),
}


@cache
def planned(model: str, gpu: str, **asked: Any) -> Plan:
    """The plan, asked once."""
    return plan(model, gpu, top=1, **asked)


def fitting_alone(recipe: Recipe, gpu: str) -> list[str]:
    """The names of SINGLE's switches that make `recipe` fit, each without the others."""
    usable = Question(recipe.model, gpu, global_batch=16).usable
    fits = lambda changes: predict(recipe.replace(**changes), gpu).process.high <= usable  # noqa: E731
    return [name for name, changes in SINGLE.items() if fits(changes)]


def combined(model: str, gpu: str, seq_len: int, precision: str) -> Finding:
    """Whether no single switch makes full training fit, and several together do."""
    plain = Recipe(model, 16, seq_len, precision, attn_implementation="eager")
    alone = fitting_alone(plain, gpu)
    found = planned(model, gpu, seq_len=seq_len, method="full", precisions=(precision,), offload=False)
    together = str(found.choices[0].recipe) if found.choices else "nothing"
    said = f"{plain} on a {gpu}: alone {', '.join(alone) or 'none'}; together {together}"
    return Finding(not alone and bool(found.choices), "predicted", said)


def accumulation_alone(model: str, gpu: str, seq_len: int) -> Finding:
    """Whether full training fits in some precision once it is cut into micro-batches of 1, with plain AdamW."""
    asked = dict(optims=("adamw_torch_fused", "adamw_torch"), checkpointing=False, offload=False)
    question = Question(model, gpu, seq_len=seq_len, method="full", **asked)
    search = Search(question)
    fits = any(search.fits((family, 1)) for family in range(len(search.families)))
    least = search.lightest()
    said = f"{least.recipe} on a {gpu}: {format_bytes(abs(least.over))} {'over' if least.over > 0 else 'left'}"
    return Finding(fits, "predicted", said)


def billions(model: str, gpu: str, seq_len: int, method: str = "any") -> Finding:
    """Billion parameters of `model` that can be in training on `gpu`, frozen ones included; 0 when nothing fits."""
    found = Search(Question(model, gpu, seq_len=seq_len, method=method, offload=False)).any_fit()
    said = str(found or f"nothing fits {model} on a {gpu}")
    return Finding(found.shape.num_parameters / 1e9 if found else 0.0, "predicted", said)


def batch_by_need(model: str, gpu: str, batch: int, seq_len: int) -> Finding:
    """Whether the wanted batch can be had on a card where it does not fit at once, by the very recipe's micro-batches."""
    found = planned(model, gpu, global_batch=batch, seq_len=seq_len, method="full", checkpointing=False, offload=False)
    if not found.choices:
        return Finding(False, "predicted", f"nothing fits {model} on a {gpu}")
    recipe = found.choices[0].recipe
    same = recipe.batch_size * recipe.gradient_accumulation_steps == batch
    at_once = recipe.replace(batch_size=batch, gradient_accumulation_steps=1)
    too_much = predict(at_once, gpu).process.high > found.usable
    return Finding(same and too_much, "predicted", f"{recipe} on a {gpu}")


def makes_it_fit(model: str, gpu: str, seq_len: int, method: str, change: dict, gpus: int = 1) -> Finding:
    """Whether `change` ({"gpu": …}, {"gpus": …}, {"offload": True}, {"method": …}) makes fit what does not without it."""
    asked = dict(gpus=gpus, seq_len=seq_len, method=method, offload=False)
    before = Search(Question(model, gpu, **asked)).any_fit()
    after = Search(Question(**{"model": model, "gpu": gpu, **asked, **change})).any_fit()
    return Finding(before is None and after is not None, "predicted", f"with {change}: {after or 'nothing fits'}")


def nothing_else(model: str, gpu: str, seq_len: int, method: str, change: dict) -> Finding:
    """Whether `change`, which asks for no other hardware, does not make fit what does not without it."""
    found = makes_it_fit(model, gpu, seq_len, method, change)
    return Finding(not found.value, found.witness, found.configuration)


def keeps_the_batch(model: str, gpu: str, batch: int) -> bool:
    """Whether every recipe of the space keeps the wanted batch (for the tests)."""
    question = Question(model, gpu, global_batch=batch)
    families = Search(question).families
    sizes = micro_batches(question)
    recipes = (with_micro_batch(family, size) for family in families for size in sizes)
    return all(recipe.batch_size * recipe.gradient_accumulation_steps == batch for recipe in recipes)
