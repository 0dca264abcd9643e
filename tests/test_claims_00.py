"""The ledger of chapter 00: every verdict is computed, and other facts would give other verdicts."""

import pytest
from claim_checks import depends_on_its_figure
from vramlab.chapters import claims_00
from vramlab.claims import HOLDS, NOT, UNDER, Verdict, experiments, judge, ledger, load_claims
from vramlab.nvml import Sensors
from vramlab.report import Interval

EXPECTED = {
    "E-eight-pin": HOLDS,
    "E-six-pin": HOLDS,
    "E-twelve-pin": UNDER,
    "E-sockets": UNDER,
    "E-split": UNDER,
    "E-throttle": UNDER,
    "E-good-temperature": UNDER,
    "E-best-temperature": UNDER,
    "E-shutdown": UNDER,
    "E-lifetime": HOLDS,
    "E-nv2": HOLDS,
    "E-phb": HOLDS,
    "E-phb-slower": UNDER,
    "E-ddp": UNDER,
    "E-zero": UNDER,
    "E-generation": UNDER,
    "E-ga102-generation": HOLDS,
    "E-ga102-links": HOLDS,
    "E-ga102-link": HOLDS,
    "E-ga102": HOLDS,
    "E-ga102-both": HOLDS,
    "E-two-cards": HOLDS,
    "E-more-links": UNDER,
    "E-fast": UNDER,
    "E-slow": UNDER,
    "E-faster": UNDER,
    "E-samples": UNDER,
    "E-samples-slow": UNDER,
    "E-epoch": UNDER,
    "E-switch": UNDER,
    "E-commands": UNDER,
    "E-titan": HOLDS,
    "E-titan-links": HOLDS,
    "D-environment": UNDER,
    "D-image": UNDER,
    "D-image-contents": HOLDS,
    "C-nvml": UNDER,
    "C-nvml-package": UNDER,
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """On a machine without NVML's sensors, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims_00, "nvml_snapshot", lambda: Sensors(False))
        return {verdict.claim.name: verdict for verdict in ledger("00")}


def test_verdicts(verdicts):
    assert {name: verdict.outcome for name, verdict in verdicts.items()} == EXPECTED
    assert {verdict.claim.experiment for verdict in verdicts.values()} == set(experiments("00"))


def test_the_slips_are_found(verdicts):
    assert verdicts["E-fast"].holding == ["E's log, cut off"]
    assert verdicts["E-samples"].holding == ["steps"] and verdicts["E-faster"].holding == ["less time"]
    assert verdicts["E-commands"].holding == ["with NVLink"] and verdicts["E-zero"].holding == ["stage 3"]


def test_another_figure_in_the_source_would_get_another_verdict(verdicts):
    assert [name for name, verdict in verdicts.items() if not depends_on_its_figure(verdict)] == []


def test_the_slow_run_follows_from_bytes_and_bandwidth(monkeypatch):
    """By hand: 497.8 MB a step, 200 steps, the NVLink run as the base."""
    found = claims_00.seconds_without_nvlink("host").value
    sent = 200 * 4 * 124_439_808
    base = 101.9003 - sent / 50e9
    assert found.low == pytest.approx(base + sent / 3.75e9) and found.high == pytest.approx(base + sent / 2.44e9)
    monkeypatch.setattr(claims_00, "HOST_PATH", (10e9, 12e9))
    assert judge(load_claims("00")["E-slow"]).outcome == NOT


def test_other_facts_would_get_other_verdicts(monkeypatch):
    claims = load_claims("00")
    assert "RTX 3090, target" in judge(claims["E-throttle"]).holding
    monkeypatch.setitem(claims_00.THRESHOLDS["RTX 3090"], "target", 82)
    assert "RTX 3090, target" not in judge(claims["E-throttle"]).holding
    monkeypatch.setitem(claims_00.RUNTIME, "no P2P", 103.0)
    assert "E's own run" in judge(claims["E-ddp"]).holding and judge(claims["E-faster"]).outcome == NOT
    monkeypatch.setitem(claims_00.P2P, "PCIe", "SHM")
    assert judge(claims["E-switch"]).outcome == HOLDS
    monkeypatch.setitem(claims_00.NVLINK, "H100 SXM", (4, 18, 26e9))
    monkeypatch.setitem(claims_00.NVLINK, "A100 80GB", (3, 12, 25.5e9))
    assert judge(claims["E-generation"]).outcome == HOLDS
    monkeypatch.setitem(claims_00.MATRICES, "no NVLink", claims_00.MATRICES["NVLink"])
    assert judge(claims["E-phb"]).outcome == NOT


@pytest.mark.parametrize("degrees, holds", [(87, True), (93, False)])
def test_the_card_of_this_machine_is_asked(monkeypatch, degrees, holds):
    seen = Sensors(True, name="a card", slowdown_temperature=degrees)
    monkeypatch.setattr(claims_00, "nvml_snapshot", lambda: seen)
    found = claims_00.throttles_at()
    assert found.value is holds and found.witness == "measured"


def test_the_epoch_tells_the_sample_length():
    shorter, longer = claims_00.epochs(512).value, claims_00.epochs(1024).value
    assert isinstance(longer, Interval) and longer.low == pytest.approx(2 * shorter.low)
    assert longer.low < 69 < longer.high and shorter.high < 69


@pytest.mark.parametrize("part, inside", [("Python packages", True), ("driver and kernel", False)])
def test_what_an_image_fixes(part, inside):
    assert claims_00.fixes("image", part).value is inside


@pytest.mark.parametrize("degrees, good", [(84, True), (79, False)])
def test_a_card_that_slows_down_at_79_degrees_is_no_good_at_79(monkeypatch, degrees, good):
    monkeypatch.setattr(claims_00, "nvml_snapshot", lambda: Sensors(True, name="a card", slowdown_temperature=degrees))
    found = claims_00.keeps_its_clocks(79)
    assert found.value is good and found.witness == "measured"


def test_what_a_sensor_says_is_judged_where_there_is_one(monkeypatch):
    for degrees, stops in ((0, False), (97, True)):
        seen = Sensors(True, name="a card", shutdown_temperature=degrees)
        monkeypatch.setattr(claims_00, "nvml_snapshot", lambda seen=seen: seen)
        assert claims_00.shuts_down().value is stops
    monkeypatch.setitem(
        claims_00.THRESHOLDS["TITAN RTX"], "shutdown", 80
    )  # below the maximum: that is no stop for heat
    assert not claims_00.shuts_down("TITAN RTX").value
    monkeypatch.setattr(claims_00, "nvml_snapshot", lambda: Sensors(True, used=700 * 2**20))
    assert claims_00.pynvml_reads(True).value and "700 MiB" in claims_00.pynvml_reads(True).configuration


def test_a_hotter_chip_wears_out_faster():
    """By hand for 0.9 eV: exp(0.9 / 8.617e-5 · (1 / 343.15 - 1 / 363.15)) = 5.34."""
    assert claims_00.wears("copper").value == pytest.approx(5.34, rel=0.01)
    assert claims_00.wears("copper", 70, 70).value == 1 > claims_00.wears("copper", 70, 60).value


def test_what_the_image_lacks_is_not_in_it():
    assert claims_00.image_has("CUDA").value and not claims_00.image_has("transformers").value


def test_the_package_of_pynvml_is_read_from_what_is_installed():
    assert claims_00.pynvml_comes_from("nvidia-ml-py").value
    assert not claims_00.pynvml_comes_from("nvidia-ml-py3").value and not claims_00.pynvml_comes_from("pytest").value
