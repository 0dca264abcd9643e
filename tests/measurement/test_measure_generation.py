"""A generation in a process of its own, on this CPU."""

import pytest
from tiny_models import config
from vramlab import Recipe, RecipeError, measure_generation, simulate_generation


def test_what_is_measured_is_what_is_simulated():
    recipe = Recipe(config("qwen3", num_hidden_layers=5), batch_size=2, precision="bf16-true")
    measured = measure_generation(recipe, 7, 12, device="cpu")
    simulated = simulate_generation(recipe, 7, 12, target="cpu")
    assert measured.source == "measured" and measured.title == simulated.title
    assert measured.phases == simulated.phases
    assert measured.speed.repeats == 12 and measured.rss > measured.peak.total


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"new_tokens": 1}, "generation.new_tokens"), ({"device": "gpu"}, "device")],
)
def test_refuses_in_a_sentence(asked, field):
    with pytest.raises(RecipeError) as caught:
        measure_generation(Recipe(config("gpt2")), 8, **{"new_tokens": 4, **asked})
    assert caught.value.field == field
