"""What every test shares: the same surroundings on every machine, no network, no window, hypothesis
without a clock.
"""

import atexit
import gc
import os
import signal
from collections.abc import Generator
from unittest.mock import patch

import hypothesis
import pytest
import settings

# In a shell's background job Ctrl-C is ignored, and so it would be by every program that the tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Before anything imports torch. Kernels and child processes inherit it.
settings.apply(deterministic=True)

# What a test collects, it asks for; a simulation makes objects by the hundred thousand, and lets go
# of most at once.
gc.set_threshold(20_000)

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    from vramlab.training.quiet import KNOWN_WARNINGS

    for start in KNOWN_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{start}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator:
    """Load all test files without the cycle collector: what they and the libraries define is no
    garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def end_without_collection() -> None:
    """End a worker seconds sooner.

    Triton's bindings would call leaks, on standard error, what is not collected.
    """
    gc.freeze()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        atexit.register(end_without_collection)
    else:
        gc.unfreeze()


def set_aside() -> None:
    """A simulation and a measurement collect first.

    What is loaded by now is set aside, so that this takes no time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    set_aside()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown() -> Generator:
    """After a test that left many objects, which are mostly libraries', the next need not visit
    them.
    """
    try:
        return (yield)
    finally:
        newest, *older = gc.get_count()
        if newest > 5000 or any(older):
            set_aside()


@pytest.fixture(scope="session", autouse=True)
def no_window() -> None:
    """Figures are drawn into memory.

    By matplotlib's own switch: notebook kernels would inherit an MPLBACKEND.
    """
    import matplotlib

    matplotlib.use("Agg")


@pytest.fixture(scope="session", autouse=True)
def release_of_the_expected_bytes() -> Generator:
    """CUDA's rules are those of torch 2.13, whose bytes the tests hold, whichever runs them."""
    from vramlab.hardware import overhead

    with patch.object(overhead, "installed", lambda package: "2.13.0"):
        yield


@pytest.fixture(scope="session")
def launcher():
    """A child process whose libraries are loaded once, for all files that run functions on real
    ranks.
    """
    from vramlab.measurement.launch import Launcher

    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def small_machine():
    """See `small_children`."""
    from rank_faults import small_children

    with small_children():
        yield


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> str:
    """The text of a small notebook that really ran and that the notebook gate lets pass."""
    import scratch

    return scratch.good_notebook(tmp_path_factory.mktemp("good"))


@pytest.fixture
def notebook(good):
    """A fresh copy of the good notebook, to spoil."""
    import nbformat

    return nbformat.reads(good, as_version=4)


@pytest.fixture
def no_figure_stays(monkeypatch):
    """Plotting functions draw and leave showing to the reader; what they drew is closed after the
    test.
    """
    import matplotlib.pyplot as plt

    monkeypatch.setattr(
        plt, "show", lambda *_, **__: pytest.fail("a plotting function must not show")
    )
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def no_records(tmp_path_factory):
    """Without the course's records, so that they do not decide what these tests see."""
    from vramlab.measurement import records

    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "measurements_folder", lambda: folder)
        yield
