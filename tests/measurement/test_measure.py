"""`measure` runs the real step in a process of its own; whatever happens there comes back as a
report or a sentence.
"""

import ast
import re
import sys
import time
from pathlib import Path

import pytest
import vramlab
from rank_faults import gone
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
from vramlab.hardware.nvml import nvml_snapshot
from vramlab.measurement import host_memory, launch, worker
from vramlab.measurement.measure import run_here

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


# --- what it says


def test_the_tracked_phases_are_those_of_simulate_to_the_byte(measured):
    simulated = simulate(TINY, target="cpu")
    assert (measured.source, simulated.source) == ("measured", "simulated")
    assert measured.phases == simulated.phases
    assert (measured.peak, measured.peak_phase) == (simulated.peak, simulated.peak_phase)
    highest = [
        max(moment.bytes.total for moment in report.timeline) for report in (measured, simulated)
    ]
    assert highest[0] == highest[1] == measured.peak.total and measured.largest == simulated.largest
    assert measured.allocated == measured.peak.total > 4 * measured.peak.parameters


def test_speed_is_that_of_the_repeats(measured):
    speed = measured.speed
    assert speed.repeats == 3 and 0 < speed.low <= speed.median <= speed.high < 60
    assert speed.tokens_per_second == pytest.approx(TINY.tokens / speed.median)


def test_rss_is_the_childs_own(measured):
    assert measured.peak.total < measured.rss < BALLAST, (
        "a large parent's peak would be over the ballast"
    )


def test_the_report_names_what_it_was_made_with(measured):
    import torch

    version = torch.__version__.split("+")[0]  # the distribution's name may lack the build's tag
    assert measured.environment["torch"].split("+")[0] == version
    assert (
        measured.recipe == TINY.to_dict()
        and measured.title == str(TINY)
        and measured.target == "cpu"
    )
    assert Report.from_json(measured.to_json()).to_dict() == measured.to_dict()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bert", {"precision": "bf16-mixed"}),
        ("gpt2", {"precision": "fp16-mixed"}),
        (
            "llama",
            {
                "gradient_checkpointing": True,
                "gradient_accumulation_steps": 2,
                "optim": "adafactor",
            },
        ),
        ("t5", {"precision": "bf16-true", "optim": "sgd", "loop": "plain"}),
    ],
)
def test_other_recipes_agree_too(family, fields):
    """The worker's passes, run here: a process each would only cost time."""
    from vramlab.measurement.measurement_passes import clean_pass, tracked_pass

    recipe = Recipe(config(family), **{**SIZES, **fields})
    truth = clean_pass(recipe, repeats=1, warmup=2, device="cpu", before=nvml_snapshot())
    report = tracked_pass(recipe, "cpu", truth)
    assert report.phases == simulate(recipe, target="cpu", full=True).phases
    assert report.speed is truth.speed and report.rss == truth.rss


# --- out of memory


def test_out_of_memory_is_a_report_that_says_what_was_asked_for(small_machine, monkeypatch):
    """Run here; that of a rank in another process is in tests/training/test_sharding_faults.py."""
    monkeypatch.setattr(measure, "run_here", lambda order, *_: worker.run(**order))
    recipe = Recipe(config("llama"), batch_size=2**24, seq_len=2**12, num_layers=1)
    report = measure_here(recipe, device="cpu", recorded=False)
    assert (report.source, report.status, report.recipe) == ("measured", "oom", recipe.to_dict())
    asked = format_bytes(8 * 2**36)  # token numbers
    assert re.fullmatch(
        rf"RAM ran out: it asked for {asked} more, and [\d.]+ GiB were free\.", report.message
    )
    assert report.environment["torch"] and "oom" in str(report) and asked in str(report)


def child(monkeypatch, code: str, timeout: float = 300, device: str = "cpu") -> Report:
    """What `measure` makes of a child process that runs `code`."""
    monkeypatch.setattr(launch, "COMMAND", [sys.executable, "-c", code])
    order = {"recipe": TINY, "repeats": 1, "warmup": 2, "device": device}
    return run_here(order, timeout)


KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def counter(monkeypatch, tmp_path):
    """A kernel's count of out-of-memory kills, in a file."""
    file = tmp_path / "vmstat"
    file.write_text("pgfault 7\noom_kill 3\nnuma_hit 3\n")
    monkeypatch.setattr(host_memory, "VMSTAT", file)
    return file


def oom_kill(counter) -> str:
    return f"open({str(counter)!r}, 'w').write('oom_kill 4\\n'); {KILL}"


def test_a_child_that_the_kernel_kills_for_its_memory_ran_out_of_memory(monkeypatch, counter):
    report = child(monkeypatch, oom_kill(counter))
    assert (report.status, report.source, report.title) == ("oom", "measured", str(TINY))
    assert report.message == "its process: killed by the kernel because RAM ran out."


def test_a_child_that_somebody_kills_is_an_error_and_no_report(monkeypatch, counter):
    """Nor is one on a GPU that ran out of RAM: it says nothing of the GPU."""
    why = (
        r"could not be measured: its process was killed by SIGKILL, as the kernel does when "
        r"RAM runs out\.$"
    )
    for code, device in ((KILL, "cpu"), (oom_kill(counter), "cuda")):
        with pytest.raises(MeasurementError, match=why):
            child(monkeypatch, code, device=device)


def test_ram_that_runs_out_says_nothing_of_a_gpu():
    assert (
        worker.out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "cuda")
        == ""
    )
    assert worker.out_of_memory(MemoryError(), "cuda") == "" and "RAM" in worker.out_of_memory(
        MemoryError(), "cpu"
    )


# --- children that fail


def test_a_child_that_ends_early_is_quoted(monkeypatch):
    ending = (
        "ended in the middle with exit status 1, without an exception; its last "
        "output:\nfirst\nSegmentation imagined"
    )
    with pytest.raises(MeasurementError, match=ending) as caught:
        child(monkeypatch, "import sys; print('first'); sys.exit('Segmentation imagined')")
    assert str(TINY) in str(caught.value)


RAISING = """
from vramlab import RecipeError
from vramlab.measurement import ranks, worker

def run(**order):
    raise {error}

worker.run = run
ranks.main()
"""


@pytest.mark.slow  # ranks' errors go the same way
def test_the_text_of_another_modules_exception_comes(monkeypatch):
    """The class may not exist here."""
    with pytest.raises(
        MeasurementError,
        match="could not be measured: its process failed: ZeroDivisionError: by zero",
    ):
        child(monkeypatch, RAISING.format(error="ZeroDivisionError('by zero')"))


@pytest.mark.slow  # so does theirs: tests/training/test_sharding_faults.py
def test_the_packages_own_exception_in_the_child_is_one_here(monkeypatch):
    error = "RecipeError('optim_args', 'beta=1', 'sgd does not take it')"
    with pytest.raises(
        RecipeError, match="'optim_args' is 'beta=1', but sgd does not take it"
    ) as caught:
        child(monkeypatch, RAISING.format(error=error))
    assert caught.value.field == "optim_args"


GRANDCHILD = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open({path!r}, "w").write(f"{{os.getpid()}} {{grandchild.pid}}")
time.sleep(300)
"""


def wait_for(path, seconds: float = 60) -> list[int]:
    until = time.monotonic() + seconds
    while not (path.exists() and len(path.read_text().split()) == 2):
        assert time.monotonic() < until, "the child never started"
        time.sleep(0.05)
    return [int(word) for word in path.read_text().split()]


def test_a_timeout_is_a_sentence_and_leaves_no_process(monkeypatch, tmp_path):
    begun = time.monotonic()
    with pytest.raises(
        MeasurementError, match=r"it took over 3 s, so all was ended: raise timeout="
    ):
        child(monkeypatch, GRANDCHILD.format(path=str(tmp_path / "pids")), timeout=3)
    assert time.monotonic() - begun < 20
    assert gone(wait_for(tmp_path / "pids"))


# --- recipes that this machine does not run


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
        (
            TINY.replace(precision="bf16-true", attn_implementation="flash_attention_2"),
            "flash-attention needs a GPU",
        ),
        (
            TINY.replace(sharding=Sharding(3, 8)),
            r"it needs 8 processes and measure\(\) starts 4 at most on a CPU",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_the_reason_and_the_way_out(
    records, monkeypatch, recipe, why
):
    monkeypatch.setattr(
        "vramlab.hardware.host.memory",
        lambda: (10**12, 10**12) if recipe is SLOW else (2**34, 2**33),
    )
    with pytest.raises(MeasurementError, match=why) as caught:
        measure_here(recipe, device="cpu")
    text = str(caught.value)
    assert (
        text.startswith(f"{recipe} was not measured here because ")
        and text.endswith(".")
        and "\n" not in text
    )
    assert (
        "there is no recorded measurement of it" in text
        and "simulate() describes it anywhere" in text
    )


def test_what_does_not_fit_comes_from_the_records(records, measured):
    from vramlab.measurement.records import save

    found = Report.from_dict({**measured.to_dict(), "recipe": BIG.to_dict(), "target": "cuda"})
    found.environment = {**found.environment, "gpu": "NVIDIA T4"}
    save(found, records)
    seen = measure_here(BIG, device="cpu")
    assert (
        seen.source == "recorded"
        and seen.environment["gpu"] == "NVIDIA T4"
        and seen.phases == measured.phases
    )
    assert measure_here(BIG, recorded=True).source == "recorded"
    with pytest.raises(MeasurementError, match=r"needs 8 processes .* records were not to be used"):
        measure_here(TINY.replace(sharding=Sharding(3, 8)), recorded=False)


def test_recorded_only_never_runs(records, monkeypatch):
    monkeypatch.setattr(measure, "run_here", lambda *args: pytest.fail("it ran"))
    with pytest.raises(
        MeasurementError,
        match="recorded=True asks for no run, and there is no recorded measurement",
    ):
        measure_here(TINY, recorded=True)


def test_a_broken_record_is_named(records):
    (records / "nvidia-t4-torch2.13-transformers5.23.json").write_text("{")
    with pytest.raises(
        MeasurementError, match=r"nvidia-t4-torch2\.13-transformers5\.23\.json cannot be read"
    ):
        measure_here(BIG, device="cpu")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "tf32"])
def test_a_gpu_that_lacks_the_precision_is_refused_before_anything_runs(monkeypatch, precision):
    monkeypatch.setattr(measure, "run_here", lambda *args: pytest.fail("it ran"))
    t4 = find_gpu("T4")
    monkeypatch.setattr(measure, "current_device", lambda: Device("cuda", t4.name, t4))
    with pytest.raises(RecipeError, match=r"T4 has compute capability 7\.5 and .* starts at 8\.0"):
        measure_here(TINY.replace(precision=precision))


def test_without_cuda_it_cannot_be_asked_for(records, monkeypatch):
    monkeypatch.setattr(measure, "current_device", lambda: Device("cpu", "CPU"))
    with pytest.raises(MeasurementError, match="torch sees no CUDA device here"):
        measure_here(TINY, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"repeats": 0}, "'repeats' is 0"),
        ({"repeats": True}, "'repeats' is True"),
        ({"warmup": 1}, "'warmup' is 1, but measure needs a whole number of at least 2"),
        ({"device": "tpu"}, "'device' is 'tpu'"),
    ],
)
def test_wrong_arguments_are_sentences(arguments, why):
    with pytest.raises(RecipeError, match=why):
        measure_here(TINY, **arguments)


CHANGES_SOURCE = {
    (
        "records.py",
        "find_record",
        "recorded",
    ),  # dataclasses.replace(a report that load() found to be measured, …)
}


def test_no_path_gives_a_report_another_source():
    """But measured to recorded, in `find_record`. `{**report, "source": …}`, `replace(…, source=…)`
    and `x.source = …` anywhere else in the package fail here."""
    found = set()
    for path in Path(vramlab.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                found |= {
                    (path.name, function.name, value)
                    for node in ast.walk(function)
                    for value in changed(node)
                }
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
        values = [
            v
            for k, v in zip(node.keys, node.values, strict=True)
            if getattr(k, "value", None) == "source"
        ]
    elif isinstance(node, ast.Assign):
        targets = [
            getattr(each, "attr", getattr(getattr(each, "slice", None), "value", None))
            for each in node.targets
        ]
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
