"""Fine-tuning the base model: the loop trains what it should, and the record's script runs end to
end.
"""

import importlib.util
import json

import pytest
import torch
from vramlab.base.data import data_path
from vramlab.base.errors import RecordError
from vramlab_course import finetuning
from vramlab_course.base_model import (
    base_model_path,
    bits_per_byte,
    finetuning_texts,
    load_base_model,
)
from vramlab_course.finetuning import (
    adapted,
    batches,
    finetune,
    fresh,
    recorded_quality,
    recorded_sweep,
)


def test_the_loop_learns_and_leaves_frozen_weights_alone():
    texts = finetuning_texts("train", 5000)
    model = fresh(4)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = bits_per_byte(model, texts, stride=256)
    losses = finetune(model, texts, steps=12, learning_rate=3e-3, batch_size=4, context=128)
    assert len(losses) == 12 and bits_per_byte(model, texts, stride=256) < 0.98 * before
    assert all(
        torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen
    )
    assert not model.training


def test_a_start_depends_on_the_seed_alone():
    a, b, c = fresh(2), fresh(2), fresh(2, seed=1)
    weights = [{n: p for n, p in model.named_parameters() if "lora_A" in n} for model in (a, b, c)]
    assert all(torch.equal(p, weights[1][n]) for n, p in weights[0].items())
    assert not all(torch.equal(p, weights[2][n]) for n, p in weights[0].items())


def test_adapters_go_where_they_are_told():
    names = {
        n.split(".lora_")[0].rsplit(".", 1)[1]
        for n, p in fresh(1, ["q_proj"]).named_parameters()
        if p.requires_grad
    }
    assert names == {"q_proj"}
    assert fresh(None).get_parameter("model.norm.weight").requires_grad
    scaled = adapted(fresh(None), 8).base_model.model.model.layers[0].mlp.up_proj.scaling["default"]
    assert scaled == 32 / 8
    half = fresh(8, lora_alpha=4).base_model.model.model.layers[0].mlp.up_proj.scaling["default"]
    assert half == 4 / 8


def test_batches_are_the_seeds():
    texts = finetuning_texts("train", 5000)
    one, two, other = (torch.stack([*batches(texts, 3, 2, 16, seed)]) for seed in (0, 0, 1))
    assert one.shape == (3, 2, 16) and torch.equal(one, two) and not torch.equal(one, other)


def test_an_unknown_run_is_refused():
    with pytest.raises(RecordError):
        recorded_sweep().run(3)


@pytest.mark.slow  # nothing but a new record runs it
def test_the_records_script_runs_end_to_end(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("quality", data_path("base_model", "quality.py"))
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "FIRST", {"full": (1,), "LoRA": (3, 4)})
    monkeypatch.setattr(script, "BATCH_SIZE", 1)
    monkeypatch.setattr(
        script, "finetuning_texts", lambda split: [text[:800] for text in finetuning_texts(split)]
    )
    rates = {
        1e-2: 1.5,
        3e-2: 1.7,
        3e-3: 1.6,
        1e-3: 1.4,
        3e-4: 1.5,
    }  # the best is within after two more
    tuned = []

    def one(setting, rate, seed, steps, texts, *judged):
        tuned.append((setting, rate, seed, *judged))
        found = trained(setting, rate, seed, steps, texts, *judged)
        return {**found, "tuning": rates[rate]} if judged == ("tuning",) else found

    trained = script.one
    monkeypatch.setattr(script, "one", one)
    out = tmp_path / "quality.json"
    small = ["--documents", "2", "--program-bytes", "500", "--processes", "1", "--seeds", "2"]
    script.main(["--out", str(out), "--steps", "1", "--ranks", "1", "--longer", "2", *small])
    facts = json.loads(out.read_text())
    kept = facts["lower"].pop()
    facts["lower"][0]["programs"] = 0.0  # is known, so it stays
    out.write_text(json.dumps(facts))
    script.main(["--out", str(out), "--steps", "1", "--only-lower", *small])
    assert json.loads(out.read_text()) == {**facts, "lower": [*facts["lower"], kept]}
    facts["lower"].append(kept)
    assert [(run["r"], run["steps"]) for run in facts["longer"]] == [(None, 2)]
    assert facts["longer"][0]["learning_rate"] == 1e-3
    assert [(run["r"], run["targets"]) for run in facts["runs"]] == [
        (None, "all"),
        (1, "all-linear"),
        (8, script.QUERY_VALUE),
        (8, script.MLP),
    ]
    assert [(run["targets"], run["learning_rate"]) for run in facts["lower"]] == [
        ("all", 3e-4),
        (script.MLP, 3e-3),
    ]
    assert [run["learning_rate"] for run in facts["runs"]] == [1e-3, 1e-2, 1e-2, 1e-2]
    assert facts["runs"][0]["tried"] == {"0.0003": 1.5, "0.001": 1.4, "0.003": 1.6}
    assert {seed for _, _, seed, *judged in tuned if judged == ["tuning"]}.isdisjoint(script.SEEDS)
    for run in facts["runs"]:
        bits = run["seeds"]["documentation"]
        assert len({*bits}) == 2 and run["documentation"] == pytest.approx(sum(bits) / 2, abs=1e-4)
        assert run["deviation"] == pytest.approx(abs(bits[0] - bits[1]) / 2**0.5, abs=1e-4)


def script_of(name):
    spec = importlib.util.spec_from_file_location(name, data_path("base_model", f"{name}.py"))
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.slow  # nothing but a new record runs it
def test_the_4_bit_records_script_runs_end_to_end(tmp_path, monkeypatch):
    script = script_of("quality_4bit")
    monkeypatch.setattr(
        script, "finetuning_texts", lambda split: [finetuning_texts(split)[0][:1500]]
    )
    monkeypatch.setattr(script, "CONTEXT", 64)
    out = tmp_path / "facts.json"
    script.main(["--steps", "1", "--seeds", "2", "--hardware", "a test", "--out", str(out)])
    facts, recorded = json.loads(out.read_text()), recorded_quality()
    assert facts.keys() == recorded.keys() and facts["runs"].keys() == recorded["runs"].keys()
    found = [facts["runs"][name] for name in script.BASES]
    befores = [run["before"] for run in found]  # near to each other
    assert len({*befores}) == len(script.BASES) and max(befores) < 1.05 * min(befores)
    for run in found:
        one, other = run["seeds"]
        assert one != other and run["after"] == pytest.approx((one + other) / 2, abs=1e-4)
        assert run["deviation"] == pytest.approx(abs(one - other) / 2**0.5, abs=1e-4)


def test_the_4_bit_record_is_of_the_sweeps_recipe_and_measure():
    script, sweep = script_of("quality_4bit"), script_of("quality")
    assert (script.STEPS, script.BATCH_SIZE, script.CONTEXT) == (
        sweep.STEPS,
        sweep.BATCH_SIZE,
        sweep.TOKENS,
    )
    assert (script.SCALE, script.WINDOW) == (sweep.SCALE, sweep.CONTEXT)
    recorded, in_fp32 = recorded_quality()["runs"], recorded_sweep()
    assert in_fp32.run(8).learning_rate == script.RATE
    assert recorded["fp32"]["seeds"] == in_fp32.run(8).seeds["documentation"]
    assert recorded["full"]["seeds"] == in_fp32.run(None).seeds["documentation"]
    assert all(len(run["seeds"]) == script.SEEDS for run in recorded.values())


def test_a_missing_record_of_quality_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(finetuning, "base_model_path", lambda *parts: tmp_path.joinpath(*parts))
    with pytest.raises(RecordError, match=r"quality_4bit\.py"):
        recorded_quality()


def test_merged_numbers_are_the_trained_model_and_the_published_base_is_not():
    script = script_of("merge_4bit")
    torch.manual_seed(0)
    trained = finetuning.adapted(load_base_model(quantization=script.BASE), 8)
    for name, part in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(part, std=0.1)
    ids = torch.arange(32).reshape(1, 32)
    logits = {name: model.train()(ids).logits for name, model in script.merged(trained).items()}
    wanted = logits.pop("adapters next to the codes")
    off = {name: (each - wanted).abs().mean().item() for name, each in logits.items()}
    assert off["codes as numbers"] < 1e-3 < 10 * 1e-3 < min(off["published base"], off["codes"])


def test_the_record_of_merges_is_of_its_scripts_recipe():
    script = script_of("merge_4bit")
    record = json.loads(base_model_path("merge_4bit.json").read_text(encoding="utf-8"))
    assert record["recipe"].startswith(f"{script.STEPS} steps")
    assert {len(seeds) for seeds in record["runs"].values()} == {script.SEEDS}
    # What is merged is the run of the other record.
    run, quality = record["runs"], recorded_quality()["runs"]["nf4 double"]
    assert run["adapters next to the codes"] == quality["seeds"]
    assert {*run["untrained"]} == {quality["before"]}
