"""Tensor and pipeline parallel: real ranks against one process, and fake ranks against real ones.

2 and 4 processes over gloo train the tables. Their losses and gradients are those of one process to
rounding (fp32 sums in another order), and a simulated rank allocates what the real one does, event
by event.
"""

import functools
from typing import Any

import pytest
from quick import params
from real_ranks import births, cases, differing, learned, when_asked
from tiny_models import config
from vramlab.base.errors import RecipeError
from vramlab.measurement.worker import on_rank
from vramlab.recipe.from_transformers import make
from vramlab.recipe.recipe import Recipe, Sharding
from vramlab.simulation.simulate import simulate, trace
from vramlab.training.engines.pipeline import keep_stage
from vramlab_course.training_on_rank import alone

EIGHT_HEADS = {"hidden_size": 128, "num_attention_heads": 8}
WHOLE = {
    "gpt_neox": {},
    "phi": {"num_key_value_heads": 8, "resid_pdrop": 0.0},
}  # families without grouped heads

Row = tuple[
    str, dict[str, Any], dict[str, Any], dict[str, Any]
]  # family, its changes, sharding, the rest of the recipe
TENSOR: dict[str, Row] = {
    "grouped key and value heads": ("llama", {}, {}, {}),
    "one matrix for queries, keys and values": ("gpt_neox", {}, {}, {}),
    "tied, plain loop, accumulating": (
        "qwen2",
        {},
        {},
        {"loop": "plain", "gradient_accumulation_steps": 2},
    ),
    "norms of heads, checkpointing": ("qwen3", {}, {}, {"gradient_checkpointing": True}),
    "a vocabulary that nothing divides, momentum": (
        "mistral",
        {"vocab_size": 1001},
        {},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
    ),
    "biases, eager": ("phi", {}, {}, {"attn_implementation": "eager", "optim": "rmsprop"}),
    "soft caps": ("gemma2", {}, {}, {"optim": "adagrad"}),
}
PIPELINE: dict[str, Row] = {
    "1F1B": ("llama", {}, {"micro_batches": 4}, {}),
    "GPipe, tied": ("qwen2", {}, {"micro_batches": 4, "schedule": "gpipe"}, {}),
    "plain loop, accumulating": (
        "gpt_neox",
        {},
        {"micro_batches": 4},
        {"loop": "plain", "gradient_accumulation_steps": 2},
    ),
    "checkpointing, layers that do not divide": (
        "qwen3",
        {},
        {"micro_batches": 4},
        {"gradient_checkpointing": True, "num_layers": 5},
    ),
    "one micro-batch, layers of two kinds": ("gemma2", {}, {"schedule": "gpipe"}, {"optim": "sgd"}),
}
ON_FOUR = [  # two ranks run everything
    "grouped key and value heads",
    "tied, plain loop, accumulating",
    "norms of heads, checkpointing",
    "1F1B",
    "GPipe, tied",
    "checkpointing, layers that do not divide",
]
WORLDS = {2: [*TENSOR, *PIPELINE], 4: ON_FOUR}
# What `make test` runs: both schedules, ways to slice heads and their norms, a tied head, a first,
# middle and last stage.
QUICK = {
    2: [
        "grouped key and value heads",
        "one matrix for queries, keys and values",
        "tied, plain loop, accumulating",
        "norms of heads, checkpointing",
        "GPipe, tied",
        "checkpointing, layers that do not divide",
    ],
    4: ["1F1B"],
}
LOSS, GRADIENT = 2e-6, 1e-5  # relative; of a gradient, to its largest entry
MOVED = 5e-6  # of a weight: Adam's first steps take its gradient's sign, that of one near 0 too
HIDDEN = 4 * 24 * 128 * 4  # bytes of the hidden states of these recipes


def recipe_of(name: str, world_size: int = 2) -> Recipe:
    engine = "tensor" if name in TENSOR else "pipeline"
    family, sizes, sharding, rest = (TENSOR | PIPELINE)[name]
    sizes = {**EIGHT_HEADS, "num_key_value_heads": 4, **WHOLE.get(family, {}), **sizes}
    if family == "gpt_neox":
        sizes.pop("num_key_value_heads")
    layers, cut = 4 if engine == "pipeline" else 2, Sharding(0, world_size, engine, **sharding)
    return Recipe(
        config(family, **sizes),
        **{"batch_size": 4, "seq_len": 24, "num_layers": layers, **rest},
        sharding=cut,
    )


@pytest.fixture(scope="module")
def ranks(launcher):
    return when_asked(launcher, WORLDS, QUICK, recipe_of, learn=WORLDS)


@functools.cache
def single(name: str) -> dict[str, Any]:
    """What one process computes."""
    return learned(alone(recipe_of(name)))


@pytest.mark.parametrize(("world", "name"), cases(WORLDS, QUICK))
def test_ranks_compute_what_one_process_does(ranks, world, name):
    one, found = single(name), ranks(world, name)
    for rank in found if name in TENSOR else found[-1:]:
        for losses, expected in zip(rank["losses"], one["losses"], strict=True):
            # a pipeline's loss is that of the whole batch
            assert losses == pytest.approx(
                expected if name in TENSOR else [sum(expected) / len(expected)], rel=LOSS
            )
    seen = set()
    for rank in found:
        for key, tensor in rank["tensors"].items():
            # a tied head has a name of its own where no embedding stands beside it
            expected = one["tensors"].get(
                key, one["tensors"].get(key.replace("lm_head", "model.embed_tokens"))
            )
            assert tensor.shape == expected.shape
            moved = MOVED if key.startswith("weight") else 0
            assert (tensor - expected).abs().max() <= GRADIENT * expected.abs().max() + moved, key
            seen.add(key)
    assert seen >= set(one["tensors"])


@pytest.mark.parametrize(("world", "name"), cases(WORLDS, QUICK))
def test_a_simulated_rank_allocates_what_a_real_one_does(ranks, world, name):
    assert differing(recipe_of(name, world), ranks(world, name)) is None


def test_a_layer_all_reduces_four_times(ranks):
    """Shoeybi et al. (2019), figure 4: two in the forward pass and two in the backward pass, hidden
    states each.

    Beside them stand one for the embedding's slices, one for the head's, and numbers for clipping.
    """
    for rank in ranks(2, "grouped key and value heads"):
        sizes = rank["sizes"]
        assert sizes["all_reduce"].count(HIDDEN) == 4 * 2 + 2
        assert max(sizes["all_reduce"]) == HIDDEN
        assert sizes["all_gather"] == [4 * 24 * 1000 * 4]  # whole logits


def test_a_stage_sends_each_micro_batch_on_and_back(ranks):
    for rank, left in enumerate(ranks(4, "1F1B")):
        sizes, neighbours = left["sizes"], (rank > 0) + (rank < 3)
        assert sizes["send"] == sizes["recv"] == [HIDDEN // 4] * 4 * neighbours


def test_slices_are_equal_shares():
    """Of everything but the norms, which are whole."""
    model = config("llama", hidden_size=128, num_attention_heads=8, num_key_value_heads=8)
    whole = simulate(Recipe(model, num_layers=2), "cpu").phases["load"].end.parameters
    norms = 4 * 128 * (2 * 2 + 1)
    for world in (2, 8):
        recipe = Recipe(model, num_layers=2, sharding=Sharding(0, world, "tensor", rank=world - 1))
        one = simulate(recipe, "cpu").phases["load"].end.parameters
        assert one == (whole - norms) // world + norms


def test_sixty_four_stages_hold_the_model_once():
    recipe = Recipe(
        config("llama"),
        4,
        8,
        num_layers=70,
        sharding=Sharding(0, 64, "pipeline", schedule="gpipe", micro_batches=4),
    )
    found = [simulate(on_rank(recipe, rank), "cpu").phases["load"].end for rank in (0, 6, 63)]
    layer = 4 * sum(w.size for w in recipe.shape.weights() if w.layer == 0)
    embedding, norm = 4 * 1000 * 96, 4 * 96
    assert [one.parameters for one in found] == [
        2 * layer + embedding,
        layer,
        layer + norm + embedding,
    ]


@pytest.mark.parametrize("target", params(["cuda", "cpu"], ["cpu"]))
def test_deepening_slices_is_running_them(target):
    recipe = Recipe(
        config("llama", **EIGHT_HEADS), 2, 24, num_layers=6, sharding=Sharding(0, 2, "tensor")
    )
    deep, full = trace(recipe, target), trace(recipe, target, full=True)
    assert births(deep) == births(full)


def test_1f1b_holds_fewer_micro_batches_than_gpipe():
    """Rank r of N keeps at most min(m, N - r) micro-batches' activations (Narayanan et al. 2021),
    GPipe all m.
    """
    most = {}
    for schedule in ("gpipe", "1f1b"):
        sharding = Sharding(0, 2, "pipeline", micro_batches=4, schedule=schedule)
        report = simulate(Recipe(config("llama"), 4, 64, num_layers=2, sharding=sharding), "cpu")
        most[schedule] = report.phases["forward"].end.activations
    assert most["1f1b"] / most["gpipe"] == pytest.approx(2 / 4, abs=0.02)


@pytest.mark.parametrize(("layers", "stages"), [(4, 4), (5, 2), (11, 4)])
def test_stages_have_every_layer_once(layers, stages):
    models = [make(Recipe(config("llama"), num_layers=layers).shape) for _ in range(stages)]
    for rank, model in enumerate(models):
        keep_stage(model, rank, stages)
    found = [[*model.get_decoder().layers._modules] for model in models]
    assert [int(i) for part in found for i in part] == list(range(layers))
    sizes = [*map(len, found)]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("model", "sharding", "rest", "words"),
    [
        (
            "llama-3.1-8b",
            {"engine": "tensor", "world_size": 16},
            {},
            "16.*divide the 8 key/value heads",
        ),
        ("qwen2.5-0.5b", {"engine": "tensor", "world_size": 4}, {}, "4.*divide the 14 heads"),
        ("gpt2", {"engine": "tensor", "world_size": 2}, {}, "llama.*gpt2"),
        (
            "bert-base",
            {"engine": "pipeline", "world_size": 2},
            {},
            "divides causal models.*bert for sequence-classification",
        ),
        ("llama-3.1-8b", {"engine": "pipeline", "world_size": 33}, {}, "32 layers"),
        (
            "llama-3.1-8b",
            {"engine": "pipeline", "world_size": 2, "micro_batches": 3},
            {"batch_size": 4},
            "4 samples.*3",
        ),
        (
            "llama-3.1-8b",
            {"engine": "pipeline", "world_size": 4, "micro_batches": 2},
            {"batch_size": 2},
            "4 stages.*gpipe",
        ),
        (
            "llama-3.1-8b",
            {"engine": "tensor", "world_size": 2},
            {"optim": "adafactor"},
            "adamw_torch",
        ),
        ("llama-3.1-8b", {"engine": "tensor", "world_size": 2}, {"lora": {"r": 8}}, "lora"),
        (
            "llama-3.1-8b",
            {"engine": "pipeline", "world_size": 1},
            {"precision": "fp16-mixed"},
            "bf16-mixed",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(model, sharding, rest, words):
    with pytest.raises(RecipeError, match=words):
        Recipe(model, sharding=Sharding(stage=0, **sharding), **rest)


def test_tables_cover_the_families():
    assert (
        len({row[0] for row in TENSOR.values()}) == 7
        and len({row[0] for row in PIPELINE.values()}) == 5
    )
