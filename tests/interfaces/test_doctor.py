"""The doctor finds what is wrong on machines that are not this one, says what to do, and never
raises.
"""

import json
import platform
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from vramlab.base import versions
from vramlab.hardware import host
from vramlab.hardware.nvml import Sensors
from vramlab.interfaces import doctor as checks
from vramlab.interfaces.doctor import MARKER, Check, Doctor, doctor, environment_stamp
from vramlab.report.report import GiB, MiB

torch = pytest.importorskip("torch")
NO_NVML = Sensors(False, reason="no NVIDIA driver answers on this machine")


def run(look):
    """The checks of one look, by name."""
    return {c.name: c for c in look()}


def sensors(**changes):
    values = dict(
        name="Tesla T4", driver="580.65.06", total=15 * GiB, used=GiB, free=14 * GiB, process=GiB
    )
    return Sensors(True, **{**values, **changes})


def machine_with(monkeypatch, cuda="13.0", available=True, nvml=NO_NVML, card=("Tesla T4", 7, 5)):
    """A pretended torch build, GPU and driver."""
    name, major, minor = card
    seen = SimpleNamespace(
        name=name, total_memory=15 * GiB, major=major, minor=minor, multi_processor_count=40
    )
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for call, answer in {
        "is_available": available,
        "device_count": int(available),
        "current_device": 0,
        "get_device_properties": seen,
    }.items():
        monkeypatch.setattr(torch.cuda, call, lambda *_, answer=answer: answer)
    monkeypatch.setattr(checks, "nvml_snapshot", lambda index=0: nvml)
    monkeypatch.setattr(checks, "all_sensors", lambda: iter([nvml] if nvml.available else []))
    for key in ("COLAB_RELEASE_TAG", "COLAB_GPU", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(key, raising=False)


def test_doctor_runs_here_and_agrees_with_the_installed_versions():
    report = doctor()
    found = {check.name: check for check in report.checks}
    assert found["torch"].value == metadata.version("torch")
    assert found["python"].value == platform.python_version() and found["python"].status == "ok"
    assert found["torch build"].value == (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    )
    assert {"RAM", "CPU cores"} <= found.keys()
    assert all(c.status in ("ok", "warn", "missing") and c.value for c in report.checks)
    assert json.loads(json.dumps(report.to_dict()))["ok"] == report.ok
    assert all(line == line.rstrip() for line in str(report).splitlines())


def test_floors_are_those_of_the_project():
    assert dict(checks.requirements())["torch"] == ">=2.11"
    assert "pytest" not in dict(checks.requirements())


def test_extras_are_no_requirements(monkeypatch):
    lines = ["torch>=2.11", 'pytest>=8; extra == "test"', 'tomli; python_version < "3.0"']
    monkeypatch.setattr(checks.metadata, "requires", lambda name: lines)
    assert checks.requirements() == [("torch", ">=2.11")]


@pytest.mark.parametrize(
    ("installed", "status", "advice"),
    [
        ("0.20.0", "ok", ""),
        ("0.21.2.dev1+g12", "ok", ""),
        ("0.19.1", "warn", "pip install --upgrade 'peft>=0.20'"),
        (None, "missing", "pip install 'peft>=0.20'"),
    ],
)
def test_package_against_its_floor(monkeypatch, installed, status, advice):
    def version(name):
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(checks, "requirements", lambda *_: [("peft", ">=0.20")])
    monkeypatch.setattr(checks.metadata, "version", version)
    check = run(checks.packages)["peft"]
    assert (check.status, check.advice) == (status, advice)
    assert Doctor((check,)).ok == (status != "missing")


def test_old_torch_is_never_told_to_be_replaced_in_place(monkeypatch):
    monkeypatch.setattr(checks, "requirements", lambda *_: [("torch", ">=99")])
    check = run(checks.packages)["torch"]
    assert (
        check.status == "warn" and "fresh environment" in check.advice and "pip" not in check.advice
    )


def test_t4_is_told_about_bf16(monkeypatch):
    machine_with(monkeypatch, nvml=sensors())
    found = run(checks.gpus)
    assert "Tesla T4" in found["GPU 0"].value and found["GPU 0"].status == "ok"
    assert (found["bf16"].status, found["bf16"].value) == ("warn", "no") and "fp16" in found[
        "bf16"
    ].advice
    assert found["tf32"].status == "warn" and found["fp8"].status == "ok"
    assert found["torch build"].value == "CUDA 13.0"


def test_h100_has_all_precisions(monkeypatch):
    machine_with(monkeypatch, nvml=sensors(), card=("NVIDIA H100 80GB HBM3", 9, 0))
    found = run(checks.gpus)
    assert all(
        found[form].status == "ok" and found[form].value == "yes"
        for form in ("bf16", "tf32", "fp8")
    )


def test_cpu_build_beside_a_gpu(monkeypatch):
    machine_with(monkeypatch, cuda=None, available=False, nvml=sensors())
    check = run(checks.gpus)["GPU"]
    assert check.status == "warn" and "CPU build" in check.advice and "pytorch.org" in check.advice


def test_a_hidden_gpu_is_no_missing_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine_with(
        monkeypatch,
        available=False,
        nvml=Sensors(False, reason="(CUDA_VISIBLE_DEVICES='' lets no GPU through)"),
    )
    check = run(checks.gpus)["GPU"]
    assert (
        check.status == "warn"
        and check.value == "none (CUDA_VISIBLE_DEVICES='' hides it)"
        and "unset" in check.advice
    )
    assert "no GPU (CUDA_VISIBLE_DEVICES='' hides it)" in environment_stamp()


def test_driver_too_old_for_the_build(monkeypatch):
    machine_with(monkeypatch, available=False, nvml=sensors(driver="470.42"))
    check = run(checks.gpus)["GPU"]
    assert check.status == "warn" and "470.42" in check.advice and "CUDA 13.0" in check.advice


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        (None, "predict and simulate need none"),
        ("COLAB_GPU", "Runtime >"),
        ("KAGGLE_KERNEL_RUN_TYPE", "T4"),
    ],
)
def test_no_gpu_says_what_still_works_and_where_to_get_one(monkeypatch, key, advice):
    machine_with(monkeypatch, cuda=None, available=False)
    if key:
        monkeypatch.setenv(key, "")
    check = run(checks.gpus)["GPU"]
    assert (check.status, check.value) == ("missing", "none") and advice in check.advice
    assert "recorded measurements" in check.advice
    assert Doctor((check,)).ok, "the course runs without a GPU"


def test_torch_that_does_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    check = run(checks.gpus)["torch build"]
    assert check.status == "missing" and check.required


def test_quiet_card(monkeypatch):
    machine_with(monkeypatch, nvml=sensors())
    found = run(checks.nvml)
    assert found["driver"].value == "580.65.06" and found["GPU 0 memory"].status == "ok"


def test_memory_held_by_others(monkeypatch):
    machine_with(monkeypatch, nvml=sensors(used=6 * GiB, free=9 * GiB, process=500 * MiB))
    check = run(checks.nvml)["GPU 0 memory"]
    assert (
        check.status == "warn"
        and "nvidia-smi" in check.advice
        and check.value == "9.00 GiB free of 15.00 GiB"
    )


def test_without_nvml(monkeypatch):
    machine_with(monkeypatch, available=False, cuda=None)
    assert run(checks.nvml)["NVML"].status == "missing"


def test_tight_machine(monkeypatch):
    monkeypatch.setattr(host, "memory", lambda: (8 * GiB, GiB))
    found = run(checks.machine)
    assert found["RAM"].status == "warn" and found["RAM"].advice


def test_memory_is_at_most_the_machines():
    import psutil

    total, available = host.memory()
    assert 0 < available <= total <= psutil.virtual_memory().total


def test_containers_limit_counts(monkeypatch):
    import builtins
    import io

    files = {"/sys/fs/cgroup/memory.max": str(2 * GiB), "/sys/fs/cgroup/memory.current": str(GiB)}
    real = builtins.open
    monkeypatch.setattr(
        builtins,
        "open",
        lambda path, *a, **k: io.StringIO(files[path]) if path in files else real(path, *a, **k),
    )
    assert host.memory() == (2 * GiB, GiB)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert host.memory()[0] > 0


def test_doctor_survives_every_look_that_breaks(monkeypatch):
    def broken():
        yield Check("half", "ok", "seen before it broke")
        raise OSError("sensor bus on fire")

    monkeypatch.setattr(checks, "LOOKS", {"bus": broken, "host": checks.machine})
    report = doctor()
    assert [c.name for c in report.checks][:3] == ["half", "bus", "CPU cores"]
    assert (
        report.checks[1].status == "warn"
        and "OSError: sensor bus on fire" in report.checks[1].advice
    )
    assert "sensor bus on fire" in str(report) and report.ok


def test_advice_stands_under_its_check():
    text = str(Doctor((Check("disk", "warn", "1 GiB", "free some"), Check("python", "ok", "3.12"))))
    assert text.splitlines() == [
        "disk    warn     1 GiB",
        "                 → free some",
        "python  ok       3.12",
    ]


def test_stamp_lines_can_be_ignored_by_their_marker(monkeypatch):
    monkeypatch.setattr(checks, "all_sensors", lambda: iter([]))
    lines = environment_stamp().splitlines()
    assert len(lines) == 2 and all(line.startswith(MARKER) for line in lines)
    assert f"torch {metadata.version('torch')}" in lines[0] and "no GPU" in lines[1]


def test_stamp_names_every_gpu(monkeypatch):
    monkeypatch.setattr(
        sys.modules["vramlab.interfaces.doctor"],
        "all_sensors",
        lambda: iter([sensors(), sensors(name="NVIDIA L4")]),
    )
    assert "Tesla T4 + NVIDIA L4 · " in environment_stamp()


def test_stamp_loads_nothing_heavy():
    import subprocess

    code = (
        "import sys; from vramlab import environment_stamp; environment_stamp(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_versions_outside_the_tested_range_are_named(monkeypatch):
    """Newer ones, and those of extras that the course does without."""
    installed = versions.installed
    others = {"torch": "99.1.0", "deepspeed": "0.18.2"}
    monkeypatch.setattr(versions, "installed", lambda name: others.get(name) or installed(name))
    monkeypatch.setattr(checks, "installed", versions.installed)
    found = run(checks.packages)
    newest = versions.version_ranges()["torch"].newest
    assert (found["torch"].status, found["torch"].value) == ("warn", "99.1.0")
    assert found["torch"].advice.startswith(
        f"torch 99.1.0 is newer than {newest}, the newest tested: "
    )
    assert (
        found["deepspeed"].status == "warn"
        and "0.18.2 is older than 0.19.8" in found["deepspeed"].advice
    )
    assert found["transformers"].status == "ok" and Doctor(tuple(found.values())).ok
