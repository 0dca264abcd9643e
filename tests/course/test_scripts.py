"""The scripts that chapters print whole: they train, and say what the chapter says of them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import nbformat
import pytest
import settings
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from vramlab_course import look
from vramlab_course.base_model import base_model_folder, load_base_model


def notebook_of(number: str) -> nbformat.NotebookNode:
    return nbformat.read(next(settings.NOTEBOOKS.glob(f"{number}_*.ipynb")), as_version=4)


def scripts(number: str) -> Iterator[str]:
    """The blocks of Python in a chapter's text."""
    for cell in notebook_of(number).cells:
        if cell.cell_type == "markdown":
            yield from re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)


def test_the_callback_of_chapter_07_leaves_a_trace_and_a_snapshot(tmp_path, monkeypatch, capsys):
    calls = []
    held = {"allocated_bytes.all.current": 2**29, "allocated_bytes.all.peak": 2**30}
    held |= {"reserved_bytes.all.peak": 2**31, "num_alloc_retries": 3}
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options),
        _dump_snapshot=lambda name: calls.append(name),
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: held)
    monkeypatch.setattr(look, "ON_GPU", True)
    out = tmp_path / "out"
    folder = str(base_model_folder())
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 15
    arguments = TrainingArguments(out, per_device_train_batch_size=1, max_steps=15, use_cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    Trainer(model, arguments, train_dataset=rows, callbacks=[look.Look(4)]).train()
    made = [{"max_entries": 1_000_000}, out / "memory_0.pickle", {"enabled": None}]
    assert calls == made
    trace = (out / "trace_0.json").read_text()
    assert len(re.findall(r'"name": "enumerate\(DataLoader\)[^"]*"', trace)) == 2  # of both steps
    printed = capsys.readouterr().out
    # A peak is the run's in both: reserved never comes down, so the other may not either.
    assert "GiB allocated: 0.50 now, 1.00 at most\nGiB reserved: 2.00, retries: 3" in printed
    (speed,) = re.findall(r"rank 0: .* ([\d,]+) tokens/s, (\S+) TFLOP/s", printed)
    # All weights are trained: 6 operations for each.
    operations = 6 * model.num_parameters()
    tokens = float(speed[1]) * 1e12 / operations
    assert tokens == pytest.approx(float(speed[0].replace(",", "")), rel=0.02, abs=0.6)
    assert len(re.findall(r"ms in +\d+ of ", printed)) == 5  # operators
    # Now a run that dies in its first step. The chapter's lines around it write what there is.
    (out / "trace_0.json").unlink()
    calls.clear()
    arguments.max_steps = 1
    callback = look.Look(4)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback, Dies()])
    (lines,) = re.findall(
        r"^ *(try:\n.*?look\.write.*?)$",
        next(cell.source for cell in notebook_of("07").cells if "callbacks=[look]" in cell.source),
        re.DOTALL | re.MULTILINE,
    )
    with pytest.raises(torch.OutOfMemoryError):
        exec(dedent(lines), {"trainer": trainer, "look": callback})
    callback.write(arguments)  # a second time, which is nothing
    assert calls == made
    assert (out / "trace_0.json").exists()


class Dies(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("first", "last", "after", "began"),
    [(0, 1, 11, 0), (0, 3, 11, 1), (15, 20, 11, 18), (500, 600, 11, 511), (0, 50, 40, 40)],
)
def test_the_callback_of_chapter_07_records_resumed_and_short_runs(
    first, last, after, began, monkeypatch, tmp_path
):
    started, files, lines = [], [], []
    profiler = SimpleNamespace(
        start=lambda: started.append(state.global_step),
        stop=lambda: None,
        export_chrome_trace=files.append,
        key_averages=list,
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: profiler)
    # The two recorded steps take four times as long.
    clock = {first: 0.0}
    for step in range(first, last):
        clock[step + 1] = clock[step] + (1 if began <= step < began + 2 else 0.25)
    monkeypatch.setattr(
        look, "time", SimpleNamespace(perf_counter=lambda: clock[state.global_step])
    )
    callback = look.Look(4, after=after, weights=5e11, say=lines.append)
    arguments = SimpleNamespace(process_index=1, output_dir=tmp_path)
    model = SimpleNamespace(num_parameters=lambda: 0)  # as under ZeRO-3
    state = SimpleNamespace(global_step=first, max_steps=last)
    callback.on_train_begin(arguments, state, None)
    while state.global_step < last:
        state.global_step += 1
        callback.on_step_end(arguments, state, None, model)
    callback.on_train_end(arguments, state, None)
    assert files == [str(tmp_path / "trace_1.json")] and started == [began]
    # A step takes 0.25 s, also where fewer than ten were done since the start or the profiler.
    assert len(lines) == last // 10 - first // 10
    if last != began + 2:
        assert {*lines} <= {"rank 1: 0.25 s a step, 16 tokens/s, 48 TFLOP/s"}


@pytest.mark.slow  # imports TRL
def test_the_lines_of_chapter_05_train_and_save_an_adapter(tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    (lines,) = (script for script in scripts("05") if "SFTTrainer(" in script)
    here = {
        '"meta-llama/Llama-3.1-8B"': repr(str(base_model_folder())),
        "bf16=True": "use_cpu=True, bf16=True",
        "max_length=2048": "max_length=32",
        "num_train_epochs=1": "max_steps=1",
    }
    for old, new in here.items():
        assert old in lines
        lines = lines.replace(old, new)
    text = json.dumps({"text": "def number():\n    return 1\n"})
    Path("train.jsonl").write_text(f"{text}\n{text}\n")
    exec(lines, {})
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out-2e-4")
    moved = [p.any().item() for name, p in saved.named_parameters() if "lora_B" in name]
    assert len(moved) == 4 * 7 and all(moved)
    (after,) = (script for script in scripts("05") if "merge_and_unload" in script)
    exec(after, {})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="bfloat16")
    assert merged.num_parameters() == load_base_model().num_parameters()
