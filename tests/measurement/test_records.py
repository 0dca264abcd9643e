"""Records are written whole or not at all, name what is wrong with them, and are made from lists of
recipes.
"""

import dataclasses
import datetime
import errno
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import card_faults
import filelock
import psutil
import pytest
import sample_reports
from quick import params
from tiny_models import config
from vramlab import (
    MeasurementError,
    Recipe,
    RecipeError,
    RecordError,
    Report,
    find_gpu,
    find_record,
)
from vramlab.base.data import data_path
from vramlab.hardware.gpu import Device
from vramlab.measurement import records
from vramlab.measurement.pieces import COURSE_LIST, START, read_list, seconds_for
from vramlab.measurement.records import add, file_name, load, save

H200 = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0+cu128",
    "transformers": "5.17.2",
    "date": "2026-11-22",
}
H200_FILE = "nvidia-h200-torch2.11-transformers5.17.json"
SMALL, OTHER, LARGE = (Recipe("gpt2", batch_size=n) for n in (1, 2, 4))


def measured(recipe: Recipe = SMALL, **changes) -> Report:
    values = {
        "recipe": recipe.to_dict(),
        "title": str(recipe),
        "environment": dict(H200),
        "target": "cuda",
        **changes,
    }
    return dataclasses.replace(sample_reports.measured(), **values)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    """A folder in the place of the course's records."""
    folder = tmp_path / "measurements"
    monkeypatch.setattr(records, "measurements_folder", lambda: folder)
    records._files.cache_clear()
    yield folder
    records._files.cache_clear()


def contents(folder: Path) -> dict[str, str]:
    """Its files, without the locks."""
    files = [path for path in folder.iterdir() if path.suffix != ".lock"] if folder.exists() else []
    return {path.name: path.read_text() for path in files}


# --- files


def test_what_is_saved_is_found(folder):
    assert save(measured(SMALL)) == save(measured(OTHER)) == folder / H200_FILE
    found = find_record(SMALL)
    assert found.source == "recorded" and found.to_dict() == {
        **measured(SMALL).to_dict(),
        "source": "recorded",
    }
    assert set(load(folder / H200_FILE)) == {SMALL.key, OTHER.key}
    with pytest.raises(RecordError, match=r"there is no recorded measurement of it$"):
        find_record(LARGE)


def test_a_file_is_read_again_only_where_somebody_else_wrote_it(folder, monkeypatch):
    """A card's run adds hundreds, and reading all before each would cost it a third of its time."""
    reads = []
    read = records.read_records

    def counted(*arguments, **options):
        reads.append(arguments)
        return read(*arguments, **options)

    monkeypatch.setattr(records, "read_records", counted)
    path = save(measured(SMALL))
    add(card_faults.context("bare"), path)
    save(measured(OTHER))
    assert (
        len(reads) == 1
        and path.read_text() == json.dumps(json.loads(path.read_text()), indent=1) + "\n"
    )
    assert {*load(path)} == {SMALL.key, OTHER.key} and len(read(path).facts) == 1
    content = json.loads(path.read_text())
    del content["reports"][SMALL.key]
    path.write_text(json.dumps(content, indent=1) + "\n")
    save(measured(LARGE))
    assert {*load(path)} == {OTHER.key, LARGE.key}, "what others took away stays away"
    save(measured(LARGE, allocated=7))
    assert load(path)[LARGE.key].allocated == 7
    with pytest.raises(RecordError, match="a measured report, but records are emulated"):
        add(card_faults.context("bare", "emulated"), path)


def test_a_new_measurement_replaces_the_old_one_and_other_versions_stay():
    save(measured(allocated=1))
    save(measured(allocated=2))
    save(measured(allocated=3, environment={**H200, "torch": "2.13.0", "date": "2026-11-23"}))
    save(measured(allocated=4, environment={**H200, "gpu": "Tesla T4", "date": "2026-11-21"}))
    assert find_record(SMALL).allocated == 3, "the newest"
    assert find_record(SMALL, gpu="t4").allocated == 4
    with pytest.raises(RecordError, match="there is no recorded measurement of it on L4"):
        find_record(SMALL, gpu="L4")


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (H200, H200_FILE),
        (
            {**H200, "gpu": "NVIDIA GeForce RTX 4090"},
            "nvidia-geforce-rtx-4090-torch2.11-transformers5.17.json",
        ),
        (
            {"gpu": None, "torch": "2.13.0+cpu", "transformers": "5.23.0"},
            "cpu-torch2.13-transformers5.23.json",
        ),
    ],
)
def test_a_file_is_named_by_card_and_versions(environment, name):
    assert file_name(environment) == name


def test_a_file_can_be_read_by_all_and_its_timelines_are_short(folder):
    moments = measured().timeline * 50
    path = save(measured(timeline=moments))
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask or os.name == "nt"
    assert len(moments) > 200 and 30 < len(find_record(SMALL).timeline) < 130


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (
            measured(source="predicted"),
            "only measured reports of a recipe are recorded, and this one is predicted",
        ),
        (measured(source="recorded"), "this one is recorded"),
        (dataclasses.replace(measured(), recipe=None), "only measured reports of a recipe"),
    ],
)
def test_only_measurements_are_kept(folder, report, why):
    with pytest.raises(RecordError, match=why):
        save(report)
    assert contents(folder) == {}


def test_a_cpus_figures_never_land_among_the_courses(monkeypatch, tmp_path):
    monkeypatch.undo()  # the real folder
    ours = Path(data_path("measurements"))
    before = contents(ours)
    report = measured(
        target="cpu", environment={"gpu": None, "torch": "2.13.0", "transformers": "5.23.0"}
    )
    for folder in (None, ours, str(ours), ours / ".." / "measurements"):
        with pytest.raises(RecordError, match="measured on a CPU: name another folder"):
            save(report, folder)
    assert contents(ours) == before
    assert save(report, tmp_path).name == "cpu-torch2.13-transformers5.23.json"


WRITER = """
import dataclasses, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/measurement"]
import test_records
from vramlab import Recipe
from vramlab.measurement.records import save

who, saves = int(sys.argv[3]), int(sys.argv[4])
small = dataclasses.replace(test_records.measured(), timeline=[], largest=[], phases={})
for n in range(saves):
    recipe = Recipe("gpt2", batch_size=1 + who, seq_len=1 + n)
    save(dataclasses.replace(small, recipe=recipe.to_dict()), sys.argv[2])
"""


@pytest.mark.parametrize("saves", params([10, 250], [10]))
def test_four_writers_lose_nothing(folder, saves):
    words = [sys.executable, "-c", WRITER, os.path.dirname(os.path.dirname(__file__)), str(folder)]
    writers = [subprocess.Popen([*words, str(who), str(saves)]) for who in range(4)]
    assert [writer.wait(600) for writer in writers] == [0] * 4
    expected = {
        Recipe("gpt2", batch_size=1 + who, seq_len=1 + n).key
        for who in range(4)
        for n in range(saves)
    }
    assert keys(folder) == expected and len(expected) == 4 * saves
    assert [path.suffix for path in folder.iterdir() if path.suffix != ".lock"] == [".json"]


def test_a_lock_that_is_never_given_back_is_a_sentence(folder, monkeypatch):
    monkeypatch.setattr(records, "LOCK_SECONDS", 0.1)
    folder.mkdir()
    with (
        filelock.FileLock(folder / f".{H200_FILE}.lock"),
        pytest.raises(RecordError, match=rf"{H200_FILE} could not be written \(The file lock"),
    ):
        save(measured())
    assert save(measured()).exists(), "it was given back"


def test_a_folder_that_cannot_be_written_is_a_sentence(folder):
    folder.write_text("a file")
    with pytest.raises(
        RecordError, match=rf"{H200_FILE} could not be written \(.*\); it is as it was before"
    ):
        save(measured())


# --- faults


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("place", "name"), [(os, "fsync"), (Path, "replace")], ids=["fsync", "replace"]
)
def test_a_full_disk_leaves_the_old_file_and_one_message(folder, monkeypatch, place, name):
    save(measured(SMALL))
    before = contents(folder)
    monkeypatch.setattr(place, name, full)
    with pytest.raises(RecordError) as caught:
        save(measured(OTHER))
    monkeypatch.undo()
    assert (
        str(caught.value)
        == f"{H200_FILE} could not be written (No space left on device); it is as it was before."
    )
    assert contents(folder) == before and keys(folder) == {SMALL.key}


def keys(folder: Path) -> set[str]:
    return {key for path in folder.glob("*.json") for key in load(path)}


def test_an_interrupt_while_writing_loses_nothing(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    save(measured(SMALL))
    before = contents(folder)
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(measured(OTHER))
    assert contents(folder) == before


BROKEN = [
    "",
    "{",
    "[]",
    "[" * 100_000,
    "{}",
    '{"reports": 5}',
    '{"reports": {"a": {}}}',
    '{"reports": {"a": [1]}}',
    "\x00",
    '{"reports": {}, "reports": {}}',
    '{"reports": {}, "more": {}}',
    '{"reports": {"a": NaN}}',
    '{"reports": {"a": 1e999}}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_named(folder, text):
    folder.mkdir()
    (folder / H200_FILE).write_text(text)
    for read in (
        lambda: load(folder / H200_FILE),
        lambda: find_record(SMALL),
        lambda: save(measured()),
    ):
        with pytest.raises(RecordError, match=f"the record file {H200_FILE} cannot be read"):
            read()
    assert contents(folder) == {H200_FILE: text}, "it is not written over"


def spoil(entry: dict | list, *path: str | int, value) -> dict | list:
    """`entry` with the value at `path` changed."""
    name, *rest = path
    if isinstance(entry, list):
        return [
            spoil(each, *rest, value=value) if i == name else each for i, each in enumerate(entry)
        ]
    return {**entry, name: spoil(entry[name], *rest, value=value) if rest else value}


EMPTY = {"peak": {}, "end": {}}
SPOILT = [
    (
        ("peak",),
        "large",
        "Report field 'peak' is 'large', but it must be an object with names and values",
    ),
    (("peak", "parameters"), "5", "'peak.parameters' is '5', but it must be a whole number"),
    (("peak", "gradients"), -5, "'peak.gradients' is -5"),
    (("peak", "total"), 5, "'peak.total' is 5, but it must be the sum of the categories"),
    (("phases", "step", "end"), None, "'phases.step.end' is None"),
    (("phases",), {"step": None}, "'phases.step' is None, but it must be an object"),
    (
        ("peak", "tensors"),
        5,
        "Report field 'peak.tensors' is unknown: known there are parameters, gradients, ",
    ),
    (("environment",), None, "'environment' is None"),
    (
        ("speed",),
        {"median": -1.0, "low": 1, "high": 1, "repeats": 1, "tokens_per_second": 1},
        "'speed.median' is -1.0",
    ),
    (("speed",), {"median": 1.0}, "speed lacks low, high, repeats, tokens_per_second"),
    (
        ("peak", "inputs"),
        2**64,
        "'peak.inputs' is 18446744073709551616, but it must be at least 0, and at most",
    ),
    (
        ("notes",),
        ["x" * 30_000_000],
        "notes has a text of 30,000,000 characters, but 1,000 are the most",
    ),
    (("notes",), ["x"] * 31, "notes has 31 entries, but 30 are the most"),
    (("notes",), ["\x1b]0;owned\x07"], "notes has the control character U+001B"),
    (("largest", 0, "where"), "a\x9bb", "largest has the control character U+009B"),
    (("phases",), {"ever": EMPTY}, "it has a phase 'ever', but phases are load, generate,"),
    (("environment", "gpu"), "<b>T4", "environment's gpu is '<b>T4', which is none"),
    (("environment", "driver"), "5 80", "environment's driver is '5 80', which is none"),
    (
        ("environment", "total_memory"),
        10**15,
        "total_memory is 1000000000000000, but it must be from 1 to 17,",
    ),
    (
        ("environment", "date"),
        "9999-99-99",
        "its date is '9999-99-99', but it must be a day from 2026-11-01 to this",
    ),
    (("environment", "date"), "9998-12-31", "its date is '9998-12-31'"),
    (("environment", "date"), "2025-12-31", "its date is '2025-12-31'"),
    (("environment", "date"), 5, "its date is 5"),
    (("status",), "fine", "'status' is 'fine', but it must be one of ok, oom, error"),
    (("source",), "simulated", "is a simulated report, but records are measured"),
    (("recipe",), None, "is the report of another recipe"),
    (("recipe", "batch_size"), 2, "is the report of another recipe: gpt2 · batch 1"),
]


@pytest.mark.parametrize(
    ("path", "value", "why"), SPOILT, ids=[".".join(map(str, path)) for path, *_ in SPOILT]
)
def test_a_record_that_cannot_be_is_refused_in_one_sentence(folder, path, value, why):
    file = save(measured())
    entries = json.loads(file.read_text())["reports"]
    file.write_text(
        json.dumps({"reports": {SMALL.key: spoil(entries[SMALL.key], *path, value=value)}})
    )
    records._files.cache_clear()
    for read in (lambda: load(file), lambda: find_record(SMALL), lambda: save(measured(OTHER))):
        with pytest.raises(RecordError) as caught:
            read()
        text = str(caught.value)
        assert why in text and SMALL.key in text and H200_FILE in text and "\n" not in text


def test_a_clock_far_behind_reads_records_all_the_same(monkeypatch):
    """And what it dates itself is refused before it spoils a file."""

    class Behind(datetime.date):
        @classmethod
        def today(cls):
            return cls(1970, 1, 1)

    save(measured())
    monkeypatch.setattr(records.datetime, "date", Behind)
    assert find_record(SMALL).environment["date"] == H200["date"]
    with pytest.raises(
        RecordError, match="what was measured cannot be recorded: its date is '1970-01-01'"
    ):
        save(measured(environment={**H200, "date": "1970-01-01"}))


def test_a_run_that_failed_is_no_record(folder):
    with pytest.raises(RecordError, match="a run that failed is not recorded: rank 1 ended it"):
        save(dataclasses.replace(measured(), status="error", message="rank 1 ended it"))
    assert contents(folder) == {}


def test_a_file_that_is_not_there(folder):
    with pytest.raises(RecordError, match=r"nothing\.json cannot be read \(FileNotFoundError"):
        load(folder / "nothing.json")


# --- lists


def quiet(line: str) -> None:
    """Where lines of progress may go."""


def recipe_list(path: Path, entries) -> Path:
    path.write_text(json.dumps(entries))
    return path


def test_a_list_takes_each_value_of_a_field(tmp_path):
    entries = [{"model": "gpt2", "batch_size": [1, 2], "lora": [None, {"r": 4}]}, {"model": "gpt2"}]
    recipes = read_list(recipe_list(tmp_path / "list.json", entries))
    assert len(recipes) == 5
    assert {(r.batch_size, r.lora and r.lora.r) for r in recipes} == {
        (1, None),
        (2, None),
        (1, 4),
        (2, 4),
    }
    again = recipe_list(tmp_path / "again.json", [recipe.to_dict() for recipe in recipes])
    assert read_list(again) == recipes, "what `record --json` prints is such a list"


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"model": "gpt2"}, "bad.json is no list of recipes: it is not a list"),
        (
            [{"model": "gpt2"}, {"model": "gpt9"}],
            "bad.json, entry 2: Recipe field 'model' is 'gpt9'",
        ),
        ([{"modle": "gpt2"}], "bad.json, entry 1: .*modle"),
        (
            [{"model": "gpt2", "bacth_size": 1}],
            "bad.json, entry 1: Recipe field 'recipe.bacth_size' is 1, but no such",
        ),
        (["gpt2"], "bad.json, entry 1: Recipe field 'recipe' is 'gpt2', but it must be an object"),
    ],
)
def test_a_bad_list_names_its_entry(tmp_path, entries, why):
    with pytest.raises(RecordError, match=why):
        read_list(recipe_list(tmp_path / "bad.json", entries))
    with pytest.raises(RecordError, match=r"none\.json is no list of recipes"):
        read_list(tmp_path / "none.json")


def test_the_courses_own_list_can_be_trained():
    recipes = read_list(COURSE_LIST)
    assert len({recipe.key for recipe in recipes}) == len(recipes) > 140
    b = [
        r
        for r in recipes
        if r.name == "polyglot-ko-1.3b" and r.seq_len == 256 and r.precision == "fp16-true"
    ]
    assert (
        {4, 8, 16} <= {r.batch_size for r in b}
        and any(r.quantization for r in b)
        and any(r.lora for r in b)
    )
    assert {"bert-large", "gpt2", "llama-3.2-1b", "qwen2.5-0.5b", "llama-3.1-8b"} <= {
        r.name for r in recipes
    }
    assert {"fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true"} == {
        r.precision for r in recipes
    }


# --- record


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a card, on which measuring is instant: `gpu.ran` are the recipes,
    `gpu.answers` what they give.
    """
    from vramlab.measurement import card, pieces
    from vramlab.measurement import record as module

    versions = {"torch": H200["torch"], "transformers": H200["transformers"]}
    seen = SimpleNamespace(ran=[], timeouts=[], answers={}, module=module, take=0.0)

    def fake(piece, launcher, timeout, device):
        seen.ran.append(piece.recipe)
        seen.timeouts.append(timeout)
        seen.now += seen.take
        answer = seen.answers.get(piece.recipe, measured(piece.recipe))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    seen.now = 0.0
    monkeypatch.setattr(pieces.Piece, "run", fake)
    monkeypatch.setattr(pieces.Piece, "start", lambda piece: None)
    monkeypatch.setattr(card, "IDLE_CORES", 10**6)
    monkeypatch.setattr(card, "environment", lambda **more: {**versions, **more})
    h200 = find_gpu("H200")
    monkeypatch.setattr(module, "current_device", lambda: Device("cuda", "NVIDIA H200", h200))
    monkeypatch.setattr(module, "measurements_folder", lambda: records.measurements_folder())
    monkeypatch.setattr(card.time, "monotonic", lambda: seen.now)
    return seen


@pytest.fixture
def three(tmp_path) -> Path:
    return recipe_list(tmp_path / "three.json", [{"model": "gpt2", "batch_size": [4, 1, 2]}])


def test_the_cheapest_come_first_and_each_is_saved_at_once(gpu, three, folder):
    done = gpu.module.record([three, three], progress=quiet)
    assert gpu.ran == [SMALL, OTHER, LARGE] and [r.title for r in done.measured] == list(
        map(str, gpu.ran)
    )
    assert keys(folder) == {SMALL.key, OTHER.key, LARGE.key} and done.file == folder / H200_FILE
    assert str(done).startswith("3 recipes wanted, 0 recorded before, 3 measured now\nin ")


def test_what_is_recorded_for_this_card_and_these_versions_is_not_run_again(gpu, three):
    save(measured(SMALL))
    save(measured(OTHER, environment={**H200, "torch": "2.13.0"}))
    save(measured(LARGE, environment={**H200, "gpu": "Tesla T4"}))
    done = gpu.module.record([three], progress=quiet)
    assert gpu.ran == [OTHER, LARGE] and done.recorded == 1
    gpu.ran.clear()
    assert gpu.module.record([three], progress=quiet).recorded == 3 and gpu.ran == []


def test_the_time_is_kept(gpu, three, folder):
    gpu.take = 50.0
    done = gpu.module.record([three], minutes=1.5, progress=quiet)
    assert gpu.ran == [SMALL, OTHER] and gpu.timeouts == [90, 40], "no child goes on past the end"
    assert [recipe for recipe, _ in done.missing] == [LARGE] and "still missing, about" in str(done)
    gpu.take = 0
    gpu.module.record([three], minutes=1.5, progress=quiet)
    assert gpu.ran == [SMALL, OTHER, LARGE], "it resumes where it stopped"


def test_the_clock_starts_with_the_first_run(gpu, three, monkeypatch):
    def slow_start():
        gpu.now += 600
        return Device("cuda", "NVIDIA H200", card)

    card = find_gpu("H200")
    monkeypatch.setattr(gpu.module, "current_device", slow_start)
    gpu.take = 20.0
    gpu.module.record([three], minutes=1, progress=quiet)
    assert gpu.ran == [SMALL, OTHER, LARGE] and gpu.timeouts == [60, 40, 20]


def test_a_folder_that_is_none_is_refused_before_anything_is_measured(gpu, three):
    with pytest.raises(RecordError, match=r"three\.json is no folder"):
        gpu.module.record([three], folder=three)
    assert gpu.ran == []


def test_out_of_memory_is_a_result(gpu, three, folder):
    oom = Report.failed(
        "measured", OTHER, "cuda", "oom", "CUDA out of memory. Tried to allocate 2 GiB."
    )
    oom.environment = dict(H200)
    gpu.answers[OTHER] = oom
    gpu.module.record([three], progress=quiet)
    assert gpu.ran == [SMALL, OTHER, LARGE]
    assert find_record(OTHER).status == "oom" and "Tried to allocate" in find_record(OTHER).message


@pytest.mark.parametrize(
    "error", [MeasurementError("The child\ncrashed."), RecipeError("precision", "x", "no")]
)
def test_one_that_fails_does_not_stop_the_others(gpu, three, folder, error):
    gpu.answers[SMALL] = error
    done = gpu.module.record([three], progress=quiet)
    assert gpu.ran == [SMALL, OTHER, LARGE] and keys(folder) == {OTHER.key, LARGE.key}
    assert done.skipped == [(SMALL, str(error))] and done.missing == []


def test_ctrl_c_keeps_what_was_measured(gpu, three, folder):
    gpu.answers[OTHER] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        gpu.module.record([three], progress=quiet)
    assert keys(folder) == {SMALL.key}


def test_a_full_disk_loses_only_what_it_hits(gpu, three, folder, monkeypatch):
    real, calls = Path.replace, []

    def fills(path, target):
        calls.append(path)
        return real(path, target) if len(calls) != 2 else full()

    monkeypatch.setattr(Path, "replace", fills)
    done = gpu.module.record([three], progress=quiet)
    assert gpu.ran == [SMALL, OTHER, LARGE] and keys(folder) == {SMALL.key, LARGE.key}
    ((lost, why),) = done.skipped
    assert lost == OTHER and "No space left on device" in why


def test_what_the_card_cannot_do_is_skipped_with_the_reason(gpu, tmp_path, monkeypatch):
    entries = [
        {"model": "gpt2", "precision": ["fp16-mixed", "bf16-mixed"]},
        {"model": "gpt2", "attn_implementation": "flash_attention_2", "precision": "bf16-true"},
        {"model": "gpt2", "sharding": {"stage": 3, "world_size": 8, "rank": 5}},
    ]
    t4 = find_gpu("T4")
    monkeypatch.setattr(gpu.module, "current_device", lambda: Device("cuda", "Tesla T4", t4))
    done = gpu.module.record([recipe_list(tmp_path / "list.json", entries)], progress=quiet)
    assert sorted(recipe.precision for recipe in gpu.ran) == ["fp16-mixed", "fp32"]
    reasons = [reason for _, reason in done.skipped]
    assert len(reasons) == 2 and all("compute capability 7.5" in reason for reason in reasons)
    assert reasons[0] in str(done)


def test_one_gpu_records_its_own_rank_of_many(gpu, tmp_path, folder):
    ranks = [{"stage": 3, "world_size": size, "rank": 5} for size in (8, 1024)]
    path = recipe_list(tmp_path / "list.json", [{"model": "gpt2", "sharding": ranks}])
    gpu.module.record([path], progress=quiet)
    assert [(r.sharding.world_size, r.sharding.rank) for r in gpu.ran] == [(8, 5), (1024, 5)]
    assert keys(folder) == {recipe.key for recipe in gpu.ran} and len(keys(folder)) == 2


def test_a_cpu_records_what_four_processes_can_do(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.module, "current_device", lambda: Device("cpu", "CPU"))
    monkeypatch.setattr(gpu.module, "too_much", lambda recipe, estimate: "")
    worlds = [{"stage": 3, "world_size": size} for size in (4, 8)]
    path = recipe_list(tmp_path / "list.json", [{"model": "gpt2", "sharding": worlds}])
    done = gpu.module.record([path], folder=tmp_path / "kept", progress=quiet)
    assert [recipe.sharding.world_size for recipe in gpu.ran] == [4]
    assert [reason for _, reason in done.skipped] == [
        "it needs 8 processes and measure() starts 4 at most on a CPU"
    ]


def test_a_dry_run_lists_and_measures_nothing(gpu, three, folder, capsys):
    save(measured(OTHER))
    before = contents(folder)
    done = gpu.module.record([three], dry_run=True)
    assert gpu.ran == [] and contents(folder) == before and capsys.readouterr().out == ""
    assert [recipe for recipe, _ in done.missing] == [SMALL, LARGE]
    assert all(START < seconds < 60 for _, seconds in done.missing)
    text = str(done)
    assert "3 recipes wanted, 1 recorded before, 0 measured now" in text and f" s  {LARGE}" in text


def test_dearer_recipes_are_expected_to_take_longer(gpu):
    seconds = seconds_for
    h200, t4 = find_gpu("H200"), find_gpu("T4")
    assert (
        seconds(SMALL, t4)
        < seconds(LARGE, t4)
        < seconds(LARGE.replace(gradient_checkpointing=True), t4)
    )
    assert seconds(LARGE, h200) < seconds(LARGE, t4) and seconds(LARGE) < seconds(
        LARGE, device="cpu"
    )


def test_there_is_a_line_each(gpu, three, capsys):
    gpu.module.record([three])
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 3
        and str(SMALL) in lines[0]
        and "GiB" in lines[0]
        and "\x1b" not in "".join(lines)
    )
    gpu.module.record([three], dry_run=True)
    assert capsys.readouterr().out == ""


def test_on_a_stand_in_for_a_gpu_nothing_is_recorded(gpu, three, monkeypatch, folder):
    monkeypatch.setenv("STAND_IN_CAPABILITY", "75")
    with pytest.raises(RecordError, match="this is a stand-in for a GPU, which measures nothing"):
        gpu.module.record([three])
    assert contents(folder) == {} and gpu.module.record([three], dry_run=True).missing


def test_without_a_gpu_the_courses_records_are_out_of_reach(gpu, three, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.module, "current_device", lambda: Device("cpu", "CPU"))
    with pytest.raises(
        RecordError, match="no CUDA device here, and the course keeps no CPU figures: name a folder"
    ):
        gpu.module.record([three])
    assert gpu.ran == []
    save(measured(OTHER))
    missing = gpu.module.record([three], dry_run=True).missing
    assert [recipe for recipe, _ in missing] == [SMALL, LARGE], "what no GPU has measured"


def test_a_real_record_on_a_cpu_and_its_resumption(tmp_path):
    from vramlab.interfaces.measure_and_record import peak_bytes
    from vramlab.measurement.record import record

    tiny = {"model": config("gpt2"), "batch_size": 2, "seq_len": 32, "num_layers": 2}
    entries = [tiny, {**tiny, "optim": "sgd"}, {"model": "llama-3.1-405b"}]
    paths = [recipe_list(tmp_path / "tiny.json", entries)]
    first = record(paths, minutes=10, folder=tmp_path / "mine", progress=quiet, estimate=peak_bytes)
    assert psutil.Process().children() == []
    assert [report.status for report in first.measured] == [
        "ok",
        "ok",
    ] and first.file.name.startswith("cpu-torch")
    assert [recipe.name for recipe, reason in first.skipped if "of RAM are free" in reason] == [
        "llama-3.1-405b"
    ]
    kept = load(first.file)[Recipe(**tiny).key]
    assert kept.peak == first.measured[0].peak and kept.speed == first.measured[0].speed
    begun = time.monotonic()
    again = record(paths, minutes=10, folder=tmp_path / "mine", progress=quiet, estimate=peak_bytes)
    assert (again.recorded, again.measured) == (2, []) and time.monotonic() - begun < 10


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_run_that_is_killed_is_not_recorded(tmp_path, monkeypatch):
    """`kill -9` says nothing of the recipe: it is measured again next time."""
    from vramlab.measurement import launch
    from vramlab.measurement.record import record

    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(launch, "COMMAND", [sys.executable, "-c", code])
    tiny = {"model": config("gpt2"), "batch_size": 2, "seq_len": 32, "num_layers": 2}
    done = record(
        [recipe_list(tmp_path / "tiny.json", [tiny])], folder=tmp_path / "mine", progress=quiet
    )
    (skipped,) = done.skipped
    assert skipped[1].endswith(
        "its process was killed by SIGKILL, as the kernel does when RAM runs out."
    )
    assert done.file is None and contents(tmp_path / "mine") == {}


def test_the_command_line_says_it_in_a_sentence(tmp_path):
    command = [
        sys.executable,
        "-m",
        "vramlab",
        "record",
        str(tmp_path / "none.json"),
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        2,
        "",
    ) and "none.json is no list of recipes" in done.stderr
