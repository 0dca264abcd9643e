"""What a release of torch changes in bytes on a GPU: the rule has the release in it, and torch's
own allocator says the same.

The sizes are those of torch 2.15's CUDA build on the stand-in for a GPU
(`data/stand_in/README.md`).
"""

import json
from pathlib import Path

import pytest
import torch
from quick import params
from vramlab.formulas.predict import predict
from vramlab.hardware import overhead
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import MiB
from vramlab.simulation.cuda_scratch import kernel_scratch, lasting_workspaces
from vramlab.simulation.simulate import simulate

HEADERS = Path(torch.__file__).parent / "include" / "ATen"
STAND_IN = Path(__file__).parent.parent / "stand_in"
AMPERE, HOPPER = find_gpu("A100 80GB").chip, find_gpu("H100 SXM").chip
CUBLAS, CUBLASLT = 8_519_680, 1 * MiB
REAL_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture
def in_release(monkeypatch):
    """Make torch another release, as (2, 15), for the rules."""
    return lambda release: monkeypatch.setattr(
        overhead, "installed", lambda _: f"{release[0]}.{release[1]}.0"
    )


def test_which_releases_free_workspaces():
    """What brought it (pull request 194311) also brought a class into a public header."""
    header = (HEADERS / "cuda" / "CUDAContextLight.h").read_text()
    assert ("CUDABlasHandleWithWorkspace" in header) == (REAL_RELEASE >= (2, 15))


def a(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


half = torch.bfloat16
PRODUCTS = {
    "a matrix product": ("mm", (a(64, 128), a(128, 256)), CUBLAS),
    "in half precision": ("mm", (a(64, 128, dtype=half), a(128, 256, dtype=half)), CUBLAS),
    "batched": ("bmm", (a(1, 64, 128), a(1, 128, 256)), CUBLAS),
    "with a vector": ("mv", (a(256, 128), a(128)), CUBLAS),
    "of vectors": ("dot", (a(256), a(256)), CUBLAS),
    "with a bias": ("addmm", (a(256), a(64, 128), a(128, 256)), CUBLASLT),
    "of one row, with a bias": ("addmm", (a(256), a(1, 128), a(128, 256)), CUBLASLT),
    "of one column, with a bias": ("addmm", (a(1), a(64, 128), a(128, 1)), CUBLAS),
    "of one inner number, with a bias": ("addmm", (a(256), a(64, 1), a(1, 256)), CUBLAS),
    "with one number for all columns": (
        "addmm",
        (a(1).expand(256), a(64, 128), a(128, 256)),
        CUBLAS,
    ),
    "added to a matrix": ("addmm", (a(64, 128), a(64, 128), a(128, 128)), CUBLAS),
    "added to a matrix of halves": (
        "addmm",
        (a(64, 128, dtype=half), a(64, 128, dtype=half), a(128, 128, dtype=half)),
        CUBLASLT,
    ),
    "over nothing": ("mm", (a(64, 0), a(0, 256)), 0),
    "of no rows": ("mm", (a(0, 128), a(128, 256)), 0),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_product_allocates_its_workspace_since_2_15(in_release, case):
    name, args, size = PRODUCTS[case]
    in_release((2, 15))
    assert kernel_scratch(AMPERE)(name, args) == size
    assert kernel_scratch(HOPPER)(name, args) == (32 * MiB if size == CUBLAS else size)
    in_release((2, 14))
    assert kernel_scratch(AMPERE)(name, args) == 0


@pytest.mark.parametrize(
    ("release", "sizes"),
    [
        ((2, 11), {"mm": CUBLAS, "addmm": CUBLASLT}),
        ((2, 12), {"mm": CUBLAS}),
        ((2, 14), {"mm": CUBLAS}),
        ((2, 15), {}),
    ],
)
def test_which_workspaces_last(in_release, release, sizes):
    in_release(release)
    assert lasting_workspaces(AMPERE) == sizes


def runs(card):
    return json.loads((STAND_IN / f"{card}-torch-2.15.json").read_text())["runs"]


RUNS = [(card, i) for card in ("t4", "h200") for i in range(len(runs(card)))]


@pytest.mark.parametrize(("card", "i"), params(RUNS, [("t4", 9), ("h200", 1)]))
def test_steps_of_torch_2_15(in_release, card, i):
    run = runs(card)[i]
    recipe = Recipe(**run["recipe"])
    if recipe.shape.num_kv_heads != recipe.shape.num_heads and REAL_RELEASE < (2, 14):
        pytest.skip("this torch has no efficient attention of grouped queries to simulate")
    in_release((2, 15))
    simulated = simulate(recipe, gpu=card)
    assert abs(simulated.requested - run["requested"]) < 100
    assert (
        abs(simulated.allocated / run["allocated"] - 1) < 0.004
    )  # blocks that the allocator does not divide


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16-mixed", "gradient_checkpointing": True}]
)
def test_formulas_and_simulation_agree(in_release, changes):
    recipe = Recipe("pythia-70m", batch_size=2, seq_len=64, num_layers=2, **changes)
    before = predict(recipe, gpu="RTX 3090")
    in_release((2, 15))
    predicted, simulated = (look(recipe, gpu="RTX 3090") for look in (predict, simulate))
    for name, phase in simulated.phases.items():
        assert predicted.phases[name].peak.total == pytest.approx(phase.peak.total, rel=0.004), name
    rest, rest_before = (report.phases["between_steps"].peak for report in (predicted, before))
    assert rest_before.total - rest.total == 2 * CUBLAS
