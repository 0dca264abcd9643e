"""The ledger of chapter 06: every verdict is computed, and other facts would give other verdicts."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from tiny_models import config
from vramlab.base_model import finetuning_texts
from vramlab.chapters import claims_06 as chapter
from vramlab.claims import HOLDS, NOT, UNDER, WAITS, Verdict, judge, ledger, load_claims
from vramlab.data import data_path
from vramlab.errors import RecordError
from vramlab.models import build_model
from vramlab.recipe import LoRA, Quantization, Recipe
from vramlab.watch import watch

pytestmark = pytest.mark.usefixtures("no_records")

CLAIMS = load_claims("06")


@pytest.fixture(scope="module")
def verdicts(no_records) -> dict[str, Verdict]:
    return {verdict.claim.name: verdict for verdict in ledger("06")}


def outcome(name: str) -> str:
    return judge(CLAIMS[name]).outcome


def test_every_claim_is_judged(verdicts):
    assert list(verdicts) == list(CLAIMS) and len(verdicts) >= 18
    assert {v.outcome for v in verdicts.values()} == {HOLDS, UNDER, NOT, WAITS}
    assert [name for name, v in verdicts.items() if v.outcome == WAITS] == ["B-paged-oom"]  # for a GPU's record


def test_the_slips_are_found(verdicts):
    assert {name for name, v in verdicts.items() if v.outcome == NOT} == {"B-qlora-deviation", "B-qlora-ratio"}
    assert verdicts["B-qlora-second"].holding == ["the blocks' scales"]
    assert verdicts["B-qlora-compute"].holding == ["L4"]
    assert "B's adapters, r = 8" not in verdicts["B-paged-out"].holding
    assert "B's model, batch 16" not in verdicts["B-qlora-less"].holding


def test_the_readings_are_explained_with_the_leak_and_not_without(verdicts):
    for name, read in (("before", 0.945), ("loaded", 2.112), ("step", 2.651)):
        verdict = verdicts[f"B-qlora-{name}"]
        assert verdict.holding == ["an earlier cell's model still alive"]
        with_, without = (finding.value for finding in verdict.findings.values())
        assert abs(with_ - read) < 0.0006 and 0.929 < with_ - without < 0.930


def test_another_figure_in_the_source_would_get_another_verdict(verdicts):
    for verdict in verdicts.values():
        claim = verdict.claim
        other = not claim.quoted if claim.rule == "is" else claim.quoted * 2.3 + 1
        changed = Verdict(dataclasses.replace(claim, quoted=other), verdict.findings)
        assert changed.outcome in (NOT, WAITS) or changed.holding != verdict.holding, claim.name


def test_other_levels_would_be_no_quantiles(monkeypatch):
    monkeypatch.setattr(chapter, "OFFSET", 0.95)
    assert outcome("B-qlora-quantiles") == NOT


def test_without_its_scales_a_base_would_not_explain_the_readings(monkeypatch):
    monkeypatch.setattr(chapter, "four_bits", lambda numbers: [numbers // 2])
    for name in ("before", "loaded", "step"):
        assert outcome(f"B-qlora-{name}") == NOT


def test_a_loss_that_held_nothing_would_not_explain_the_last_reading(monkeypatch):
    parts = chapter.step_bytes()
    monkeypatch.setattr(chapter, "step_bytes", lambda: {**parts, "and its gradient": 0})
    assert outcome("B-qlora-step") == NOT and outcome("B-qlora-loaded") == UNDER


@pytest.mark.parametrize("numbers", [64 * 64, 2048 * 6144])
def test_four_bits_are_the_storages_of_bitsandbytes(numbers):
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(torch.randn(numbers), compress_statistics=True, quant_type="nf4")
    nested = state.state2
    found = [codes, state.absmax, nested.absmax, state.offset, nested.code, state.code]
    assert [tensor.untyped_storage().nbytes() for tensor in found] == chapter.four_bits(numbers)


def test_a_loss_holds_the_embeddings_result_and_its_gradient():
    """The 64 MiB of B's step, on a small model: two tensors of tokens × width are left once inputs require gradients."""
    quantization = Quantization("nf4", double=True)
    recipe = Recipe(config("gpt_neox"), num_layers=2, lora=LoRA(r=4), quantization=quantization)
    ids = torch.arange(64).reshape(2, 32)
    left = []
    for inputs in (False, True):
        model = build_model(recipe)
        if inputs:
            model.enable_input_require_grads()
        with watch(model) as watcher:
            outputs = model(input_ids=ids, labels=ids, use_cache=False)
            outputs.loss.backward()
        left.append(watcher.report().phases["between_steps"].end.total)
        del outputs
    assert left[1] - left[0] == 2 * 4 * ids.numel() * 96


@pytest.mark.parametrize("status, total, found", [("ok", 14, True), ("oom", 14, False), ("ok", 80, False)])
def test_only_a_record_of_an_overflow_says_that_paging_works(monkeypatch, status, total, found):
    """Not a run that ended, nor one that would have fitted anyway."""
    monkeypatch.setattr(chapter, "find_record", lambda recipe, gpu: SimpleNamespace(status=status, source="recorded"))
    monkeypatch.setattr(chapter, "find_gpu", lambda name: SimpleNamespace(total=total * 2**30))
    (case,) = CLAIMS["B-paged-oom"].cases.values()
    assert chapter.overflows_and_lives(**case).value is found


def test_the_script_records_what_the_claim_reads(monkeypatch, tmp_path, capsys):
    path = data_path("base_model", "quality_4bit.py")
    spec = importlib.util.spec_from_file_location("quality_4bit", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "finetuning_texts", lambda split: [finetuning_texts(split)[0][:1500]])
    monkeypatch.setattr(script, "CONTEXT", 64)
    script.main(["--steps", "2", "--hardware", "a test", "--out", str(tmp_path / "facts.json")])
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts.keys() == chapter.recorded_quality().keys() and facts["hardware"] == "a test"
    assert facts["runs"].keys() == chapter.recorded_quality()["runs"].keys()
    befores = [run["before"] for run in facts["runs"].values()]
    assert (
        len({*befores}) == 4 and len(befores) == 5 and max(befores) < 1.05 * min(befores)
    )  # four bases, near to each other, one used twice
    assert all(run["after"] != run["before"] for run in facts["runs"].values())


def test_quality_is_read_from_the_record(monkeypatch, tmp_path):
    facts = chapter.recorded_quality()
    assert outcome("B-qlora-quality") in (HOLDS, UNDER)
    worse = json.loads(json.dumps(facts))
    for name in ("nf4", "nf4 double", "fp4"):
        worse["runs"][name]["after"] *= 1.02
    monkeypatch.setattr(chapter, "recorded_quality", lambda: worse)
    assert outcome("B-qlora-quality") == NOT


def test_a_missing_record_of_quality_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(chapter, "data_path", lambda *parts: tmp_path.joinpath(*parts))
    with pytest.raises(RecordError, match=r"quality_4bit\.py"):
        chapter.recorded_quality.__wrapped__()
