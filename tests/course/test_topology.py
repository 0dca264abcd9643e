"""The matrix of nvidia-smi topo -m: source E's two, harder ones, and broken ones; links and
rings.
"""

import pytest
from vramlab.hardware.gpu import find_gpu
from vramlab.hardware.links import pcie_bandwidth
from vramlab_course import topology
from vramlab_course.collectives import ring_share
from vramlab_course.topology import NVLINK, ROUNDS, TopologyError, parse_topology

E_NVLINK = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity
GPU0     X      NV2     0-23            N/A
GPU1    NV2      X      0-23            N/A
"""
E_PCIE = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity
GPU0     X      PHB     0-11            N/A
GPU1    PHB      X      0-11            N/A
"""
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., \
QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a \
NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""
# The hybrid cube mesh of eight V100 (DGX-1): one link or two to four neighbours, PCIe to the other
# three.
V100_MESH = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	CPU Affinity	NUMA Affinity
GPU0	 X 	NV1	NV1	NV2	NV2	SYS	SYS	SYS	0-19,40-59	0
GPU1	NV1	 X 	NV2	NV1	SYS	NV2	SYS	SYS	0-19,40-59	0
GPU2	NV1	NV2	 X 	NV2	SYS	SYS	NV1	SYS	0-19,40-59	0
GPU3	NV2	NV1	NV2	 X 	SYS	SYS	SYS	NV1	0-19,40-59	0
GPU4	NV2	SYS	SYS	SYS	 X 	NV1	NV1	NV2	20-39,60-79	1
GPU5	SYS	NV2	SYS	SYS	NV1	 X 	NV2	NV1	20-39,60-79	1
GPU6	SYS	SYS	NV1	SYS	NV1	NV2	 X 	NV2	20-39,60-79	1
GPU7	SYS	SYS	SYS	NV1	NV2	NV1	NV2	 X 	20-39,60-79	1
"""
BRIDGED = """\
	GPU0	GPU1	GPU2	GPU3	CPU Affinity	NUMA Affinity
GPU0	 X 	NV4	PIX	SYS	0-15	0
GPU1	NV4	 X 	PXB	NODE	0-15	0
GPU2	PIX	PXB	 X 	NV4	16-31	1
GPU3	SYS	NODE	NV4	 X 	16-31	1
"""


def nvswitch() -> str:
    """Eight GPUs behind NVSwitch on two NUMA nodes, two network cards, as a terminal gets it:
    coloured, with tabs.
    """
    gpus, nics = [f"GPU{i}" for i in range(8)], ["NIC0", "NIC1"]
    near = {"NIC0": 0, "NIC1": 4}
    head = "\t".join(["", *gpus, *nics, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{head}\x1b[0m"]
    for i, gpu in enumerate(gpus):
        links = [" X " if other == gpu else "NV18" for other in gpus]
        cards = [
            "PIX" if near[n] == i else "NODE" if near[n] // 4 == i // 4 else "SYS" for n in nics
        ]
        node = i // 4
        lines.append(
            "\t".join([gpu, *links, *cards, f"{node * 48}-{node * 48 + 47}", f"{node}\t", "N/A"])
        )
    for n in nics:
        cells = [
            "PIX" if near[n] == i else "NODE" if near[n] // 4 == i // 4 else "SYS" for i in range(8)
        ]
        lines.append("\t".join([n, *cells, *(" X " if m == n else "SYS" for m in nics)]))
    return "\n".join(lines) + "\n" + LEGEND


@pytest.mark.parametrize("text, code", [(E_NVLINK, "NV2"), (E_PCIE, "PHB")])
@pytest.mark.parametrize("after", ["", LEGEND])
def test_source_e(text, code, after):
    found = parse_topology(text + after)
    assert found.gpus == ["GPU0", "GPU1"] and found.codes["GPU0", "GPU1"] == code
    assert found.codes["GPU1", "GPU0"] == code


def test_what_is_printed_explains_the_path():
    assert "NVLink, 2 bonded" in str(parse_topology(E_NVLINK))
    assert "host bridge" in str(parse_topology(E_PCIE))
    assert str(parse_topology("GPU0 CPU Affinity\nGPU0 X 0-3")) == "1 GPU: no path to speak of"


def test_eight_gpus_behind_nvswitch_with_network_cards():
    found = parse_topology(nvswitch())
    assert len(found.gpus) == 8 and found.devices[8:] == ("NIC0", "NIC1")
    assert found.codes["GPU0", "GPU7"] == "NV18"


def test_a_mesh_has_slow_pairs():
    found = parse_topology(V100_MESH + LEGEND)
    codes = [found.codes["GPU0", other] for other in found.gpus]
    assert sum(int(code[2:]) for code in codes if code.startswith("NV")) == NVLINK["V100"][1]
    assert [line.split()[:2] for line in str(found).splitlines()[2:]] == [
        ["NV2", "8"],
        ["NV1", "8"],
        ["SYS", "12"],
    ]


def test_columns_that_a_driver_leaves_out():
    found = parse_topology("GPU0 GPU1 NUMA Affinity\nGPU0 X SYS 0\nGPU1 SYS X 1")
    assert found.devices == ("GPU0", "GPU1")


def test_paths_are_listed_best_first():
    found = parse_topology(BRIDGED)
    order = [line.split()[0] for line in str(found).splitlines()[2:]]
    assert order == ["NV4", "PIX", "PXB", "NODE", "SYS"]


def test_fewer_links_are_the_slower_path():
    text = "GPU0 GPU1 GPU2\nGPU0 X NV12 NV2\nGPU1 NV12 X NV4\nGPU2 NV2 NV4 X"
    found = parse_topology(text)
    assert [line.split()[0] for line in str(found).splitlines()[2:]] == [
        "NV12",
        "NV4",
        "NV2",
    ]  # as numbers, best first


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "no matrix"),
        ("GPU0 X NV2\nGPU1 NV2 X", "no matrix"),
        (LEGEND, "no matrix"),
        (E_NVLINK.replace("NV2", "NVX"), "'NVX'"),
        (E_NVLINK.replace("NV2", "NV"), "'NV'"),
        ("GPU0 GPU1\nGPU0 X NV2\n", "no row for GPU1"),
        ("GPU0 GPU1\nGPU0 X\nGPU1 NV2 X", "has 1 entries"),
        ("GPU0 GPU1\nGPU0 X NV2\nGPU1 PHB X", "GPU0 to GPU1 is NV2, but GPU1 to GPU0 is PHB"),
        ("GPU0 GPU1\nGPU0 PHB X\nGPU1 X PHB", "diagonal"),
        ("GPU0 GPU1\nGPU0 X X\nGPU1 X X", "diagonal"),
    ],
)
def test_a_broken_matrix_is_refused_in_one_sentence(text, said):
    with pytest.raises(TopologyError, match=said) as error:
        parse_topology(text)
    assert str(error.value).endswith(".")


def test_a_machine_without_nvidia_smi_says_so(monkeypatch):
    monkeypatch.setattr(topology.shutil, "which", lambda name: None)
    with pytest.raises(TopologyError, match="no nvidia-smi"):
        topology.read_topology()


@pytest.mark.parametrize(
    "script, said", [(f"cat <<'.'\n{E_NVLINK}.", None), ("echo no driver; exit 9", "no driver")]
)
def test_the_machine_is_asked(tmp_path, monkeypatch, script, said):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if said is None:
        assert topology.read_topology().codes["GPU0", "GPU1"] == "NV2"
    else:
        with pytest.raises(TopologyError, match=said):
            topology.read_topology()


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
