"""predict against simulate on four hundred recipes over all models that it knows, and at full depth
on some.
"""

import predict_grid
import pytest
from predict_grid import assert_still_said, grid, simulated, stored
from quick import params
from vramlab import LoRA, Quantization, Recipe
from vramlab.formulas.predict import predict

BOUND, MEAN = 0.03, 0.002  # of the simulated peak: for each recipe, and on average
PHASE_BOUND = 0.05  # for each phase of each recipe
UNSPLIT = (
    5 << 20
    # bytes of blocks that the allocator does not split, which may be more than BOUND of a small
    # model
)
GRID = grid()
SAMPLE = 100  # the quick suite simulates one recipe in 100
FULL_DEPTH = [
    Recipe("gpt2", batch_size=8, seq_len=512),
    Recipe("polyglot-ko-1.3b", batch_size=4, seq_len=256, precision="fp16-true"),
    Recipe("polyglot-ko-1.3b", batch_size=8, seq_len=256, precision="fp16-true", loop="plain"),
    Recipe(
        "polyglot-ko-1.3b",
        batch_size=16,
        seq_len=256,
        precision="fp16-true",
        gradient_checkpointing=True,
    ),
    Recipe("bert-large", batch_size=4, seq_len=512),
    Recipe("llama-3.1-8b", batch_size=2, seq_len=1024, precision="bf16-true", lora=LoRA(r=16)),
    Recipe(
        "llama-3.1-8b",
        batch_size=2,
        seq_len=1024,
        precision="bf16-true",
        lora=LoRA(r=16, target_modules="all-linear"),
        quantization=Quantization("nf4", double=True),
        gradient_checkpointing=True,
    ),
    Recipe("llama-3.1-405b", precision="bf16-true", gradient_checkpointing=True),
]


@pytest.fixture(scope="module")
def pairs():
    """(recipe, predicted, simulated) for the grid; what was simulated is stored, and held by the
    tests of the sample.
    """
    truths = stored("grid.jsonl")
    assert truths.keys() >= {recipe.key for recipe in GRID}, (
        "another catalogue: run python tests/predict_grid.py"
    )
    return [(recipe, predict(recipe), truths[recipe.key]) for recipe in GRID]


@pytest.mark.parametrize("recipe", params(GRID, GRID[::SAMPLE]), ids=str)
def test_simulate_still_says_what_is_stored(recipe):
    assert_still_said("grid.jsonl", recipe, simulated)


def error(predicted: int, truth: int) -> float:
    """Relative, over-estimates positive."""
    return predicted / truth - 1


def worst(rows: list[tuple[float, str]], count: int = 10) -> str:
    """The rows furthest off, as text."""
    return "\n".join(
        f"{100 * e:+7.2f} %  {text}"
        for e, text in sorted(rows, key=lambda row: -abs(row[0]))[:count]
    )


def test_the_grid_is_large_and_covers_the_catalogue(pairs):
    recipes = [recipe for recipe, _, _ in pairs]
    assert len({recipe.key for recipe in recipes}) >= 300
    for setting in ("precision", "optim", "gradient_checkpointing", "attn_implementation"):
        assert len({(recipe.shape.family, getattr(recipe, setting)) for recipe in recipes}) > 20, (
            setting
        )
    assert sum(recipe.lora is not None for recipe in recipes) > 100
    assert sum(recipe.quantization is not None for recipe in recipes) > 50


def test_the_peak_is_within_three_percent(pairs):
    for kind in (True, False):  # weights in a format of their own under autocast, and all others
        rows = [
            (error(p.peak.total, t["peak"]), str(r))
            for r, p, t in pairs
            if (r.dtype is not None) is kind
        ]
        mean = sum(abs(e) for e, _ in rows) / len(rows)
        print(f"\n{len(rows)} recipes, mean error {100 * mean:.3f} %, worst:\n{worst(rows)}")
        assert mean <= MEAN and max(abs(e) for e, _ in rows) <= PHASE_BOUND
    far = [
        str(r)
        for r, p, t in pairs
        if abs(p.peak.total - t["peak"]) > max(BOUND * t["peak"], UNSPLIT)
    ]
    assert not far, far


def test_every_phase_is_close(pairs):
    rows = [
        (error(p.phases[name].peak.total, n), f"{name}: {recipe}")
        for recipe, p, t in pairs
        for name, n in t["phases"].items()
    ]
    print(f"\n{len(rows)} phases, worst:\n{worst(rows)}")
    assert max(abs(e) for e, _ in rows) <= PHASE_BOUND, worst(rows)


def test_the_phase_of_the_peak_is_right_unless_two_are_level(pairs):
    for recipe, p, t in pairs:
        if p.peak_phase != t["phase"]:
            assert t["phases"][p.peak_phase] >= (1 - BOUND) * t["peak"], str(recipe)


def test_reserved_is_inside_its_interval_nearly_always(pairs):
    rows = [(p.reserved, t["reserved"], str(recipe)) for recipe, p, t in pairs]
    under = [
        f"{interval} against {truth:,}: {text}"
        for interval, truth, text in rows
        if truth > interval.high
    ]
    middle = sum(interval.value < truth for interval, truth, _ in rows)
    print(
        f"\nunder-estimated {len(under)} of {len(rows)}; the likely figure {middle}\n"
        + "\n".join(under)
    )
    assert all(interval.low <= truth for interval, truth, _ in rows)
    assert len(under) <= 0.03 * len(rows)


@pytest.mark.parametrize("recipe", params(FULL_DEPTH, FULL_DEPTH[::3]), ids=str)
def test_full_depth_is_within_three_percent(recipe):
    truth = simulated(recipe)
    assert abs(error(predict(recipe).peak.total, truth["peak"])) <= BOUND


REWARD = Recipe("bert-base", batch_size=32, gradient_checkpointing=True, trainer="reward")
RECOMPUTED = [
    REWARD.replace(num_layers=3),
    Recipe(
        "gpt2",
        batch_size=16,
        num_layers=3,
        gradient_checkpointing=True,
        trainer="sft",
        precision="bf16-mixed",
    ),
    Recipe("gpt2", seq_len=32, num_layers=3, lora=LoRA(bias="all")),
    Recipe("bert-base", seq_len=32, num_layers=3, lora=LoRA(bias="lora_only")),
    REWARD,
]


@pytest.mark.parametrize("recipe", params(RECOMPUTED, RECOMPUTED[:4:2]), ids=str)
def test_what_a_checkpoint_and_a_trained_bias_hold(recipe):
    """What is recomputed goes before a bias's gradient is summed up; and "all" biases are those of
    norms too.
    """
    predicted, truth = predict(recipe), simulated(recipe)
    for name, size in truth["phases"].items():
        assert abs(predicted.phases[name].peak.total - size) <= max(0.003 * size, UNSPLIT), name


def test_a_model_is_simulated_again_and_the_others_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(predict_grid, "FOLDER", tmp_path)
    recipes = [Recipe("gpt2"), Recipe("opt-125m"), Recipe("opt-125m", batch_size=2)]
    predict_grid.store("some.jsonl", recipes, lambda recipe: {"peak": 1})
    predict_grid.store("some.jsonl", recipes, lambda recipe: {"peak": 2}, only="opt-125m")
    rows = predict_grid.stored("some.jsonl")
    assert [rows[recipe.key]["peak"] for recipe in recipes] == [1, 2, 2]
    with pytest.raises(ValueError, match=r"some\.jsonl lacks"):
        more = [*recipes, Recipe("gpt2", batch_size=3)]
        predict_grid.store("some.jsonl", more, lambda recipe: {"peak": 2}, only="opt-125m")
