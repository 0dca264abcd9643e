"""The recipes that `python tests/drawn_recipes.py SEED COUNT` holds: the same each time, and one line each."""

from drawn_recipes import Outcome, drawn, line, main, smaller
from vramlab import Recipe

SEED = 20261123


def test_a_draw_is_the_same_each_time_and_is_read_from_its_line():
    from vramlab import Loop, LoRA, Quantization, Sharding

    names = {"Recipe": Recipe, "Loop": Loop, "LoRA": LoRA, "Sharding": Sharding, "Quantization": Quantization}
    for number in range(8):
        recipe = drawn(SEED, number)
        assert recipe == drawn(SEED, number) == eval(line(recipe), names)


def test_a_failing_recipe_is_made_smaller():
    recipe = Recipe("gpt2", batch_size=4, optim="sgd", precision="bf16-true", gradient_checkpointing=True)
    found = smaller(recipe, lambda one: one.optim == "sgd")
    assert found == Recipe("gpt2", optim="sgd", seq_len=recipe.seq_len)


def test_the_script_counts_what_it_draws(capsys, monkeypatch):
    monkeypatch.setattr("drawn_recipes.held", lambda recipe: Outcome(recipe, "", 0.01))
    main(SEED, 2)
    assert capsys.readouterr().out == "2 drawn, 2 comparable, mean 1.000 %, worst 1.00 %, 0 faults\n"
