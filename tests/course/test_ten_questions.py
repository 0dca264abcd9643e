"""What the ten questions tell of other people's runs is what is stored of them."""

import pytest
from told import text_of
from vramlab import LoRA, Quantization, Recipe, Sharding, predict
from vramlab.report.report import GiB
from vramlab_course import published
from vramlab_course.chapters.ten_questions import asked


def stored(name):
    return published.json_of(f"elsewhere/{name}")["runs"]


@pytest.fixture
def told():
    return text_of("ten_questions")


def test_a_question_prints_its_recipe(capsys):
    recipe = asked(1)
    assert recipe.name == "qwen3-0.6b" and capsys.readouterr().out == f"{recipe}\n"


def test_a_70b_is_offloaded_on_two_cards(told):
    (run,) = (
        run
        for run in stored("answer_ai")
        if (run["gpu"], run["model"]) == ("RTX 4090", "llama-2-70b")
    )
    assert (run["ranks"], run["offload"], run["batch_size"]) == (2, "parameters", 2)
    assert f"{run['peak_reserved_gib']:.1f} GiB a card (published)" in told
    # Llama 2 70B has the sizes of Llama 3.1's, and a vocabulary of 32,000.
    model = {**Recipe("llama-3.1-70b").shape.config, "vocab_size": 32_000}
    recipe = Recipe(
        model,
        run["batch_size"],
        run["tokens"],
        "bf16-true",
        gradient_checkpointing=True,
        lora=LoRA(
            64, target_modules=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
        ),
        quantization=Quantization("nf4", double=True, prepare=False),
        sharding=Sharding(stage=3, world_size=2, engine="fsdp", offload="parameters"),
    )
    reserved = predict(recipe, gpu=run["gpu"]).reserved
    sizes = reserved.low, reserved.value, reserved.high
    least, likely, most = (f"{size / GiB:.1f}" for size in sizes)
    assert f"We predict {least} to {most} GiB reserved, most likely {likely}." in told


def test_lora_solves_as_many_problems_as_all_weights(told):
    runs = {run["name"]: run for run in stored("peft_metamath")}
    full, lora = runs["all weights"], runs["LoRA r=32"]
    sizes = [f"{run['memory_max_bytes'] / GiB:.1f}" for run in (full, lora)]
    assert f"all weights reserved {sizes[0]} GiB and solved {full['right']} of 1,319" in told
    assert f"LoRA {sizes[1]} and {lora['right']}" in told


def test_a_t4_trained_a_14b(told):
    (run,) = (run for run in stored("trl_sft") if run["gpu"] == "T4")
    assert run["recipe"]["model"] == "qwen3-14b" and run["recipe"]["quantization"]
    assert "TRL's authors trained a 14B on a free T4" in told


def test_scores_on_a_t4_take_what_was_measured(told):
    found = {}
    for run in published.timed_on("T4"):
        recipe = run.recipe
        size = recipe.name, recipe.batch_size, recipe.seq_len
        if size == ("tinyllama-1.1b", 2, 2048) and recipe.quantization:
            found[run.as_run] = run.allocated / GiB, run.seconds
    (written, slow), (repeated, fast) = found[None], found["repeated keys"]
    assert f"took {written:.1f} GiB with all scores, and {repeated:.1f} with repeated" in told
    assert f"{slow:.1f} s, and {fast:.1f} with repeated keys" in told
