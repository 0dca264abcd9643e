"""Chapter 04's claims: what ranks hold is simulated, what they send is counted from real ones; every verdict can fail."""

import pytest
from claim_checks import depends_on_its_figure
from vramlab.chapters import claims_04
from vramlab.claims import HOLDS, NOT, UNDER, Verdict, experiments, ledger, load_claims

EXPECTED = {
    "B-dp-speed": UNDER,
    "B-dp-copy": HOLDS,
    "B-model-parallel-copy": UNDER,
    "B-pipeline-layers": HOLDS,
    "B-pipeline-order": UNDER,
    "B-tensor-parts": UNDER,
    "B-zero-both": UNDER,
    "B-zero-work": UNDER,
    "B-zero-part": UNDER,
    "B-zero-when-needed": UNDER,
    "B-accumulation-sync": UNDER,
    "C-zero-parameters": HOLDS,
    "C-zero-redundancy": UNDER,
    "D-ddp-identical": HOLDS,
    "D-ddp-backward": HOLDS,
    "D-zero1-share": HOLDS,
    "D-zero1-collects": NOT,
    "D-zero1-backward": NOT,
    "D-zero2-gradients": HOLDS,
    "D-zero2-broadcast": UNDER,
    "D-zero3-fetch": UNDER,
    "D-fsdp-wrap": HOLDS,
    "D-fsdp-optimizer": HOLDS,
    "D-shard-grad-op": HOLDS,
    "D-one-unit": HOLDS,
    "D-one-unit-memory": UNDER,
    "D-submodules": HOLDS,
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {verdict.claim.name: verdict for verdict in ledger("04")}


def test_every_claim_of_the_chapter_is_tested_here():
    claims = load_claims("04")
    assert set(claims) == set(EXPECTED)
    assert {claim.experiment for claim in claims.values()} == set(experiments("04"))


def test_verdicts(verdicts):
    assert {name: verdict.outcome for name, verdict in verdicts.items()} == EXPECTED


def test_another_figure_would_get_another_verdict(verdicts):
    assert [name for name, verdict in verdicts.items() if not depends_on_its_figure(verdict)] == []


def test_which_conditions_hold(verdicts):
    assert verdicts["B-zero-part"].holding == ["stages 2 and 3, FSDP"]
    assert verdicts["B-zero-work"].holding == ["tensor"]
    assert verdicts["B-model-parallel-copy"].holding == ["data parallel, which is meant"]
    assert verdicts["C-zero-redundancy"].holding == ["states, stage 1", "gradients, stage 2", "parameters, stage 3"]
    assert verdicts["D-zero3-fetch"].holding == ["forward"]  # the tied embedding is kept to the backward pass
    assert verdicts["B-accumulation-sync"].holding == ["DDP without no_sync"]


def test_experiments_can_say_the_opposite():
    assert claims_04.optimizer_reaches("after").value and not claims_04.optimizer_reaches("before").value
    assert not claims_04.wrapper_exists("fully_wrapped").value
    assert not claims_04.peak_falls("DDP", "ZeRO-1").value
    assert not claims_04.holds_a_part("DDP").value and claims_04.holds_a_part("pipeline").value
    assert claims_04.larger_models(0, 8).value == 1
    assert claims_04.gathered_at_once("a unit each").value == 1
    assert claims_04.synchronised(2, no_sync=False).value == 2
