"""What chapter 09 says of Answer.AI's runs on two cards follows from the stored numbers."""

import re

import pytest
from told import text_of
from transformers import LlamaConfig
from vramlab import LoRA, Quantization, Recipe, Sharding, simulate
from vramlab.recipe.options import Loop
from vramlab.report.report import GiB
from vramlab_course.chapters.chapter_09 import Ways, fsdp_step, gathered, published
from vramlab_course.published import json_of

STORED = json_of("elsewhere/answer_ai")
SIMULATED = [run for run in STORED["runs"] if "simulated" in run]


@pytest.fixture
def chapter():
    return text_of("09_")


def test_the_chapters_tables_are_the_stored_runs(chapter):
    simulated, found = [], []
    for method, sharding, batch in (
        ("QLoRA", "DDP", 8),
        ("QLoRA", "FSDP", 10),
        ("LoRA", "DDP", 4),
        ("LoRA", "FSDP", 6),
    ):
        key = method.lower(), sharding.lower(), batch
        slow, fast = (published()[gpu, *key] for gpu in ("RTX 3090", "RTX 4090"))
        row = f"| {method}, {sharding} | {batch} "
        assert row + f"| {slow['seconds']:,} s | {fast['seconds']:,} s |" in chapter
        simulated.append(f"{slow['simulated']['reserved_gib']:.1f}")
        found.append(f"{slow['peak_reserved_gib']:.1f}")
    listed = [", ".join(sizes[:-1]) + f" and {sizes[-1]}" for sizes in (simulated, found)]
    assert f"reserve {listed[0]} GiB; published are {listed[1]}." in chapter
    for batch in (1, 4, 6):
        run = fsdp_step("RTX 3090", "lora", batch)
        seconds = run.seconds, run.computing, run.waiting
        row = " | ".join(f"{each:.1f}" for each in seconds)
        assert f"| {run.tokens:,} | {row} |" in chapter


def test_a_step_waits_for_its_bytes_and_not_for_its_tokens(chapter):
    few, more, most = (fsdp_step("RTX 3090", "lora", batch) for batch in (1, 4, 6))
    assert more.waiting == pytest.approx(most.waiting, rel=0.01)
    assert few.waiting == pytest.approx(most.waiting, abs=0.6)
    assert "Look at the last column: a step waits about 4 s" in chapter
    assert round(few.waiting) == round(most.waiting) == 4
    assert f"{2 * gathered('lora') / 1e9:.0f} GB" == "13 GB"
    link = 2 * gathered("lora") / most.waiting
    assert f"{link / 1e9:.1f}" == "3.4"
    # The other weights, in 4 bits, over the link that these two runs have given.
    quarter = fsdp_step("RTX 3090", "qlora", 4).waiting
    assert quarter == pytest.approx(2 * gathered("qlora") / link, rel=0.05)
    ways = Ways(1.72 / 2048, 3.4e9)
    for method, batch in (("lora", 4), ("lora", 6), ("qlora", 4), ("qlora", 10)):
        run = fsdp_step("RTX 3090", method, batch)
        assert run.seconds / run.computing == pytest.approx(
            ways.unhidden(run.tokens, method), rel=0.02
        )
    assert ways.hidden(6810) == 1 < ways.hidden(6750)
    assert f"{ways.tensor(2048):.1f}" == f"{ways.tensor(30_000):.1f}" == "1.9"


def test_qlora_without_the_cut_is_faster_by_what_the_chapter_says(chapter):
    shorter = []
    for gpu in ("RTX 3090", "RTX 4090"):
        seconds = [
            published()[gpu, *key]["seconds"] for key in (("qlora", "ddp", 8), ("lora", "fsdp", 6))
        ]
        shorter.append(seconds[1] - seconds[0])
    found = re.search(r"by (\d+) s over the old board's link, and by (\d+) s", chapter)
    assert shorter == [int(each) for each in found.groups()]


def test_what_was_simulated_reaches_what_was_published():
    for run in SIMULATED:
        found, reserved = run["simulated"], run["peak_reserved_gib"]
        if "peak_allocated_gib" in run:  # loading decides what it reserves: the file's text
            assert found["tensors_gib"] == pytest.approx(run["peak_allocated_gib"], rel=0.01)
        else:
            assert found["reserved_from_gib"] <= reserved <= found["reserved_to_gib"]
            assert found["reserved_gib"] == pytest.approx(reserved, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    SIMULATED,
    ids=lambda run: f"{run['model']} {run['method']} {run['sharding']} {run['batch_size']}",
)
def test_the_stored_simulation_is_made_again(run):
    lora = STORED["recipe"]["lora"]
    sizes = STORED["models"].get(run["model"])
    recipe = Recipe(
        LlamaConfig(**sizes) if sizes else run["model"],
        run["batch_size"],
        run["tokens"],
        STORED["recipe"]["precision"],
        "adamw_torch",
        lora=LoRA(**lora, autocast_adapter_dtype=False),
        quantization=Quantization(double=True, prepare=False) if run["method"] == "qlora" else None,
        gradient_checkpointing=True,
        attn_implementation="sdpa",
        sharding=Sharding(
            3 if run["sharding"] == "fsdp" else 0, 2, run["sharding"], run["offload"]
        ),
        loop=Loop("script", keep_outputs="step", outputs_to_fp32=False, max_grad_norm=None),
    )
    report = simulate(recipe, gpu="RTX 3090")
    reserved = report.reserved
    found = report.peak.total, reserved.value, reserved.low, reserved.high
    assert [round(each / GiB, 2) for each in found] == pytest.approx(
        list(run["simulated"].values()), abs=0.02
    )
