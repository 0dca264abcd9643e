"""The ledger of claims: every claim has an experiment, and every verdict is computed from it."""

import dataclasses
import json

import pytest
import sample_reports
from vramlab import records
from vramlab.chapters import claims_02
from vramlab.claims import HOLDS, NOT, UNDER, WAITS, Claim, ClaimError, Ledger, Verdict, judge, ledger, load_claims
from vramlab.claims import Finding as F
from vramlab.data import data_path
from vramlab.errors import RecordError
from vramlab.report import GiB, Interval, MiB, Speed

pytestmark = pytest.mark.usefixtures("no_records")

ENTRY = {
    "name": "B-test",
    "chapter": "02",
    "place": "5.1.3",
    "claim": "A thing is so.",
    "quoted": 12,
    "unit": "GB",
    "experiment": "card_memory",
    "cases": {"RTX 4070": {"gpu": "RTX 4070"}},
}


@pytest.fixture(scope="module")
def verdicts(no_records) -> dict[str, Verdict]:
    return {verdict.claim.name: verdict for verdict in ledger("02")}


def stored(tmp_path, *entries):
    path = tmp_path / "claims.json"
    path.write_text(json.dumps({"claims": entries}))
    return path


# --- the ledger's form --------------------------------------------------------------------------------------------


def test_every_claim_of_the_ledger_loads_and_is_judged(verdicts):
    assert list(verdicts) == list(load_claims("02"))
    assert {"A", "B", "C"} == {verdict.claim.source for verdict in verdicts.values()}
    assert {v.outcome for v in verdicts.values()} <= {HOLDS, UNDER, NOT, WAITS}
    assert all(set(v.findings) == set(v.claim.cases) for v in verdicts.values())


def test_the_ledger_that_readers_see_is_judged_with_the_courses_records(monkeypatch):
    monkeypatch.setattr(records, "measurements_folder", lambda: data_path("measurements"))
    found = ledger("02")
    assert {verdict.outcome for verdict in found} <= {HOLDS, UNDER, NOT, WAITS}
    assert all(verdict.found and verdict.text for verdict in found)


def test_no_verdict_is_stored():
    entries = json.loads(data_path("claims.json").read_text())["claims"]
    fields = {field.name for field in dataclasses.fields(Claim)}
    assert all(set(entry) <= fields for entry in entries)
    assert not fields & {"verdict", "outcome", "found", "holds"}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"verdict": "holds"}, "unexpected keyword argument 'verdict'"),
        ({"experiment": "an_opinion"}, "no experiment 'an_opinion'"),
        ({"experiment": ""}, "no experiment ''"),
        ({"chapter": "99"}, "in chapter 99: it has none"),
        ({"cases": {}}, "needs a case or more"),
        ({"rule": "roughly"}, "rules are"),
        ({"quoted": True}, "'is' goes with true or false only"),
        ({"rule": "is"}, "'is' goes with true or false only"),
        ({"tolerance": 0.5}, "allowed is 0 to 0.05"),
        ({"name": "test"}, "a name is"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_refused(tmp_path, change, said):
    with pytest.raises(ClaimError, match=said):
        load_claims(path=stored(tmp_path, {**ENTRY, **change}))


@pytest.mark.parametrize("field", ["experiment", "cases", "quoted", "place"])
def test_a_claim_without_one_of_its_parts_is_refused(tmp_path, field):
    with pytest.raises(ClaimError, match=f"B-test.*{field}"):
        load_claims(path=stored(tmp_path, {k: v for k, v in ENTRY.items() if k != field}))


def test_a_name_stands_once(tmp_path):
    with pytest.raises(ClaimError, match="twice"):
        load_claims(path=stored(tmp_path, ENTRY, ENTRY))


# --- verdicts are computed ----------------------------------------------------------------------------------------


def test_another_figure_in_the_source_would_get_another_verdict(verdicts):
    for verdict in verdicts.values():
        claim = verdict.claim
        if verdict.outcome == WAITS:
            continue
        other = not claim.quoted if claim.rule == "is" else claim.quoted * 2.3 + 1
        changed = Verdict(dataclasses.replace(claim, quoted=other), verdict.findings)
        assert changed.holding != verdict.holding, claim.name
        if verdict.outcome != NOT:
            assert changed.outcome != HOLDS, claim.name


def test_other_bytes_would_get_another_verdict(monkeypatch):
    claim = load_claims("02")["B-batch-8"]
    assert judge(claim).holding == ["reading after the step"]
    monkeypatch.setattr(claims_02, "old_buffers", lambda recipe: [4 * MiB])  # not what the old source says
    assert judge(claim).outcome == NOT


def test_todays_libraries_keep_what_the_derivation_says_they_do():
    """The same sum with today's cache (copies of 2 + 2 bytes) and today's buffers is what the simulation keeps."""
    for batch, changes in ((4, {}), (16, {}), (16, {"gradient_checkpointing": True})):
        recipe = claims_02.lecture(batch, **changes)
        shape, tokens = recipe.shape, batch * 256
        cached = 6 * shape.num_layers * tokens * shape.hidden_size if recipe.loop.use_cache else 0
        today = claims_02.lecture_after_step(batch, **changes) - sum(claims_02.old_buffers(recipe)) - cached
        simulated = claims_02.witness(recipe, "T4", simulated=True).phases["step"].end
        assert abs(today - simulated.total) < 2.1 * MiB, recipe  # a remainder that is not split off, or two


def verdict_of(values: dict, **changes) -> Verdict:
    claim = Claim(**{**ENTRY, "cases": {name: {} for name in values}, **changes})
    return Verdict(claim, {name: None if v is None else F(v, "derived", "") for name, v in values.items()})


def test_the_outcome_of_every_mixture_of_cases():
    assert verdict_of({"a": 12, "b": 12}).text == HOLDS
    assert verdict_of({"a": 12, "b": 13, "c": 12}).text == "holds under a; c"
    assert verdict_of({"a": 13, "b": 11}).text == NOT
    assert verdict_of({"a": None}).text == WAITS
    assert verdict_of({"a": 13, "b": None}).text == WAITS
    assert verdict_of({"a": 12, "b": None}).text == "holds under a"


def test_the_rules():
    assert verdict_of({"a": 12.1}, tolerance=0.01).outcome == HOLDS
    assert verdict_of({"a": 12.2}, tolerance=0.01).outcome == NOT
    assert verdict_of({"a": 12.0}, rule="at least").outcome == HOLDS
    assert verdict_of({"a": 40.0}, rule="at least").outcome == HOLDS
    assert verdict_of({"a": 11.9}, rule="at least").outcome == NOT
    assert verdict_of({"a": Interval(11, 11, 13)}, rule="within").outcome == HOLDS
    assert verdict_of({"a": Interval(13, 13, 14)}, rule="within").outcome == NOT
    assert verdict_of({"a": True}, rule="is", quoted=True).outcome == HOLDS
    assert verdict_of({"a": False}, rule="is", quoted=True).outcome == NOT
    assert verdict_of({"a": 1}, rule="is", quoted=True).outcome == NOT


def test_what_is_missing_is_said_of_each_case_without_a_finding(verdicts):
    for verdict in verdicts.values():
        assert set(verdict.missing) == {case for case, found in verdict.findings.items() if found is None}
        assert all(verdict.missing.values())


SPEED_UNITS = {"samples/s", "× the time"}
ON_A_GPU = [c for c in load_claims().values() if c.name.endswith(("-speed", "-slower")) or c.unit in SPEED_UNITS]


@pytest.mark.parametrize("claim", ON_A_GPU, ids=lambda claim: claim.name)
def test_without_a_record_nothing_is_said_of_a_speed(claim):
    """Except where the wait itself was measured here, or where bandwidths are compared and not runs."""
    verdict = judge(claim)
    if verdict.outcome == WAITS:
        return
    assert claim.experiment in {"workers_cut_the_wait", "slower_than_nvlink", "speedup"}
    assert {found.witness for found in verdict.findings.values()} <= {"measured", "derived"}


# --- what the experiments find ------------------------------------------------------------------------------------


def test_the_lectures_readings_are_explained_to_a_mebibyte(verdicts):
    """Six figures of B, printed to 0.001 GiB, from bytes that were counted and tensors read off the old source."""
    for name in (
        "B-loaded",
        "B-batch-4",
        "B-batch-8",
        "B-batch-16",
        "B-accumulation-reading",
        "B-checkpointing-reading",
    ):
        claim, (first, *_) = verdicts[name].claim, verdicts[name].findings.values()
        assert abs(first.value - claim.quoted) * GiB < 1.1 * MiB, name


def test_simulation_and_formula_agree_on_what_they_both_test(monkeypatch):
    honest = claims_02.witness
    for name in ("B-batch-16", "B-accumulation", "C-eighteen"):
        claim = load_claims("02")[name]
        predicted = judge(claim)
        with monkeypatch.context() as patch:
            patch.setattr(claims_02, "witness", lambda recipe, gpu=None, simulated=True: honest(recipe, gpu, True))
            simulated = judge(claim)
        assert simulated.text == predicted.text, name
        assert "simulated" in {found.witness for found in simulated.findings.values()}, name


def test_only_a_record_says_how_fast_it_was(monkeypatch, tmp_path):
    claim = load_claims("02")["C-speed"]
    monkeypatch.setattr(records, "measurements_folder", lambda: tmp_path)
    assert judge(claim).outcome == WAITS
    assert "no record yet" in str(Ledger([judge(claim)]))
    with pytest.raises(RecordError):
        claims_02.samples_per_second("eager")
    recipe = claims_02.bert()
    for seconds, outcome in ((4 / 4.58, HOLDS), (4 / 9.0, NOT)):
        speed = Speed(seconds, seconds, seconds, 3, recipe.tokens / seconds)
        env = {"gpu": "NVIDIA T4", "torch": "2.13.0", "transformers": "5.23.0", "date": "2026-01-01"}
        records.save(sample_reports.measured(recipe=recipe.to_dict(), title=str(recipe), speed=speed, environment=env))
        assert judge(claim).outcome == outcome


def test_a_record_on_the_card_outweighs_the_formula(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "measurements_folder", lambda: tmp_path)
    recipe = claims_02.lecture(8)
    env = {"gpu": "Tesla T4", "torch": "2.13.0", "transformers": "5.23.0", "date": "2026-01-01"}
    records.save(sample_reports.measured(recipe=recipe.to_dict(), title=str(recipe), environment=env))
    found = judge(load_claims("02")["B-batch-8"]).findings["reading at the peak"]
    assert found.witness == "recorded"
    assert found.value * GiB == pytest.approx(sample_reports.measured().peak.total)


def test_the_table_shows_figure_finding_and_verdict(verdicts):
    table = Ledger([verdicts["B-sgd"], verdicts["C-trained"], verdicts["B-growth"]])
    text, markdown = str(table), table._repr_markdown_()
    for part in ("B 5.1.3", "SGD with momentum: 1 × N (predicted)", "→ holds under SGD without momentum", "11,488 MiB"):
        assert part in text
    assert "→ does not hold" in text
    lines = markdown.splitlines()
    assert len(lines) == 2 + 3 and all(line.count("|") == 5 for line in lines)
    assert max(len(line) for line in text.splitlines()) <= 112


def test_a_case_says_what_it_waits_for_where_its_experiment_names_it():
    claim = Claim(**{**ENTRY, "cases": {"a": {}, "b": {}}})
    verdict = Verdict(claim, {"a": None, "b": None}, {"a": "Waits for a GPU with a fan.", "b": "there is no record"})
    assert verdict.outcome == WAITS and verdict.found == "a: waits for a GPU with a fan; b: no record yet"


def test_gddr6_is_told_from_gddr6x_by_its_rate():
    assert claims_02.memory_is_gddr6x("RTX 4070").value
    assert not claims_02.memory_is_gddr6x("RTX 4070", 480).value  # 20 Gbit/s times 192 pins
    assert "21.0 Gbit/s" in claims_02.memory_is_gddr6x("RTX 4070").configuration


def test_the_log_of_c_agrees_with_itself(verdicts):
    assert verdicts["C-rate"].outcome == verdicts["C-rate-steps"].outcome == HOLDS
    assert verdicts["C-labels"].holding == ["randint(0, 2)"] and len(verdicts["C-file"].holding) == 1
    assert verdicts["C-full"].holding == ["a card of 12 GB"]
    assert verdicts["A-adamw-proportional"].outcome == HOLDS
