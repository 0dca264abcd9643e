"""What the sources say about tricks on one GPU: each claim is judged, and each experiment can say no."""

import dataclasses
import json

import pytest
import sample_reports
from vramlab import predict
from vramlab.chapters import claims_03 as chapter
from vramlab.chapters import installed_03, trained_03
from vramlab.claims import HOLDS, NOT, UNDER, WAITS, Verdict, experiments, judge, load_claims
from vramlab.data import data_path
from vramlab.report import Speed

GPU_ONLY = ("faster", "slower", "time_ratio", "apex_is_fastest", "adafactor_is_slower", "pinned_is_faster")


@pytest.fixture(scope="module", autouse=True)
def cheap():
    """Without records, and with predictions in place of simulations; a test below holds the two together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chapter, "find_record", missing)
        patch.setattr(chapter, "simulation", lambda recipe: predict(recipe, gpu=chapter.CARD))
        yield


def missing(recipe, gpu=None):
    raise chapter.RecordError("there is none")


@pytest.fixture(scope="module")
def verdicts(cheap):
    return {name: judge(claim) for name, claim in load_claims("03").items()}


def test_every_claim_is_judged(verdicts):
    assert len(verdicts) >= 50 and {verdict.claim.source for verdict in verdicts.values()} == {"A", "B", "C"}
    assert all(set(verdict.findings) == set(verdict.claim.cases) for verdict in verdicts.values())
    assert {verdict.claim.experiment for verdict in verdicts.values()} == set(experiments("03"))


@pytest.mark.parametrize("source, rows", [("A", 9), ("C", 7)])
def test_every_row_of_the_tables_has_a_verdict_on_memory_and_on_speed(source, rows):
    for what in ("memory", "speed"):
        found = [c for n, c in load_claims("03").items() if n.startswith(f"{source}-") and n.endswith(f"-{what}")]
        assert len([claim for claim in found if claim.place.startswith("table: ")]) == rows


def test_another_figure_in_the_source_would_get_another_verdict(verdicts):
    for name, verdict in verdicts.items():
        claim = verdict.claim
        if verdict.outcome == WAITS:
            assert claim.experiment in GPU_ONLY, name
            continue
        other = not claim.quoted if claim.rule == "is" else claim.quoted * 40 + 1
        changed = Verdict(dataclasses.replace(claim, quoted=other), verdict.findings)
        assert (changed.holding != verdict.holding and changed.outcome != HOLDS) or verdict.outcome == NOT, name


def test_prediction_and_simulation_judge_alike(verdicts, monkeypatch):
    from vramlab import simulate

    monkeypatch.setattr(chapter, "simulation", lambda recipe: simulate(recipe, gpu=chapter.CARD))
    assert judge(load_claims("03")["C-checkpoint-weights"]).text == verdicts["C-checkpoint-weights"].text


def test_what_the_tables_say_is_judged_as_it_is(verdicts):
    texts = {name: verdict.text for name, verdict in verdicts.items()}
    assert texts["A-batch-memory"] == texts["A-accumulation-memory"] == HOLDS
    assert texts["A-checkpointing-memory"] == "holds under every layer"
    assert texts["A-mixed-memory"] == "holds under bf16, batch 8"
    assert texts["C-mixed-memory"] == "holds under bf16, batch 1; tf32"  # C's "no" of the same row
    assert texts["A-sdpa-memory"] == "holds under 512 tokens"
    assert texts["C-zero-memory"] == "holds under stage 3 on 8 GPUs"
    assert texts["A-data-memory"] == HOLDS and texts["A-compile-memory"] == NOT


def test_the_arguments_that_the_paragraphs_name_do_not_accumulate(verdicts):
    assert verdicts["A-accumulation-argument"].holding == ["gradient_accumulation_steps, as the listing does"]
    assert verdicts["A-checkpointing-argument"].holding == ["gradient_accumulation_steps"]
    assert verdicts["A-apex"].outcome == verdicts["A-default-optimizer"].outcome == NOT
    assert verdicts["A-backends"].holding[:3] == ["eager", "aot_eager", "inductor"]


def record(recipe, seconds, **more):
    speed = Speed(seconds, seconds, seconds, 3, recipe.tokens / seconds)
    return dataclasses.replace(sample_reports.report(), source="recorded", speed=speed, **more)


@pytest.mark.parametrize("ratio, held", [(1.2, HOLDS), (1.4, NOT), (1.0, NOT)])
def test_only_a_record_says_how_much_slower_checkpointing_is(monkeypatch, ratio, held):
    claim = load_claims("03")["A-checkpointing-20"]
    assert judge(claim).outcome == WAITS
    monkeypatch.setattr(chapter, "find_record", lambda r: record(r, ratio if r.gradient_checkpointing else 1.0))
    assert judge(claim).outcome == held


@pytest.mark.parametrize("seconds, fast", [(0.5, HOLDS), (0.99, NOT), (2.0, NOT)])
def test_only_a_record_says_that_compiling_is_faster(monkeypatch, seconds, fast):
    monkeypatch.setattr(chapter, "find_record", lambda r: record(r, seconds if r.torch_compile else 1.0))
    assert judge(load_claims("03")["A-compile-speed"]).outcome == fast


def test_speeds_are_compared_per_token(monkeypatch):
    monkeypatch.setattr(chapter, "find_record", lambda r: record(r, 1.0))
    assert chapter.time_ratio({"batch_size": 16}, {"batch_size": 2}).value == pytest.approx(1 / 8)


def test_a_record_goes_before_a_simulation(monkeypatch):
    assert chapter.lowers_peak({"gradient_checkpointing": True}).value is True
    monkeypatch.setattr(chapter, "find_record", lambda r: record(r, 1.0, allocated=10**9))
    found = chapter.lowers_peak({"gradient_checkpointing": True})
    assert found.value is False and found.witness == "recorded"


def test_accumulated_gradients_are_told_from_a_mean_of_means():
    assert chapter.accumulated_error([8] * 8, "micro-batches") < 1e-6
    assert chapter.accumulated_error([2, 3, 3, 4, 9, 12, 20, 24], "words") < 1e-6
    assert chapter.accumulated_error([2, 3, 3, 4, 9, 12, 20, 24], "micro-batches") > 0.05


def test_operations_of_recomputing():
    """By hand for one layer without attention's quadratic part, which is 4 · s · h beside 24 · h²."""
    found = chapter.recomputed_operations("gpt2", 512).value
    layers, head = 12 * (24 * 768**2 + 4 * 512 * 768), 2 * 50257 * 768
    assert found == pytest.approx(1 + layers / (3 * (layers + head)), rel=0.001)


def test_saved_bytes_are_those_of_the_storages():
    import torch

    x, w = torch.ones(64, 32, requires_grad=True), torch.ones(32, 16, requires_grad=True)
    kept, loss = chapter.saved_bytes(lambda: (x @ w).relu().sum(), (x, w))
    assert loss.item() == 64 * 16 * 32 and kept == 64 * 16 * 4  # the ReLU's result
    assert chapter.saved_bytes(lambda: (x @ w).relu().sum())[0] == kept + x.nbytes + w.nbytes


def test_workers_that_hide_nothing_would_be_seen(monkeypatch):
    import torch.utils.data

    loader = torch.utils.data.DataLoader
    monkeypatch.setattr(torch.utils.data, "DataLoader", lambda data, **options: loader(data, batch_size=1))
    assert chapter.workers_cut_the_wait().value is False


def test_no_verdict_of_the_chapter_is_stored():
    entries = [e for e in json.loads(data_path("claims.json").read_text())["claims"] if e["chapter"] == "03"]
    assert entries and not any({"verdict", "outcome", "found"} & set(entry) for entry in entries)
    assert {judge(load_claims("03")["B-epoch"]).outcome} == {UNDER}


def test_what_the_libraries_lack_is_said_to_be_gone(verdicts):
    assert verdicts["C-better"].outcome == NOT and chapter.model_has("save_pretrained").value
    assert set(verdicts["C-evaluation-strategy"].claim.cases) - set(verdicts["C-evaluation-strategy"].holding) == {
        "evaluation_strategy"
    }
    assert verdicts["A-listings"].holding == ["bf16"]


def test_a_loop_that_trains_otherwise_is_no_answer(monkeypatch):
    assert chapter.lines_for_accelerate().value == 4
    other = installed_03.ACCELERATED.replace("accelerator.backward(loss)", "accelerator.backward(2 * loss)")
    monkeypatch.setattr(installed_03, "ACCELERATED", other)
    assert chapter.lines_for_accelerate().value == float("inf")


def test_statistics_of_a_batch_are_told_from_those_of_a_sample():
    assert (
        chapter.statistics_differ("BatchNorm1d").value and not chapter.statistics_differ("BatchNorm1d", parts=1).value
    )
    assert not chapter.statistics_differ("LayerNorm").value


@pytest.mark.parametrize("name, hardware", [("A-apex-fastest", "with NVIDIA Apex"), ("A-adafactor-slower", "2,000")])
def test_what_waits_names_what_it_waits_for(verdicts, name, hardware):
    assert verdicts[name].outcome == WAITS
    assert all(said.startswith("Waits for a GPU") and hardware in said for said in verdicts[name].missing.values())


def test_calls_are_timed_between_waits_for_the_device():
    calls = []
    seconds = chapter._seconds(lambda: calls.append("update"), lambda: calls.append("wait"), times=5)
    assert calls == ["wait", "update", "wait"] * 8 and 0 <= seconds < 1


def test_runs_are_told_apart_by_their_losses(monkeypatch):
    losses = {"fp32": 3.0, "mixed": 3.01, "bf16": 3.2}
    monkeypatch.setattr(trained_03, "loss_after", lambda rate, precision="fp32", **changes: losses[precision])
    assert chapter.keeps_the_loss("mixed", 1e-3).value and not chapter.keeps_the_loss("bf16", 1e-3).value
    assert chapter.update_in_fp32_helps(1e-3).value
    losses["bf16"] = 3.02
    assert not chapter.update_in_fp32_helps(1e-3).value
    for slow, found in ((3.5, True), (3.01, False), (2.0, False)):
        monkeypatch.setattr(
            trained_03, "loss_after", lambda rate, optim="adamw", s=slow, **c: s if c or optim != "adamw" else 3.0
        )
        assert chapter.adafactor_is_slower().value is found
        assert chapter.larger_batch_ends_lower(16).value is found


def test_training_lowers_the_loss_and_bf16_alone_loses_small_updates():
    before, after = (trained_03.loss_after(1e-4, steps=steps, batch_size=1) for steps in (0, 6))
    assert after < before and trained_03.loss_after(1e-4, "bf16", steps=6, batch_size=1) > after


def test_a_cache_that_is_emptied_for_nothing_is_told_from_one_that_saves(monkeypatch):
    for out, saves in (((True, False), True), ((True, True), False), ((False, False), False), ((False, True), False)):
        monkeypatch.setattr(chapter, "_runs_out", lambda emptied, limit, out=out: out[emptied])
        assert chapter.emptying_saves(0.02).value is saves


def test_an_older_torch_is_told_from_the_installed_one():
    import torch

    assert chapter.torch_is_new_enough(torch.__version__.split("+")[0]).value
    assert not chapter.torch_is_new_enough("1.13").value


def test_what_a_trainer_registered_before_does_not_matter(monkeypatch):
    from bitsandbytes.optim import GlobalOptimManager

    monkeypatch.setitem(GlobalOptimManager.get_instance().index2config, (0, 0), {"optim_bits": 32})
    assert chapter.updates_from_dequantized().value


def test_states_that_are_not_dequantized_would_be_seen(monkeypatch):
    import bitsandbytes.functional

    honest = bitsandbytes.functional.dequantize_blockwise
    monkeypatch.setattr(bitsandbytes.functional, "dequantize_blockwise", lambda *a, **k: 2 * honest(*a, **k))
    assert not chapter.updates_from_dequantized().value
