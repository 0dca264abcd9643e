"""Ranks that fail: within seconds, one clear message that names the rank, and no process left
behind.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from compared_ranks import run_alone, run_ranks
from quick import params
from rank_faults import gone, small_children
from tiny_models import config
from vramlab import MeasurementError, Recipe, RecipeError, Sharding, measure
from vramlab.base.errors import MissingExtra
from vramlab.measurement.launch import Launcher, RankError

SMALL = {"batch_size": 2, "seq_len": 16, "num_layers": 1, "loop": "plain"}
FSDP = Recipe(config("llama"), sharding=Sharding(3, 2), **SMALL)
pytestmark = pytest.mark.skipif(os.name == "nt", reason="gloo's ranks are forked")


@pytest.fixture(scope="module")
def launcher():
    """Libraries loaded once. Whatever a test did to its ranks, none is left."""
    BEFORE.update(psutil.Process().children(recursive=True))
    with Launcher() as launcher:
        with small_children():
            launcher.start()
        yield launcher
    assert started() == []


BEFORE: set[psutil.Process] = (
    set()
)  # what earlier test files started in this worker, such as a resource tracker


def started() -> list[psutil.Process]:
    """The processes that this file's tests started and that still run."""
    return [p for p in psutil.Process().children(recursive=True) if p not in BEFORE]


@pytest.fixture(autouse=True)
def quickly(launcher):
    """No test leaves more than the process that starts ranks and, after spawned ones,
    multiprocessing's resource tracker.
    """
    yield
    assert len(started()) <= 2


def pids(folder: Path, count: int = 0) -> list[int]:
    until = time.monotonic() + 300
    while (
        len(found := [int(path.name) for path in folder.iterdir() if path.name.isdigit()]) < count
    ):
        assert time.monotonic() < until, "the ranks never started"
        time.sleep(0.05)
    return found


# --- what works


@pytest.mark.parametrize("world_size", params([2, 3, 5], [2]))
def test_every_rank_answers_in_order(launcher, world_size):
    """Any number, more than there are cores included."""
    answers = launcher.run("rank_faults:greet", {"word": "안녕"}, world_size)
    total = sum(range(world_size))
    assert answers == [
        {"rank": r, "word": "안녕", "total": total, "local": r} for r in range(world_size)
    ]


@pytest.mark.slow
def test_for_gpus_each_rank_is_a_fresh_process(launcher):
    """CUDA does not survive a fork, so they are spawned; the ranks themselves may as well be a
    CPU's.
    """
    assert [
        answer["rank"] for answer in launcher.run("rank_faults:greet", world_size=2, device="cuda")
    ] == [0, 1]


def test_three_ranks_compute_what_one_does(launcher):
    recipe = Recipe(config("llama"), sharding=Sharding(3, 3), **SMALL)
    ranks, alone = run_ranks(recipe, steps=3, launcher=launcher), run_alone(recipe, steps=3)
    assert ranks.losses == pytest.approx(alone.losses, rel=1e-6) and len(set(ranks.losses)) == 3
    assert set(ranks.gradients) == set(alone.gradients)
    for name, gradient in alone.gradients.items():
        assert (ranks.gradients[name] - gradient).abs().max() <= 2e-6 * gradient.abs().max().clamp(
            min=1e-3
        ), name
    assert [report.recipe["sharding"]["rank"] for report in ranks.reports] == [0, 1, 2]
    assert {report.source for report in ranks.reports} == {"measured"}


# --- ranks that fail

FAILURES = {
    "raise": (None, "failed: ValueError: a bad value"),
    "exit": (7, "ended in the middle with exit status 7, without an exception."),
    "leave": (1, "ended in the middle with exit status 1, without an exception."),
    "kill": (-9, "was killed by SIGKILL, as the kernel does when RAM runs out."),
}


WHO_FAILS = [("raise", 1), ("raise", 0), ("exit", 1), ("leave", 2), ("kill", 0)]


@pytest.mark.parametrize(("how", "who"), params(WHO_FAILS, WHO_FAILS[1:4]))
def test_the_rank_that_failed_is_named_and_the_others_do_not_wait(launcher, tmp_path, how, who):
    code, words = FAILURES[how]
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        launcher.run(
            "rank_faults:fail", {"how": how, "folder": str(tmp_path), "who": who}, 3, timeout=60
        )
    assert time.monotonic() - begun < 45, "long before gloo's own patience ends"
    assert (caught.value.rank, caught.value.code) == (who, code)
    assert str(caught.value).startswith(f"Rank {who} of 3 {words}")
    assert len(pids(tmp_path)) == 3 and gone(pids(tmp_path))


def test_the_traceback_is_the_ranks_own_in_one_piece(launcher, tmp_path):
    with pytest.raises(RankError) as caught:
        launcher.run("rank_faults:fail", {"how": "raise", "folder": str(tmp_path)}, 2)
    text = str(caught.value)
    assert text.count("Traceback") == 1 and text.endswith("ValueError: a bad value\nof two lines")
    assert 'rank_faults.py", line' in text and "in _raise" in text
    for others in (
        "torchelastic",
        "elastic_launch",
        "torch/distributed/run",
        "ranks.py",
        "[rank",
        "=",
    ):
        assert others not in text, "it is not torchrun's wall of text"


def test_what_does_not_divide_starts_no_process():
    with pytest.raises(RecipeError, match="must divide the 6 heads"):
        run_ranks(Recipe(config("llama"), sharding=Sharding(0, 4, "tensor"), **SMALL))


def test_an_error_about_the_recipe_is_one_here_too(launcher, tmp_path):
    with pytest.raises(RecipeError) as caught:
        launcher.run("rank_faults:fail", {"how": "refuse", "folder": str(tmp_path)}, 2)
    assert (caught.value.field, caught.value.value) == ("sharding.world_size", 3)
    assert str(caught.value).endswith("but it must divide what it must divide.")


def test_without_deepspeed_it_says_what_to_install(launcher):
    recipe = FSDP.replace(sharding=Sharding(2, 2, "deepspeed"))
    arguments = {"recipe": recipe, "steps": 1, "device": "cpu"}
    with pytest.raises(MissingExtra, match=r"pip install") as caught:
        launcher.run("rank_faults:without_deepspeed", arguments)
    assert "\n" not in str(caught.value) and "deepspeed" in str(caught.value).lower()


def test_memory_that_runs_out_on_a_rank_is_a_report_that_names_it(launcher, monkeypatch):
    monkeypatch.setattr(
        "vramlab.measurement.measure.Launcher", lambda: contextlib.nullcontext(launcher)
    )
    report = measure(FSDP.replace(batch_size=2**24, seq_len=2**12), device="cpu", recorded=False)
    assert report.status == "oom"
    assert re.fullmatch(
        r"Rank \d of 2: RAM ran out: it asked for 512\.000 GiB more, and .* GiB were free\.",
        report.message,
    )


# --- what cannot be started


def test_too_few_gpus_is_a_sentence():
    with pytest.raises(
        MeasurementError, match=r"2 ranks need as many GPUs and \d are here: take device='cpu'"
    ):
        run_ranks(FSDP, device="cuda")


def test_what_ranks_do_not_find_is_their_error(launcher):
    with pytest.raises(RankError, match="no attribute 'nothing'"):
        launcher.run("rank_faults:nothing")
    with pytest.raises(RankError, match="Can't pickle"):
        launcher.run("rank_faults:unanswerable")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"steps": 0}, "'steps' is 0"),
        ({"steps": True}, "'steps' is True"),
        ({"device": "tpu"}, "'device' is 'tpu'"),
    ],
)
def test_wrong_arguments_are_sentences(arguments, why):
    with pytest.raises(RecipeError, match=why):
        run_ranks(FSDP, **arguments)
    with pytest.raises(RecipeError, match="'sharding' is None"):
        run_ranks(FSDP.replace(sharding=None))


# --- the one who asked


def test_a_timeout_ends_ranks_that_ignore_everything(launcher, tmp_path):
    launcher.run("rank_faults:greet")  # so that its libraries are loaded
    begun = time.monotonic()
    with pytest.raises(
        MeasurementError, match="it took over 5 s, so all was ended: raise timeout="
    ):
        launcher.run("rank_faults:hang", {"folder": str(tmp_path)}, timeout=5)
    assert time.monotonic() - begun < 20
    assert len(pids(tmp_path)) == 2 and gone(pids(tmp_path)) and started() == []
    assert launcher.start()._child.poll() is None, "the next launch starts anew"
    launcher.end()


def test_no_order_finds_what_an_earlier_one_or_a_trainer_has_left(launcher, monkeypatch):
    """Else a rank built its model in parts ("'weight' must be 2-D") when a Trainer had run before
    it.
    """
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    launcher.end()
    for world in (1, 2):
        assert launcher.run("rank_faults:traces", {"mark": "left"}, world) == [(None, [])] * world


ASKING = """
import sys
sys.path.insert(0, {tests!r})
import psutil
from vramlab.measurement.launch import Launcher
try:
    with Launcher() as launcher:
        launcher.run("rank_faults:hang", {{"folder": {folder!r}}}, {ranks})
except KeyboardInterrupt:
    print("interrupted", len(psutil.Process().children(recursive=True)), flush=True)
"""


ENDS = [
    (signal.SIGINT, 2),
    (signal.SIGTERM, 2),
    (signal.SIGKILL, 2),
    (signal.SIGINT, 1),
    (signal.SIGKILL, 1),
]


@pytest.mark.parametrize(("how", "ranks"), params(ENDS, [ENDS[0]]))
def test_nothing_outlives_the_one_who_asked(how, ranks, tmp_path):
    """Ctrl-C is answered at once; a killed notebook takes ranks or its one measurement with it, and
    no folder stays.
    """
    files = tmp_path / "files"
    files.mkdir()
    tests = os.path.dirname(os.path.dirname(__file__))
    code = ASKING.format(tests=tests, folder=str(tmp_path), ranks=ranks)
    surroundings = {**os.environ, "TMPDIR": str(files)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=surroundings
    )
    try:
        family = pids(tmp_path, ranks) + [
            child.pid for child in psutil.Process(parent.pid).children(recursive=True)
        ]
        begun = time.monotonic()
        parent.send_signal(how)
        out, _ = parent.communicate(timeout=30)
    finally:
        parent.kill()
    assert time.monotonic() - begun < 15
    assert out == ("interrupted 0\n" if how == signal.SIGINT else "")
    assert len(set(family)) == (3 if ranks == 2 else 1) and gone(family)
    assert [path.name for path in files.iterdir() if path.name.startswith("vramlab")] == []
