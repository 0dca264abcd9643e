"""On CUDA every byte is accounted for: the real passes, run here over an allocator that is made of
a second tracker.
"""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import config
from vramlab import MiB, Recipe, Report, find_gpu
from vramlab.hardware.nvml import Sensors
from vramlab.measurement import measurement_passes as passes
from vramlab.measurement import worker
from vramlab.tracking.tracker import Tracker
from vramlab.training.training import build

SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2}
CUBLAS = 8_519_680
SCRATCH = 3 * MiB + 100
MATMULS = ("mm", "addmm", "bmm")


class Card:
    """Stands for torch.cuda: counts the storages of the CPU's tensors as the caching allocator
    would its blocks.

    Its first matmul takes a workspace for cuBLAS, each `scratchy` operator takes scratch while it
    runs, and every block of over 32 KiB is `slack` bytes larger than what was asked for.
    """

    def __init__(self, scratchy: str = "nothing", slack: int = 0):
        self.shadow = Tracker("cpu", round_to=512, scratch=self.scratch)
        self.scratchy, self.slack = scratchy, slack
        self.workspace, self.workspaces = 0, []
        self.since = 0
        self.emptied = 0

    def scratch(self, name: str, args) -> int:
        if name in MATMULS and not self.workspace:
            self.workspace = CUBLAS
            self.workspaces.append((len(self.shadow.log), CUBLAS))
        return SCRATCH if name == self.scratchy else 0

    def levels(self) -> list[tuple[int, int]]:
        """(allocated, asked for) after every event."""
        allocated, asked, found = 0, 0, [(0, 0)]
        workspaces = iter([*self.workspaces, (10**12, 0)])
        position, size = next(workspaces)
        for i, (n, storage, _) in enumerate(self.shadow.log):
            while position <= i:
                allocated, asked = allocated + size, asked + size
                position, size = next(workspaces)
            sign = 1 if n > 0 else -1
            allocated += n + sign * (self.slack if storage.size > 32 * 1024 else 0)
            asked += sign * storage.asked
            found.append((allocated, asked))
        while position < 10**12:
            allocated, asked = allocated + size, asked + size
            position, size = next(workspaces)
        return [*found, (allocated, asked)]

    # what the passes call

    def synchronize(self) -> None:
        pass

    def reset_peak_memory_stats(self) -> None:
        self.since = len(self.shadow.log)

    def memory_stats(self) -> dict[str, int]:
        levels = self.levels()
        recent = levels[self.since :]
        stats = {}
        for i, kind in enumerate(("allocated", "requested")):
            stats[f"{kind}_bytes.all.peak"] = max(level[i] for level in recent)
            stats[f"{kind}_bytes.all.current"] = levels[-1][i]
        return {**stats, "reserved_bytes.all.peak": 2 * stats["allocated_bytes.all.peak"]}

    def memory_allocated(self) -> int:
        return self.levels()[-1][0]

    def clear(self) -> None:
        if self.workspace:
            self.workspaces.append((len(self.shadow.log), -self.workspace))
        self.workspace = 0

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.fixture
def on(monkeypatch):
    """Runs both passes of a recipe "on CUDA", which is `card`."""
    build(recipe(), "cpu")  # what it imports must not be seen

    def run(card: Card, recipe: Recipe) -> Report:
        names = (
            "synchronize",
            "reset_peak_memory_stats",
            "memory_stats",
            "memory_allocated",
            "empty_cache",
        )
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(card, name))
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", card.clear, raising=False)
        monkeypatch.setattr(passes, "build", lambda recipe, device: build(recipe, "cpu"))
        monkeypatch.setattr(
            passes, "Tracker", lambda device, round_to: Tracker("cpu", round_to=round_to)
        )
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(
            passes, "nvml_snapshot", lambda index: Sensors(True, process=(4 + index) * MiB)
        )
        with card.shadow:
            truth = passes.clean_pass(
                recipe, repeats=2, warmup=2, device="cuda", before=Sensors(True, used=MiB)
            )
            return passes.tracked_pass(recipe, "cuda", truth)

    return run


def recipe(**fields) -> Recipe:
    # torch's step counters are on the host on CUDA, and with these optimizers there are none
    return Recipe(
        config("gpt2"), **{**SIZES, "optim": "sgd", "optim_args": "momentum=0.9", **fields}
    )


LAST = ("forward", "backward", "step", "between_steps")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"loop": "optimizer_in_backward"},
    ],
)
def test_the_balance_closes_with_nothing_unexplained(on, fields):
    card = Card()
    report = on(card, recipe(**fields))
    assert set(report.phases) == {"load", *LAST}
    for name in LAST:
        for split in (report.phases[name].peak, report.phases[name].end):
            assert (split.workspace, split.unexplained) == (CUBLAS, 0), name
    assert report.phases["load"].end.workspace == report.phases["load"].end.unexplained == 0
    assert (report.peak.workspace, report.peak.unexplained) == (CUBLAS, 0)
    assert (
        report.peak.total
        == report.allocated
        == max(report.phases[name].peak.total for name in LAST)
    )
    assert max(moment.bytes.total for moment in report.timeline) == report.peak.total
    assert report.requested <= report.allocated and report.reserved >= report.allocated
    assert (
        card.emptied == 2  # before and after the clean pass
        and report.process == 7 * MiB
        and not [note for note in report.notes if "tracked pass" in note]
    )


def test_scratch_that_nobody_saw_is_unexplained_where_it_was(on):
    """One layer's matmuls are small beside the scratch of its last operator, so that this makes
    backward's peak.
    """
    fields = {"seq_len": 128, "batch_size": 1, "num_layers": 1}
    sound, report = (
        on(Card(), recipe(**fields)),
        on(Card(scratchy="native_layer_norm_backward"), recipe(**fields)),
    )
    assert report.phases["backward"].peak.unexplained > SCRATCH // 2
    assert report.phases["backward"].peak.total > sound.phases["backward"].peak.total
    for name in ("forward", "step", "between_steps"):
        assert report.phases[name] == sound.phases[name]
    assert report.phases["backward"].end == sound.phases["backward"].end
    assert report.peak.total == report.allocated
    rest = report.peak.workspace - CUBLAS  # rounding, of the scratch and at another moment
    assert report.peak.unexplained + rest == report.allocated - sound.allocated and 0 <= rest < 1024


def test_what_blocks_hold_beyond_the_request_is_workspace(on):
    report, sound = on(Card(slack=5120), recipe(seq_len=128)), on(Card(), recipe(seq_len=128))
    blocks = (report.peak.total - sound.peak.total) // 5120
    assert blocks > 3 and report.peak.workspace == CUBLAS + blocks * 5120
    assert report.peak.unexplained == 0 and report.allocated - report.requested >= blocks * 5120
    for name in LAST:
        assert report.phases[name].peak.unexplained == report.phases[name].end.unexplained == 0


def test_an_allocator_that_does_not_count_requests_closes_too(on, monkeypatch):
    card = Card(slack=5120)
    levels = card.levels
    card.levels = lambda: [(allocated, 0) for allocated, _ in levels()]
    report = on(card, recipe(seq_len=128))
    assert (
        report.peak.workspace == CUBLAS
        and report.peak.unexplained > 0
        and report.peak.unexplained % 5120 == 0
    )
    assert report.peak.total == report.allocated


def test_a_tracked_pass_that_peaks_elsewhere_is_said(on, monkeypatch):
    card = Card()
    clean = passes.clean_pass

    def lighter(*args, **kwargs):
        truth = clean(*args, **kwargs)
        key = "allocated_bytes.all.peak"
        return passes.replace(truth, stats={**truth.stats, key: truth.stats[key] - 512})

    monkeypatch.setattr(passes, "clean_pass", lighter)
    report = on(card, recipe())
    assert report.peak.unexplained == -512 and report.peak.total == report.allocated
    assert [note for note in report.notes if note.startswith("the tracked pass peaked at")]


# --- the device's own figure


BLIND = Sensors(False, reason="no NVIDIA driver answers")


@pytest.mark.parametrize(
    ("now", "process", "notes"),
    [
        (Sensors(True, process=7 * MiB), 7 * MiB, ()),
        (
            Sensors(True, used=10 * MiB),
            9 * MiB,
            ("process: the device's memory in use, less what was in use before",),
        ),
        (BLIND, None, ("process: not known, no NVIDIA driver answers",)),
        (Sensors(True, missing={"process": "it hides"}), None, ("process: not known, it hides",)),
    ],
)
def test_process_memory_is_nvmls_or_what_the_device_gained(now, process, notes):
    assert passes.process_bytes(now, Sensors(True, used=MiB)) == (process, notes)
    assert notes == () or passes.process_bytes(now, BLIND)[0] is None


# --- out of memory on CUDA

TORCH = (
    "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 14.56 GiB of "
    "which 811.50 MiB is "
    "free. Process 2112 has 13.77 GiB memory in use. 8.00 GiB allowed; Of the allocated memory "
    "13.31 GiB is allocated "
    "by PyTorch, and 342.47 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large "
    "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
ERRORS = [
    (torch.OutOfMemoryError(TORCH), "CUDA out of memory. Tried to allocate 1.53 GiB."),
    (
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously"),
        "CUDA error: out of memory",
    ),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "CUDA error: CUBLAS_",
    ),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuDNN error"),
]


@pytest.mark.parametrize(("error", "start"), ERRORS)
def test_all_ways_to_run_out_are_one(error, start):
    message = worker.out_of_memory(error, "cuda")
    assert (
        message.startswith(start)
        and "documentation" not in message
        and "kernel errors" not in message
    )
    assert "\n" not in message and ("811.50 MiB is free" in message) == (
        "Tried to allocate" in message
    )


@pytest.mark.parametrize(
    "text", ["mat1 and mat2 shapes cannot be multiplied", "CUDA error: invalid argument"]
)
def test_other_errors_are_not(text):
    error = RuntimeError(text)
    assert worker.out_of_memory(error, "cuda") == worker.out_of_memory(error, "cpu") == ""


def test_ram_that_runs_out_says_what_was_free(monkeypatch):
    monkeypatch.setattr(worker, "memory", lambda: (2**34, 2**33))
    text = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    )
    text += "you tried to allocate 10737418240 bytes. Error code 12 (Cannot allocate memory)"
    message = worker.out_of_memory(RuntimeError(text), "cpu")
    assert message == "RAM ran out: it asked for 10.000 GiB more, and 8.000 GiB were free."
    assert (
        worker.out_of_memory(MemoryError(), "cpu")
        == "RAM ran out: an allocation failed, and 8.000 GiB were free."
    )


@pytest.fixture
def t4(monkeypatch):
    properties = SimpleNamespace(
        name="Tesla T4",
        major=7,
        minor=5,
        multi_processor_count=40,
        total_memory=find_gpu("T4").total,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (MiB, properties.total_memory))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 * MiB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 6 * MiB)
    monkeypatch.setattr(worker, "nvml_snapshot", lambda: Sensors(True, driver="580.1"))
    return properties


def test_an_oom_report_names_the_card_and_how_far_it_got(monkeypatch, t4):
    def run_out(*args):
        raise torch.OutOfMemoryError(TORCH)

    monkeypatch.setattr(worker, "clean_pass", run_out)
    report = worker.run(recipe(), repeats=1, warmup=2, device="cuda")
    assert (report.status, report.target, report.allocated, report.reserved) == (
        "oom",
        "cuda",
        5 * MiB,
        6 * MiB,
    )
    expected = {
        "gpu": "Tesla T4",
        "driver": "580.1",
        "compute_capability": "7.5",
        "total_memory": t4.total_memory,
    }
    assert expected.items() <= report.environment.items()


def test_errors_that_are_not_about_memory_come_through(monkeypatch, t4):
    def fail(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(worker, "clean_pass", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.run(recipe(), repeats=1, warmup=2, device="cuda")
