"""Links and rings: what two GPUs are connected by, and what a step sends."""

import pytest
from vramlab.hardware.gpu import find_gpu
from vramlab.hardware.links import pcie_bandwidth
from vramlab_course.collectives import ring_share
from vramlab_course.topology import NVLINK, ROUNDS


@pytest.mark.parametrize("name", [name for name in NVLINK if name != "P100"])
def test_links_times_bandwidth_is_the_datasheets_figure(name):
    _, links, each = NVLINK[name]
    assert 2 * links * each == find_gpu(name).nvlink


def test_pcie_by_its_line_rate():
    assert pcie_bandwidth("3.0 x16") == pytest.approx(15.754e9, rel=1e-4)
    assert pcie_bandwidth("4.0 x8") == pcie_bandwidth("3.0 x16")


def ring(size: int, world_size: int, rounds: int) -> list[int]:
    """Bytes each rank sends, counted by passing the pieces round: a piece to the next rank, N − 1
    times a round.
    """
    piece, sent = size // world_size, [0] * world_size
    for _ in range(rounds * (world_size - 1)):
        for rank in range(world_size):
            sent[rank] += piece
    return sent


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_an_all_reduce_sends_two_rounds_of_a_ring(world_size):
    assert set(ring(8000, world_size, ROUNDS["DDP"])) == {
        8000 * ring_share("all_reduce", world_size)
    }
