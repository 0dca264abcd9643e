"""predict against simulate for TRL's SFTTrainer: a recipe of every causal family and size that is
written down.
"""

import itertools

import pytest
from predict_grid import assert_still_said, packed_grid, sft_grid, simulated, stored
from quick import params
from test_predict_grid import error, worst
from vramlab import LoRA, Quantization, Recipe, RecipeError, Sharding, predict, simulate

GRID, PACKED = sft_grid(), packed_grid()
SAMPLE = 20


@pytest.mark.parametrize(
    "recipe, file",
    [
        pytest.param(r, file, marks=[] if i % SAMPLE == 0 else pytest.mark.slow)
        for file, grid in (("sft_grid.jsonl", GRID), ("packed_grid.jsonl", PACKED))
        for i, r in enumerate(grid)
    ],
    ids=str,
)
def test_simulate_still_says_what_is_stored(recipe, file):
    assert_still_said(file, recipe, simulated)


def test_the_peak_of_packed_and_padded_samples_is_what_simulate_says():
    truths = stored("packed_grid.jsonl")
    rows = [
        (error(predict(recipe).peak.total, truths[recipe.key]["peak"]), str(recipe))
        for recipe in PACKED
    ]
    mean = sum(abs(e) for e, _ in rows) / len(rows)
    print(f"\n{len(rows)} recipes, mean error {100 * mean:.3f} %, worst:\n{worst(rows)}")
    assert len(rows) > 35 and mean <= 0.0016
    assert max(abs(e) for e, _ in rows) <= 0.015, worst(rows)


def test_the_peak_is_what_simulate_says():
    truths, rows = stored("sft_grid.jsonl"), []
    for recipe in GRID:
        rows.append((error(predict(recipe).peak.total, truths[recipe.key]["peak"]), str(recipe)))
    mean = sum(abs(e) for e, _ in rows) / len(rows)
    print(f"\n{len(rows)} recipes, mean error {100 * mean:.3f} %, worst:\n{worst(rows)}")
    assert len(rows) > 35 and mean <= 0.001
    assert max(abs(e) for e, _ in rows) <= 0.01, worst(rows)


ENGINES = [("ddp", 0), ("fsdp", 2), ("fsdp", 3), ("deepspeed", 1), ("deepspeed", 2)]
SHARDED = [*itertools.product(ENGINES, ("full", "lora", "qlora"), (False, True), (1, 3))]


@pytest.mark.parametrize(
    ("engine", "method", "checkpointing", "steps"),
    params(SHARDED, [(("fsdp", 3), "full", True, 1), (("ddp", 0), "qlora", False, 3)]),
    ids=str,
)
def test_the_peak_of_a_rank_is_what_simulate_says(engine, method, checkpointing, steps):
    name, stage = engine
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    lora = LoRA(r=16, target_modules="all-linear")
    ways = {
        "full": {},
        "lora": dict(lora=lora, dtype="bfloat16"),
        "qlora": dict(lora=lora, quantization=Quantization("nf4", prepare=False)),
    }
    recipe = Recipe(
        "qwen2.5-0.5b",
        2,
        512,
        "bf16-mixed",
        trainer="sft",
        num_layers=4,
        sharding=Sharding(stage, 4, name),
        gradient_checkpointing=checkpointing,
        gradient_accumulation_steps=steps,
        **ways[method],
    )
    peaks = [witness(recipe, gpu="A100").peak.total for witness in (predict, simulate)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.006)


def test_no_logits_are_predicted():
    """Full logits are most of a checkpointed step of a small model with a large vocabulary."""
    recipe = Recipe(
        "qwen3-0.6b",
        batch_size=8,
        seq_len=2048,
        precision="bf16-mixed",
        gradient_checkpointing=True,
    )
    plain, fused = predict(recipe), predict(recipe.replace(trainer="sft"))
    assert plain.peak.total > 3 * fused.peak.total
    assert fused.peak.total == pytest.approx(
        simulate(recipe.replace(trainer="sft")).peak.total, rel=1e-3
    )


def test_tokens_without_a_label_are_not_computed():
    recipe = Recipe("gpt2", batch_size=2, seq_len=512, optim="sgd", trainer="sft")
    answers = recipe.replace(completion_lengths=(1, 100))
    assert predict(answers).peak.total == pytest.approx(simulate(answers).peak.total, rel=0.01)
    assert 1.04 * predict(answers).peak.total < predict(recipe).peak.total


@pytest.mark.parametrize(
    "model, fields",
    [
        ("mixtral-8x7b", {}),
        (
            "gpt2",
            {"precision": "fp16-true", "lora": LoRA(), "quantization": Quantization(prepare=False)},
        ),
    ],
)
def test_what_it_does_not_know_names_simulate(model, fields):
    with pytest.raises(RecipeError, match="ask simulate"):
        predict(Recipe(model, trainer="sft", **fields))
