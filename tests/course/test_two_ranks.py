"""The experiment for two GPUs, run for real with two CPU processes."""

import json
import subprocess
import sys

import pytest

SCRIPT = ["-m", "vramlab_course.chapters.two_ranks", "--steps", "2"]


@pytest.fixture(scope="module")
def found() -> dict:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *SCRIPT]
    run = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    return json.loads(line)


def test_ddp_hands_over_the_bytes_of_the_gradients(found):
    assert found["sent_buckets"] == 4 * found["parameters"] > 0


def test_both_ranks_hold_the_same_weights_though_they_read_other_text(found):
    assert found["same"] is True


def test_it_says_where_it_ran_and_how_long(found):
    import torch

    assert found["backend"] == ("nccl" if torch.cuda.device_count() >= 2 else "gloo")
    assert found["step_seconds"] > 0 and found["alone_seconds"] > 0


def test_without_torchrun_it_says_how_to_start_it():
    run = subprocess.run([sys.executable, *SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and "torchrun --standalone --nproc_per_node 2" in run.stderr
