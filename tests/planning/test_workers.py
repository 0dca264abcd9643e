"""A plan's simulations run in processes that end with it, and load libraries quickly."""

import contextlib
import importlib.metadata
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils
from vramlab import __main__ as program
from vramlab.planning import search
from vramlab.planning.question import Question
from vramlab.training.trl_trainers import Distributions

LOADING = """
import contextlib, multiprocessing, time
from vramlab.planning import workers
with contextlib.suppress(KeyboardInterrupt), workers.loaded_early(), workers.loaded_early():
    print(len(multiprocessing.active_children()), flush=True)
    time.sleep(60)
print(len(multiprocessing.active_children()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing loads early")
@pytest.mark.parametrize(
    "ending", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_what_loads_early_ends_with_the_plan(ending):
    child = subprocess.Popen(
        [sys.executable, "-c", LOADING], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert child.stdout.readline() == "1\n"
        child.send_signal(ending)
        # until everybody who could write has ended
        out, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    is_killed = ending == signal.SIGKILL
    assert (child.returncode, out) == ((-ending, "") if is_killed else (0, "0\n"))


@pytest.mark.parametrize(
    ("words", "loads"),
    [
        (["plan", "gpt2"], True),
        (["plan", "gpt2", "--no-confirm"], False),
        (["plan", "qwen3-vl-2b", "--images", "1"], False),
        (["predict", "plan"], False),
        ([], False),
    ],
)
def test_the_program_loads_before_it_reads_its_words(words, loads):
    context = program._loading_meanwhile(words)
    assert loads is not isinstance(context, contextlib.nullcontext)


def test_what_transformers_reads_twice_is_the_same():
    models = Path(transformers.__file__).parent / "models"
    scan = import_utils.create_import_structure_from_path
    assert scan.__wrapped__(str(models / "__init__.py")) == scan(models)


def test_trl_asks_for_a_version_by_the_packages_name():
    for package in ("peft", "transformers"):
        assert package in importlib.metadata.packages_distributions()[package]
        assert Distributions()[package] == [package]


def test_what_formulas_do_not_know_is_simulated_beside_each_other(monkeypatch):
    class Asked(Exception):
        """How many are simulated at once."""

    def simulate(candidates):
        raise Asked(len(candidates))

    monkeypatch.setattr(search, "confirm", simulate)
    question = Question("qwen3-0.6b", "RTX 3090", 2, trainer="grpo")
    with pytest.raises(Asked, match="3"):
        search.Search(question).answers(confirmed=True)
