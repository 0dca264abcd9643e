"""The experiment for two GPUs, run for real with two CPU processes."""

import contextlib
import io
import json
import sys

import pytest
from vramlab_course.chapters import two_ranks


def said() -> str:
    """What a rank prints."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setattr(sys, "argv", ["two_ranks.py", "--steps", "2"])
        two_ranks.main()
    return text.getvalue()


@pytest.fixture(scope="module")
def found(launcher) -> dict:
    """The ranks have torchrun's environment."""
    first, second = launcher.run("test_two_ranks:said")
    assert second == ""
    (line,) = first.splitlines()
    return json.loads(line)


def test_ddp_hands_over_the_bytes_of_the_gradients(found):
    assert found["sent_buckets"] == 4 * found["parameters"] > 0


def test_it_says_where_it_ran_and_how_long(found):
    import torch

    assert found["backend"] == ("nccl" if torch.cuda.device_count() >= 2 else "gloo")
    assert found["step_seconds"] > 0 and found["alone_seconds"] > 0
    assert 0 < found["link_gb_per_second"] < 1000


def test_without_torchrun_it_says_how_to_start_it(capsys):
    with pytest.raises(SystemExit, match="2"):
        said()
    assert "torchrun --standalone --nproc_per_node 2" in capsys.readouterr().err
