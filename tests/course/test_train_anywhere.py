"""The script to take away: one process, two, a restart with another number, and SLURM's two nodes
give the same losses.

SLURM's test starts torchrun; the others run the script on ranks that the session's launcher forks,
with torchrun's environment.
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from vramlab.base.data import DATA
from vramlab.measurement.launch import Launcher
from vramlab_course import train_anywhere

SCRIPT = Path(train_anywhere.__file__)
REPOSITORY = DATA.parent
SBATCH = REPOSITORY / "notebooks" / "slurm" / "train.sbatch"
BIN = Path(sys.executable).parent
TEXT = "def add(a, b):\n    return a + b\n\n" * 200
COMMON = ["--from-scratch", "--pattern=*.txt", "--context=32", "--batch-size=4", "--lr=3e-3"]
pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="torchrun's processes are started as on Linux and macOS"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(TEXT)
    return folder


def environment(**more: str) -> dict[str, str]:
    """As in a shell: no rank yet, this Python's torchrun first."""
    left = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK") and "SLURM" not in k
    }
    return {
        **left,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def lines(done: subprocess.CompletedProcess) -> list[dict]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def train(text: Path, *arguments: str, launcher: Launcher | None = None) -> list[dict]:
    """Rank 0's lines of two ranks, or of this process alone."""
    words = [f"--text={text}", *COMMON, *arguments]
    return (
        launcher.run("test_train_anywhere:script", {"words": words})[0]
        if launcher
        else script(words)
    )


def script(words: list[str]) -> list[dict]:
    """What the script prints in this process."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["train_anywhere.py", *words])
        train_anywhere.main()
    return [json.loads(line) for line in said.getvalue().splitlines() if line.startswith("{")]


def losses(found: list[dict]) -> list[float]:
    return [line["loss"] for line in found]


@pytest.fixture(scope="module")
def alone(text) -> list[dict]:
    return train(text, "--steps=6")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "new"


@pytest.fixture(scope="module")
def two(text, checkpoints, launcher) -> list[dict]:
    """Two processes under FSDP2, ended after four steps, with a checkpoint after each second."""
    return train(
        text, "--steps=4", f"--checkpoint={checkpoints}", "--save-every=2", launcher=launcher
    )


def test_one_process_learns(alone):
    assert [line["step"] for line in alone] == [1, 2, 3, 4, 5, 6] and alone[0]["world_size"] == 1
    assert losses(alone)[-1] < losses(alone)[0] - 1


def test_two_processes_learn_the_same(alone, two):
    assert [line["world_size"] for line in two] == [2] * 4
    assert losses(two) == pytest.approx(losses(alone)[:4], rel=1e-5)


def test_a_replica_on_each_in_micro_batches_learns_the_same(alone, text, launcher):
    found = train(
        text, "--steps=3", "--sharding=ddp", "--micro-batch=1", "--checkpointing", launcher=launcher
    )
    assert losses(found) == pytest.approx(losses(alone)[:3], rel=1e-5)


def test_one_process_goes_on_where_two_stopped(alone, two, checkpoints, text, tmp_path):
    """The checkpoint is of whole tensors, whoever has their shards; a half-written one is passed
    over.
    """
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-4"]
    (checkpoints / "step-5.part").mkdir()
    arguments = "--steps=6", f"--checkpoint={checkpoints}", f"--export={tmp_path / 'model'}"
    found = train(text, *arguments)
    assert [line["step"] for line in found] == [5, 6]
    assert losses(found) == pytest.approx(losses(alone)[4:], rel=1e-5)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")(TEXT[:300], return_tensors="pt")[
        "input_ids"
    ]
    assert model(input_ids=ids, labels=ids).loss.item() < losses(alone)[1], (
        "it is the trained model"
    )


def test_bf16_computes_in_half_precision_and_learns(alone, text, launcher):
    """Both ways of it: FSDP's policy, and autocast in a process alone."""
    sharded = train(text, "--steps=3", "--precision=bf16", launcher=launcher)
    single = train(text, "--steps=3", "--precision=bf16")
    for found in (sharded, single):
        assert losses(found) == pytest.approx(losses(alone)[:3], rel=2e-2)
        assert losses(found) != pytest.approx(losses(alone)[:3], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--model=nowhere"],
            "--model must be a folder with config.json, weights and tokenizer, not nowhere",
        ),
        (["--pattern=*.none"], "has 0 tokens in files *.none; over 32 are needed"),
        (["--batch-size=3"], "--batch-size 3 cannot be divided among 2 ranks"),
    ],
)
def test_what_cannot_be_is_a_sentence(text, monkeypatch, arguments, why):
    import torch

    monkeypatch.setattr(sys, "argv", ["train_anywhere.py", f"--text={text}", *COMMON, *arguments])
    with pytest.raises(SystemExit) as caught:
        train_anywhere.train(
            train_anywhere.arguments(), torch.device("cpu"), 0, 2 if "3" in arguments[0] else 1
        )
    assert why in str(caught.value)


def test_a_copy_elsewhere_asks_for_a_model(tmp_path, monkeypatch):
    copy = tmp_path / "mine.py"
    copy.write_text(SCRIPT.read_text())
    monkeypatch.setattr(sys, "argv", [str(copy)])
    with pytest.raises(
        SystemExit,
        match=r"--model must be a folder with config.json, weights and tokenizer, not None\.$",
    ):
        runpy.run_path(str(copy), run_name="__main__")


# --- SLURM

FAKES = {
    "scontrol": '[ "$*" = "show hostnames node[1-2]" ] || exit 9\necho localhost\necho node2\n',
    "srun": 'for node in $(seq "$SLURM_JOB_NUM_NODES"); do\n  SLURM_NODEID=$((node - 1)) "$@" '
    "&\n  pids+=($!)\ndone\n"
    'status=0\nfor pid in "${pids[@]}"; do wait "$pid" || status=$?; done\nexit $status\n',
}


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a job of two nodes with a process each, which are both this machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    job |= {
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_CPUS_PER_TASK": "1",
        "CHECKPOINTS": str(tmp_path / "kept"),
    }
    surroundings = environment(**job)
    return {**surroundings, "PATH": f"{folder}{os.pathsep}{surroundings['PATH']}"}


@pytest.mark.slow
def test_slurm_runs_it_on_two_nodes(cluster, text, alone, tmp_path):
    command = ["bash", str(SBATCH), f"--text={text}", *COMMON, "--steps=2", "--save-every=1"]
    found = lines(subprocess.run(command, capture_output=True, text=True, timeout=300, env=cluster))
    assert [line["world_size"] for line in found] == [2, 2]
    assert losses(found) == pytest.approx(losses(alone)[:2], rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-1", "step-2"]


def test_a_node_that_fails_fails_the_job(cluster, tmp_path):
    """And what torchrun is told: four processes a node, the first node's name, a port of the job's
    own.
    """
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(
        '#!/bin/bash\necho "$OMP_NUM_THREADS" "$@"\n[ "$SLURM_NODEID" = 0 ] || exit 3\n'
    )
    torchrun.chmod(0o755)
    job = {
        **cluster,
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "18",
        "SLURM_JOB_ID": "1234567",
    }
    done = subprocess.run(
        ["bash", str(SBATCH), "--steps=7"], capture_output=True, text=True, timeout=60, env=job
    )
    told = (
        "4 --nnodes 2 --nproc_per_node 4 --rdzv_id 1234567 --rdzv_backend c10d --rdzv_endpoint "
        "localhost:24567 "
        f"helpers/vramlab_course/train_anywhere.py --checkpoint {tmp_path / 'kept'} --steps=7"
    )
    assert done.returncode == 3 and done.stdout.splitlines() == [told, told]


def test_the_batch_file_asks_for_what_it_uses():
    assert subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True, text=True).stderr == ""
    text = SBATCH.read_text()
    asked = {
        line.split("#SBATCH ")[1].split()[0]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    }
    assert {"--nodes=2", "--ntasks-per-node=1", "--requeue"} <= asked
    assert "srun torchrun" in text and "helpers/vramlab_course/train_anywhere.py" in text
    body = text.index("set -euo pipefail")
    assert text.rindex("#SBATCH") < body, "SLURM reads no option after the first command"
