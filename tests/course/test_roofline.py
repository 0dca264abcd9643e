"""The roofline's arithmetic against the GPU table, and that both measurements time what they say."""

import pytest
from vramlab.hardware.gpu import find_gpu
from vramlab.report.errors import MeasurementError
from vramlab_course import roofline
from vramlab_course.roofline import RooflineError, attainable, copy_bandwidth, matmul_intensity, matmul_rate


@pytest.mark.parametrize("name", ["T4", "A100", "H200"])
def test_it_bends_at_the_ridge(name):
    gpu = find_gpu(name)
    peak, ridge = gpu.flops("fp16"), gpu.ridge("fp16")
    assert attainable(ridge, peak, gpu.bandwidth) == pytest.approx(peak)
    assert attainable(ridge / 4, peak, gpu.bandwidth) == pytest.approx(peak / 4)
    assert attainable(ridge * 4, peak, gpu.bandwidth) == peak


def test_intensity_counts_each_number_once():
    assert matmul_intensity(4096, 4096, 4096, 2) == pytest.approx(4096 / 3)
    assert matmul_intensity(1, 4096, 4096, 2) == pytest.approx(1, rel=1e-3)  # a vector: each weight is read for two
    assert matmul_intensity(8, 8, 8, 4) == matmul_intensity(8, 8, 8, 2) / 2


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_figures_that_no_roofline_has(wrong):
    with pytest.raises(RooflineError, match="above zero"):
        attainable(*wrong)
    with pytest.raises(RooflineError, match="above zero"):
        matmul_intensity(*wrong, 2)


def test_rates_are_amount_over_time(monkeypatch):
    """With a clock that says a second a turn, the rate is the amount, and the first turn is not counted."""
    ticks = iter([0, 9, 10, 10.1, 20, 20.2, 30, 30.1])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(roofline, "PATIENCE", 100)
    found = roofline._rate(lambda: None, 10, "cpu", repeats=3)
    assert found.best == pytest.approx(100) and found.median == pytest.approx(100)


def test_a_slow_format_is_not_repeated(monkeypatch):
    ticks = iter([0, 5])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(ticks))
    assert roofline._rate(lambda: None, 10, "cpu", repeats=3).best == 2


def test_measured_here():
    found = copy_bandwidth("cpu", size=1 << 20, repeats=3)
    assert 1e8 < found.median <= found.best < 1e13
    assert 1e7 < matmul_rate("fp32", "cpu", size=128, repeats=3).best < 1e14


@pytest.mark.parametrize("form, device", [("tf32", "cpu"), ("int7", "cpu"), ("fp32", "tpu")])
def test_what_cannot_be_measured_is_refused(form, device):
    with pytest.raises(MeasurementError):
        matmul_rate(form, device)


def test_the_readers_matmul_setting_is_left_alone():
    import torch

    before = torch.get_float32_matmul_precision()
    matmul_rate("fp32", "cpu", size=32)
    assert torch.get_float32_matmul_precision() == before
