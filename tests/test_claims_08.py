"""Chapter 08's claims: every verdict is computed by a search, and other facts would give other verdicts."""

import dataclasses

import pytest
from claim_checks import depends_on_its_figure
from vramlab.chapters import claims_08 as chapter
from vramlab.claims import HOLDS, NOT, UNDER, Verdict, judge, ledger, load_claims

CLAIMS = load_claims("08")
EXPECTED = {
    "A-combine": UNDER,
    "A-accumulate-large": UNDER,
    "A-billions": UNDER,
    "C-batch-by-need": HOLDS,
    "E-bigger-gpu": HOLDS,
    "E-more-gpus": UNDER,
    "E-offload": UNDER,
    "E-three-ways": NOT,
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {verdict.claim.name: verdict for verdict in ledger("08")}


def test_every_claim_has_the_verdict_that_the_text_says(verdicts):
    assert {name: verdict.outcome for name, verdict in verdicts.items()} == EXPECTED


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "A-billions"])
def test_another_figure_in_the_source_would_get_another_verdict(verdicts, name):
    assert depends_on_its_figure(verdicts[name])


def test_billions_have_an_end(verdicts):
    claim = dataclasses.replace(CLAIMS["A-billions"], quoted=100)
    assert Verdict(claim, verdicts["A-billions"].findings).outcome == NOT


def test_accumulation_helps_only_where_the_model_itself_fits(verdicts):
    assert verdicts["A-accumulate-large"].holding == ["Llama 3.1 8B on an H200"]
    assert chapter.accumulation_alone("gpt2", "RTX 4090", 256).value is True


def test_one_switch_is_enough_where_memory_is_not_short(verdicts):
    assert "GPT-2 on an RTX 4090, mixed" not in verdicts["A-combine"].holding
    assert "several" not in chapter.combined("gpt2", "T4", 64, "fp32").configuration


def test_what_fits_before_is_not_made_to_fit():
    found = chapter.makes_it_fit("gpt2", "T4", 128, "full", {"gpu": "H200"})
    assert found.value is False
    assert chapter.nothing_else("gpt2", "T4", 128, "full", {"method": "lora"}).value is True


def test_replicas_divide_nothing():
    """DDP on eight cards needs what one card needs, and its buckets."""
    (case,) = (name for name, found in judge(CLAIMS["E-more-gpus"]).findings.items() if not found.value)
    assert "DDP" in case


def test_each_recipe_of_the_space_keeps_the_batch():
    assert chapter.keeps_the_batch("gpt2", "T4", 12)
