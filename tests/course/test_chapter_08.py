"""Chapter 08's helpers: a program leaves the notebook's process as it was, a small card kills one,
and a folder with a model's real layout is trained, merged and asked.
"""

import ast
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import vramlab
from vramlab import GiB, MiB, Recipe, step_time
from vramlab.base.data import data_path
from vramlab.interfaces.messages import read_message
from vramlab.measurement.records import find_record
from vramlab.planning.question import usable_memory
from vramlab.report.report import text_table
from vramlab_course import blank
from vramlab_course.chapters import chapter_08
from vramlab_course.chapters.chapter_07 import recorded_8b
from vramlab_course.chapters.chapter_08 import (
    chat,
    choose,
    parts,
    run,
    small_card,
    typed_heads,
    untyped,
)
from vramlab_course.figures import figures_08
from vramlab_course.guesses import guess

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "08_make_it_fit.ipynb"

TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_program_that_fails_leaves_arguments_and_callback(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", "")
    program = tmp_path / "train.py"
    program.write_text(
        "import sys, vramlab; print(1); raise SystemExit(f'{vramlab.WatchCallback.__name__} "
        "{sys.argv[1:]}')"
    )
    before = sys.argv, vramlab.WatchCallback
    with pytest.raises(SystemExit, match=r"Kept \['--data', 'x', '--watch'\]"):
        run(program, "--data", "x")
    assert (sys.argv, vramlab.WatchCallback) == before
    assert capsys.readouterr().out == ""


def test_a_program_counts_one_gpu_and_leaves_the_environment(tmp_path, monkeypatch):
    """It hides others itself, which is too late where the notebook has used CUDA."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("HF_DATASETS_CACHE", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "train.py"
    program.write_text(
        "import os, torch; os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"
        "raise SystemExit(f'sees {torch.cuda.device_count()}')"
    )
    with pytest.raises(SystemExit, match="sees 1"):
        run(program)
    assert torch.cuda.device_count() == 2 and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_small_card_refuses_in_words_that_explain_reads():
    kept = []
    with small_card(4 * MiB), pytest.raises(torch.OutOfMemoryError) as caught:
        for _ in range(5):
            kept.append(torch.zeros(MiB // 4))
    assert len(kept) == 4
    seen = read_message(str(caught.value)).bytes
    assert seen["asked"] == MiB and seen["free"] == 0
    with small_card(2 * MiB):
        torch.zeros(MiB // 4)  # what was held before does not count


def test_stored_samples_keep_the_house_rule():
    stored = typed_heads()
    assert len(stored) == len(set(stored)) == 984
    for head in stored:
        (function,) = ast.parse(f"{head} ...").body
        (parameter,) = function.args.args
        assert parameter.annotation and function.returns, head


def test_a_chat_asks_for_a_head_without_its_types():
    head = "def size(unit: str='GiB') -> float:"
    question, reply = chat(head)
    assert question == {"role": "user", "content": "def size(unit='GiB'):"}
    assert reply == {"role": "assistant", "content": head}


def test_a_head_is_taken_apart():
    assert parts("def f(x: int=1) -> str:") == ("int", "str", "def f(x=1):")
    assert parts("def f(x):") == ("", "", "def f(x):")
    for text in ("", "no head", "x = 1", "class A:", "def f(x, y: int) -> str:", "def f(x: int"):
        assert parts(text) == ("", "", "")


def test_the_base_model_goes_on_with_a_head_and_is_taken_where_no_other_can_be_had(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    learner = choose("Qwen/Qwen3-0.6B")
    assert not learner.is_chat and learner.sample("def f(x):") == {"text": "def f(x):"}
    assert learner.prompt("def f(x):", "told\n") == "told\ndef f(x"
    assert learner.as_read("def f(x):") == "def f(x):<|start|>"
    assert learner.head_in(": int) -> str:\n    pass", "def f(x):") == "def f(x: int) -> str:"


def test_a_chat_models_first_head_is_its_answer(folder):
    learner = choose(str(folder))
    said = "Sure:\ndef f(x: int) -> int:\ndef g(): ..."
    assert learner.head_in(said, "def f(x):") == "def f(x: int) -> int:"
    assert learner.head_in("no head", "def f(x):") == "no head"
    assert learner.prompt("def f(x):", "rule\n").count("rule\ndef f(x):") == 1
    read = learner.as_read("def f(x: int) -> int:")
    assert read.startswith(learner.prompt("def f(x):")) and "-> int:" in read


def test_a_head_is_right_with_both_types_and_nothing_else_changed():
    asked = "def f(x):"
    assert chapter_08.is_right("def f(x: int) -> str:", asked)
    for head in ("def f(x: int):", "def f(x) -> str:", "def f(xs: int) -> str:", "no head", ""):
        assert not chapter_08.is_right(head, asked)


def test_the_cell_to_paste_writes_the_samples_of_section_5(tmp_path, monkeypatch):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    (text,) = [text for text in texts if "\n!vramlab plan " in text]
    monkeypatch.chdir(tmp_path)
    exec(text.split("```")[1].partition("!")[0])
    written = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    heads = typed_heads()
    asked = [untyped(head) for head in heads[::20]]
    assert written == [{"messages": chat(head)} for head in heads if untyped(head) not in asked]
    assert len(written) == 984 - 52  # two questions stand in the data twice, with other types


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model's folder as the hub has it: several files of weights with their index, a
    tokenizer, a chat template and settings of generation. The base model's numbers in Qwen3's
    layout.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from vramlab_course.base_model import load_base_model, load_base_tokenizer

    base = load_base_model()
    taken = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    taken += ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    fields = {name: getattr(base.config, name) for name in taken}
    fields["head_dim"] = base.config.hidden_size // base.config.num_attention_heads
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.load_state_dict(base.state_dict(), strict=False)
    tokenizer = load_base_tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("hub") / "qwen3-tiny"
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.bfloat16().save_pretrained(path, max_shard_size="2MB")
    tokenizer.save_pretrained(path)
    return path


def cells_of_section_5() -> str:
    """The code with which the chapter trains a model and asks it."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    begin = next(i for i, text in enumerate(texts) if "## 5 · " in text)
    end = next(i for i, text in enumerate(texts) if "### Today, on your card" in text)
    code = [cell for cell in cells[begin:end] if cell["cell_type"] == "code"]
    return "\n".join("".join(cell["source"]) for cell in code)


def test_a_folder_of_real_layout_is_trained_merged_and_asked(folder, tmp_path, monkeypatch, capsys):
    """By the very lines that the notebook has."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    wish = {"seq_len": 64, "global_batch": 2, "gpu": "T4"}
    learner = replace(choose(str(folder)), wish=wish, updates=3)
    monkeypatch.setattr(chapter_08, "choose", lambda _: learner)
    lines = cells_of_section_5()
    names = {"folder": tmp_path, "Path": Path, "json": json, "plan": vramlab.plan, "torch": torch}
    names |= {"device": "cpu", "live": print, "guess": guess, "chapter_08": chapter_08}
    names["blank"] = blank
    names |= {"MiB": MiB, "simulate": vramlab.simulate, "run": run}
    names |= {"evaluations": chapter_08.evaluations, "tensors": chapter_08.tensors}
    names |= {"heads": typed_heads()[:60], "text_table": text_table}
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").exists()
    exec(lines, names)

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    adapter = load_file(tmp_path / "mine" / "adapter_model.safetensors")
    base, trained = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        for path in (folder, tmp_path / "merged")
    )
    assert trained.dtype == base.dtype == torch.bfloat16
    for name, weight in base.named_parameters():
        after = trained.get_parameter(name)
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"
        assert torch.equal(weight, after) == (key not in adapter), name
    said = capsys.readouterr().out
    assert said.count(" became ") == 3
    assert "MiB, measured " in said and "before:         0 of 3 right" in said
    # the cell to paste counts on the folder of the adapter itself
    assert chapter_08.count_right(str(tmp_path / "mine"), names["held_back"]) == 0
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_recipes_are_in_the_cloud():
    plain = Recipe("gpt2")
    light = (900.0, (12 * GiB, 13 * GiB, 14 * GiB), plain)
    fast = (1000.0, (18 * GiB, 20 * GiB, 22 * GiB), plain)
    large = (1100.0, (70 * GiB, 80 * GiB, 90 * GiB), plain)
    marked = {"saves most": light, "chosen": fast}
    figure = figures_08.cloud([fast, large, light], marked, 23 * GiB, "title", "about")
    axes = figure.axes[0]
    where = {text.get_text(): text.xy for text in axes.texts}
    assert (where["saves most"], where["chosen"]) == ((13, 900), (20, 1000))
    assert axes.collections[0].get_offsets().tolist() == [[13, 900], [20, 1000]]
    assert list(axes.lines[0].get_ydata()) == [900, 1000]
    assert "1 of 3 need more than 32 GiB" in axes.get_title(loc="left")


def test_recorded_peaks_are_as_predicted():
    """Section 1's table of large models. Its text reads the row of our plan aloud."""
    steps = [recipe for recipe, _ in recorded_8b("H200") if recipe.use_liger_kernel]
    (best,) = [recipe for recipe in steps if recipe.quantization]
    rows = chapter_08.recorded(best)[1:]
    assert [row[0] for row in rows] == ["T4", "T4", "T4", "H200"]
    assert all(abs(said / seen - 1) < 0.006 for _, _, said, seen in rows)
    _, name, said, seen = rows[3]
    assert name == "llama-3.1-8b"
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert f"our very plan: {seen:.2f} GiB, and {said:.2f} were predicted" in text
    speed = find_record(best, "H200").speed
    assert f"two updates, of {speed.low:.1f} and {speed.high:.1f} s" in text


def test_trls_published_runs_lie_in_the_predicted_range():
    """The text says so, with the times: a T4's is estimated in fp16, which the script left out."""
    stored = json.loads(data_path("elsewhere/trl_sft.json").read_text(encoding="utf-8"))["runs"]
    text = NOTEBOOK.read_text(encoding="utf-8")
    on_t4, on_a100 = (Recipe(**run["recipe"]) for run in stored)
    off = []
    for (card, name, *shown, seen), recipe in zip(
        chapter_08.by_trl()[1:], (on_t4, on_a100), strict=True
    ):
        said = vramlab.predict(recipe, gpu=card).reserved
        assert name == recipe.name and said.low < seen * GiB < said.high
        assert [size * GiB for size in shown] == [said.low, said.value, said.high]
        off.append(round(100 * (1 - said.value / GiB / seen)))
    assert f"the likely sizes are {off[0]} and {off[1]} % below them" in text
    process = vramlab.predict(on_t4, gpu="T4").process
    assert process.value < usable_memory(vramlab.find_gpu("T4")) < process.high  # the tier likely
    t4, a100 = (run["published"]["seconds"] / run["published"]["steps"] for run in stored)
    estimated = step_time(on_t4.replace(precision="fp16-mixed"), "T4").tokens_per_second
    most = 4 * 1024 / t4
    assert f"took the T4 {t4:.0f} s: **at most {most:.0f} tokens/s. Our estimate is " in text
    assert f"Our estimate is {estimated:.0f}, in fp16.**" in text
    said = step_time(on_a100, "A100 40GB").seconds
    assert f"update took {a100:.1f} s, and {said:.1f} were estimated" in text


def test_a_program_that_ran_on_a_card_is_the_shortest_ways():
    """The text says its peak; `test_written_programs.py` holds simulate to it."""
    runs = json.loads(data_path("program_runs.json").read_text(encoding="utf-8"))["runs"]
    (run,) = [run for run in runs if run["chapter"] == "08"]
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    (text,) = [text for text in texts if "\n!vramlab plan " in text]
    # --tokens is another name of the option
    assert "!" + run["command"].replace("--tokens", "--seq-len") in text.replace(" \\\n   ", "")
    assert f"was **{run['peak_gib']:.2f} GiB**, as predicted." in text and run["steps"] == 10


def test_two_plans_were_estimated_and_recorded_on_a_card():
    """Section 3 says that the estimate named the slower one, and that `plan`'s rule does not."""
    rates = {}
    for timed, ratio in figures_08.timed()["H200"]:
        recipe = timed.recipe
        if recipe.use_liger_kernel and (recipe.quantization or recipe.gradient_checkpointing):
            rows = recipe.batch_size * recipe.gradient_accumulation_steps
            recorded = rows * recipe.seq_len / timed.seconds
            rates[bool(recipe.quantization)] = ratio * recorded, recorded
            if recipe.quantization:
                time = step_time(recipe, "H200")
    (qlora, qlora_ran), (lora, lora_ran) = rates[True], rates[False]
    assert qlora > lora and lora_ran > qlora_ran
    assert qlora / lora < time.high / time.seconds
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert f"with {qlora:,.0f} tokens/s against {lora:,.0f}." in text
    assert f"with {lora_ran:,.0f} against {qlora_ran:,.0f}." in text


def test_the_text_says_how_many_steps_were_near_their_estimate():
    runs = figures_08.timed()["T4"]
    near = sum(abs(ratio - 1) < 0.2 for _, ratio in runs)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert f"**{near} of {len(runs)} steps on a T4 lie in the grey, within a fifth" in text
    assert len({run.recipe.name for run, _ in runs}) == 10 and "of ten models" in text


def test_far_from_the_estimate_qlora_was_slower_and_lora_faster():
    """The figure's title, and one mark for each step in it."""
    timed = figures_08.timed()
    far = [pair for runs in timed.values() for pair in runs if abs(pair[1] - 1) >= 0.2]
    assert all((ratio > 1) == bool(run.recipe.quantization) for run, ratio in far) and len(far) == 9
    axes = figures_08.errors(timed, "title").axes[0]
    lines = [label.get_text() for label in axes.get_yticklabels()]
    assert lines == ["T4, QLoRA", "T4, LoRA", "H200, QLoRA", "H200, LoRA"]
    assert [text.get_text() for text in axes.texts].count("our plan") == 2
    assert len(axes.lines) == 1 + sum(map(len, timed.values()))


def test_a_step_is_judged_by_a_fit_that_has_not_seen_its_model():
    """The constants in use have seen all of them, so they give other estimates."""
    off = []
    for timed, ratio in figures_08.timed()["T4"]:
        off.append(abs(timed.seconds / ratio / step_time(timed.recipe, "T4").seconds - 1))
    assert max(off) > 0.02
