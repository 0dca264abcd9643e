"""The ledger of chapter 01: every verdict is computed, and other facts would give other verdicts."""

import pytest
import torch
from claim_checks import depends_on_its_figure
from vramlab.chapters import claims_01
from vramlab.claims import HOLDS, NOT, UNDER, Verdict, judge, ledger, load_claims
from vramlab.numerics import Format


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {verdict.claim.name: verdict for verdict in ledger("01")}


def test_all_are_judged_and_none_waits(verdicts):
    assert {verdict.outcome for verdict in verdicts.values()} == {HOLDS, UNDER, NOT}
    assert {verdict.claim.source for verdict in verdicts.values()} == {"A", "B", "C"} and len(verdicts) > 25


def test_the_slips_are_found(verdicts):
    assert {name for name, v in verdicts.items() if v.outcome == NOT} == {"B-seven-billion", "B-eight-bit-15"}
    (fifteen,) = verdicts["B-eight-bit-15"].findings.values()
    assert fifteen.value == 223 == round((15 + 20) / 40 * 255)
    assert verdicts["B-block-1"].holding == ["cut off"] and verdicts["B-block-2"].holding == ["rounded"]
    assert "B's own example" not in verdicts["B-blocks"].holding


def test_another_figure_in_the_source_would_get_another_verdict(verdicts):
    assert [name for name, verdict in verdicts.items() if not depends_on_its_figure(verdict)] == []


def test_other_formats_would_get_other_verdicts(monkeypatch):
    names = ("B-bf16-range", "B-bf16-exponent", "A-tf32-precision", "A-tf32-bf16", "B-bf16-holds")
    before = {name: judge(load_claims("01")[name]).holding for name in names}
    swapped = {"bf16": Format("bf16", 5, 10), "tf32": Format("tf32", 8, 7)}
    monkeypatch.setattr(claims_01, "FORMATS", {**claims_01.FORMATS, **swapped})
    assert all(judge(load_claims("01")[name]).holding != before[name] for name in names)


def test_a_format_that_loses_too_much_would_not_pass_for_fp32(monkeypatch):
    claim = load_claims("01")["B-bf16-quality"]
    monkeypatch.setitem(claims_01.FORMATS, "bf16", Format("coarse", 4, 1))
    claims_01._bits_per_byte.cache_clear()
    assert judge(claim).outcome == NOT
    claims_01._bits_per_byte.cache_clear()


def test_a_network_that_learns_nothing_is_said_to_learn_nothing():
    assert claims_01.learns("bfloat16", steps=1).value is False
    assert claims_01.needs_scaling(4, steps=1).value is False  # nothing learned with scaling either


def test_another_kind_of_rounding_would_not_give_the_printed_codes(monkeypatch):
    monkeypatch.setattr(claims_01, "NINE", [*claims_01.NINE[:-2], 0, 15])
    assert claims_01.other_codes().value is False


def test_a_smaller_number_would_be_the_largest(monkeypatch):
    monkeypatch.setitem(claims_01.BLOCKS, 1, [1, -7, 3])
    assert claims_01.largest(1).value == 7 and claims_01.largest().value == 20


def test_half_precision_saves_bytes_and_time_but_no_operations(verdicts):
    assert verdicts["A-half-work"].holding == ["bytes of its operands", "time at an A100's peak rates"]
    assert not claims_01.half_is_less("operations").value


def test_lines_that_turn_nothing_on_would_be_seen(monkeypatch):
    monkeypatch.setattr(claims_01, "_tf32_switches", lambda turned_on=False: (not turned_on, turned_on))
    assert not claims_01.tf32_turned_on("matmuls").value and claims_01.tf32_turned_on("convolutions").value


def test_blocks_without_an_outlier_help_less(monkeypatch):
    monkeypatch.setattr(claims_01, "normal_numbers", lambda outlier=None: torch.randn(4096))
    assert claims_01.blocks_help("outlier").value is False
