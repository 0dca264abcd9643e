"""Out-of-memory messages as PyTorch writes them, recipes and snapshots, explained; and the command
line that does so.
"""

import json
import pickle
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vramlab import GiB, LoRA, MiB, Recipe, explain, predict
from vramlab.interfaces.cli import app
from vramlab.interfaces.explain import MessageError, read_message
from vramlab.report.report import format_bytes

# The figures of messages in public issues, in the standard words of the program that wrote them.
ISSUES = json.loads((Path(__file__).parent / "messages_of_issues.json").read_text(encoding="utf-8"))
RECIPE = Recipe("gpt2", batch_size=2, seq_len=128, num_layers=2)
NOW = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 23.65 GiB of "
    "which {free} is free. "
    "{more}Including non-PyTorch memory, this process has {process} memory in use. Of the "
    "allocated memory {allocated} is "
    "allocated by PyTorch, and {unallocated} is reserved by PyTorch but unallocated. If reserved "
    "but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FULL = {"asked": "22.00 MiB", "free": "11.06 MiB", "process": "23.60 GiB", "allocated": "22.90 GiB"}
FULL |= {"unallocated": "194.87 MiB", "more": ""}


def message(**changes):
    return NOW.format(**{**FULL, **changes})


def test_the_figures_of_a_message():
    text = "Traceback …\n" + message(asked="1.00 GiB") + "\n" + message().replace(". ", ".\n")
    found = read_message(text).bytes
    assert found["asked"] == 22 * MiB and found["total"] == int(
        23.65 * GiB
    )  # the last one, and over several lines
    assert found["lack"] == 22 * MiB - int(11.06 * MiB)
    assert found["context"] == int(23.60 * GiB) - int(22.90 * GiB) - int(194.87 * MiB)
    assert found["others"] == int(23.65 * GiB) - int(11.06 * MiB) - int(23.60 * GiB)
    rounded = read_message(message(free="62.44 MiB", process="23.58 GiB")).bytes
    assert rounded["others"] == 0, "two digits of three figures"


def test_in_a_container_the_process_that_holds_much_more_is_another():
    """NVML's numbers are the machine's there, so PyTorch calls its own process by number too."""
    own = "Including non-PyTorch memory, this process has {} memory in use."
    numbered = "Process 1888 has 72.00 GiB memory in use. Process 2999 has 7.01 GiB memory in use."
    held = {"asked": "512.00 MiB", "free": "131.19 MiB", "allocated": "6.30 GiB"}
    said = message(**held, process="{}").replace("23.65", "79.15")
    found = explain(said.replace(own, numbered))
    assert found.bytes["others"] > 71 * GiB and found.bytes["process"] < 8 * GiB
    for text in (found, explain(said.format("7.01 GiB"))):
        lines = str(text)
        assert "another process is on the card" in lines and "a real lack" not in lines


WITHOUT_PROCESS = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a "
    "total capacity of 6.00 GiB of "
    "which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 "
    "GiB is reserved by PyTorch "
    "but unallocated."
)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (
            message(),
            "a real lack: the tensors fill the card; of it all, only 194.87 MiB are fragments",
        ),
        (
            message(asked="2.00 GiB", unallocated="3.00 GiB", allocated="20.00 GiB"),
            "fragmentation: 3.00 GiB would do",
        ),
        (message(asked="2.00 GiB"), "a real lack: at least 1.80 GiB are missing"),
        (
            message(asked="2.00 GiB", process="18.00 GiB", allocated="17 GiB"),
            "another process is on the card",
        ),
        (
            message(
                more="1.00 GiB allowed; ",
                allocated="0.99 GiB",
                unallocated="2.00 MiB",
                free="20 GiB",
            ),
            "a real lack",
        ),
        (WITHOUT_PROCESS, "fragmentation: 2.30 GiB would do"),
        (message(free="1.00 GiB", process="22.60 GiB"), "that much is free"),
        ("HIP out of memory. Tried to allocate 20.00 MiB.", "20.00 MiB asked for"),
    ],
)
def test_what_a_message_means(text, verdict):
    lines = explain(text).lines
    assert any(line.startswith(verdict) for line in lines), lines
    assert any("is on the card" in line for line in lines) == verdict.startswith("another")


@pytest.mark.parametrize(
    "text",
    ["", "exit code 1", "RuntimeError: CUDA error: an illegal memory access was encountered"],
)
def test_what_is_no_message_is_said(text):
    with pytest.raises(MessageError, match="no out-of-memory message"):
        explain(text)


@pytest.mark.parametrize("case", ISSUES, ids=lambda case: case["source"])
def test_a_message_of_an_issue_is_read(case):
    """Each says what it is, has its figures, what to do, and what would tell more."""
    found = explain(case["text"])
    assert found.kind == case["kind"]
    assert {name: found.bytes.get(name) for name in case["bytes"]} == case["bytes"]
    assert any(case["says"] in line for line in found.lines), found.lines
    remedies = (
        "to make room",
        "set PYTORCH_ALLOC_CONF",
        "ask for more of it",
        "end the other process",
        "who holds",
        "vllm_gpu_memory_utilization",
        "Fewer samples do not help",
        "nvidia-smi says",
        "leave some",
    )
    assert any(remedy in line for line in found.lines for remedy in remedies)
    # no recipe explains what is no lack of a training's memory
    assert ("say MODEL with its options" in found.lines[-1]) is (case["kind"] != "other")
    # a line of a log, which breaks a long message, says who printed it: srun, torchrun or Ray
    is_one = case["kind"] in ("card", "share", "other")
    lines = textwrap.wrap(case["text"], 60) if is_one else case["text"].splitlines()
    for prefix in ("gpu-q-13: ", "[rank0]: ", "(Worker pid=4711) ", "0: [default3]:"):
        lines = [prefix + line for line in lines]
        assert explain("\n".join(lines)).lines == found.lines


def test_at_least_twenty_messages_of_all_kinds():
    assert len({case["source"] for case in ISSUES}) == len(ISSUES) >= 20
    assert {case["kind"] for case in ISSUES} == {"card", "bare", "share", "other", "host", "table"}


def test_the_frames_of_a_traceback_name_the_remedy():
    card = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total "
    card += "capacity of 44.40 GiB of which 1.89 GiB is free. Of the allocated memory 42.44 GiB is "
    card += "allocated by PyTorch, and 0.96 MiB is reserved by PyTorch but unallocated."
    frame = 'File "/lib/vllm/worker/cache_engine.py", line 69, in __init__\n'
    for recipe in (None, "mistral-7b"):
        found = explain(frame + card.format("2.00 GiB"), recipe)
        text = str(found)
        assert found.kind == "share" and "vllm_gpu_memory_utilization" in text
        assert "Liger" not in text and "logits" not in text and "halve" not in text
    larger = str(explain(card.format("74.16 GiB")))
    assert "larger than the whole card" in larger and "halve" not in larger
    softmax = "    ret = input.{}(dim, dtype=dtype)\n          ^^^^^\n" + card.format("2.00 GiB")
    assert "attn_implementation='sdpa'" in str(explain(softmax.format("softmax")))
    assert "attn_implementation" not in str(explain(softmax.format("log_softmax")))
    both = "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 79.17 GiB total capacity; "
    both += "78.00 GiB already allocated; 0.50 GiB free; 78.20 GiB reserved in total by PyTorch)"
    assert "likely A100 80GB or H100 SXM" in str(explain(both))


def test_a_bare_model_is_trained_as_the_message_says():
    """Llama 3.1 8B by fp32 AdamW keeps 90 GiB: nobody held 23 of them."""
    found = explain(message(asked="7.83 GiB"), "llama-3.1-8b")
    text = str(found)
    assert (
        "7.83 GiB is the size of the logits in fp32, 32 × 512 tokens × 128,256 words"
        in found.request
    )
    assert "taken from the message: LoRA over bf16 weights, because full training" in text
    assert "gradient_checkpointing, without which the layers had kept" in text
    assert found.contradictions == []
    assert 0 < found.missing < 23.65 * GiB
    assert text.count("missing") == 1, "one figure for what is missing"
    fallen = explain(message(asked="7.83 GiB") + " .../peft/tuners/lora/layer.py", "llama-3.1-8b")
    assert "PEFT in its traceback" in str(fallen)
    older = str(explain(message(asked="7.83 GiB"), "llama-3.1-8b", gpu="T4"))
    assert "LoRA over fp16 weights" in older and "bf16" not in older, "a T4 has no bf16"


def test_a_batch_and_a_length_that_are_given_stay():
    usual = run(message(asked="7.83 GiB"), "llama-3.1-8b").stdout
    assert "32 × 512 tokens" in usual
    given = run(message(asked="7.83 GiB"), "llama-3.1-8b", "--batch-size", "1").stdout
    assert "32 × 512 tokens" not in given and "LoRA over bf16 weights" in given


def test_an_option_that_names_the_default_counts_before_the_message():
    """An H100 ran out of memory in the first step of fp32 weights, which the options say."""
    full = {"free": "22.44 MiB", "process": "78.53 GiB", "allocated": "77.78 GiB"}
    said = message(asked="224.00 MiB", **full).replace("23.65", "79.18")
    words = ("llama-3.1-8b", "--batch-size", "1", "--seq-len", "8")
    assumed = run(said, *words).stdout
    assert "taken from the message: full training of bf16 weights" in assumed
    for precision in (("--precision", "fp32"), ("--precision=fp32",)):
        text = run(said, *words, *precision).stdout
        assert "taken from" not in text and "contradiction" not in text
        assert "224.00 MiB is the size of a matrix of an MLP in fp32" in text
        assert "estimated on H100 SXM" in text


def test_a_change_is_enough_if_the_process_fits_with_it():
    """Its tensors alone shrink by less than is missing: the allocator's own goes with them."""
    recipe = Recipe("qwen2.5-1.5b", 4, 1024, "bf16-mixed", "adamw_torch_fused")
    found = explain(recipe, gpu="A100 40GB")
    change = next(one for one in found.changes if "use_liger_kernel" in one["fields"])
    changed = predict(recipe.replace(**change["fields"]), gpu="A100 40GB")
    assert change["saves"] < found.missing
    assert int(changed.process) <= changed.usable and change["enough"]


def test_what_the_process_lacks_is_held_against_what_leaves_the_process_after_a_message_too():
    recipe = Recipe("llama-3.1-8b", 1, 1024, "bf16-true", gradient_checkpointing=True)
    said = message(asked="112.00 MiB", allocated="22.75 GiB")
    found = explain(said, recipe, gpu="RTX 4090")
    adapted = recipe.replace(lora=LoRA(r=16))
    after = predict(adapted, gpu="RTX 4090")
    assert after.verdict == "likely"
    change = found.changes[0]
    assert change["saves"] < found.missing and change["enough"]
    assert change["text"].startswith("LoRA r=16: ") and " of the process" in change["text"]


def test_changes_come_with_gib_and_seconds():
    found = explain(message(asked="7.83 GiB"), "llama-3.1-8b", gpu="RTX 4090")
    for change in found.changes:
        assert change["saves"] > 0 and change["seconds"] > 0 and change["seconds_before"] > 0
    assert [change["enough"] for change in found.changes] == [True, False, False]
    shown = [line for line in found.lines if " s a step, " in line]
    assert len(shown) == 3 and "estimated on RTX 4090" in shown[0]


def test_keys_are_repeated_where_a_card_has_no_kernel_for_shared_ones():
    recipe = Recipe("qwen2.5-1.5b", 4, 2048, "fp16-mixed", lora=LoRA(r=16))
    found = explain(recipe, gpu="T4")
    first = found.changes[0]
    assert first["fields"] == {"attn_implementation": "sdpa_repeated"} and first["same"]
    repeated = predict(recipe.replace(attn_implementation="sdpa_repeated"), gpu="T4")
    assert first["saves"] == predict(recipe, gpu="T4").peak.total - repeated.peak.total
    assert "(repeat_shared_keys() of vramlab): −22.255 GiB" in first["text"]
    (head,) = [line for line in found.lines if line.startswith("the cheapest changes")]
    assert head.endswith("GiB being missing with what its allocator keeps:"), "of the process"


def test_a_recipe_that_contradicts_the_message_is_named():
    found = explain(message(), RECIPE, gpu="T4")
    heavier, other_card = found.contradictions
    assert "the recipe's peak is 1.11 GiB, but 22.90 GiB were allocated and 22.00 MiB" in heavier
    assert "the message's card has 23.65 GiB, T4 has 14.56 GiB" in other_card
    assert found.missing == explain(message()).missing, "what the message says is missing"
    adapted = Recipe("llama-3.1-8b", 1, 4096, "bf16-mixed", dtype="bfloat16", lora=LoRA(r=16))
    adapted = adapted.replace(gradient_checkpointing=True)
    peak = predict(adapted).peak.total / GiB
    assert 21.8 < peak < 22.1, "it holds what was allocated, and not what was asked for besides"
    said = message(asked="1.96 GiB", allocated="21.71 GiB")
    another = explain(said, adapted, gpu="RTX 4090")
    (more,) = another.contradictions
    assert "21.71 GiB were allocated and 1.96 GiB more asked for" in more
    setting = "  PYTORCH_ALLOC_CONF=expandable_segments:True: likely, "
    assert any(line.startswith(setting) for line in explain(adapted, gpu="RTX 4090").lines)
    assert not any(line.startswith(setting) for line in another.lines)
    loading = explain(message(asked="1.00 GiB", allocated="10.00 GiB"), Recipe("llama-3.1-8b"))
    assert (
        "the recipe's weights take 29.92 GiB, but 10.00 GiB were allocated"
        in loading.contradictions[0]
    )


def test_a_killed_process_is_told_what_the_host_has_to_hold():
    text = str(
        explain("exits with return code = -9", Recipe("llama-3.1-8b", precision="bf16-mixed"))
    )
    assert "all ranks together need" in text and "of it for weights while they load" in text


@pytest.mark.parametrize("word", ["error", "Error"])
def test_a_message_without_sizes_says_what_it_means(word):
    found = explain(f"CUDA {word}: out of memory at line 84 in file /src/ops.cu")
    assert found.kind == "bare" and "another process that fills the card" in str(found)


def test_a_message_and_its_recipe_are_both_explained():
    peak = predict(RECIPE).peak.total
    lines = explain(message(asked="1.00 GiB", allocated="0.10 GiB", free="11.00 MiB"), RECIPE).lines
    assert f"predicted: {RECIPE}" in lines and any("50257" in line for line in lines)
    head = next(i for i, line in enumerate(lines) if line.startswith("the cheapest changes, "))
    assert len(lines) == head + 4 and all(": −" in line for line in lines[head + 1 :])
    lines = explain(message(asked="1.00 MiB", allocated="0.50 GiB", free="11.00 MiB"), RECIPE).lines
    lack = (peak - int(0.5 * GiB) - 11 * MiB) / MiB
    whose = "(no --gpu is said: the seconds are estimated on A100 80GB)"
    assert f"the cheapest changes, {lack:,.2f} MiB being missing {whose}:" in lines, (
        "what the rest of the step lacks"
    )


def test_seconds_are_of_the_card_that_a_message_names():
    of_a_4090 = message(asked="1.00 GiB", allocated="0.10 GiB").replace("23.65", "23.51")
    said = str(explain(of_a_4090, RECIPE))
    assert "the seconds are estimated on RTX 4090):" in said and "A100" not in said


def test_an_exception_is_read_as_its_text():
    assert explain(MemoryError(message())).bytes == read_message(message()).bytes


def test_a_recipe_is_explained_and_what_predict_refuses_is_simulated():
    said = str(explain(RECIPE, gpu="T4"))
    assert (
        said.startswith(f"predicted: {RECIPE}\npeak in ")
        and "safe: T4 has 14.562 GiB, the process needs" in said
    )
    assert "the cheapest changes:\n  " in said
    offloaded = RECIPE.replace(loop="plain", optim="sgd", optim_args="momentum=0.9")
    assert str(explain(offloaded)).split(":")[0] in ("predicted", "simulated")


def run(*words, text=None):
    return CliRunner().invoke(app, ["explain", *words], input=text)


def test_the_command_takes_text_files_snapshots_and_recipes(tmp_path):
    file, snapshot, recipe = (
        tmp_path / name for name in ("oom.txt", "memory.pickle", "recipe.json")
    )
    file.write_text(message(asked="50.00 MiB"))
    snapshot.write_bytes(
        pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1, "size": MiB}]]})
    )
    recipe.write_text(RECIPE.replace(precision="bf16-mixed").to_json())
    assert (
        run(text=message()).output
        == run("-", text=message()).output
        == str(explain(message())) + "\n"
    )
    assert run(message()).output == run(text=message()).output, "longer than a file's name may be"
    words = (
        "gpt2",
        "--batch-size",
        "2",
        "--seq-len",
        "128",
        "--num-layers",
        "2",
        "--precision",
        "bf16-mixed",
    )
    assert run(str(file), *words).output == run(str(file), str(recipe)).output
    assert "T4 has 14.562 GiB" in run(str(file), *words, "--gpu", "T4").output
    assert run(str(snapshot)).output.startswith("peak: 1.000 MiB allocated")
    assert (
        run(*words).output
        == run(str(recipe)).output
        == str(explain(RECIPE.replace(precision="bf16-mixed"))) + "\n"
    )
    assert (
        run(str(file), "llama-3.1-8b").output
        == str(explain(message(asked="50.00 MiB"), "llama-3.1-8b")) + "\n"
    )
    assert json.loads(run("-", "--json", text=message()).output)["bytes"]["asked"] == 22 * MiB


def test_the_command_takes_training_arguments(tmp_path):
    file = tmp_path / "args.json"
    recipe = RECIPE.replace(gradient_checkpointing=True, optim="adafactor", precision="bf16-mixed")
    file.write_text(recipe.training_arguments(str(tmp_path)).to_json_string())
    found = run("gpt2", str(file), "--seq-len", "128", "--num-layers", "2", "--lora-r", "8")
    assert found.output.startswith(f"predicted: {recipe} · LoRA r=8\n")


def test_arguments_of_trl_are_told_and_foreign_names_noted(tmp_path):
    file = tmp_path / "args.json"
    values = {"per_device_train_batch_size": 2, "max_length": 64, "packing": True, "foo": 3}
    file.write_text(json.dumps(values))
    note = "without foo: the arguments have no field of that name"
    found = run("gpt2", str(file), "--num-layers", "2")
    assert "64 tokens" in found.output and "SFTTrainer · packed" in found.output
    assert found.output.endswith(f"\nnote: {note}\n")
    assert json.loads(run("gpt2", str(file), "--json").output)["notes"] == [note]
    file.write_text(json.dumps({"cpo_alpha": 1.0, "per_device_train_batch_size": 2}))
    found = run("gpt2", str(file))
    assert (
        found.exit_code == 2
        and "CPOConfig" in found.output
        and "only transformers' own" in found.output
    )
    file.write_text("[1]")
    assert "must hold a JSON object" in run("gpt2", str(file)).output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-",), "no out-of-memory message"),
        (("gpt2", "--batch-size", "0"), "--batch-size is 0"),
        (("none.txt",), "none.txt"),
        (("-", "gpt2", "--frobnicate"), "--frobnicate"),
    ],
)
def test_a_wrong_request_is_one_sentence(words, said):
    found = run(*words, text="hello" if len(words) == 1 else message())
    assert found.exit_code == 2 and said in found.output


SCRIPT = """
import argparse
import torch
from transformers import AutoModelForCausalLM, TrainingArguments, BitsAndBytesConfig
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Trainer
MODEL, ROWS = "gpt2", 4
NAME = MODEL_OF_ELSEWHERE = "gpt2"
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
asked = parser.parse_args()
base = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                          bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=base, dtype=torch.bfloat16)
adapters = LoraConfig(r=32, target_modules=["c_attn"])
args = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, learning_rate=rate(),
                         optim=best(), gradient_accumulation_steps=asked.steps)
tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer("text", max_length=64)
trainer = Trainer(get_peft_model(model, adapters), args)
raise SystemExit("it was run")
"""


def test_a_script_is_read_without_running_it(tmp_path):
    path = tmp_path / "finetune.py"
    path.write_text(SCRIPT)
    found = run(str(path))
    recipe = (
        "gpt2 · batch 2 · 64 tokens · bf16-mixed · adamw_torch_fused · accumulate ×3 · LoRA "
        "r=32 · nf4"
    )
    assert f"predicted: {recipe}" in found.output
    note = "without line 17: `optim=best()`, whose value only running it would tell"
    assert found.output.endswith(f"note: {note}\n")
    assert json.loads(run(str(path), "--json").output)["notes"] == [note]
    again = explain(path)
    assert again.notes == [note] and f"{again}\n" == found.output
    assert (
        "batch 8 · 16 tokens"
        in run("gpt2", str(path), "--batch-size", "8", "--seq-len", "16").output
    )
    path.write_text(SCRIPT.replace("r=32", "inference_mode=True", 1))
    refused = run(str(path)).output
    assert "inference_mode" in refused and "no recipe models" in refused
    path.write_text(SCRIPT.replace("4bit", "8bit", 1))
    assert "LoRA r=32 · int8" in run(str(path)).output
    path.write_text("print(1")
    assert "must be a Python file" in run(str(path)).output
    path.write_text("print(1)")
    assert "none of Trainer, Seq2SeqTrainer" in run(str(path)).output


def test_a_script_of_trl_says_how_its_model_is_loaded(tmp_path):
    path = tmp_path / "sft.py"
    options = "bf16=True, max_length=64, model_init_kwargs={'dtype': torch.bfloat16}"
    path.write_text(
        f"trainer = SFTTrainer('gpt2', SFTConfig('out', {options}), peft_config=LoraConfig(r=4))"
    )
    found = run(str(path), "gpt2").output
    assert "LoRA r=4 · bfloat16 weights · SFTTrainer" in found and "not read" not in found


def test_a_program_of_plan_is_read_as_its_recipe(tmp_path):
    from vramlab import plan

    for number, asked in enumerate(
        ({"method": "qlora"}, {"method": "full", "gpus": 2, "engines": "fsdp"})
    ):
        found = plan("llama-3.2-1b", "RTX 4090", seq_len=64, confirm=False, offload=False, **asked)
        script = found.write(tmp_path / f"train{number}.py")[0]
        output = run(str(script), "--gpu", "RTX 4090").output
        assert f"predicted: {found.best.recipe}\n" in output
        # The program sets expandable segments, so the plan's figures count.
        likely = f"the process needs {format_bytes(found.best.needs.value)} ("
        assert likely in output or found.best.recipe.sharding
