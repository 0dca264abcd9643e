"""`measure` runs the real step in a process of its own; whatever happens there comes back as a report or a sentence."""

import ast
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import vramlab
from tiny_models import config
from vramlab import (
    MeasurementError,
    MiB,
    Recipe,
    RecipeError,
    RecordError,
    Report,
    Sharding,
    find_record,
    format_bytes,
    simulate,
)
from vramlab import measure as measure_here
from vramlab.hardware.gpu import Device, find_gpu
from vramlab.measurement import child_process as apart
from vramlab.measurement import worker
from vramlab.measurement.measure import run_child

# The package's attribute `measure` is the function; the module is what is patched here.
measure = sys.modules["vramlab.measurement.measure"]

SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2}
TINY = Recipe(config("gpt2"), **SIZES)
BALLAST = 1536 * MiB


@pytest.fixture(scope="module")
def measured() -> Report:
    """One real measurement, asked for by a process that is itself large."""
    ballast = b"\1" * BALLAST
    report = measure_here(TINY, repeats=3, recorded=False, device="cpu")
    assert ballast
    return report


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_tracked_phases_are_those_of_simulate_to_the_byte(measured):
    simulated = simulate(TINY, target="cpu")
    assert (measured.source, simulated.source) == ("measured", "simulated")
    assert measured.phases == simulated.phases
    assert (measured.peak, measured.peak_phase) == (simulated.peak, simulated.peak_phase)
    highest = [max(moment.bytes.total for moment in report.timeline) for report in (measured, simulated)]
    assert highest[0] == highest[1] == measured.peak.total and measured.largest == simulated.largest
    assert measured.allocated == measured.peak.total > 4 * measured.peak.parameters


def test_speed_is_that_of_the_repeats(measured):
    speed = measured.speed
    assert speed.repeats == 3 and 0 < speed.low <= speed.median <= speed.high < 60
    assert speed.tokens_per_second == pytest.approx(TINY.tokens / speed.median)


def test_rss_is_the_childs_own(measured):
    assert measured.peak.total < measured.rss < BALLAST, "a large parent's peak would be over the ballast"
    assert any("before the model was built" in note for note in measured.notes)


def test_the_report_names_what_it_was_made_with(measured):
    import torch

    version = torch.__version__.split("+")[0]  # the distribution's name may lack the build's tag
    assert measured.environment["torch"].split("+")[0] == version and "memory_limit" not in measured.environment
    assert measured.recipe == TINY.to_dict() and measured.title == str(TINY) and measured.target == "cpu"
    assert Report.from_json(measured.to_json()).to_dict() == measured.to_dict()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bert", {"precision": "bf16-mixed"}),
        ("gpt2", {"precision": "fp16-mixed"}),
        ("llama", {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "optim": "adafactor"}),
        ("t5", {"precision": "bf16-true", "optim": "sgd", "loop": "plain"}),
    ],
)
def test_other_recipes_agree_too(family, fields):
    """The worker's passes, run here: a process each would only cost time."""
    from vramlab.measurement.measurement_passes import clean_pass, tracked_pass

    recipe = Recipe(config(family), **{**SIZES, **fields})
    truth = clean_pass(recipe, repeats=1, warmup=2, device="cpu")
    report = tracked_pass(recipe, "cpu", truth)
    assert report.phases == simulate(recipe, target="cpu", full=True).phases
    assert report.speed is truth.speed and report.rss == truth.rss


# --- out of memory ---------------------------------------------------------------------------------------------------


def test_out_of_memory_is_a_report_that_says_what_was_asked_for():
    recipe = Recipe(config("gpt2", vocab_size=50257), batch_size=64, seq_len=128, num_layers=1)
    logits = format_bytes(4 * 64 * 128 * 50257)
    report = measure_here(recipe, device="cpu", memory_limit=400 * MiB)
    assert (report.source, report.status, report.recipe) == ("measured", "oom", recipe.to_dict())
    assert report.message == f"RAM ran out: it asked for {logits} more, and the limit was 0.391 GiB."
    assert report.environment["memory_limit"] == 400 * MiB and report.environment["torch"]
    assert "oom" in str(report) and logits in str(report)


def fake_worker(monkeypatch, code: str) -> None:
    monkeypatch.setattr(measure, "WORKER", [sys.executable, "-c", code])


def child(recipe: Recipe = TINY, timeout: float = 60, device: str = "cpu") -> Report:
    return run_child(recipe, 1, 2, device, timeout)


KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def counter(monkeypatch, tmp_path):
    """A kernel's count of out-of-memory kills, in a file."""
    file = tmp_path / "memory.events"
    file.write_text("max 7\noom 3\noom_kill 3\n")
    monkeypatch.setattr(apart, "oom_counters", lambda: [tmp_path / "none", file])
    return file


def test_a_child_that_the_kernel_kills_for_its_memory_ran_out_of_memory(monkeypatch, counter):
    fake_worker(monkeypatch, f"open({str(counter)!r}, 'w').write('oom_kill 4\\n'); {KILL}")
    report = child()
    assert (report.status, report.source, report.title) == ("oom", "measured", str(TINY))
    assert report.message == "The kernel killed the process because RAM ran out."


def test_a_child_that_somebody_kills_is_an_error(monkeypatch, counter):
    fake_worker(monkeypatch, KILL)
    with pytest.raises(MeasurementError, match=r"was killed by somebody, not for its memory: that is no result\.$"):
        child()


def test_ram_that_runs_out_says_nothing_of_a_gpu(monkeypatch, counter):
    fake_worker(monkeypatch, f"open({str(counter)!r}, 'w').write('oom_kill 4\\n'); {KILL}")
    with pytest.raises(MeasurementError, match="because this machine's RAM ran out, not the GPU's memory"):
        child(device="cuda")
    assert worker.out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "cuda") == ""
    assert worker.out_of_memory(MemoryError(), "cuda") == "" and "RAM" in worker.out_of_memory(MemoryError(), "cpu")


def test_the_kernels_count_is_read(monkeypatch, counter):
    assert apart.oom_kills() == 3
    monkeypatch.undo()
    assert apart.oom_kills() >= 0 and all(isinstance(path, Path) for path in apart.oom_counters())


@pytest.mark.skipif(sys.platform != "linux", reason="the score is Linux's")
def test_the_kernel_takes_the_child_before_the_notebook():
    code = "from vramlab.measurement.child_process import end_with_parent; end_with_parent(); "
    code += "print(open('/proc/self/oom_score_adj').read(), flush=True)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout.readline() == "1000\n", "the highest score goes first when RAM runs out"


# --- children that fail ----------------------------------------------------------------------------------------------


def test_a_child_that_ends_early_is_quoted(monkeypatch):
    fake_worker(monkeypatch, "import sys; print('first'); sys.exit('Segmentation imagined')")
    with pytest.raises(
        MeasurementError, match="ended with code 1; its last words:\nfirst\nSegmentation imagined"
    ) as caught:
        child()
    assert str(TINY) in str(caught.value)


def answer(monkeypatch, capfd, error: Exception) -> Report:
    """What the worker writes, and measure makes of it, when its run raises `error`."""
    order = {"recipe": TINY.to_dict(), "repeats": 1, "warmup": 2, "device": "cpu"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order) + "\n"))
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(worker, "run", lambda *args, **options: raises(error))
    worker.main()
    (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith(apart.ANSWER))
    return measure._answer(TINY, json.loads(line.removeprefix(apart.ANSWER)))


def raises(error: Exception):
    raise error


def test_an_exception_in_the_child_is_a_sentence(monkeypatch, capfd):
    """A pickled class would need its module here; what crosses is text."""
    sentence = r"could not be measured: ZeroDivisionError: division by zero \(.*, line"
    with pytest.raises(MeasurementError, match=sentence):
        answer(monkeypatch, capfd, ZeroDivisionError("division by zero"))


def test_a_recipe_error_in_the_child_is_one_here(monkeypatch, capfd):
    with pytest.raises(RecipeError, match="'optim_args' is 'beta=1', but sgd does not take it") as caught:
        answer(monkeypatch, capfd, RecipeError("optim_args", "beta=1", "sgd does not take it"))
    assert caught.value.field == "optim_args"


GRANDCHILD = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open({path!r}, "w").write(f"{{os.getpid()}} {{grandchild.pid}}")
time.sleep(300)
"""


GUARDED = """
import os, time, vramlab.measurement.child_process
vramlab.measurement.child_process.end_with_parent()
open({path!r}, "w").write(f"{{os.getpid()}} {{os.getpid()}}")
time.sleep(300)
"""


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether none of `pids` is left within `seconds`, not even as a zombie of ours."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        left = [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        if not left:
            return not [p for p in psutil.Process().children(recursive=True) if p.pid in pids]
        time.sleep(0.05)
    return False


def wait_for(path, seconds: float = 60) -> list[int]:
    until = time.monotonic() + seconds
    while not (path.exists() and len(path.read_text().split()) == 2):
        assert time.monotonic() < until, "the child never started"
        time.sleep(0.05)
    return [int(word) for word in path.read_text().split()]


def test_a_timeout_is_a_sentence_and_leaves_no_process(monkeypatch, tmp_path):
    fake_worker(monkeypatch, GRANDCHILD.format(path=str(tmp_path / "pids")))
    begun = time.monotonic()
    with pytest.raises(MeasurementError, match=r"took over 3 s and was ended: raise timeout="):
        child(timeout=3)
    assert time.monotonic() - begun < 20
    assert gone(wait_for(tmp_path / "pids"))


INTERRUPTED = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/measurement"]
import vramlab.measurement.measure
from test_measure import TINY
module = sys.modules["vramlab.measurement.measure"]
module.WORKER = [sys.executable, "-c", {worker!r}]
try:
    module.run_child(TINY, 1, 2, "cpu", 300)
except KeyboardInterrupt:
    import psutil
    print("interrupted", len(psutil.Process().children(recursive=True)), flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to the whole console, pytest included")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_one_who_asked(how, tmp_path):
    """Ctrl-C is answered at once; a killed notebook takes its measurement with it, and no file stays."""
    pids, files = tmp_path / "pids", tmp_path / "files"
    files.mkdir()
    worker = (GRANDCHILD if how == signal.SIGINT else GUARDED).format(path=str(pids))
    code = INTERRUPTED.format(tests=os.path.dirname(os.path.dirname(__file__)), worker=worker)
    surroundings = {**os.environ, "TMPDIR": str(files)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=surroundings)
    try:
        children = wait_for(pids)
        begun = time.monotonic()
        parent.send_signal(how)
        out, _ = parent.communicate(timeout=30)
    finally:
        parent.kill()
    assert time.monotonic() - begun < 15
    assert out == ("interrupted 0\n" if how == signal.SIGINT else "")
    assert gone(children) and [*files.iterdir()] == []


# --- recipes that this machine does not run --------------------------------------------------------------------------


@pytest.fixture
def records(monkeypatch, tmp_path):
    """An empty folder of records in the place of the course's."""
    from vramlab.measurement import records

    monkeypatch.setattr(records, "measurements_folder", lambda: tmp_path)
    records._files.cache_clear()
    yield tmp_path
    records._files.cache_clear()


BIG = Recipe("llama-3.1-70b", batch_size=1, seq_len=64)
SLOW = Recipe("gpt2", batch_size=32, seq_len=1024)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (BIG, r"it needs about [\d,.]+ GiB and [\d,.]+ GiB of RAM are free"),
        (SLOW, r"it would take this CPU about [\d,]+ minutes"),
        (TINY.replace(precision="bf16-true", attn_implementation="flash_attention_2"), "flash-attention needs a GPU"),
        (TINY.replace(sharding=Sharding(3, 8)), r"it needs 8 processes and measure\(\) starts 4 at most on a CPU"),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_the_reason_and_the_way_out(records, monkeypatch, recipe, why):
    monkeypatch.setattr("vramlab.hardware.host.memory", lambda: (10**12, 10**12) if recipe is SLOW else (2**34, 2**33))
    with pytest.raises(MeasurementError, match=why) as caught:
        measure_here(recipe, device="cpu")
    text = str(caught.value)
    assert text.startswith(f"{recipe} was not measured here because ") and text.endswith(".") and "\n" not in text
    assert "there is no recorded measurement of it" in text and "simulate() and predict() describe it anywhere" in text


def test_what_does_not_fit_comes_from_the_records(records, measured):
    from vramlab.measurement.records import save

    found = Report.from_dict({**measured.to_dict(), "recipe": BIG.to_dict(), "target": "cuda"})
    found.environment = {**found.environment, "gpu": "NVIDIA T4"}
    save(found, records)
    seen = measure_here(BIG, device="cpu")
    assert seen.source == "recorded" and seen.environment["gpu"] == "NVIDIA T4" and seen.phases == measured.phases
    assert measure_here(BIG, recorded=True).source == "recorded"
    with pytest.raises(MeasurementError, match=r"needs 8 processes .* records were not to be used"):
        measure_here(TINY.replace(sharding=Sharding(3, 8)), recorded=False)


def test_recorded_only_never_runs(records, monkeypatch):
    monkeypatch.setattr(measure, "run_child", lambda *args: pytest.fail("it ran"))
    with pytest.raises(MeasurementError, match="recorded=True asks for no run, and there is no recorded measurement"):
        measure_here(TINY, recorded=True)


def test_a_broken_record_is_named(records):
    (records / "nvidia-t4-torch2.13-transformers5.23.json").write_text("{")
    with pytest.raises(MeasurementError, match=r"nvidia-t4-torch2\.13-transformers5\.23\.json cannot be read"):
        measure_here(BIG, device="cpu")


def test_a_limit_makes_size_harmless(monkeypatch):
    ran = []
    monkeypatch.setattr(measure, "run_child", lambda *args: ran.append(args))
    monkeypatch.setattr("vramlab.hardware.host.memory", lambda: (2**30, 2**20))
    with pytest.raises(MeasurementError):
        measure_here(TINY, device="cpu")
    measure_here(TINY, device="cpu", memory_limit=MiB)
    assert ran == [(TINY, 3, 2, "cpu", 1800, MiB, None)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "tf32"])
def test_a_gpu_that_lacks_the_precision_is_refused_before_anything_runs(monkeypatch, precision):
    monkeypatch.setattr(measure, "run_child", lambda *args: pytest.fail("it ran"))
    t4 = find_gpu("T4")
    monkeypatch.setattr(measure, "current_device", lambda: Device("cuda", t4.name, t4.total, gpu=t4))
    with pytest.raises(RecipeError, match=r"T4 has compute capability 7\.5 and .* starts at 8\.0"):
        measure_here(TINY.replace(precision=precision))


def test_without_cuda_it_cannot_be_asked_for(records, monkeypatch):
    monkeypatch.setattr(measure, "current_device", lambda: Device("cpu", "CPU", 2**34))
    with pytest.raises(MeasurementError, match="torch sees no CUDA device here"):
        measure_here(TINY, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"repeats": 0}, "'repeats' is 0"),
        ({"repeats": True}, "'repeats' is True"),
        ({"warmup": 1}, "'warmup' is 1, but measure needs a whole number of at least 2"),
        ({"memory_limit": -1}, "'memory_limit' is -1"),
        ({"device": "tpu"}, "'device' is 'tpu'"),
    ],
)
def test_wrong_arguments_are_sentences(arguments, why):
    with pytest.raises(RecipeError, match=why):
        measure_here(TINY, **arguments)


CHANGES_SOURCE = {
    ("records.py", "find_record", "recorded"),  # dataclasses.replace(a report that load() found to be measured, …)
}


def test_no_path_gives_a_report_another_source():
    """But measured to recorded, in `find_record`. `{**report, "source": …}`, `replace(…, source=…)` and `x.source = …`
    anywhere else in the package fail here."""
    found = set()
    for path in Path(vramlab.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                found |= {(path.name, function.name, value) for node in ast.walk(function) for value in changed(node)}
    assert found == CHANGES_SOURCE


def changed(node: ast.AST) -> list[str]:
    """The values that `node` puts in the place of a source."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
        "replace",
        "setattr",
    ):
        values = [word.value for word in node.keywords if word.arg == "source"]
        texts = [getattr(each, "value", None) for each in node.args]
        values += node.args[-1:] if "source" in texts else []
    elif isinstance(node, ast.Dict) and None in node.keys:  # {**other, "source": value}
        values = [v for k, v in zip(node.keys, node.values, strict=True) if getattr(k, "value", None) == "source"]
    elif isinstance(node, ast.Assign):
        targets = [getattr(each, "attr", getattr(getattr(each, "slice", None), "value", None)) for each in node.targets]
        values = [node.value] if "source" in targets and not is_own(node) else []
    else:
        return []
    return [getattr(value, "value", "computed") for value in values]


def is_own(node: ast.Assign) -> bool:
    """`self.source = …` of another class."""
    return ast.unparse(node.targets[0]).startswith("self.")


def test_whatever_surrounds_it_a_measurement_is_one(records, monkeypatch, tmp_path):
    """Earlier, this variable made predictions come back as measured."""
    monkeypatch.setenv("VRAMLAB_COLLECT", str(tmp_path / "wanted"))
    with pytest.raises(MeasurementError, match="there is no recorded measurement"):
        measure_here(BIG, device="cpu")
    with pytest.raises(RecordError, match="there is no recorded measurement"):
        find_record(BIG)
    assert not (tmp_path / "wanted").exists()
