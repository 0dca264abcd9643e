"""The recipe that plan chose gets plan's own tier from predict, simulate, explain and the page."""

import html
import json

import pytest
from typer.testing import CliRunner
from vramlab import GiB, explain, plan, predict, simulate
from vramlab.interfaces.cli import app
from vramlab.planning.question import Question
from vramlab.report.report import SETTINGS, Interval

# Cards on which the default segments have another tier than expandable ones.
ASKED = [
    ("llama-3.1-8b", "RTX 4090", 4096),
    ("qwen2.5-0.5b", "T4", 512),
]
SMALL = {"seq_len": 256, "num_layers": 2, "method": "lora", "global_batch": 2}


@pytest.mark.parametrize(("model", "card", "tokens"), ASKED)
def test_predict_and_explain_give_both_settings_tiers_of_plans_recipe(model, card, tokens):
    found = plan(model, card, seq_len=tokens, confirm=False)
    decides = []
    for choice in found.choices:
        report = predict(choice.recipe, gpu=card)
        assert report.process == choice.by_default
        assert report.otherwise == choice.needs
        by_default = choice.by_default.verdict(found.usable)
        decides.append(by_default != choice.tier)
        if decides[-1]:
            grade = f"{by_default} {SETTINGS[False]}; {choice.tier} {SETTINGS[True]}"
        else:
            grade = f"{choice.tier} with expandable segments and without"
        assert report.grade == grade
        assert grade in html.unescape(report._repr_html_())
        with_them = predict(choice.recipe, gpu=card, expandable_segments=True)
        assert (with_them.process, with_them.otherwise) == (choice.needs, choice.by_default)
        assert with_them.verdict == choice.tier
        if decides[-1]:
            assert f"; {choice.tier} {SETTINGS[True]}: {choice.needs}" in report.answer(card)
            assert report.answer(card) in str(explain(choice.recipe, gpu=card))
    assert any(decides)
    assert (
        "without expandable segments (no PYTORCH_ALLOC_CONF=expandable_segments:True): "
        in found._repr_html_()
    )


def test_simulate_gives_both_settings_tiers_of_plans_recipe():
    found = plan("qwen2.5-0.5b", "T4", memory=int(2.2 * GiB), **SMALL)
    [choice] = found.choices
    assert choice.report.source == "simulated"
    report = simulate(choice.recipe, gpu="T4")
    assert (report.process, report.otherwise) == (choice.by_default, choice.needs)
    assert f"{choice.tier} with expandable segments" in report.grade


def test_the_recipe_of_plans_json_is_a_model_for_other_commands(tmp_path):
    run = CliRunner().invoke
    asked = ["plan", "qwen2.5-0.5b", "--gpu", "T4", "--tokens", "512", "--no-confirm", "--json"]
    whole = run(app, asked).stdout
    content = json.loads(whole)
    chosen = content["choices"][0]
    files = {"plan.json": content, "recipe.json": chosen["recipe"]}
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(json.dumps(text), encoding="utf-8")
        shown = run(app, ["predict", str(path), "--gpu", "T4", "--json"])
        answer = json.loads(shown.stdout)
        needs = Interval(**chosen["needs"])
        assert answer["recipe"] == chosen["recipe"], shown.output
        assert Interval(**answer["otherwise"]) == needs
        assert f"; {chosen['tier']} with expandable" in answer["environment"]["grade"]
        # What is said counts before what the file says.
        shorter = ["predict", str(path), "--gradient-accumulation-steps", "2", "--json"]
        halved = run(app, shorter)
        recipe = json.loads(halved.stdout)["recipe"]
        assert recipe == {**chosen["recipe"], "gradient_accumulation_steps": 2}
        again = run(app, ["plan", str(path), "--gpu", "T4", "--no-confirm", "--json"])
        assert json.loads(again.stdout)["choices"][0]["recipe"] == chosen["recipe"]


def test_beside_a_vllm_that_sleeps_no_segments_are_expandable():
    asked = Question("qwen2.5-0.5b", "RTX 4090", trainer="grpo", rollouts={"use_vllm": True})
    assert not asked.expandable_segments
    elsewhere = {"use_vllm": True, "vllm_mode": "server"}
    asked = Question("qwen2.5-0.5b", "RTX 4090", trainer="grpo", rollouts=elsewhere)
    assert asked.expandable_segments
