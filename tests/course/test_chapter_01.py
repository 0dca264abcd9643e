"""Chapter 01's own functions: the formats of few bits agree with their specifications, number by
number.
"""

import gc
import importlib.util
import json
import math
import time
import weakref

import pytest
import torch
from vramlab_course.base_model import base_model_path, held_out, load_base_model
from vramlab_course.chapters.chapter_01 import (
    best_seconds,
    bits_by_piece,
    continued,
    size_and_bits,
)
from vramlab_course.finetuning import recorded_formats
from vramlab_course.number_formats import E2M1, E4M3FN
from vramlab_course.quantizers import fp8, mxfp4, nvfp4


@pytest.fixture(params=[0, 1, 2])
def numbers(request):
    """Normal numbers, the same much smaller and with an outlier, and numbers halfway between two of
    fp4's.
    """
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(request.param))
    if request.param == 1:
        drawn = drawn / 1000
        drawn[3, 5] = 0.2
    if request.param == 2:
        drawn = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 512).reshape(64, 64)
    return drawn


def test_mxfp4_is_that_of_the_specification(numbers):
    """OCP MX 1.0, section 6.3: the scale is the largest power of two within the block's largest
    magnitude, divided by the largest power of two of the elements' format; elements round to
    nearest, ties to even, and saturate."""
    for block, found in zip(numbers.reshape(-1, 32), mxfp4(numbers).reshape(-1, 32), strict=True):
        exponent = math.frexp(block.abs().max().item())[1] - 1
        scale = 2.0 ** (exponent - 2)
        assert found.tolist() == [E2M1.round(x / scale) * scale for x in block.tolist()]


def test_nvfp4_has_scales_of_e4m3_within_one_of_fp32(numbers):
    """As Transformer Engine and torchao compute them: amax / (6 · 448) for the tensor, amax / 6 for
    a block in e4m3.
    """
    whole = numbers.abs().max() / (6 * 448)
    for block, found in zip(numbers.reshape(-1, 16), nvfp4(numbers).reshape(-1, 16), strict=True):
        fraction = (block.abs().max() / 6 / whole).item()
        scale = torch.tensor(E4M3FN.round(max(fraction, 2.0**-6))) * whole
        levels = [E2M1.round(x) for x in (block / scale).tolist()]
        assert torch.equal(found, torch.tensor(levels) * scale)


def test_fp8_uses_its_whole_range(numbers):
    found = fp8(numbers)
    assert found.abs().max() == pytest.approx(numbers.abs().max().item(), rel=1e-6)
    assert (
        (found - numbers).abs() <= numbers.abs() * 2**-4 + numbers.abs().max() * 2**-10 / 448
    ).all()


@pytest.mark.parametrize("way", [mxfp4, nvfp4, fp8])
def test_zeros_come_back_as_zeros(way):
    numbers = torch.zeros(4, 64)
    assert not way(numbers).any()
    numbers[1] = 1.0
    assert torch.equal(way(numbers), numbers)


def test_a_beginning_is_continued_by_the_likeliest_tokens():
    model = load_base_model()
    (line,) = continued(model, "class Error(", tokens=3)
    generated = continued(model, "class Error(", tokens=6)[0]
    assert line.startswith("class Error( → ") and generated.startswith(line[:-1])


def test_of_several_runs_the_shortest_counts():
    pauses = iter([0.02, 0.002, 0.02])
    assert 2 <= 1e3 * best_seconds(lambda: time.sleep(next(pauses)), times=2) < 20


def test_a_model_is_measured_window_by_window_and_freed():
    made = []

    def load(config):
        model = load_base_model()
        model.get_memory_footprint = lambda: config
        made.append(weakref.ref(model))
        return model

    windows = torch.arange(60).reshape(3, 1, 20)
    size, bits = size_and_bits(load, 5, windows)
    assert size == 5 and bits.shape == (3,)
    loss = load_base_model()(input_ids=windows[1], labels=windows[1]).loss.item()
    assert bits[1].item() == pytest.approx(loss / math.log(2))
    gc.collect()
    assert made[0]() is None


RECORD = recorded_formats()


def test_the_record_of_formats_is_of_every_held_out_piece():
    first = bits_by_piece(load_base_model(), held_out(1_200))
    assert RECORD["as trained"][: len(first)] == pytest.approx(first.tolist(), rel=1e-3)
    assert {len(RECORD["as trained"]), *map(len, RECORD["more"].values())} == {248}


@pytest.mark.slow  # three minutes, and nothing but a new record or another quantizer changes it
def test_the_record_of_formats_can_be_made_again(tmp_path):
    path = base_model_path("formats.py")
    spec = importlib.util.spec_from_file_location("formats", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(["--out", str(tmp_path / "formats.json")])
    found = json.loads((tmp_path / "formats.json").read_text())
    assert found["more"].keys() == RECORD["more"].keys()
    for name, more in found["more"].items():
        assert more == pytest.approx(RECORD["more"][name], abs=0.01)
