"""The GPU table holds together, names are found, arithmetic is what the cards have, and NVML's gaps
are answers.
"""

import json
import os
import pickle
import sys
from types import SimpleNamespace

import pytest
from vramlab.base import versions
from vramlab.base.data import data_path
from vramlab.base.errors import RecipeError
from vramlab.hardware import gpu as gpu_module
from vramlab.hardware import overhead
from vramlab.hardware.gpu import Gpu, GpuError, current_device, find_gpu, gpu_names
from vramlab.hardware.nvml import nvml_snapshot
from vramlab.hardware.overhead import cublas_workspace, rules_of, torch_release
from vramlab.recipe.recipe import PRECISIONS
from vramlab.report.report import GiB, MiB

ASKED = """T4; V100; RTX 2080 Ti; RTX 3060 12GB; RTX 3090; RTX 4060 Ti 16GB; RTX 4070; RTX 4090; \
RTX 5090; A10;
A10G; L4; L40S; A6000; A100 40GB; A100 80GB; H100 SXM; H100 PCIe; H200; B200""".replace(
    "\n", " "
).split("; ")


@pytest.mark.parametrize("name", ASKED)
def test_card_is_known_by_its_usual_name(name):
    assert find_gpu(name).name in gpu_names()


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("rtx-4060ti 16gb", "RTX 4060 Ti 16GB"),
    ],
)
def test_names_that_drivers_and_people_write(reported, name):
    assert find_gpu(reported).name == name


def test_no_two_cards_share_a_name_and_a_total_says_its_source():
    owners = {}
    for entry in json.loads(data_path("gpus.json").read_text(encoding="utf-8"))["gpus"]:
        for name in (entry["name"], *entry["aliases"]):
            assert owners.setdefault(gpu_module._key(name), entry["name"]) == entry["name"]
            assert find_gpu(name).name == entry["name"]
        assert entry["source"] and (entry["total_mib"] is None or entry["total_source"])


def test_bare_family_name_means_the_smaller_card():
    assert find_gpu("A100").total < find_gpu("A100 80GB").total
    assert find_gpu("V100").total < find_gpu("V100 32GB").total


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("RTX4091", "did you mean 'RTX 4090'"),
        ("4900", "did you mean 'RTX 4090'"),
        ("2x RTX 4090", r"did you mean 'RTX 4090'\? How many is --gpus 2 "),
        ("8 × H100", r"did you mean 'H100 SXM'\? How many is --gpus 8 "),
    ],
)
def test_a_name_that_is_nearly_one_is_guessed(wrong, said):
    with pytest.raises(GpuError, match=said):
        find_gpu(wrong)


@pytest.mark.parametrize("wrong", ["", None, 5, "zzzzzz", "NVIDIA", "RTX 4080 Ti"])
def test_an_unknown_name_lists_what_there_is(wrong):
    with pytest.raises(GpuError, match=r"known are .*T4"):
        find_gpu(wrong)


def test_gpu_passes_through():
    gpu = find_gpu("T4")
    assert find_gpu(gpu) is gpu


@pytest.mark.parametrize("name", gpu_names())
def test_figures_are_consistent(name):
    gpu = find_gpu(name)
    # A reading is under the box's figure in GiB (driver and ECC take a part), and never far under
    # the same in GB.
    assert 0.9 * gpu.memory_gb * 1e9 < gpu.total <= gpu.memory_gb * GiB
    assert 5e12 < gpu.peak["fp32"] < 2e14 and 2e11 < gpu.bandwidth < 1e13 and 50 <= gpu.tdp <= 1200
    order = [gpu.peak[f] for f in ("fp32", "tf32", "bf16", "fp8") if f in gpu.peak]
    assert order == sorted(order)
    if "bf16" in gpu.peak:
        assert gpu.peak["bf16"] == gpu.peak["fp16"]
    for form in ("tf32", "bf16", "fp8"):
        assert (form in gpu.peak) == gpu.supports(form), (
            f"{name}: {form} has a rate exactly when the card computes in it"
        )


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        # Figures everybody can check: datasheets, and for GeForce the whitepapers' rate with fp32
        # accumulation.
        ("T4", "fp16-mixed", 65),
        ("A100 80GB", "bf16-true", 312),
        ("A100 80GB", "tf32", 156),
        ("A100 80GB", "fp32", 19.5),
        ("H100 SXM", "bf16-mixed", 989.5),
        ("RTX 3090", "bf16-mixed", 71),
        ("RTX 4090", "fp16-true", 165.2),
    ],
)
def test_peak_is_dense_with_fp32_accumulation(name, precision, tera):
    assert find_gpu(name).flops(precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "cores", "mhz"),
    [
        ("RTX 3060 12GB", 3584, 1777),
        ("RTX 3090", 10496, 1695),
        ("RTX 4070", 5888, 2475),
        ("RTX 4090", 16384, 2520),
    ],
)
def test_fp32_peak_is_cores_times_clock(name, cores, mhz):
    assert find_gpu(name).peak["fp32"] == pytest.approx(2 * cores * mhz * 1e6, rel=0.01)


def test_t4_has_no_bf16_and_the_sentence_says_what_to_do():
    t4 = find_gpu("T4")
    assert [p for p in PRECISIONS if t4.supports(p)] == ["fp32", "fp16-mixed", "fp16-true"]
    why = t4.why_not("bf16-mixed")
    assert all(part in why for part in ("T4", "7.5", "8.0", "emulates", "fp16"))
    with pytest.raises(
        RecipeError, match=r"'precision' is 'bf16-mixed', but T4 has compute capability 7\.5"
    ):
        t4.require("bf16-mixed")
    assert t4.why_not("fp16-mixed") == "" and t4.require("fp16-mixed") is None


def test_ampere_and_later_have_every_precision_of_a_recipe():
    for name in ("A100 40GB", "RTX 3060", "L4", "H200", "RTX 5090"):
        assert all(find_gpu(name).supports(p) for p in PRECISIONS)
    assert not find_gpu("A100").supports("fp8") and find_gpu("L4").supports("fp8")


@pytest.mark.parametrize("wrong", ["fp64", None, "bf16-half", ""])
def test_unknown_precision_is_refused(wrong):
    with pytest.raises(RecipeError, match="precision"):
        find_gpu("T4").supports(wrong)


@pytest.mark.parametrize(
    ("capability", "release", "size"),
    [
        (
            (7, 5),
            (2, 13),
            8_519_680,
        ),  # as seen in memory snapshots of matmuls: discuss.pytorch.org/t/178671
        ((8, 0), (2, 11), 8_519_680),
        ((9, 0), (2, 11), 32 * MiB),
        ((9, 0), (2, 13), 32 * MiB),
        ((10, 0), (2, 11), 8_519_680),
        ((10, 0), (2, 12), 32 * MiB),
        ((12, 0), (2, 13), 32 * MiB),
    ],
)
def test_cublas_workspace(monkeypatch, capability, release, size):
    monkeypatch.setattr(overhead, "torch_release", lambda: release)
    assert cublas_workspace(capability) == size


def test_the_release_is_that_of_the_torch_that_is_here(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(overhead, "installed", versions.installed)
    assert list(torch_release()) == [int(part) for part in torch.__version__.split(".")[:2]]


def test_a_records_own_torch_takes_the_place_of_the_one_that_is_here():
    here = torch_release()
    with rules_of("2.11.0+cu128"):
        assert torch_release() == (2, 11) and cublas_workspace((10, 0)) == 8_519_680
        with rules_of("2.12.1"):
            assert torch_release() == (2, 12) and cublas_workspace((10, 0)) == 32 * MiB
        assert torch_release() == (2, 11)
    assert torch_release() == here


def test_gpu_is_a_plain_value():
    gpu = find_gpu("L4")
    assert pickle.loads(pickle.dumps(gpu)) == gpu and hash(gpu) == hash(find_gpu("NVIDIA L4"))
    assert str(gpu) == "L4 · 22.03 GiB · 300 GB/s · 121 TFLOP/s bf16 · compute capability 8.9"


# ── this machine
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def fake_cuda(monkeypatch, name, total, major, minor):
    torch = pytest.importorskip("torch")
    seen = SimpleNamespace(
        name=name, total_memory=total, multi_processor_count=40, major=major, minor=minor
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)


def test_current_device_without_cuda(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = current_device()
    assert (device.kind, device.gpu) == ("cpu", None)


def test_current_device_is_matched_and_keeps_its_own_memory(monkeypatch):
    fake_cuda(
        monkeypatch, "Tesla T4", 15_102 * MiB, 7, 5
    )  # an older driver leaves more than the table says
    device = current_device()
    assert (device.kind, device.gpu.name, device.gpu.total) == ("cuda", "T4", 15_102 * MiB)
    assert device.gpu.bandwidth == 320e9 and device.gpu.total_known


def test_current_device_that_nobody_knows(monkeypatch):
    fake_cuda(monkeypatch, "NVIDIA Future 9000", 64 * GiB, 13, 0)
    gpu = current_device().gpu
    assert isinstance(gpu, Gpu) and gpu.total == 64 * GiB and gpu.supports("fp8")
    assert gpu.flops("bf16-true") is None and gpu.bandwidth is None
    assert "64.00 GiB" in str(gpu)


# ── NVML
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of pynvml as is asked for; `without` names calls that answer "Not Supported"."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVMLError = NVMLError

    def __init__(self, without=(), init_error=None, pid=None, throttle=0):
        self.without, self.init_error, self.throttle = set(without), init_error, throttle
        self.pid = pid
        self.asked = None

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "without"):

            def refuse(*args, **kwargs):
                raise NVMLError("Not Supported")

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        if self.init_error:
            raise NVMLError(self.init_error)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise NVMLError("Invalid Argument")
        self.asked = index
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked = uuid
        return uuid

    nvmlDeviceGetName = staticmethod(lambda handle: "Tesla T4")
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.65.06")
    nvmlDeviceGetTemperature = staticmethod(lambda handle, sensor: 71)
    nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 68_500)
    nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda handle: 70_000)
    nvmlDeviceGetClockInfo = staticmethod(lambda handle, clock: 1590)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=15360 * MiB, used=2000 * MiB, free=13360 * MiB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=self.pid, usedGpuMemory=1500 * MiB)] if self.pid else []

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.throttle


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(**kwargs):
        fake = FakeNvml(**kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_every_sensor_is_read(nvml):
    nvml(pid=os.getpid(), throttle=0x4 | 0x20)
    seen = nvml_snapshot()
    assert seen.available and not seen.missing
    assert (seen.name, seen.driver, seen.temperature) == ("Tesla T4", "580.65.06", 71)
    assert (seen.power, seen.power_limit, seen.clock) == (68.5, 70.0, 1590)
    assert (seen.total, seen.used, seen.process) == (15360 * MiB, 2000 * MiB, 1500 * MiB)
    assert seen.throttle == ("software power cap", "software thermal slowdown")
    assert "68.5 W" in str(seen) and "15.000 GiB" in str(seen)


def test_no_throttling_is_an_empty_answer_not_a_missing_one(nvml):
    nvml(throttle=0)
    assert nvml_snapshot().throttle == ()


SENSORS = {
    "nvmlDeviceGetName": ["name"],
    "nvmlDeviceGetMemoryInfo": ["total", "used", "free"],
    "nvmlDeviceGetTemperature": ["temperature"],
    "nvmlDeviceGetPowerUsage": ["power"],
    "nvmlDeviceGetEnforcedPowerLimit": ["power_limit"],
    "nvmlDeviceGetClockInfo": ["clock"],
    "nvmlDeviceGetCurrentClocksEventReasons": ["throttle"],
}


@pytest.mark.parametrize(("call", "fields"), SENSORS.items())
def test_missing_sensor_is_none_with_its_reason_and_the_rest_is_there(nvml, call, fields):
    nvml(without=[call], pid=os.getpid())
    seen = nvml_snapshot()
    assert seen.available
    assert seen.missing == dict.fromkeys(fields, "Not Supported")
    assert all(getattr(seen, name) is None for name in fields)
    assert "none: Not Supported" in str(seen)
    assert seen.driver == "580.65.06"


@pytest.mark.parametrize("pid", [None, 1])
def test_process_memory_that_nvml_cannot_attribute(nvml, pid):
    nvml(pid=pid)
    seen = nvml_snapshot()
    assert seen.process is None and "a container hides or renumbers them" in seen.missing["process"]


def test_machine_without_a_driver(nvml):
    nvml(init_error="NVML Shared Library Not Found")
    seen = nvml_snapshot()
    assert not seen.available and seen.total is None
    assert seen.reason == "no NVIDIA driver answers on this machine (NVML Shared Library Not Found)"
    assert str(seen).startswith("NVML: no NVIDIA driver")


def test_machine_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seen = nvml_snapshot()
    assert not seen.available and "pip install nvidia-ml-py" in seen.reason


def test_gpu_that_is_not_there(nvml):
    nvml()
    seen = nvml_snapshot(7)
    assert not seen.available and seen.reason == "GPU 7 does not answer (Invalid Argument)"


@pytest.mark.parametrize(
    ("visible", "index", "asked"),
    [("1,0", 0, 1), ("1,0", 1, 0), ("GPU-8f6d", 0, "GPU-8f6d"), ("0, 1", 1, 1)],
)
def test_visible_devices_are_honoured(nvml, monkeypatch, visible, index, asked):
    fake = nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml_snapshot(index).available and fake.asked == asked


@pytest.mark.parametrize("visible", ["", "-1", "-1,0"])
def test_hidden_gpus_are_not_read(nvml, monkeypatch, visible):
    fake = nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = nvml_snapshot()
    assert not seen.available and "lets no GPU through" in seen.reason and fake.asked is None
