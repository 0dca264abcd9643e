"""Source D's claims: each is judged, and each experiment can say no."""

import dataclasses
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from vramlab.allocator import AllocatorError
from vramlab.chapters import claims_07 as chapter
from vramlab.claims import HOLDS, NOT, UNDER, WAITS, Verdict, judge, ledger, load_claims
from vramlab.errors import RecordError
from vramlab.fragmentation import Followed, requests_of
from vramlab.trace import Trace


@pytest.fixture(scope="module", autouse=True)
def small():
    """The same experiments on a smaller model, whose lengths fill a smaller card."""
    with pytest.MonkeyPatch.context() as patch:
        recipe = chapter.RECIPE.replace(model="pythia-70m", num_layers=1, precision="fp32")
        lengths = [256, 384, 512, 768, 1024, 128, 640, 1024]
        patch.setattr(chapter, "RECIPE", recipe)
        patch.setattr(chapter, "LENGTHS", lengths)
        found = requests_of(recipe, [*lengths, *chapter.BUCKETS])
        patch.setattr(chapter, "requests", lambda: found)
        most = chapter.follow(found, lengths).peak_allocated
        patch.setattr(chapter, "room", lambda: int(1.4 * most))
        chapter.run.cache_clear()
        yield
    chapter.run.cache_clear()


@pytest.fixture(scope="module")
def verdicts(small):
    return {verdict.claim.name: verdict for verdict in ledger("07")}


def test_every_claim_is_judged(verdicts):
    assert list(verdicts) == list(load_claims("07")) and len(verdicts) >= 20
    assert {verdict.claim.source for verdict in verdicts.values()} == {"D"}
    assert {verdict.outcome for verdict in verdicts.values()} <= {HOLDS, UNDER, NOT, WAITS}


def test_another_figure_in_the_source_would_get_another_verdict(verdicts):
    for verdict in verdicts.values():
        claim = verdict.claim
        if verdict.outcome == WAITS:
            continue
        other = not claim.quoted if claim.rule == "is" else claim.quoted * 40 + 1
        changed = Verdict(dataclasses.replace(claim, quoted=other), verdict.findings)
        assert changed.holding != verdict.holding, claim.name
        assert changed.outcome != HOLDS or verdict.outcome == NOT, claim.name


def test_what_only_a_gpu_shows_waits_for_it(verdicts):
    if not torch.cuda.is_available():
        waiting = {name for name, verdict in verdicts.items() if None in verdict.findings.values()}
        speeds = {"D-flash-speed", "D-compile-speed"}
        assert {"D-backward-thread", "D-records", "D-expandable-gpu", "D-malloc-cost", *speeds} == waiting


def test_the_listing_of_the_source_does_not_run(verdicts):
    assert verdicts["D-profile-call"].holding == ["torch.profiler"]


def test_a_label_that_is_kept_outside_a_profiler_would_be_seen(monkeypatch):
    monkeypatch.setattr(chapter, "_labels", lambda profiled: {"forward_pass": None} if not profiled else {})
    assert judge(load_claims("07")["D-label"]).outcome == NOT
    assert judge(load_claims("07")["D-label-free"]).outcome == NOT


def test_workers_that_hide_nothing_would_be_seen(monkeypatch):
    monkeypatch.setattr(chapter, "_traced", lambda step, **options: None)
    for with_workers, outcome in (((0.06, 0.05, 0.05), NOT), ((0.06, 0.01, 0.01), HOLDS)):
        waits = cycle([with_workers, (0.06, 0.06, 0.06)])
        monkeypatch.setattr(Trace, "of", lambda profiler, waits=waits: SimpleNamespace(waiting=lambda: next(waits)))
        assert judge(load_claims("07")["D-workers"]).outcome == outcome


def test_an_allocator_that_does_nothing_would_be_seen(monkeypatch):
    nothing = Followed([1, 2], [2, 2], [1, 2], [0], [0])
    monkeypatch.setattr(chapter, "run", lambda cure: nothing)
    for name in ("D-expandable", "D-padding", "D-warm-up"):
        assert judge(load_claims("07")[name]).outcome == NOT, name
    monkeypatch.setattr(chapter, "run", lambda cure: dataclasses.replace(nothing, mallocs=[1, 1], given_back=[0, 0]))
    assert judge(load_claims("07")["D-malloc-once"]).outcome == NOT
    assert "a T4, which they fill" not in judge(load_claims("07")["D-panic"]).holding


def test_a_record_of_a_gpu_decides(monkeypatch):
    def found(recipe, lengths, settings):
        return {"reserved": [10 if settings else 20, 5], "gpu": "Tesla T4"}

    monkeypatch.setattr(chapter, "find_lengths", found)
    assert judge(load_claims("07")["D-expandable-gpu"]).outcome == HOLDS
    monkeypatch.setattr(chapter, "find_lengths", lambda recipe, lengths, settings: {"reserved": [7], "gpu": "T4"})
    assert judge(load_claims("07")["D-expandable-gpu"]).outcome == NOT
    with pytest.raises(RecordError):
        chapter.compiled_speed()


def test_an_attention_that_is_not_exact_or_keeps_all_would_be_seen(monkeypatch):
    honest = chapter._attention
    kept = {"FLASH_ATTENTION": 100, "MATH": 900}
    monkeypatch.setattr(chapter, "_attention", lambda name: (torch.zeros(1) + (name == "MATH") * 1e-3, kept[name]))
    assert judge(load_claims("07")["D-exact"]).outcome == NOT
    assert judge(load_claims("07")["D-flash-memory"]).outcome == NOT
    assert honest("MATH")[1] > honest("FLASH_ATTENTION")[1]


def test_a_call_that_is_gone_and_a_kernel_that_is_not_taken_would_be_seen(monkeypatch):
    assert chapter.history_call("_record_memory_history", max_entries=1).value
    assert not chapter.history_call("_record_memory_history", entries=1).value
    assert not chapter.history_call("_no_such_call").value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: 0)  # the math kernel
    assert chapter.flash_has_to_be_asked_for().value


def test_workers_that_are_no_processes_would_be_seen(monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert not chapter.workers_are_processes().value


def test_python_calls_are_counted():
    def three(x):
        return list(map(lambda _: None, range(2)))

    assert chapter._python_calls(three, None) == 3


def test_a_trace_that_only_a_plugin_reads_would_be_seen(verdicts, monkeypatch):
    assert verdicts["D-tensorboard"].holding == ["in TensorBoard"]
    monkeypatch.setattr(Trace, "load", lambda path: SimpleNamespace(events=[]))
    assert chapter.trace_needs_a_plugin("JSON").value


def test_expandable_segments_that_give_nothing_back_would_be_seen(monkeypatch):
    """Over unequal lengths only: what comes with equal ones too is not the sizes' fault."""
    claim = load_claims("07")["D-expandable-limit"]
    assert {case.get("spare") for case in claim.cases.values()} == {None, 0.02, 0.05, 0.1}
    for unequal, equal, outcome in ((1, 0, HOLDS), (0, 0, NOT), (1, 1, NOT), (None, 0, HOLDS), (None, None, NOT)):

        def follow(requests, lengths, allocator, back=(unequal, equal)):
            given = back[len(set(lengths)) == 1]
            if given is None and allocator.limit:
                raise AllocatorError("out of memory")
            return Followed([1], [1], [1], [0], [given])

        monkeypatch.setattr(chapter, "follow", follow)
        assert judge(claim).outcome == outcome


def test_a_variable_that_torch_does_not_know_would_be_seen():
    assert chapter.torch_reads_variable("PYTORCH_ALLOC_CONF").value
    assert not chapter.torch_reads_variable("PYTORCH_NO_SUCH_CONF").value
