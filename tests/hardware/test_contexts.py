"""What a process holds outside torch's allocator: each reading has a source, and a card takes its
own or its like's.
"""

import json
import re

import pytest
from vramlab import GiB, LoRA, MiB, Quantization, Recipe, RecipeError
from vramlab.base.data import data_path
from vramlab.hardware.contexts import CONVOLUTIONS, LESS, Room, context_on, readings
from vramlab.hardware.gpu import find_gpu, gpu_names
from vramlab.recipe.options import Sharding
from vramlab.recipe.process_context import context_of, room_on
from vramlab.report.report import Interval

# A public repository, a package, or a record of ours: what can be looked up again.
NAMED = re.compile(r"[\w.-]+/[\w.-]+( (issue|pull request) \d+|, \w)|fitcheck-llm \d")
USUAL = [
    one for one in readings() if one.loaded not in (*LESS, CONVOLUTIONS) and one.gpu in gpu_names()
]


def test_each_reading_has_a_source_and_follows_from_its_message():
    rows = json.loads(data_path("contexts.json").read_text(encoding="utf-8"))["readings"]
    for row, one in zip(rows, readings(), strict=True):
        assert NAMED.match(row["source"]) and 90 * MiB < one.size < 4 * GiB
        assert ("mib" in row) != ("process" in row)
    there = next(one for one in readings() if one.source.startswith("lrzjason/T2ITrainer issue 37"))
    assert there.size == pytest.approx((22.39 - 21.58) * GiB - 350.11 * MiB, abs=2)


def test_likely_is_low_in_about_half_of_the_readings_and_high_in_none():
    low = above = 0
    for one in USUAL:
        needs = context_on(find_gpu(one.gpu), one.loaded, one.ranks)
        assert needs.low <= needs.value <= needs.high
        low += needs.value < one.size
        above += needs.high < one.size
    assert len(USUAL) > 40 and 0.2 <= low / len(USUAL) <= 0.5 and above == 0


@pytest.mark.parametrize(
    ("card", "value", "high"),
    [
        ("T4", 134, 151),
        ("RTX 4090", 476, 515),
        ("RTX 5090", 610, 630),
        ("A100 80GB", 512, 533),
        ("H100 SXM", 750, 760),
    ],
)
def test_a_card_with_readings_takes_its_own(card, value, high):
    needs = context_on(find_gpu(card))
    assert needs.value // MiB == value and needs.high <= high * MiB


def test_a_card_that_nobody_read_takes_the_middle_of_its_like_and_the_highest_of_all():
    l4, rtx_4090 = context_on(find_gpu("L4")), context_on(find_gpu("RTX 4090"))
    assert l4.value == rtx_4090.value  # of its compute capability and class of memory
    b200 = context_on(find_gpu("B200"))
    assert b200.value == context_on(find_gpu("H200")).value
    assert b200.high == max(one.size + one.off for one in USUAL if one.ranks == 1)


def test_what_is_loaded_and_how_many_ranks_there_are_count():
    h100, rtx = find_gpu("H100 SXM"), find_gpu("RTX 4090")
    fields = {"model": "gpt2", "batch_size": 1, "seq_len": 64}
    plain = context_of(Recipe(**fields, precision="fp32"), h100)
    flash = context_of(Recipe(**fields, precision="bf16-mixed"), h100)
    four_bits = Recipe(
        **fields, precision="bf16-mixed", lora=LoRA(r=8), quantization=Quantization("nf4")
    )
    assert plain.value == context_of(four_bits, h100).value < flash.value
    pair = Recipe(**fields, sharding=Sharding(3, 2, "fsdp"))
    assert context_of(pair, rtx).high > 1.5 * GiB > context_of(Recipe(**fields), rtx).high
    vision = Recipe("vit-base", batch_size=1)
    assert context_of(vision, rtx).high > 2 * GiB and context_of(vision, rtx).value < 512 * MiB


def test_what_others_hold_is_taken_off_the_card():
    t4 = find_gpu("T4")
    room = room_on(None, t4, other_memory=GiB)
    assert room.usable == t4.total - GiB and room.left("high") == room.usable - context_on(t4).high
    assert str(Room(t4, 4 * GiB, Interval(GiB, GiB, 2 * GiB))).startswith(
        "granted to the allocator, without expandable"
    )
    for wrong in (-1, t4.total):
        with pytest.raises(RecipeError, match="other_memory"):
            room_on(None, t4, other_memory=wrong)
