"""Ranks that fail: within seconds, one clear message that names the rank, and no process left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import rank_faults
from test_measure import gone
from tiny_models import config
from vramlab import MeasurementError, MiB, Recipe, RecipeError, Sharding, measure
from vramlab.measurement import child_process as apart
from vramlab.measurement.sharding import Launcher, launch, run_alone, run_ranks
from vramlab.report.errors import RankError

SMALL = {"batch_size": 2, "seq_len": 16, "num_layers": 1, "loop": "plain"}
FSDP = Recipe(config("llama"), sharding=Sharding(3, 2), **SMALL)
pytestmark = pytest.mark.skipif(os.name == "nt", reason="gloo's ranks are forked")


@pytest.fixture(scope="module")
def launcher():
    """Libraries loaded once. Whatever a test did to its ranks, none is left."""
    BEFORE.update(psutil.Process().children(recursive=True))
    with Launcher().start() as launcher:
        yield launcher
    assert started() == []


BEFORE: set[psutil.Process] = set()  # what earlier test files started in this worker, such as a resource tracker


def started() -> list[psutil.Process]:
    """The processes that this file's tests started and that still run."""
    return [p for p in psutil.Process().children(recursive=True) if p not in BEFORE]


@pytest.fixture(autouse=True)
def quickly(launcher):
    """No test leaves more than the one process that starts ranks."""
    yield
    assert len(started()) <= 1


def pids(folder: Path, count: int = 0) -> list[int]:
    until = time.monotonic() + 60
    while len(found := [int(path.name) for path in folder.iterdir() if path.name.isdigit()]) < count:
        assert time.monotonic() < until, "the ranks never started"
        time.sleep(0.05)
    return found


# --- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_every_rank_answers_in_order(launcher, world_size):
    """Any number, more than there are cores included."""
    answers = launch(rank_faults.greet, {"word": "안녕"}, world_size, launcher=launcher)
    total = sum(range(world_size))
    assert answers == [{"rank": r, "word": "안녕", "total": total, "local": r} for r in range(world_size)]


def test_for_gpus_each_rank_is_a_fresh_process(launcher):
    """CUDA does not survive a fork, so these are spawned; the ranks themselves may as well be a CPU's."""
    assert [answer["rank"] for answer in launch(rank_faults.greet, device="cuda", launcher=launcher)] == [0, 1]


def test_three_ranks_compute_what_one_does(launcher):
    recipe = Recipe(config("llama"), sharding=Sharding(3, 3), **SMALL)
    ranks, alone = run_ranks(recipe, steps=3, launcher=launcher), run_alone(recipe, steps=3)
    assert ranks.losses == pytest.approx(alone.losses, rel=1e-6) and len(set(ranks.losses)) == 3
    assert set(ranks.gradients) == set(alone.gradients)
    for name, gradient in alone.gradients.items():
        assert (ranks.gradients[name] - gradient).abs().max() <= 2e-6 * gradient.abs().max().clamp(min=1e-3), name
    assert [report.recipe["sharding"]["rank"] for report in ranks.reports] == [0, 1, 2]
    assert {report.source for report in ranks.reports} == {"measured"}


# --- ranks that fail -------------------------------------------------------------------------------------------------

FAILURES = {
    "raise": (None, "failed: ValueError: a bad value"),
    "exit": (7, "ended in the middle with exit status 7, without an exception."),
    "leave": (1, "ended in the middle with exit status 1, without an exception."),
    "kill": (-9, "was killed by SIGKILL."),
}


@pytest.mark.parametrize(("how", "who"), [("raise", 1), ("raise", 0), ("exit", 1), ("leave", 2), ("kill", 0)])
def test_the_rank_that_failed_is_named_and_the_others_do_not_wait(launcher, tmp_path, how, who):
    code, words = FAILURES[how]
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch("rank_faults:fail", {"how": how, "folder": str(tmp_path), "who": who}, 3, launcher=launcher, timeout=60)
    assert time.monotonic() - begun < 45, "long before gloo's own patience ends"
    assert (caught.value.rank, caught.value.code) == (who, code)
    assert str(caught.value).startswith(f"Rank {who} of 3 {words}")
    assert len(pids(tmp_path)) == 3 and gone(pids(tmp_path))


@pytest.mark.parametrize("oom", [True, False])
def test_a_rank_that_is_killed_ran_out_of_memory_only_if_the_kernel_says_so(launcher, tmp_path, monkeypatch, oom):
    monkeypatch.setattr(apart.Apart, "out_of_memory", lambda self: oom)
    with pytest.raises(RankError) as caught:
        launch("rank_faults:fail", {"how": "kill", "folder": str(tmp_path)}, 2, launcher=launcher)
    assert caught.value.oom == ("It was killed by the kernel because RAM ran out." if oom else "")
    assert str(caught.value).endswith("SIGKILL by the kernel because RAM ran out." if oom else "SIGKILL.")


def test_the_traceback_is_the_ranks_own_in_one_piece(launcher, tmp_path):
    with pytest.raises(RankError) as caught:
        launch(rank_faults.fail, {"how": "raise", "folder": str(tmp_path)}, 2, launcher=launcher)
    text = str(caught.value)
    assert text.count("Traceback") == 1 and text.endswith("ValueError: a bad value\nof two lines")
    assert 'rank_faults.py", line' in text and "in _raise" in text
    for others in ("torchelastic", "elastic_launch", "torch/distributed/run", "ranks.py", "[rank", "="):
        assert others not in text, "it is not torchrun's wall of text"


def test_what_does_not_divide_starts_no_process():
    with pytest.raises(RecipeError, match="has 6 heads, which 4 ranks cannot share equally; these can: 1, 2"):
        run_ranks(Recipe(config("llama"), sharding=Sharding(0, 4, "tensor"), **SMALL))


def test_an_error_about_the_recipe_is_one_here_too(launcher, tmp_path):
    with pytest.raises(RecipeError) as caught:
        launch("rank_faults:fail", {"how": "refuse", "folder": str(tmp_path)}, 2, launcher=launcher)
    assert (caught.value.field, caught.value.value) == ("sharding.world_size", "3")
    assert str(caught.value).endswith("but it must divide what it must divide.")


def test_without_deepspeed_it_says_what_to_install(launcher):
    recipe = FSDP.replace(sharding=Sharding(2, 2, "deepspeed"))
    arguments = {"recipe": recipe.to_dict(), "steps": 1, "device": "cpu"}
    with pytest.raises((RecipeError, MeasurementError), match=r"pip install") as caught:
        launch("rank_faults:without_deepspeed", arguments, launcher=launcher)
    assert "\n" not in str(caught.value) and "deepspeed" in str(caught.value).lower()


def test_memory_that_runs_out_on_one_rank_is_a_report_that_names_it(launcher):
    recipe = FSDP.replace(batch_size=64, seq_len=128)
    ranks = run_ranks(recipe, memory_limit={1: 20 * MiB}, launcher=launcher)
    assert [report.status for report in ranks.reports] == ["error", "oom"] and ranks.losses == []
    assert ranks.reports[1].message.startswith("Rank 1 of 2: RAM ran out: it asked for ")
    assert ranks.reports[1].message.endswith("more, and the limit was 0.020 GiB.")
    assert "rank 1 ran out of memory" in ranks.reports[0].message


def test_measure_says_it_likewise():
    report = measure(FSDP.replace(batch_size=64, seq_len=128), device="cpu", recorded=False, memory_limit=20 * MiB)
    assert report.status == "oom" and report.message.startswith("Rank ") and "RAM ran out" in report.message
    assert report.environment["memory_limit"] == 20 * MiB


# --- what cannot be started ------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named(launcher):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeasurementError, match=f"port {port} is in use") as caught:
            launch(rank_faults.greet, launcher=launcher, port=port, timeout=60)
    assert "\n" not in str(caught.value)


def test_too_few_gpus_is_a_sentence():
    with pytest.raises(MeasurementError, match=r"2 ranks need as many GPUs and \d are here: take device='cpu'"):
        run_ranks(FSDP, device="cuda")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("rank_faults.greet", "'package.module:function'"),
        (lambda: None, "put it into a module"),
        (lambda: None, "ranks import what they run"),
    ],
)
def test_what_ranks_cannot_import_is_refused(function, why):
    with pytest.raises(RecipeError, match=why):
        launch(function)


def test_what_ranks_do_not_find_is_their_error(launcher):
    with pytest.raises(RankError, match="no attribute 'nothing'"):
        launch("rank_faults:nothing", launcher=launcher)
    with pytest.raises(RankError, match="not JSON serializable"):
        launch("rank_faults:unanswerable", launcher=launcher)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [({"steps": 0}, "'steps' is 0"), ({"steps": True}, "'steps' is True"), ({"device": "tpu"}, "'device' is 'tpu'")],
)
def test_wrong_arguments_are_sentences(arguments, why):
    with pytest.raises(RecipeError, match=why):
        run_ranks(FSDP, **arguments)
    with pytest.raises(RecipeError, match="'sharding' is None"):
        run_ranks(FSDP.replace(sharding=None))


# --- the one who asked -----------------------------------------------------------------------------------------------


def test_a_timeout_ends_ranks_that_ignore_everything(launcher, tmp_path):
    launch(rank_faults.greet, launcher=launcher)  # so that its libraries are loaded
    begun = time.monotonic()
    with pytest.raises(MeasurementError, match=r"2 ranks took over 5 s and were ended \(no answer from 0, 1\)"):
        launch(rank_faults.hang, {"folder": str(tmp_path)}, launcher=launcher, timeout=5)
    assert time.monotonic() - begun < 20
    assert len(pids(tmp_path)) == 2 and gone(pids(tmp_path)) and started() == []
    assert launch(rank_faults.greet, launcher=launcher)[1]["rank"] == 1, "the next launch starts anew"


ASKING = """
import sys
sys.path.insert(0, {tests!r})
import psutil, rank_faults
from vramlab.measurement.sharding import launch
try:
    launch(rank_faults.hang, {{"folder": {folder!r}}})
except KeyboardInterrupt:
    print("interrupted", len(psutil.Process().children(recursive=True)), flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_one_who_asked(how, tmp_path):
    """Ctrl-C is answered at once; a killed notebook takes its ranks with it, and no folder stays."""
    files = tmp_path / "files"
    files.mkdir()
    code = ASKING.format(tests=os.path.dirname(os.path.dirname(__file__)), folder=str(tmp_path))
    surroundings = {**os.environ, "TMPDIR": str(files)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=surroundings)
    try:
        ranks = pids(tmp_path, 2)
        family = ranks + [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        begun = time.monotonic()
        parent.send_signal(how)
        out, _ = parent.communicate(timeout=30)
    finally:
        parent.kill()
    assert time.monotonic() - begun < 15
    assert out == ("interrupted 0\n" if how == signal.SIGINT else "")
    assert len(family) >= 5 and gone(family)
    assert [path.name for path in files.iterdir() if path.name.startswith("vramlab")] == []
