"""Processes forked from one that has loaded the libraries: each is as fresh, and dies alone."""

import io
import pickle
import sys
from types import SimpleNamespace

import pytest
from rank_faults import gone
from vramlab.measurement import ranks
from vramlab.measurement.launch import LateError, Launcher, RankError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, which CUDA bears there")


def test_a_fork_starts_as_a_fresh_process_and_dies_alone(tmp_path):
    with Launcher({"SAID": "by the caller"}, forks=True) as launcher:

        def alone(function: str, timeout: float = 300, **arguments) -> object:
            return launcher.run(function, arguments, 1, timeout=timeout)[0]

        parent = alone("os:getppid")
        assert alone("os:getpid") != parent and alone("os:getenv", key="SAID") == "by the caller"
        assert alone("rank_faults:traces", mark="first") == (None, [])
        assert alone("rank_faults:traces", mark="second") == (None, []), "nothing is left behind"
        with pytest.raises(RankError, match="ValueError: a bad value"):
            alone("rank_faults:fail_alone", how="raise", words="the first")
        with pytest.raises(RankError, match=r"was killed by SIGKILL|RAM runs out") as caught:
            alone("rank_faults:fail_alone", how="kill", words="the second")
        assert caught.value.code == -9
        with pytest.raises(RankError, match="exit status 7") as caught:
            alone("rank_faults:fail_alone", how="exit", words="the third")
        assert "the third" in str(caught.value) and "the second" not in str(caught.value)
        with pytest.raises(RankError, match="exit status 1"):
            alone("rank_faults:fail_alone", how="full", words="what it found cannot be written")
        assert alone("os:getppid") == parent, "all from one process"
        with pytest.raises(LateError, match="it took over 1 s"):
            alone("rank_faults:hang", timeout=1, folder=str(tmp_path))
        assert gone([int(file.name) for file in tmp_path.iterdir()]), "with its time it is over"


def test_without_a_fork_that_can_use_cuda_each_has_a_fresh_process(monkeypatch, tmp_path):
    order = {"call": pickle.dumps(("os:getpid", {})), "world_size": 1}
    monkeypatch.setattr(ranks, "is_in_bad_fork", lambda: True)
    assert ranks.of_fork(order, tmp_path) == {"unfit": True}
    launcher = Launcher(forks=True)
    orders = []

    def outcome(child, file, *limits):
        orders.append(pickle.loads(file.with_name("order.pickle").read_bytes()))
        return {"unfit": True} if len(orders) == 1 else {"answers": [pickle.dumps(7)]}

    monkeypatch.setattr(launcher, "_started", lambda: SimpleNamespace(stdin=None))
    monkeypatch.setattr(launcher, "_output", io.StringIO(), raising=False)
    monkeypatch.setattr(launcher, "_outcome", outcome)
    assert launcher.run("os:getpid", world_size=1) == [7] and not launcher.forks
    assert [order["is_forked"] for order in orders] == [True, False]
