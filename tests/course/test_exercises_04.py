"""Chapter 04's exercises: right answers in any form are accepted, and what readers get wrong is
told apart.
"""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from vramlab_course import blank, exercises
from vramlab_course.chapters.chapter_04 import all_gather, reduce_scatter
from vramlab_course.exercises import judge
from vramlab_course.judges import judges_04

FOUND = exercises.chapter("04")


def test_there_are_three_with_two_hints_each():
    assert list(FOUND) == [f"04.{i}" for i in range(1, 4)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


def root_and_layers(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh), torch.optim.SGD(model.parameters(), lr=0.1)


def by_share(gradients, tokens):
    counted = [(g, n) for g, n in zip(gradients, tokens, strict=True) if n > 0]
    return torch.stack([g * (n / sum(tokens)) for g, n in counted]).sum(0)


def with_ranks_of_no_tokens(gradients, tokens):
    return sum(g * n for g, n in zip(gradients, tokens, strict=True)) / sum(tokens)


@pytest.mark.parametrize(
    "name, answer",
    [
        ("04.2", by_share),
        ("04.1", root_and_layers),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer).text


def as_the_trainer(model, mesh):
    """Its own units: the embedding, and last norm and head together (accelerate 1.15)."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_the_trainers_own_units_are_right_and_their_number_is_told():
    verdict = blank.judge(blank.find("04.sharded"), as_the_trainer)
    assert verdict.right and "these are 5" in verdict.text, verdict.text


def one_gradient(ctx, gradient):
    return gradient


def other_way_round(ctx, gradient):
    x, shard = ctx.saved_tensors
    return gradient @ all_gather(shard), reduce_scatter(x.T @ gradient)


def not_reduced(ctx, gradient):
    x, shard = ctx.saved_tensors
    return gradient @ all_gather(shard), gradient.T @ x


@pytest.mark.parametrize(
    "backward, said",
    [
        (one_gradient, "return two gradients"),
        (other_way_round, "the shape of the shard"),
        (not_reduced, "a rank gets its own rows."),
    ],
)
def test_what_autograd_refuses_is_said_in_the_chapters_words(backward, said):
    own = blank.find("04.Gathered").own()
    answer = type("Gathered", (own,), {"backward": staticmethod(backward)})
    verdict = blank.judge(blank.find("04.Gathered"), answer)
    assert not verdict.right and said in verdict.text, verdict.text


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("04.2", lambda gradients, tokens: sum(gradients) / len(gradients), "mean over all tokens"),
        ("04.2", with_ranks_of_no_tokens, "0 times nan is nan"),
        ("04.2", lambda gradients, tokens: None, "not answered yet"),
        ("04.1", judges_04.wrong_order, "none of the model's shards"),
        ("04.1", judges_04.one_unit, "a unit of its own"),
        ("04.1", judges_04.too_early, "lacks 3 of its parameters, model.embed_tokens.weight first"),
        ("04.1", lambda model, mesh: None, "not answered yet"),
        ("04.1", lambda model, mesh: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_typical_mistakes_are_told_what_they_are(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict.text
