"""Against PyTorch's own CUDA allocator, which ran the steps on a stand-in for a GPU (`stand_in/`):
its sizes, not ours.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from quick import params
from vramlab import Recipe, predict, simulate, simulate_evaluation
from vramlab.hardware.gpu import find_gpu
from vramlab.hardware.kernels import efficient_scratch, reduction_scratch
from vramlab.recipe.diffusion import Diffusion
from vramlab.recipe.evaluation import Evaluation
from vramlab.simulation.simulate_diffusion import simulate_diffusion

FOLDER = Path(__file__).parent.parent / "stand_in"
CARDS = {
    "h200": ("H200", 24),
    "rtx-3090": ("RTX 3090", 5),
    "t4": ("T4", 5),
}  # one run in so many is simulated
LATER = {
    **{name: card for name, (card, _) in CARDS.items()},
    "rtx-4090": "RTX 4090",
    "h100": "H100 SXM",
}


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("card", read("reductions"))
def test_buffers_of_reductions(card):
    """(shape, strides, dimensions, bytes a value, blocks that the kernel took) of sums, means and
    norms.
    """
    for shape, strides, reduced, itemsize, blocks in read("reductions")[card]:
        found = reduction_scratch(shape, strides, reduced, itemsize, find_gpu(card).chip)
        assert sorted(set(found)) == blocks, (shape, strides, reduced, itemsize)


@pytest.mark.parametrize("card", read("attention"))
def test_workspace_of_memory_efficient_attention(card):
    """(heads, tokens, head size, bytes a value, dropout, bytes of the workspace) of the backward
    pass.
    """
    for heads, tokens, dim, itemsize, dropout, workspace in read("attention")[card]:
        blocks = efficient_scratch(
            heads, (tokens, tokens), (dim, dim), itemsize, dropout, find_gpu(card).chip
        )
        delta, product = 4 * heads * tokens, 4 * heads * tokens * dim
        in_its_place = (
            [product, delta, delta]
            if itemsize == 4 and product + delta > workspace
            else [delta, workspace]
        )
        assert blocks == in_its_place, (heads, tokens, dim, itemsize, dropout)


def caches_as_recorded(recipe):
    """Tell whether the installed transformers caches what the recorded one did.

    Since 5.24 a cache's values have their own dtype, and no longer the keys' fp32.
    """
    minor = int(version("transformers").split(".")[1])
    return minor < 24 or not recipe.get("loop", {}).get("use_cache")


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("part", params([1, 8], [8]), ids=["all", "an eighth"])
def test_steps(name, part):
    card, every = CARDS[name]
    every *= part
    runs = [run for run in read(name)["runs"] if "row" not in run][::every]
    errors = []
    for run in runs:
        simulated = simulate(Recipe(**run["recipe"]), gpu=card)
        asked, held = (
            getattr(simulated, what) / run[what] - 1 for what in ("requested", "allocated")
        )
        assert abs(asked) < 0.004 and abs(held) < 0.01, (run["recipe"], asked, held)
        if caches_as_recorded(run["recipe"]):
            errors.append(abs(asked))
    assert sum(error < 1e-5 for error in errors) > 0.8 * len(errors), (
        "what is asked for is nearly always met to the byte"
    )


MENDED = {
    "experts one by one below 8.0, with a gradient for frozen ones": ("t4", "mixtral-8x7b"),
    "PEFT casts no input of a 4-bit layer's adapter under autocast": (
        "h200",
        "405b",
        "adafactor",
        "fp4",
    ),
    "backward's workspace is taken at its first product": (
        "h200",
        "gemma-3-1b",
        '"gradient_checkpointing": true',
    ),
    "DeepSpeed's streams do not share blocks": (
        "h200",
        '"deepspeed"',
        "3.2-1b",
        '"parameters"',
        '"plain"',
    ),
}


@pytest.mark.parametrize("why", params(MENDED, list(MENDED)[:3]))
def test_what_was_off(why):
    name, *words = MENDED[why]
    [run] = (
        run
        for run in read(name)["runs"]
        if all(word in json.dumps(run["recipe"]) for word in words)
    )
    recipe, card = Recipe(**run["recipe"]), CARDS[name][0]
    simulated = simulate(recipe, gpu=card)
    assert abs(simulated.requested / run["requested"] - 1) < 1e-5
    assert abs(simulated.allocated / run["allocated"] - 1) < 1e-3
    assert (
        recipe.quantization or abs(simulated.reserved.value / run["reserved"] - 1) < 0.02
    )  # loading leaves segments
    assert (
        recipe.sharding or abs(predict(recipe, gpu=card).peak.total / run["allocated"] - 1) < 1e-3
    )


ROWS = (
    "dtype",
    "sft",
    "preference",
    "samples",
    "lora",
    "offload",
    "optimizers",
    "evaluation",
    "loading",
    "families",
    "liger",
    "rollouts",
    "compiled",
    "images",
    "peft",
    "packed experts",
)


@pytest.mark.parametrize("row", params(ROWS, ["samples"]))
def test_what_came_later(row):
    for name, card in LATER.items():
        for run in (run for run in read(name)["runs"] if run.get("row") == row):
            recipe = Recipe(**run["recipe"])
            if row == "loading":
                held, asked = simulate(recipe, gpu=card).loading.total, None
            elif row == "evaluation":
                report = simulate_evaluation(recipe, Evaluation(**run["evaluation"]), gpu=card)
                held, asked = report.allocated, None
            else:
                report = simulate(recipe, gpu=card)
                held, asked = report.allocated, report.requested
            assert abs(held / run["allocated"] - 1) < 0.003, run["recipe"]
            assert asked is None or abs(asked / run["requested"] - 1) < 2e-5, run["recipe"]


@pytest.mark.parametrize("number", params(range(6), []))
def test_diffusion(number):
    pytest.importorskip("diffusers", reason="the extra vramlab[diffusion] is not installed")
    content = read("diffusion")
    run = content["runs"][number]
    report = simulate_diffusion(Diffusion(**run["diffusion"]), gpu=content["card"])
    assert report.requested == run["requested"]
    assert abs(report.allocated / run["allocated"] - 1) < 0.003
