"""Code that asks NVIDIA's libraries runs on the stand-in for them.

Needs PyTorch's CUDA build and a compiler.
"""

import os
import subprocess
import sys

import pytest
from vramlab.measurement import stand_in

HEADERS = stand_in.NVIDIA / "cu13" / "include" / "crt" / "host_config.h"
pytestmark = [
    pytest.mark.slow,  # compiles the libraries, and starts PyTorch's CUDA build for each
    pytest.mark.skipif(not HEADERS.exists(), reason="needs torch for CUDA 13 and nvidia-cuda-crt"),
]
TOTAL = 16 << 30


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return stand_in.build(tmp_path_factory.mktemp("stand_in"))


def run(libraries, code, **more):
    """What `code` prints on a T4 of 16 GiB, of which the context has half of one."""
    card = {
        "CAPABILITY": "75",
        "MULTIPROCESSORS": "40",
        "BYTES": str(TOTAL),
        "NAME": "Tesla T4",
        "CONTEXT": str(1 << 29),
    }
    said = {f"STAND_IN_{name}": value for name, value in (card | more).items()}
    said |= {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
    }
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    } | said
    command = [sys.executable, "-c", f"import torch\n{code}"]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_running_out_of_memory_is_told_as_on_a_card(libraries):
    code = """
held = torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)"""
    said = run(libraries, code)
    assert "GPU 0 has a total capacity of 16.00 GiB of which 5.50 GiB is free." in said
    assert "this process has 10.50 GiB memory in use" in said  # NVML's word


def test_nvml_counts_what_the_runtime_gave(libraries):
    code = """
import pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(1)
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
used = pynvml.nvmlDeviceGetMemoryInfo(card).used
print(pynvml.nvmlDeviceGetName(card), torch.cuda.device_count(), used)
try:
    torch.empty(1, device="cuda:2")
except torch.AcceleratorError as error:
    print(error)"""
    said = run(libraries, code, COUNT="2")
    assert (
        said.startswith(f"Tesla T4 2 {(1 << 30) + (1 << 29)}\n")
        and "invalid device ordinal" in said
    )


@pytest.mark.parametrize(
    "code",
    [
        "print(torch.nn.Conv2d(3, 8, 3).cuda()(torch.zeros(2, 3, 8, 8, device='cuda')).shape)",
        """
from liger_kernel.transformers import LigerRMSNorm
print(LigerRMSNorm(64).cuda()(torch.zeros(2, 64, device="cuda")).shape)""",
        """
import bitsandbytes
layer = bitsandbytes.nn.Linear4bit(64, 64).cuda()
print(layer(torch.zeros(2, 64, device="cuda", dtype=torch.float16)).shape)""",
        """
values, graph = torch.zeros(2, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = values * 2
graph.replay()
print(doubled.shape)""",
        """
with torch.profiler.profile() as profiler:
    product = torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")
print(product.shape, len(profiler.events()))""",
    ],
    ids=["cuDNN", "Triton", "bitsandbytes", "graph", "profiler"],
)
def test_kernels_are_left_out(libraries, code):
    assert run(libraries, code).startswith("torch.Size([2")


def test_ranks_meet_in_nccl(libraries):
    code = """
import os
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
model = fully_shard(torch.nn.Linear(64, 64).cuda())
model(torch.zeros(2, 64, device="cuda")).sum().backward()
gathered = [None]
dist.all_gather_object(gathered, "mine")
print(gathered)
dist.destroy_process_group()"""
    assert run(libraries, code) == "['mine']\n"
