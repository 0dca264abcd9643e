"""predict against simulate with Liger's kernels: a recipe of every model whose family predict knows
them in.
"""

import pytest
from predict_grid import assert_still_said, liger_grid, simulated, stored
from quick import params
from test_predict_grid import error, worst
from vramlab import Recipe, RecipeError, predict

GRID = liger_grid()
SAMPLE = 12


@pytest.mark.parametrize("recipe", params(GRID, GRID[::SAMPLE]), ids=str)
def test_simulate_still_says_what_is_stored(recipe):
    pytest.importorskip("liger_kernel", reason="Triton, which Liger needs, is for Linux")
    assert_still_said("liger_grid.jsonl", recipe, simulated)


def test_the_peak_is_what_simulate_says():
    truths = stored("liger_grid.jsonl")
    rows = [
        (error(predict(recipe).peak.total, truths[recipe.key]["peak"]), str(recipe))
        for recipe in GRID
    ]
    mean = sum(abs(e) for e, _ in rows) / len(rows)
    print(f"\n{len(rows)} recipes, mean error {100 * mean:.3f} %, worst:\n{worst(rows)}")
    assert len(rows) > 20 and mean <= 0.002
    assert max(abs(e) for e, _ in rows) <= 0.02, worst(rows)


def test_a_family_that_liger_leaves_alone_takes_the_same():
    recipe = Recipe("gpt2", batch_size=2, seq_len=128)
    assert predict(recipe.replace(use_liger_kernel=True)).peak == predict(recipe).peak


def test_what_it_does_not_know_names_simulate():
    with pytest.raises(RecipeError, match="ask simulate"):
        predict(Recipe("granite-3.3-2b", use_liger_kernel=True))
