"""Against PyTorch's own CUDA allocator, which ran the steps on a stand-in for a GPU (`stand_in/`): its sizes, not ours."""

import json
from pathlib import Path

import pytest
from quick import params
from vramlab import Recipe, simulate
from vramlab.hardware.gpu import find_gpu
from vramlab.hardware.kernels import efficient_scratch, reduction_scratch

FOLDER = Path(__file__).parent.parent / "stand_in"
CARDS = {"h200": ("H200", 24), "rtx-3090": ("RTX 3090", 5), "t4": ("T4", 5)}  # one run in so many is simulated


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("card", read("reductions"))
def test_buffers_of_reductions(card):
    """(shape, strides, dimensions, bytes a value, blocks that the kernel took) of sums, means and norms."""
    for shape, strides, reduced, itemsize, blocks in read("reductions")[card]:
        found = reduction_scratch(shape, strides, reduced, itemsize, find_gpu(card).chip)
        assert sorted(set(found)) == blocks, (shape, strides, reduced, itemsize)


@pytest.mark.parametrize("card", read("attention"))
def test_workspace_of_memory_efficient_attention(card):
    """(heads, tokens, head size, bytes a value, dropout, bytes of the workspace) of the backward pass."""
    for heads, tokens, dim, itemsize, dropout, workspace in read("attention")[card]:
        blocks = efficient_scratch(heads, (tokens, tokens), (dim, dim), itemsize, dropout, find_gpu(card).chip)
        delta, product = 4 * heads * tokens, 4 * heads * tokens * dim
        in_its_place = [product, delta, delta] if itemsize == 4 and product + delta > workspace else [delta, workspace]
        assert blocks == in_its_place, (heads, tokens, dim, itemsize, dropout)


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("part", params([1, 4], [4]), ids=["all", "a quarter"])
def test_steps(name, part):
    card, every = CARDS[name]
    every *= part
    runs = [run for run in read(name)["runs"] if "mixtral" not in run["recipe"]["model"] or name != "t4"][::every]
    errors = []
    for run in runs:
        simulated = simulate(Recipe(**run["recipe"]), gpu=card)
        asked, held = (getattr(simulated, what) / run[what] - 1 for what in ("requested", "allocated"))
        assert abs(asked) < 0.004 and abs(held) < 0.01, (run["recipe"], asked, held)
        errors.append(abs(asked))
    assert sum(error < 1e-5 for error in errors) > 0.8 * len(errors), (
        "what is asked for is nearly always met to the byte"
    )
