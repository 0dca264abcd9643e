"""Chapter 05's claims: each experiment agrees with the source where the source is right, and can say that it is not."""

import json

import pytest
from vramlab import claims as ledger
from vramlab.chapters import claims_05
from vramlab.claims import HOLDS, NOT, UNDER, Claim, judge, load_claims
from vramlab.finetuning import recorded_sweep
from vramlab.report import GiB

EXPECTED = {
    "B-lora-trained": HOLDS,
    "B-lora-all": HOLDS,
    "B-lora-share": HOLDS,
    "B-lora-more-weights": HOLDS,
    "B-lora-total": UNDER,
    "B-lora-gradients": UNDER,
    "B-lora-states": UNDER,
    "B-lora-loaded": UNDER,
    "B-lora-reading": UNDER,
    "B-lora-need": NOT,
    "B-lora-fits": HOLDS,
    "B-lora-alpha": HOLDS,
}


@pytest.fixture(scope="module")
def claims() -> dict[str, Claim]:
    return load_claims("05")


def test_every_claim_of_the_chapter_is_tested_here(claims):
    assert set(claims) == {*EXPECTED, "B-lora-small-rank", "B-lora-quality"}
    assert {claim.experiment for claim in claims.values()} == set(claims_05.EXPERIMENTS)


@pytest.mark.parametrize("name", EXPECTED)
def test_verdicts(claims, name):
    assert judge(claims[name]).outcome == EXPECTED[name]


def test_the_peak_could_have_agreed(claims):
    claim = claims["B-lora-need"]
    assert Claim(**{**vars(claim), "quoted": claims_05.peak().value}).agrees(claims_05.peak().value)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in ("B-lora-alpha", "B-lora-need")])
def test_another_figure_would_not_hold(claims, name):
    claim = claims[name]
    other = not claim.quoted if isinstance(claim.quoted, bool) else 1.2 * claim.quoted
    arguments = next(iter(claim.cases.values()))
    found = claims_05.EXPERIMENTS[claim.experiment](**arguments).value
    wrong = Claim(**{**vars(claim), "quoted": other})
    assert claim.agrees(found) is not wrong.agrees(found)


def test_lora_loses_where_activations_rule(claims):
    verdict = judge(claims["B-lora-total"])
    assert set(verdict.findings) - set(verdict.holding) == {"the same, 32,768 tokens"}


def test_the_factor_is_alpha_over_r(claims):
    """Another rule, alpha / √r, would not pass."""
    claim = claims["B-lora-alpha"]
    assert claims_05.scaling("r halved").value == pytest.approx(2)
    assert not claim.agrees(2**0.5)


def test_adapter_sizes_are_those_of_pefts_layers():
    from vramlab.training import build

    recipe = claims_05.adapted(1).replace(num_layers=1, seq_len=8)
    model = build(recipe).model
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == claims_05.trained(recipe)
    assert claims_05.part("gradients", 4).value * GiB == 24 * 4 * claims_05.trained(recipe)


@pytest.fixture
def swept(monkeypatch):
    """A function that puts other results into the record."""
    facts = recorded_sweep()

    def change(bits):
        runs = [claims_05.recorded_sweep().run(r) for r in bits]
        kept = {run.r: run for run in runs}
        monkeypatch.setattr(
            claims_05,
            "recorded_sweep",
            lambda: type(facts)(facts.base, [_with(kept[r], b) for r, b in bits.items()], facts.where),
        )

    return change


def _with(run, bits):
    return type(run)(**{**vars(run), "documentation": bits})


def test_quality_verdicts_follow_the_record(claims, swept):
    swept({None: 1.5, 1: 1.5, 8: 1.5, 64: 1.5})
    assert judge(claims["B-lora-quality"]).outcome == HOLDS and judge(claims["B-lora-small-rank"]).outcome == NOT


def test_quality_verdicts_follow_another_record(claims, swept):
    swept({None: 1.5, 1: 1.9, 8: 1.8, 64: 1.7})
    assert judge(claims["B-lora-quality"]).outcome == NOT and judge(claims["B-lora-small-rank"]).outcome == HOLDS


def test_a_missing_record_waits(claims, monkeypatch, tmp_path):
    monkeypatch.setattr("vramlab.finetuning.data_path", lambda *parts: tmp_path.joinpath(*parts))
    assert judge(claims["B-lora-quality"]).outcome == ledger.WAITS


def test_the_record_is_whole():
    sweep = recorded_sweep()
    assert [run.r for run in sweep.runs if run.targets == "all-linear"] == [1, 2, 4, 8, 16, 32, 64]
    assert all(run.documentation < sweep.base["documentation"] for run in sweep.runs)
    assert json.dumps(sweep.where) and {"hardware", "date", "versions", "recipe"} <= set(sweep.where)
