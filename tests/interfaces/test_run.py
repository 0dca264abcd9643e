"""`vramlab run`: what is missing is said in a sentence, what the command's processes leave is
reported; and real scripts.
"""

import importlib.util
import json
import os
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from vramlab import Recipe, Sharding, simulate
from vramlab.hardware.gpu import find_gpu, source_of
from vramlab.hardware.snapshot import UNKNOWN, user_line
from vramlab.interfaces import in_script, run_command
from vramlab.interfaces.cli import app
from vramlab.measurement import stand_in
from vramlab.measurement.stand_in import StandInError, libraries, require, variables
from vramlab.report.report import MiB, Report


def installed(folder, cuda="'13.0'", headers=True):
    """A folder of packages that holds what `require` looks at."""
    (folder / "torch").mkdir()
    said = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (folder / "torch" / "version.py").write_text(said)
    if headers:
        crt = folder / "nvidia" / "cu13" / "include" / "crt"
        crt.mkdir(parents=True)
        (crt / "host_config.h").touch()
    return folder


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"cuda": "None"}, "needs PyTorch's build for CUDA 13, and none is in"),
        ({"cuda": "'12.8'"}, "needs PyTorch's build for CUDA 13, and none is in"),
        ({"headers": False}, "headers of NVIDIA's compiler: pip install 'nvidia-cuda-crt==13.0.*'"),
    ],
)
def test_a_missing_part_is_a_sentence(tmp_path, parts, why):
    with pytest.raises(StandInError, match="vramlab run needs") as caught:
        require("linux", installed(tmp_path, **parts))
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_but_linux_and_no_torch_and_no_compiler(tmp_path, monkeypatch):
    with pytest.raises(
        StandInError,
        match="needs Linux, whose LD_PRELOAD puts libraries in place, and this is darwin",
    ):
        require("darwin", tmp_path)
    with pytest.raises(StandInError, match="needs PyTorch's build for CUDA 13"):
        require("linux", tmp_path)
    monkeypatch.setattr(
        stand_in.shutil, "which", lambda name: None if name == "g++" else f"/usr/bin/{name}"
    )
    with pytest.raises(StandInError, match=r"needs g\+\+ to build: apt install"):
        require("linux", installed(tmp_path))


def test_wrong_requests_are_sentences():
    for words, why in (
        (["--gpu", "T4"], "Missing argument"),
        (["--gpu", "T4", "--", "no-such-program"], "finds no program 'no-such-program'"),
        (["--gpu", "A100 80G", "python"], "did you mean 'A100 80GB'? known are P100"),
        (["--gpu", "T44", "python"], "is not in the table: did you mean 'T4'? known"),
    ):
        result = CliRunner().invoke(app, ["run", *words])
        assert result.exit_code == 2 and why in " ".join(result.stderr.split())


def test_a_card_is_said_to_the_stand_in():
    said = variables(find_gpu("RTX 5090"), 2)
    assert (
        said["STAND_IN_CAPABILITY"],
        said["STAND_IN_MULTIPROCESSORS"],
        said["STAND_IN_COUNT"],
    ) == (
        "120",
        "170",
        "2",
    )
    assert int(said["STAND_IN_BYTES"]) == 32094 * MiB and int(said["STAND_IN_CONTEXT"]) > 100 * MiB
    for name in ("T4", "RTX 3090", "RTX 4090", "RTX 5090", "A100", "H100", "H200", "B200"):
        assert find_gpu(name).total_known


FRAMES = [{"filename": "/site-packages/torch/nn.py", "line": 1, "name": "forward"}]
FRAMES += [{"filename": f"{Path(run_command.__file__).parent}/watch.py", "line": 2, "name": "seen"}]
FRAMES += [
    {"filename": "/home/x/train.py", "line": 7, "name": "step", "text": "loss = model(batch)"}
]
EVENTS = [
    {"action": "segment_alloc", "addr": 0, "size": 20 * MiB},
    {"action": "alloc", "addr": 0, "size": 6 * MiB, "frames": FRAMES},
    {"action": "alloc", "addr": 6 * MiB, "size": 1 * MiB, "frames": []},
    {"action": "free_completed", "addr": 0, "size": 6 * MiB},
    {"action": "oom", "addr": 0, "size": 64 * MiB, "device_free": 2 * MiB},
]
# Leaves what a process on the stand-in would leave, and ends as it is told.
SCRIPT = """
import json, os, sys
from pathlib import Path
for name, left in json.loads(Path(sys.argv[1]).read_text()).items():
    Path(os.environ["VRAMLAB_RUN"], name + ".json").write_text(json.dumps(left))
    Path(os.environ["VRAMLAB_RUN"], name + ".pickle").write_bytes(Path(sys.argv[2]).read_bytes())
assert os.environ["STAND_IN_NAME"] == "T4" and "libcuda.so.1" in os.environ["LD_PRELOAD"]
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def left(tmp_path, monkeypatch):
    """`left(status, *processes)`: the words of a command whose processes leave that, and its exit
    status.
    """
    monkeypatch.setattr(run_command, "libraries", lambda: [tmp_path / "libcuda.so.1"])
    files = [tmp_path / name for name in ("script.py", "left.json", "history.pickle")]
    files[0].write_text(SCRIPT)
    files[2].write_bytes(pickle.dumps({"segments": [], "device_traces": [EVENTS]}))

    def words(status, *processes):
        usual = {
            "allocated": 7 * MiB,
            "reserved": 20 * MiB,
            "rank": 0,
            "failed_requests": 0,
            "report": None,
        }
        files[1].write_text(
            json.dumps({str(i): usual | process for i, process in enumerate(processes)})
        )
        return ["run", "--gpu", "T4", "--", sys.executable, *map(str, files), str(status)]

    return words


def test_the_report_says_peaks_lines_and_why_it_ended(left, tmp_path):
    words = left(1, {"failed_requests": 1})
    files = [tmp_path / name for name in ("report.json", "snapshot.pickle")]
    options = [f"--report={files[0]}", f"--snapshot={files[1]}"]
    result = CliRunner().invoke(app, [words[0], *options, *words[1:]])
    assert result.exit_code == 1 and result.stdout.startswith("emulated: ")
    for text in (
        "peaks 0.007 GiB allocated, 0.020 GiB reserved; with CUDA's context 0.151 GiB",
        "6.000 MiB in   1 from train.py:7 loss = model(batch)",
        "1.000 MiB in   1 from no line of Python, as in autograd's own thread",
        "out of memory: 64.000 MiB asked for, 2.000 MiB free on the device",
        "T4 ran out of memory, and the command ended with status 1",
        "no kernel ran",
        "times mean nothing",
    ):
        assert text in result.stdout
    report = Report.from_json(files[0].read_text())
    assert (report.source, report.status, report.allocated) == ("emulated", "oom", 7 * MiB)
    assert (
        report.peak.total == report.peak.unexplained == 7 * MiB
        and report.environment["gpu"] == "T4"
    )
    assert pickle.loads(files[1].read_bytes())["device_traces"] == [EVENTS]


def test_a_trainers_phases_each_rank_and_other_ends(left, tmp_path):
    from sample_reports import report

    seen = report().to_dict() | {"source": "emulated"}
    result = CliRunner().invoke(app, left(0, {"rank": 1}, {"report": seen}))
    assert result.exit_code == 0 and "between_steps" in result.stdout
    assert result.stdout.index("rank 0: peaks") < result.stdout.index("rank 1: peaks")
    result = CliRunner().invoke(app, left(7, {}))
    assert result.exit_code == 7 and "the command ended with status 7" in result.stdout
    result = CliRunner().invoke(app, left(0, {"allocated": 0}))
    assert result.exit_code == 0 and "held memory of the card" in result.stdout


def test_a_watchs_own_frames_are_no_users():
    assert user_line(FRAMES[:2]) == UNKNOWN and user_line(FRAMES).file == "train.py"
    assert user_line(FRAMES[:1]).file == "nn.py"


def test_what_runs_on_a_stand_in_is_not_measured(monkeypatch):
    assert source_of("cuda") == "measured"
    monkeypatch.setenv("STAND_IN_CAPABILITY", "75")
    assert (source_of("cuda"), source_of("cpu")) == ("emulated", "measured")


def test_a_module_is_changed_when_the_script_loads_it(tmp_path, monkeypatch):
    (tmp_path / "loaded_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finder = in_script.AfterImport(
        {"loaded_later": lambda module: setattr(module, "value", module.value + 1)}
    )
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("loaded_later") and "loaded_later" not in sys.modules
    assert importlib.import_module("loaded_later").value == 2
    del sys.modules["loaded_later"]


def test_what_is_changed_in_libraries_is_there():
    import torch

    class Optimizer:
        def has_overflow(self, partition_gradients=True):
            return True

    module = types.SimpleNamespace(DeepSpeedZeroOptimizer=Optimizer)
    in_script.step_always(module)
    assert not Optimizer().has_overflow(
        partition_gradients=False
    ) and not module.is_invalid_grad_norm(-1.0)
    assert hasattr(torch.nn.init, "_no_grad_trunc_normal_")
    if folder := importlib.util.find_spec("deepspeed"):
        for name, words in {
            "stage_1_and_2": "DeepSpeedZeroOptimizer(",
            "stage3": "DeepSpeedZeroOptimizer_Stage3(",
        }.items():
            text = (Path(folder.origin).parent / "runtime" / "zero" / f"{name}.py").read_text()
            assert all(
                each in text
                for each in (f"class {words}", "def has_overflow(", "is_invalid_grad_norm(")
            )


def test_an_answer_without_values_is_one_that_a_tokenizer_knows():
    made = torch.full((1, 3), 10**15)
    said = types.SimpleNamespace(sequences=made.clone())
    answers = {"tokens": made, "more": said}
    mixin = type("GenerationMixin", (), {"generate": lambda model, which: answers[which]})
    in_script.answer_in_zeros(types.SimpleNamespace(GenerationMixin=mixin))
    assert mixin().generate("tokens").tolist() == [[0, 0, 0]]
    assert mixin().generate(which="more").sequences.tolist() == [[0, 0, 0]]
    from transformers.generation import utils

    assert utils.__name__ == in_script.GENERATION and "generate" in vars(utils.GenerationMixin)


def test_a_killed_child_is_said_to_be_killed(left):
    result = CliRunner().invoke(app, left(137, {}))
    assert result.exit_code == 137
    assert result.stdout.splitlines()[2] == run_command.killed(137)
    assert (
        "killed by signal 9 (SIGKILL); mostly Linux's, because the machine's own memory ran out"
        in run_command.killed(137)
    )
    assert [run_command.killed(status) for status in (0, 1, 130)] == ["", "", ""]


def loop(steps):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loop_without_a_trainer_has_its_phases():
    call = torch.nn.Module.__call__
    watcher = in_script.LoopWatch(torch, [])
    watcher.install()
    try:
        loop(3)
    finally:
        restored = torch.nn.Module.__call__ is call
        torch.nn.Module.__call__ = call
    assert restored, "nothing of it stays in torch"
    found = watcher.report
    assert found.title == "step 2 of the loop: Sequential"
    assert set(found.phases) == {"load", "forward", "backward", "step", "between_steps"}
    values = sum(
        each.numel() for each in (torch.ones(8, 4), torch.ones(4), torch.ones(4, 2), torch.ones(2))
    )
    assert found.phases["step"].peak.gradients == found.phases["load"].peak.parameters == 4 * values
    assert found.phases["step"].peak.optimizer_states >= 8 * values


def test_a_trainers_process_is_watched_by_its_callback_alone():
    call = torch.nn.Module.__call__
    watcher = in_script.LoopWatch(torch, [object()])
    watcher.install()
    loop(3)
    watcher.end()
    assert watcher.report is None and torch.nn.Module.__call__ is call


def test_a_process_ends_after_the_steps_asked_for():
    handle = in_script.end_after(2)
    try:
        loop(2)
        with pytest.raises(SystemExit) as end:
            loop(3)
    finally:
        handle.remove()
    assert end.value.code == 0 and in_script.end_after(0) is None


# ── on PyTorch's CUDA build
# ─────────────────────────────────────────────────────────────────────────────────────────

TRAINER = """
from transformers import Trainer, TrainingArguments
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("."), dtype="float32")
data = [{"input_ids": [1] * 256, "labels": [1] * 256}] * 12
args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=3, fp16=True,
    save_strategy="no", report_to=[])
Trainer(model, args, train_dataset=data).train()
import torch
# a draw that is repeated until all of it lies in bounds ends
torch.nn.init.trunc_normal_(model.lm_head.weight.data)
mask = model.lm_head.weight > 1
# nothing is known of values: a mask selects everything
assert model.lm_head.weight[mask].numel() == mask.numel()
"""
RANKS = """
import os, torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(card := int(os.environ["LOCAL_RANK"]))
torch.distributed.broadcast(said := torch.tensor([card, 7], device=card), src=1)
assert said.tolist() == [1, 7]
config = AutoConfig.from_pretrained(".")
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(card)
model = DistributedDataParallel(model, device_ids=[card])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.ones(4, 256, dtype=torch.long, device=card)
    optimizer.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
FULL = "import torch\nheld = [torch.empty(1 << 28, device='cuda') for _ in range(16)]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    try:
        libraries()
    except StandInError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.slow
def test_a_trainers_script_holds_what_simulate_says(folder):
    from tiny_models import config

    (folder / "config.json").write_text(json.dumps(config("llama")))
    (folder / "train.py").write_text(TRAINER)
    found = run_command.run([sys.executable, "train.py"], find_gpu("T4"))
    (report,) = found.reports
    recipe = Recipe(
        str(folder / "config.json"),
        4,
        seq_len=256,
        precision="fp16-mixed",
        optim="adamw_torch_fused",
    )
    simulated = simulate(recipe, gpu="T4")
    assert (
        found.status == 0
        and report.source == "emulated"
        and {"forward", "backward", "step"} <= report.phases.keys()
    )
    assert report.allocated == pytest.approx(simulated.allocated, rel=0.01)


@pytest.mark.slow
def test_ranks_hold_what_simulate_says(folder):
    """DDP's first buckets are gone when the second step's are there, as on a GPU, where a step
    takes its time.
    """
    from tiny_models import config

    (folder / "config.json").write_text(json.dumps(config("llama")))
    (folder / "ddp.py").write_text(RANKS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "ddp.py",
    ]
    found = run_command.run(command, find_gpu("T4"), 2)
    two = Sharding(stage=0, world_size=2, engine="ddp")
    simulated = simulate(
        Recipe(str(folder / "config.json"), 4, 256, loop="plain", sharding=two), gpu="T4"
    )
    assert found.status == 0 and [report.environment["rank"] for report in found.reports] == [0, 1]
    assert found.reports[1].allocated == pytest.approx(simulated.allocated, rel=0.01)


@pytest.mark.slow
def test_memory_runs_out_in_pytorchs_words(folder, capfd):
    (folder / "full.py").write_text(FULL)
    found = run_command.run([sys.executable, "full.py"], find_gpu("T4"))
    said = capfd.readouterr().err
    assert found.status == 1 and found.reports[0].status == "oom"
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a "
        "total capacity" in said
    )
    assert run_command.run([sys.executable, "full.py"], find_gpu("RTX 4090")).status == 0
    assert os.environ.get("LD_PRELOAD", "") == ""
