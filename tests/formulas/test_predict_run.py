"""`predict_run`: an epoch's micro-batches are the Trainer's, and the highest peak among them is
found without trying all.
"""

import datasets
import pytest
from tiny_models import config
from vramlab import Recipe, RecipeError, predict, predict_run
from vramlab.formulas.whole_run import _dealt
from vramlab.training.models import build_model

LENGTHS = [7, 64, 9, 30, 12, 50, 64, 3, 40, 21, 33, 8, 15, 27, 64, 64, 5, 18, 44, 10, 11]
BASE = Recipe(config("llama"), 4, 64, num_layers=2, precision="bf16-mixed")
JOINED = {"trainer": "sft", "attn_implementation": "flash_attention_2"}


@pytest.mark.parametrize(
    "recipe, sampling",
    [
        (BASE, "random"),
        (
            BASE.replace(pad_to_multiple_of=16, attn_implementation="flash_attention_2"),
            "sequential",
        ),
        (BASE.replace(trainer="sft", gradient_checkpointing=True), "group_by_length"),
        (BASE.replace(padding_free=True, **JOINED), "random"),
        (BASE.replace(packing=True, trainer="sft"), "random"),
    ],
    ids=str,
)
def test_the_highest_peak_is_that_of_all_micro_batches(recipe, sampling):
    run = predict_run(recipe, LENGTHS, sampling)
    size = {} if recipe.packing else {"batch_size": 1}
    recipes = [
        recipe.replace(lengths=found, **size) for found in _dealt(recipe, LENGTHS, sampling, 42)
    ]
    peaks = [predict(one).peak.total for one in recipes]
    assert run.largest.peak.total == max(peaks) and run.micro_batches == len(peaks)
    computed = sum(one.tokens for one in recipes)
    assert (run.tokens, run.padding) == (sum(LENGTHS), computed - sum(LENGTHS))
    assert min(peaks) <= run.typical <= max(peaks) and "over the run" in str(run)


@pytest.mark.parametrize("sampling", ["random", "sequential"])
def test_micro_batches_are_the_trainers(sampling, tmp_path):
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from vramlab.base.data import data_path

    arguments = SFTConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        train_sampling_strategy=sampling,
    )
    rows = [{"input_ids": list(range(length)), "labels": list(range(length))} for length in LENGTHS]
    data, tokenizer = (
        datasets.Dataset.from_list(rows),
        AutoTokenizer.from_pretrained(data_path("base_model")),
    )
    trainer = SFTTrainer(
        build_model(BASE), arguments, train_dataset=data, processing_class=tokenizer
    )
    real = [
        tuple(batch["attention_mask"].sum(1).tolist()) for batch in trainer.get_train_dataloader()
    ]
    assert _dealt(BASE, LENGTHS, sampling, arguments.seed) == real


def test_long_samples_are_cut_and_others_refused():
    run = predict_run(BASE, [100, 64, 10])
    assert run.cut == 36 and max(run.largest.recipe["lengths"]) == 64
    for lengths, field in (([], "lengths"), ([5, 0], "lengths"), ([True], "lengths")):
        with pytest.raises(RecipeError) as caught:
            predict_run(BASE, lengths)
        assert caught.value.field == field
    with pytest.raises(RecipeError, match="train_sampling_strategy"):
        predict_run(BASE, [5], "batch_rebalance")


@pytest.mark.parametrize("line", ["", "x", '{"text": "a"}', '{"length": 0}', "{}", "1.5"])
def test_a_file_without_lengths_is_refused_in_a_sentence(line, tmp_path):
    from typer.testing import CliRunner
    from vramlab.interfaces.cli import app

    path = tmp_path / "lengths.jsonl"
    path.write_text(line)
    done = CliRunner().invoke(app, ["predict", "gpt2", "--lengths", str(path)])
    said = " ".join(done.output.split())
    assert (
        done.exit_code == 2
        and ("length" in said or "dataset" in said)
        and "Traceback" not in done.output
    )
    path.write_text('{"length": 5}\n[1, 2]\n{"input_ids": [1]}\n7')
    done = CliRunner().invoke(app, ["predict", "gpt2", "--lengths", str(path), "--batch-size", "2"])
    assert done.exit_code == 0 and "2 micro-batches" in done.output
