"""`vramlab card`: the list and its order; whatever happens in the middle loses only the piece that
it hits.
"""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import card_faults
import pytest
import sample_reports
import torch
from settings import ROOT
from vramlab import (
    MeasurementError,
    Recipe,
    RecordError,
    Report,
    ReportError,
    Sharding,
    find_gpu,
    share,
)
from vramlab.hardware.gpu import Device
from vramlab.measurement import card as module
from vramlab.measurement import pieces, records
from vramlab.measurement.card import run_card
from vramlab.measurement.facts import ASKED, FOUND, LOADED, Fact
from vramlab.measurement.launch import LateError, RankError
from vramlab.measurement.pieces import (
    COURSE_LIST,
    START,
    Piece,
    pieces_of,
    read_list,
    read_pieces,
)
from vramlab.measurement.records import add, load, read_records

FOUR = [
    {
        "kind": "context",
        "worth": 1,
        "why": "a test",
        "loaded": ["bare", "cuBLAS", "cuDNN", "training"],
    }
]
FILE = "tesla-t4-torch2.13-transformers5.23.json"


def written(path: Path, entries: object) -> Path:
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def four(tmp_path) -> Path:
    return written(tmp_path / "four.json", FOUR)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a T4, on which all is found at once: `gpu.ran` are the titles, `gpu.answers`
    what a key gives.
    """
    seen = SimpleNamespace(ran=[], answers={}, now=0.0, take=0.0)

    def fake(piece, launcher, timeout, device):
        seen.ran.append(piece.asked.get("loaded") or piece.title)
        seen.now += seen.take
        answer = seen.answers.get(
            seen.ran[-1], card_faults.context(piece.asked.get("loaded", "bare"))
        )
        if isinstance(answer, BaseException):
            raise answer
        return answer

    on_a_t4(monkeypatch)
    monkeypatch.setattr(module, "measurements_folder", lambda: tmp_path / "no records")
    monkeypatch.setattr(Piece, "run", fake)
    monkeypatch.setattr(Piece, "start", lambda piece: None)
    monkeypatch.setattr(module, "IDLE_CORES", 10**6)
    monkeypatch.setattr(module.time, "monotonic", lambda: seen.now)
    return seen


def on_a_t4(monkeypatch) -> None:
    here = Device("cuda", "Tesla T4", find_gpu("T4"))
    monkeypatch.setattr(module, "current_device", lambda: here)
    versions = {
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "peft": None,
        "bitsandbytes": None,
        "accelerate": None,
    }
    monkeypatch.setattr(module, "environment", lambda **more: versions | more)


def recorded(recipe: Recipe) -> Report:
    """A report of `recipe` as a T4 would give it."""
    values = {"recipe": recipe.to_dict(), "title": str(recipe), "target": "cuda"}
    return dataclasses.replace(sample_reports.measured(), **values)


def found(folder: Path) -> set[str]:
    return {fact.asked["loaded"] for fact in read_records(folder / FILE).facts.values()}


def quiet(line: str) -> None:
    pass


# --- the list


def test_the_list_has_what_chapters_ask_and_what_the_stand_in_ran_for_later_abilities():
    asked = {piece.key for piece in pieces_of(None)}
    assert {recipe.key for recipe in read_list(COURSE_LIST)} <= asked
    later = set()
    for path in sorted((ROOT / "tests" / "stand_in").glob("*.json")):
        content = json.loads(path.read_text())
        runs = content.get("runs", []) if isinstance(content, dict) else []
        for run in runs:
            if "row" in run and not {"loading", "evaluation"} & run.keys():
                later.add(Recipe(**run["recipe"]).key)
    assert len(later) >= 69 and later <= asked, "add the row's recipe to data/card.json"


def test_the_list_has_each_kind_of_fact_and_each_way_to_load_a_context():
    wanted = pieces_of(None)
    assert {piece.kind for piece in wanted} == {"recipe", *ASKED} and ASKED.keys() == FOUND.keys()
    assert {piece.asked["loaded"] for piece in wanted if piece.kind == "context"} == {*LOADED}
    assert len({piece.key for piece in wanted}) == len(wanted)
    expandable = [piece.asked["expandable"] for piece in wanted if piece.kind == "steps"]
    assert expandable.count(True) == expandable.count(False) > 0
    assert all(START <= piece.seconds(find_gpu("H100")) < 20 * 60 for piece in wanted)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({}, "is no list of pieces: it is not a list"),
        ([{"kind": "context", "worth": 1, "why": ""}], "entry 1: .*a context has other fields"),
        (
            [{"kind": "generation", "worth": 1, "why": ""}],
            "entry 1: .*kinds are recipe, list, context",
        ),
        ([{"kind": "context", "loaded": "bare", "why": ""}], "entry 1: 'worth'"),
        (
            [*FOUR, {"kind": "recipe", "worth": 1, "why": "", "recipe": {"batch_size": 1}}],
            "entry 2: .*a model",
        ),
    ],
)
def test_a_bad_list_names_its_entry(tmp_path, entries, why):
    with pytest.raises(RecordError, match=why):
        read_pieces(written(tmp_path / "list.json", entries))


# --- the order


def test_what_is_worth_most_a_second_comes_first_and_what_is_known_of_such_a_card_last(
    gpu, tmp_path, monkeypatch
):
    own = tmp_path / "records"
    add(card_faults.context("bare"), own / "of-another-version.json")
    monkeypatch.setattr(module, "measurements_folder", lambda: own)
    entries = [
        {"kind": "context", "worth": 30, "why": "", "loaded": ["bare", "cuDNN"]},
        {"kind": "context", "worth": 40, "why": "", "loaded": "training"},
        {
            "kind": "out_of_memory",
            "worth": 60,
            "why": "",
            "recipe": {"model": "gpt2"},
        },  # 45 seconds, not 15
        {"kind": "context", "worth": 10, "why": "", "loaded": ["NCCL", "cuDNN"]},
    ]
    done = run_card([written(tmp_path / "list.json", entries)], dry_run=True, folder=tmp_path)
    titles = [piece.asked.get("loaded", "out of memory") for piece, _ in done.left]
    assert titles == ["training", "cuDNN", "out of memory", "NCCL", "bare"] and gpu.ran == []


def test_further_answers_to_one_question_wait_for_dearer_questions(gpu, tmp_path):
    """Thirty models for 25 s each would keep a card of some minutes from all that takes longer."""
    families = [{"model": "gpt2", "seq_len": 8 * number} for number in range(1, 31)]
    entries = []
    for recipe in families:
        entries.append({"kind": "recipe", "worth": 25, "why": "families", "recipe": recipe})
    compiled = {"model": "gpt2", "seq_len": 512, "torch_compile": True}
    entries.append({"kind": "recipe", "worth": 60, "why": "compiled", "recipe": compiled})
    path = written(tmp_path / "list.json", entries)
    left = run_card([path], dry_run=True, folder=tmp_path).left
    assert [piece.why for piece, _ in left][:4] == ["families", "families", "compiled", "families"]
    add(recorded(left[0][0].recipe), tmp_path / FILE)
    again = run_card([path], dry_run=True, folder=tmp_path)
    assert again.before == 1 and [item[0] for item in again.left] == [item[0] for item in left[1:]]


def test_what_a_card_cannot_do_or_hold_is_left_out_with_the_reason(gpu, tmp_path):
    entries = [
        {
            "kind": "context",
            "worth": 1,
            "why": "",
            "loaded": ["flash attention", "cuDNN attention", "efficient attention"],
        },
        {
            "kind": "recipe",
            "worth": 1,
            "why": "",
            "recipe": {"model": "gpt2", "precision": ["bf16-mixed", "fp32"]},
        },
        {
            "kind": "recipe",
            "worth": 1,
            "why": "",
            "recipe": {"model": "llama-3.1-70b", "precision": "fp16-true"},
        },
    ]
    path = written(tmp_path / "list.json", entries)
    size = {"gpt2": 2**30, "llama-3.1-70b": 2**40}
    done = run_card(
        [path], dry_run=True, folder=tmp_path, estimate=lambda recipe: size[recipe.model]
    )
    assert {piece.title for piece, _ in done.left} == {
        "context · loaded efficient attention",
        str(Recipe("gpt2")),
    }
    reasons = [reason for _, reason in done.not_here]
    assert (
        len(reasons) == 4
        and "bf16 starts at 8.0" in reasons[2]
        and "is larger than Tesla T4" in reasons[3]
    )


def test_a_stand_in_is_not_asked_what_depends_on_values(gpu, tmp_path, monkeypatch):
    recipe = {"model": "gpt2", "batch_size": 8, "trainer": "grpo", "rollouts": {}}
    entries = [{"kind": "recipe", "worth": 1, "why": "", "recipe": recipe}]
    path = written(tmp_path / "list.json", entries)
    assert len(run_card([path], dry_run=True, folder=tmp_path).left) == 1
    monkeypatch.setenv("STAND_IN_CAPABILITY", "75")
    ((_, reason),) = run_card([path], dry_run=True, folder=tmp_path).not_here
    assert "a stand-in computes no values" in reason


# --- what happens in the middle


@pytest.mark.slow
def test_a_kill_and_out_of_memory_lose_only_their_piece(four, tmp_path, monkeypatch):
    """Real processes: one is killed, one runs out of memory, and one that is ready is used.

    All but the last are forked from one.
    """
    on_a_t4(monkeypatch)
    monkeypatch.setattr(pieces, "WORK", "card_faults:find")
    monkeypatch.setattr(Piece, "can_fork", lambda piece, _: piece.asked["loaded"] != "training")
    monkeypatch.setattr(module, "IDLE_CORES", 1)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    lines: list[str] = []
    done = run_card([four], folder=tmp_path, progress=lines.append)
    assert found(tmp_path) == {"bare", "training"} and len(done.done) == 2 and done.left == []
    ((killed, how),) = done.failed
    assert killed.asked["loaded"] == "cuBLAS"
    assert "was killed by SIGKILL" in how or "when RAM runs out" in how
    ((large, why),) = done.not_here
    assert large.asked["loaded"] == "cuDNN"
    assert why == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert list(temporary.iterdir()) == [], "what the killed process wrote is gone"
    assert len(lines) == 5 and lines[-1].startswith("████████████████████████ 4/4 · ")
    assert (tmp_path / "card.log").read_text().count("\n") >= 4


def test_a_card_too_small_for_a_fact_is_told_from_a_fault(tmp_path, monkeypatch):
    from vramlab.measurement import card_work

    def load(before, loaded):
        message = "CUDA out of memory. Tried to allocate 2.00 GiB. See documentation for more."
        raise torch.OutOfMemoryError(message) if loaded == "training" else RuntimeError("a fault")

    monkeypatch.setitem(card_work.WORK, "context", load)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(RankError) as caught:
        card_work.find("context", {"loaded": "training"}, str(tmp_path))
    assert caught.value.oom == "CUDA out of memory. Tried to allocate 2.00 GiB."
    with pytest.raises(RuntimeError, match="a fault"):
        card_work.find("context", {"loaded": "bare"}, str(tmp_path))


def test_a_second_call_goes_on(gpu, four, tmp_path):
    gpu.answers["cuBLAS"] = MeasurementError("The child\ncrashed.")
    first = run_card([four], folder=tmp_path, progress=quiet)
    assert gpu.ran == [
        "bare",
        "cuBLAS",
        "cuDNN",
        "training",
    ] and "failed: context · loaded cuBLAS: The child" in str(first)
    gpu.ran.clear()
    del gpu.answers["cuBLAS"]
    second = run_card([four], folder=tmp_path, progress=quiet)
    assert (
        gpu.ran == ["cuBLAS"]
        and second.before == 3
        and found(tmp_path) == {"bare", "cuBLAS", "cuDNN", "training"}
    )


def test_a_disk_that_is_full_for_a_moment_loses_one_piece(gpu, four, tmp_path, monkeypatch):
    real = records.write_atomically
    calls = []

    def fills(path, content):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, content)

    monkeypatch.setattr(records, "write_atomically", fills)
    done = run_card([four], folder=tmp_path, progress=quiet)
    assert found(tmp_path) == {"bare", "cuDNN", "training"}
    ((piece, why),) = done.failed
    assert (
        piece.asked["loaded"] == "cuBLAS"
        and "No space left on device" in why
        and "as it was before" in why
    )


def test_a_disk_that_is_full_when_a_process_starts_loses_one_piece(
    gpu, four, tmp_path, monkeypatch
):
    starts = []

    def start(piece):
        starts.append(piece.asked["loaded"])
        if starts[-1] == "cuBLAS":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Piece, "start", start)
    done = run_card([four], folder=tmp_path, progress=quiet)
    assert found(tmp_path) == {"bare", "cuDNN", "training"} and len(done.failed) == 1
    assert "No space left on device" in done.failed[0][1]


def test_the_program_itself_is_killed(four, tmp_path):
    """The second piece ends this very program without a word; what was saved before is there,
    whole.
    """
    program = f"""
import os, sys
sys.path[:0] = {[str(ROOT / "tests"), str(ROOT / "tests" / "tools")]!r}
import card_faults, pytest
from vramlab.measurement import card
from vramlab.measurement.pieces import Piece
sys.path.append({str(ROOT / "tests" / "measurement")!r})
import test_card
patch = pytest.MonkeyPatch()
test_card.on_a_t4(patch)
def run(piece, launcher, timeout, device):
    if piece.asked["loaded"] == "cuBLAS":
        os.kill(os.getpid(), 9)
    return card_faults.context(piece.asked["loaded"])
Piece.run = run
Piece.start = lambda piece: None
card.IDLE_CORES = 10**6
card.run_card([{str(four)!r}], folder={str(tmp_path)!r})
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == -9, ended.stderr
    assert found(tmp_path) == {"bare"} and not list(tmp_path.glob("*.part"))


def test_a_kind_that_fails_again_and_again_leaves_the_time_to_others(gpu, tmp_path):
    names = ["bare", "cuBLAS", "cuBLASLt", "cuDNN", "NCCL", "Triton", "training"]
    entries = [
        {"kind": "context", "worth": 99, "why": "", "loaded": names},
        {"kind": "recipe", "worth": 1, "why": "", "recipe": {"model": "gpt2"}},
    ]
    gpu.answers |= dict.fromkeys(names, MeasurementError("its process was killed by SIGSEGV"))
    done = run_card([written(tmp_path / "list.json", entries)], folder=tmp_path, progress=quiet)
    assert gpu.ran == [*names[:5], str(Recipe("gpt2"))] and len(done.left) == 2, (
        "what was not tried is left"
    )


def test_ctrl_c_keeps_what_was_found(gpu, four, tmp_path):
    gpu.answers["cuDNN"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_card([four], folder=tmp_path, progress=quiet)
    assert found(tmp_path) == {"bare", "cuBLAS"}


def test_the_time_is_kept_and_what_is_shorter_still_goes_in(gpu, tmp_path):
    entries = [
        {
            "kind": "out_of_memory",
            "worth": 900,
            "why": "",
            "recipe": {"model": "gpt2"},
        },  # 45 s are estimated
        {
            "kind": "context",
            "worth": 10,
            "why": "",
            "loaded": ["bare", "cuBLAS", "cuDNN"],
        },  # 15 s each
    ]
    gpu.take = 14.0
    done = run_card(
        [written(tmp_path / "list.json", entries)], minutes=0.5, folder=tmp_path, progress=quiet
    )
    assert gpu.ran == ["bare", "cuBLAS"] and len(done.left) == 2, "2 s of 30 are left then"
    assert "2 left, about 1 minutes at most: run it again to go on" in str(done)


def test_what_the_end_of_the_time_cuts_is_left_and_what_hangs_has_failed(gpu, four, tmp_path):
    def late(after):
        def run(piece, launcher, timeout, device):
            gpu.now += after
            raise LateError(f"it took over {timeout:.0f} s")

        return run

    patch = pytest.MonkeyPatch()
    patch.setattr(Piece, "run", late(15.0))
    lines: list[str] = []
    done = run_card([four], minutes=0.25, folder=tmp_path, progress=lines.append)
    patch.undo()
    assert len(done.left) == 4 and done.failed == [] == done.done
    assert "the time was over before it ended: it is still left" in lines[1]
    gpu.answers["bare"] = LateError("it took over 150 s")
    done = run_card([four], minutes=99, folder=tmp_path, progress=quiet)
    assert len(done.done) == 3 and done.left == []
    assert done.failed[0][1] == "it took over 150 s"


def test_a_piece_that_hangs_ends_after_ten_times_what_it_should_take(gpu, four, tmp_path):
    limits = []

    def run(piece, launcher, timeout, device):
        limits.append(timeout)
        return card_faults.context(piece.asked["loaded"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Piece, "run", run)
        run_card([four], minutes=4, folder=tmp_path, progress=quiet)
        run_card([four], minutes=1, folder=tmp_path / "other", progress=quiet)
    assert limits[0] == 10 * START and limits[4] == 60


def test_what_asks_for_the_process_itself_or_starts_others_is_not_forked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    asked = {"context": {"loaded": "bare"}, "steps": {}}
    for kind, question in asked.items():
        assert not Piece(kind, asked=question).can_fork()
    assert Piece("generation", recipe=Recipe("gpt2")).can_fork()
    for fields in ({"torch_compile": True}, {"sharding": Sharding(3, 8, "deepspeed")}):
        assert not Piece("recipe", recipe=Recipe("gpt2", **fields)).can_fork()
    plain = Piece("recipe", recipe=Recipe("gpt2"))
    assert plain.can_fork() and not plain.can_fork("cpu")
    monkeypatch.setattr(sys, "platform", "win32")
    assert not plain.can_fork()


def test_what_no_reader_would_take_is_not_written(gpu, four, tmp_path):
    gpu.answers["cuBLAS"] = card_faults.context("cuBLAS", reserved=-1)
    done = run_card([four], folder=tmp_path, progress=quiet)
    assert found(tmp_path) == {"bare", "cuDNN", "training"}, "the file is still read"
    assert "its reserved is -1, which cannot be" in done.failed[0][1]


# --- facts


def test_without_a_card_it_is_a_sentence(monkeypatch, four):
    monkeypatch.setattr(module, "current_device", lambda: Device("cpu", "CPU"))
    with pytest.raises(RecordError, match="there is no CUDA device here"):
        run_card([four])


def test_what_a_stand_in_says_is_no_record(gpu, four, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_CAPABILITY", "75")
    for name in ("bare", "cuBLAS", "cuDNN", "training"):
        gpu.answers[name] = card_faults.context(name, "emulated")
    done = run_card([four], folder=tmp_path / "out", progress=quiet)
    assert len(done.done) == 4 and done.file.name == f"emulated-{FILE}"
    assert run_card([four], folder=tmp_path / "out", progress=quiet).before == 4, (
        "it goes on all the same"
    )
    with pytest.raises(
        RecordError, match="it is a fact that was emulated, but records are measured"
    ):
        load(done.file)
    with pytest.raises(RecordError, match="was emulated"):
        share(tmp_path / "out")
    add(card_faults.context("bare"), tmp_path / "measured.json")
    with pytest.raises(RecordError, match="was measured, but records are emulated"):
        add(card_faults.context("bare", "emulated"), tmp_path / "measured.json")


GOOD = card_faults.context("bare").to_dict()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "rumour"}, "its kind is 'rumour'"),
        ({"asked": {}}, "what it was asked must be loaded"),
        ({"asked": {"loaded": "everything"}}, "its loaded is 'everything', which cannot be"),
        ({"found": {**GOOD["found"], "reserved": "2 MiB"}}, "its reserved is '2 MiB'"),
        ({"found": {**GOOD["found"], "allocated": True}}, "its allocated is True"),
        ({"found": {**GOOD["found"], "mood": 1}}, "what it found must be used_before"),
        ({"note": "hello"}, "it is no fact"),
        (
            {"environment": {**GOOD["environment"], "driver": "<b>"}},
            "its environment's driver is '<b>'",
        ),
    ],
)
def test_a_fact_that_is_none_is_refused_in_one_sentence(tmp_path, change, why):
    fact = GOOD | change
    key = f"{fact['kind']} {json.dumps(fact['asked'], sort_keys=True)}"
    with pytest.raises(RecordError, match=why):
        read_records(written(tmp_path / "file.json", {"reports": {}, "facts": {key: fact}}))


def test_a_fact_under_anothers_key_is_refused(tmp_path):
    with pytest.raises(RecordError, match="it is another fact: context"):
        read_records(
            written(tmp_path / "file.json", {"reports": {}, "facts": {"context {}": GOOD}})
        )


def test_a_fact_comes_back_as_it_was():
    assert Fact.from_dict(json.loads(json.dumps(GOOD))) == card_faults.context("bare")
    with pytest.raises(ReportError):
        Fact.from_dict([GOOD])
    assert card_faults.context("bare").outside == card_faults.CONTEXT
    assert (
        card_faults.context("bare", process=card_faults.CONTEXT).outside
        == card_faults.CONTEXT - 2 * 2**20
    )
