"""The recipes that `python tests/drawn_recipes.py SEED COUNT` holds: the same each time, and one
line each.
"""

import pytest
from drawn_recipes import Outcome, drawn, held, line, main, smaller
from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError, Sharding, predict

SEED, COUNT = 20261123, 2000
FOUND = {  # by drawing: what predict got wrong
    "DeepSpeed joins half-precision gradients before it copies them to fp32": Recipe(
        "gpt2",
        seq_len=16,
        precision="bf16-mixed",
        optim="adamw_torch_fused",
        sharding=Sharding(2, 2, "deepspeed"),
    ),
    "a micro-batch that FSDP does not reduce": Recipe(
        "qwen3-0.6b",
        seq_len=16,
        precision="bf16-mixed",
        gradient_accumulation_steps=3,
        sharding=Sharding(3, 8),
    ),
    "layers that run again under stage 3": Recipe(
        "llama-3.2-1b",
        num_layers=4,
        seq_len=16,
        precision="bf16-mixed",
        gradient_checkpointing=True,
        sharding=Sharding(3, 2, "deepspeed", "parameters"),
    ),
    "Falcon's own linear class, whose casts autocast does not keep": Recipe(
        "falcon-7b",
        seq_len=64,
        precision="bf16-mixed",
        optim="sgd",
        gradient_checkpointing=True,
        trainer="dpo",
    ),
    "DeepSpeed's step frees gradients, whatever the loop says": Recipe(
        "gpt2",
        seq_len=16,
        precision="bf16-mixed",
        sharding=Sharding(1, 2, "deepspeed"),
        loop=Loop(zero_grad="before_backward"),
    ),
    "paged states under DeepSpeed are not the device's": Recipe(
        "pythia-160m",
        seq_len=16,
        precision="bf16-mixed",
        optim="paged_adamw_8bit",
        sharding=Sharding(2, 8, "deepspeed"),
    ),
    "a last rank whose configuration lacks bf16 keeps gradients to the end of backward": Recipe(
        "pythia-160m",
        num_layers=3,
        seq_len=16,
        precision="bf16-true",
        sharding=Sharding(2, 2, "deepspeed", rank=1),
    ),
    "a later rank whose configuration lacks bf16 has a piece of a tied table": Recipe(
        "qwen3-0.6b",
        num_layers=4,
        seq_len=16,
        precision="bf16-true",
        sharding=Sharding(2, 8, "deepspeed", rank=3),
    ),
    "fp32 gradients are joined and not copied": Recipe(
        "gpt2",
        num_layers=3,
        seq_len=16,
        optim="sgd",
        sharding=Sharding(1, 2, "deepspeed", rank=1),
    ),
    "schedule-free SGD makes nothing, one by one": Recipe(
        "gpt2",
        seq_len=16,
        precision="bf16-true",
        optim="schedule_free_sgd",
        loop=Loop(foreach=False),
    ),
}
REFUSED = {  # by formulas: what drawing found them wrong in
    "quantization.compute_dtype": Recipe(
        "gpt2",
        num_layers=1,
        precision="fp16-mixed",
        lora=LoRA(r=1),
        quantization=Quantization("nf4", compute_dtype="bfloat16"),
    ),
    "sharding.rank": Recipe(
        "granite-3.3-2b",
        precision="fp16-true",
        sharding=Sharding(1, 8, "deepspeed", rank=7),
    ),
    "sharding.stage": Recipe(
        "mixtral-8x7b",
        num_layers=3,
        precision="fp16-true",
        sharding=Sharding(2, 64, "deepspeed", rank=63),
    ),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_formulas_do_not_know_is_refused(field):
    with pytest.raises(RecipeError, match=f"{field}.*ask simulate"):
        predict(REFUSED[field])


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_by_drawing_is_held(name):
    outcome = held(FOUND[name], bound=0.015, phase_bound=0.03)
    assert outcome.fault == ""
    assert outcome.error is not None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, COUNT, 100))
def test_no_draw_shows_a_fault(first):
    faults = [
        (line(outcome.recipe), outcome.fault)
        for n in range(first, first + 100)
        if (outcome := held(drawn(SEED, n))).fault
    ]
    assert faults == []


def test_a_draw_is_the_same_each_time_and_is_read_from_its_line():
    names = {
        "Recipe": Recipe,
        "Loop": Loop,
        "LoRA": LoRA,
        "Sharding": Sharding,
        "Quantization": Quantization,
    }
    for number in range(8):
        recipe = drawn(SEED, number)
        assert recipe == drawn(SEED, number) == eval(line(recipe), names)


def test_a_failing_recipe_is_made_smaller():
    recipe = Recipe(
        "gpt2", batch_size=4, optim="sgd", precision="bf16-true", gradient_checkpointing=True
    )
    found = smaller(recipe, lambda one: one.optim == "sgd")
    assert found == Recipe("gpt2", optim="sgd", seq_len=recipe.seq_len)


def test_the_script_counts_what_it_draws(capsys, monkeypatch):
    monkeypatch.setattr("drawn_recipes.held", lambda recipe: Outcome(recipe, "", 0.01))
    main(SEED, 2)
    assert (
        capsys.readouterr().out == "2 drawn, 2 comparable, mean 1.000 %, worst 1.00 %, 0 faults\n"
    )
