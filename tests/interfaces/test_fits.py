"""`assert_fits`, the marker and the budgets: what fits passes, what does not says why, and a run
may rewrite budgets.
"""

import dataclasses
import json

import pytest
import torch
from vramlab import Recipe, RecipeError, assert_fits, find_gpu, predict
from vramlab.report.report import GiB, Interval

pytest_plugins = ["pytester"]
T4 = find_gpu("T4")
SMALL = Recipe("gpt2", batch_size=1, seq_len=32, num_layers=1)


@pytest.mark.parametrize(("tier", "fits"), [("safe", False), ("likely", False), ("tight", True)])
def test_the_tier_says_which_end_has_to_fit(tier, fits):
    needs = Interval(T4.total, T4.total + 1, T4.total + GiB)
    report = dataclasses.replace(predict(SMALL), process=needs)
    if fits:
        assert assert_fits(report, "T4", tier) is report
    else:
        with pytest.raises(
            AssertionError, match=rf"does not fit T4 \({tier}\): it needs .*too much"
        ):
            assert_fits(report, "T4", tier)


def test_the_largest_parts_are_named():
    with pytest.raises(AssertionError) as error:
        assert_fits(predict(Recipe("gpt2-xl", batch_size=8)), gpu="T4")
    assert (
        "gpt2-xl" in str(error.value)
        and "activations" in str(error.value)
        and "by " in str(error.value)
    )


def test_recipes_and_modules_are_simulated():
    assert assert_fits(SMALL, tier="safe").source == "simulated"
    model, batch = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    given = {
        "batch": batch,
        "optimizer": torch.optim.SGD(model.parameters()),
        "loss": lambda out, _: out.sum(),
    }
    report = assert_fits(model, "T4", **given)
    assert report.peak == assert_fits({"model": model, **given}).peak and report.title == "Linear"


def test_what_cannot_be_asked_is_said():
    with pytest.raises(RecipeError, match="'safe', 'likely', 'tight'"):
        assert_fits(SMALL, tier="sure")
    with pytest.raises(RecipeError):
        assert_fits("no-such-model")


TESTS = """
import pytest
from vramlab import Recipe, predict

@pytest.fixture
def size():
    return 1

@pytest.mark.fits("T4", tier="safe")
def test_small(size):
    return predict(Recipe("gpt2", batch_size=size))

@pytest.mark.fits("T4")
@pytest.mark.parametrize("size", [64])
def test_large(size):
    return predict(Recipe("gpt2", batch_size=size))

def test_budget(memory_budget):
    memory_budget(predict(Recipe("gpt2", batch_size={})))
"""


def run(pytester, batch_size, *options):
    pytester.makepyfile(test_it=TESTS.format(batch_size))
    plugin = (
        "-p",
        "no:vramlab",
        "-p",
        "vramlab.interfaces.pytest_plugin",
        "-p",
        "no:cacheprovider",
    )
    return pytester.runpytest_inprocess(*plugin, "--strict-markers", *options)


def test_a_budget_holds_a_module_by_the_names_that_simulate_takes(pytester):
    pytester.makepyfile(
        test_it="""
import torch

def test_module(memory_budget):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    memory_budget(model=model, batch=torch.ones(2, 64), optimizer=optimizer,
                  loss=lambda out, batch: out.sum())
"""
    )
    plugin = ("-p", "no:vramlab", "-p", "vramlab.interfaces.pytest_plugin")
    options = (*plugin, "-p", "no:cacheprovider", "--update-memory-budgets")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=1)
    assert "test_module" in (pytester.path / "test_it.budgets.json").read_text()


def test_a_marked_test_that_returns_nothing_is_told_what_to_return(pytester):
    body = "import pytest\n\n@pytest.mark.fits('T4')\ndef test_it():\n    pass\n"
    pytester.makepyfile(test_it=body)
    plugin = ("-p", "no:vramlab", "-p", "vramlab.interfaces.pytest_plugin")
    ran = pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider")
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["*this one returns nothing: return Recipe(*"])


def test_the_marker_and_the_budgets(pytester):
    file = pytester.path / "test_it.budgets.json"
    first = run(pytester, 2)
    first.assert_outcomes(passed=1, failed=2)
    first.stdout.fnmatch_lines(
        ["*gpt2 · batch 64 * does not fit T4 (likely)*", "*has no memory budget for test_budget*"]
    )
    # The test's own lines alone, once: the plug-in's frames would bury the sentences.
    assert "another exception occurred" not in first.stdout.str()
    assert "pytest_plugin.py" not in first.stdout.str() and "explain.py" not in first.stdout.str()
    run(pytester, 2, "--update-memory-budgets").assert_outcomes(passed=2, failed=1)
    assert (
        json.loads(file.read_text())["test_budget"]["total"]
        == predict(Recipe("gpt2", batch_size=2)).peak.total
    )
    run(pytester, 2).assert_outcomes(passed=2, failed=1)
    run(pytester, 1).assert_outcomes(passed=2, failed=1)  # less is no failure
    text = file.read_text()
    run(pytester, 4).stdout.fnmatch_lines(["*B above its budget: *activations +*"])
    assert file.read_text() == text
