"""The command line builds the recipe asked for, prints what the witnesses return, and fails in one
sentence.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import vramlab
import vramlab.formulas.whole_run
import vramlab.interfaces.explain_recipe
import vramlab.planning.plan  # both before a test puts something in the place of predict
from tiny_models import config
from typer.testing import CliRunner
from vramlab.base.errors import MeasurementError, RecipeError, RecordError
from vramlab.hardware.gpu import find_gpu
from vramlab.interfaces.cli import app
from vramlab.interfaces.recipe_options import OPTIONS
from vramlab.planning.question import Question
from vramlab.recipe.recipe import LoRA, Quantization, Recipe, Sharding
from vramlab.recipe.shapes import read_shape
from vramlab.report.report import Bytes, GiB, Interval, Phase, Report


def run(*words):
    return CliRunner().invoke(app, list(words))


def report(source="predicted", recipe=None, target="cuda", total=GiB, status="ok", **more):
    split = Bytes(parameters=total // 2, activations=total - total // 2)
    phases = {"forward": Phase(split, split)} if status == "ok" else {}
    title = str(recipe) if recipe else "a recipe"
    return Report(
        source, recipe and recipe.to_dict(), title, target, phases, split, "forward", status, **more
    )


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a function in the place of a module's: `stand_in("predict", function)` for that of the
    same name.
    """

    homes = {
        "predict": "formulas.predict",
        "simulate": "simulation.simulate",
        "measure": "interfaces.measure_and_record",
    }

    def put(name, function):
        module = SimpleNamespace(**{name: function})
        monkeypatch.setitem(sys.modules, f"vramlab.{homes[name]}", module)

    return put


@pytest.fixture
def asked(stand_in):
    """Witnesses that only note what they were asked: what the options mean is looked at apart from
    the answers.
    """
    seen = SimpleNamespace(recipes=[], options=[])

    def witness(source):
        def answer(recipe, **options):
            seen.recipes.append(recipe)
            seen.options.append((source, options))
            return report(
                source, recipe, options.get("target", "cpu" if source == "measured" else "cuda")
            )

        return answer

    for name, source in (
        ("predict", "predicted"),
        ("simulate", "simulated"),
        ("measure", "measured"),
    ):
        stand_in(name, witness(source))
    return seen


# Each option beside the field it sets; the recipe must be exactly this and nothing else.
WORDS = [
    ("", {}),
    ("--batch-size 4 --seq-len 128", {"batch_size": 4, "seq_len": 128}),
    ("--precision fp16-mixed", {"precision": "fp16-mixed"}),
    ("--optim sgd --optim-args momentum=0.9", {"optim": "sgd", "optim_args": "momentum=0.9"}),
    ("--gradient-checkpointing", {"gradient_checkpointing": True}),
    ("--gradient-accumulation-steps 8", {"gradient_accumulation_steps": 8}),
    ("--attn-implementation eager", {"attn_implementation": "eager"}),
    ("--torch-compile", {"torch_compile": True}),
    ("--num-layers 3 --task causal-lm", {"num_layers": 3, "task": "causal-lm"}),
    ("--loop plain", {"loop": "plain"}),
    ("--lora-r 16", {"lora": LoRA(r=16)}),
    ("--lora-alpha 32 --lora-dropout 0.1", {"lora": LoRA(lora_alpha=32, lora_dropout=0.1)}),
    ("--lora-target c_attn,c_proj", {"lora": LoRA(target_modules=("c_attn", "c_proj"))}),
    ("--lora-r 4 --lora-target all-linear", {"lora": LoRA(r=4, target_modules="all-linear")}),
    ("--lora-r 8 --quantization nf4", {"lora": LoRA(), "quantization": Quantization("nf4")}),
    ("--lora-r 8 --quantization fp4 --double-quant",
     {"lora": LoRA(), "quantization": Quantization("fp4", double=True)}),
    ("--lora-r 8 --double-quant",
        {"lora": LoRA(), "quantization": Quantization("nf4", double=True)}),
    # TRL does not prepare the base
    ("--trainer sft --lora-r 8 --quantization nf4 --precision bf16-mixed",
     {"lora": LoRA(), "quantization": Quantization("nf4", prepare=False), "precision": "bf16-mixed",
         "trainer": "sft"}),
    ("--stage 2 --world-size 4", {"sharding": Sharding(2, 4)}),
    ("--world-size 8 --engine deepspeed --offload optimizer",
        {"sharding": Sharding(3, 8, "deepspeed", "optimizer")}),
    ("--world-size 2 --engine ddp", {"sharding": Sharding(0, 2, "ddp")}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "fields"), WORDS)
def test_options_make_the_recipe(asked, words, fields):
    result = run("predict", "gpt2", *words.split())
    assert result.exit_code == 0, result.output
    assert asked.recipes == [Recipe("gpt2", **fields)]


def test_every_field_of_a_recipe_can_be_set():
    # predict takes the lengths of a whole data set
    in_python_only = {"model", "lengths", "completion_lengths"}
    fields = set(inspect.signature(Recipe).parameters) - in_python_only
    assert {path[0] for path, _ in OPTIONS.values()} == fields


@pytest.mark.parametrize("command", ["predict", "simulate", "measure"])
def test_all_commands_take_the_same_recipe(asked, command):
    result = run(command, "gpt2", "--batch-size", "3", "--lora-r", "2")
    assert result.exit_code == 0, result.output
    assert set(asked.recipes) == {Recipe("gpt2", batch_size=3, lora=LoRA(r=2))}


def test_model_by_path(asked, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "n_embd": 64,
                "n_layer": 2,
                "n_head": 4,
                "vocab_size": 100,
                "n_positions": 64,
            }
        )
    )
    assert run("predict", str(path)).exit_code == 0
    assert asked.recipes[0].shape.num_layers == 2


def test_witnesses_get_their_options(asked):
    run("predict", "gpt2", "--gpu", "tesla t4")
    run("simulate", "gpt2", "--target", "cpu", "--gpu", "L4")
    run("measure", "gpt2", "--repeats", "2")
    assert asked.options == [
        ("predicted", {"gpu": find_gpu("T4"), "other_memory": 0, "expandable_segments": False}),
        (
            "simulated",
            {
                "target": "cpu",
                "gpu": find_gpu("L4"),
                "other_memory": 0,
                "expandable_segments": False,
            },
        ),
        ("measured", {"repeats": 2}),
    ]


@pytest.mark.parametrize("witness", ["predict", "simulate"])
def test_what_is_granted_reaches_the_witness(asked, witness):
    run(witness, "gpt2", "--gpu", "T4", "--other-memory", "1GiB", "--expandable-segments")
    ((_, options),) = asked.options
    assert (options["other_memory"], options["expandable_segments"]) == (GiB, True)
    refused = run(witness, "gpt2", "--other-memory", "1GiB")
    assert refused.exit_code == 2 and "say --gpu too" in refused.output


def test_json_is_the_report_and_nothing_else(asked):
    result = run("predict", "gpt2", "--json", "--gpu", "T4")
    assert Report.from_json(result.stdout).to_dict() == report(recipe=Recipe("gpt2")).to_dict()
    assert json.loads(result.stdout)["peak"]["total"] == GiB


def test_text_is_the_reports_own(asked):
    assert str(report(recipe=Recipe("gpt2"))) in run("predict", "gpt2").stdout


WEIGHTS = 4 * 124439808  # gpt2's, while they load


@pytest.mark.parametrize(
    ("needs", "answer"),
    [
        (
            {"process": Interval(8 * GiB, 9 * GiB, 10 * GiB)},
            "safe: T4 has 14.562 GiB, the process needs 9.000 GiB (8",
        ),
        ({"process": Interval(13 * GiB, 14 * GiB, 16 * GiB)}, "likely: T4"),
        ({"process": Interval(14 * GiB, 15 * GiB, 16 * GiB)}, "tight: T4"),
        ({"process": Interval(15 * GiB, 16 * GiB, 17 * GiB)}, "does not fit: T4"),
        ({"process": 14 * GiB}, "safe: T4 has 14.562 GiB, the process needs 14.000 GiB"),
    ],
)
def test_verdict_on_a_gpu(stand_in, needs, answer):
    stand_in("predict", lambda recipe, gpu, **granted: report(recipe=recipe, **needs))
    shown = run("predict", "gpt2", "--gpu", "T4")
    code = 1 if answer.startswith(("does not fit", "tight")) else 0  # of tight ones half die
    last = shown.stdout.splitlines()[-1]
    assert last.startswith(answer) and shown.exit_code == code
    assert ("Next: `vramlab explain`" in last) is answer.startswith("does not fit")
    shown = run("predict", "gpt2", "--gpu", "T4", "--json")
    found = Report.from_json(shown.stdout)
    tier = answer.partition(":")[0]
    fits = {"safe": True, "does not fit": False}.get(tier)
    said = {"gpu": "T4", "fits": fits, "tier": tier, "grade": tier, "host_memory": WEIGHTS}
    assert (found.environment, shown.exit_code) == (said, code)
    assert found.notes[-1].startswith(answer)


def test_an_evaluation_is_judged_by_the_hosts_memory_too():
    asked = "evaluate gpt2 --num-layers 1 --tokens 128 --compute-metrics --samples 4000 --gpu T4"
    words = [*asked.split(), "--eval-accumulation-steps", "1"]
    shown = run(*words)
    said = shown.stdout.splitlines()
    assert shown.exit_code == 1
    assert "evaluation of 4,000 samples, 8 at once · compute_metrics" in said[0]
    # logits in fp32, all and once more while the last are appended
    size = 2 * 4 * 4000 * 128 * 50257 / GiB
    assert said[-1].startswith("does not fit: T4") and f"but {size:.1f} GiB of host" in said[-1]
    assert "of 30.000 GiB (assumed, Kaggle's: --host-memory says another)" in said[-1]
    cures = [line for line in said if line.startswith("note: with ")]
    assert "does not fit: simulating what is left with batch_eval_metrics=True\n" in shown.stderr
    for name, tier in {
        "preprocess_logits_for_metrics='argmax'": "safe",
        "batch_eval_metrics=True": "safe",
        "eval_do_concat_batches=False": "too much for the host",
        "samples=": "safe",
        "prediction_loss_only=True": "safe",
    }.items():
        (cure,) = [line for line in cures if line.startswith(f"note: with {name}")]
        assert f": {tier}, the process" in cure
    enough = run(*words, "--host-memory", "256GiB", "--json")
    found = json.loads(enough.stdout)["environment"]
    assert (found["fits"], found["host_memory"] // GiB, enough.exit_code) == (True, int(size), 0)
    kept = run(*words, "--preprocess-logits-for-metrics", "argmax", "--json")
    assert kept.exit_code == 0 and json.loads(kept.stdout)["kept_on_host"] < GiB


def test_an_evaluation_that_no_change_alone_makes_fit_is_told_two_that_do():
    asked = "evaluate gpt2 --num-layers 1 --tokens 1024 --compute-metrics --samples 640 --gpu T4"
    words = [*asked.split(), "--host-memory", "64GiB", "--json"]
    shown = json.loads(run(*words, "--eval-batch-size", "64").stdout)
    assert shown["reserved"]["value"] < 2.1 * shown["allocated"], "not that of a card without end"
    assert shown["reserved"]["high"] < 2.4 * shown["allocated"]
    *alone, both = [note for note in shown["notes"] if note.startswith("with ")]
    assert alone and not any(re.search(": (safe|likely), ", note) for note in alone)
    # 64 samples' logits are 12.3 GiB in fp32: the first batch dies before outputs are joined
    assert any("in evaluation batch 1 of 10, it tries to all" in note for note in shown["notes"])
    assert any("alone keeps as many outputs" in note for note in shown["notes"])
    size = re.match(
        r"with per_device_eval_batch_size=(\d+), preprocess_logits_for_metrics='argmax': "
        "(safe|likely), ",
        both,
    )[1]
    cured = run(*words, "--eval-batch-size", size, "--preprocess-logits-for-metrics", "argmax")
    assert cured.exit_code == 0


def test_a_simulation_that_does_not_fit_exits_with_1_too(stand_in):
    stand_in("simulate", lambda recipe, **options: report("simulated", recipe, process=15 * GiB))
    assert run("simulate", "gpt2", "--gpu", "T4").exit_code == 1
    assert run("simulate", "gpt2", "--gpu", "A100").exit_code == 0


PLANS = [
    ("", {}),
    ("--gpus 2 --global-batch 32 --seq-len 64 --task causal-lm",
        {"gpus": 2, "global_batch": 32, "seq_len": 64,
     "task": "causal-lm"}),
    ("--precision fp16-mixed --precision fp32 --optim sgd --engine ddp",
     {"precisions": ["fp16-mixed", "fp32"], "optims": ["sgd"], "engines": ["ddp"]}),
    ("--no-offload --lora-r 4 --lora-target c_attn,c_fc", {"offload": False,
     "lora": {"r": 4, "target_modules": ("c_attn", "c_fc")}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "fields"), PLANS)
def test_options_make_the_question(monkeypatch, words, fields):
    asked = []
    found = SimpleNamespace(choices=[1], to_json=None)
    module = SimpleNamespace(plan=lambda **options: asked.append(options) or found)
    monkeypatch.setitem(sys.modules, "vramlab.planning.plan", module)
    result = run("plan", "gpt2", "--gpu", "T4", *words.split())
    assert result.exit_code == 0, result.output
    usual = {
        "gpus": 1,
        "global_batch": 16,
        "method": "any",
        "offload": True,
        "trainer": "transformers",
    }
    usual["liger"] = True
    usual["expandable_segments"] = True
    given = {"model": "gpt2", "gpu": "T4", "confirm": True, "standing": None}
    assert asked == [{**given, **usual, **fields}]
    Question("gpt2", "T4", **{**usual, **fields})


def test_what_cannot_be_written_is_refused_before_a_search(monkeypatch, tmp_path):
    module = SimpleNamespace(plan=lambda **options: pytest.fail("it searches"))
    monkeypatch.setitem(sys.modules, "vramlab.planning.plan", module)
    written = str(tmp_path / "train.py")
    result = run("plan", "qwen2.5-vl-3b", "--gpu", "T4", "--images", "1", "--write", written)
    assert (result.exit_code, "programs for samples with images" in result.output) == (2, True)


# ── what goes wrong
# ─────────────────────────────────────────────────────────────────────────────────────────────────

WRONG = [
    ("gpt9", "", "did you mean 'gpt2'"),
    ("no/such/config.json", "", "model"),
    ("gpt2", "--batch-size 0", "--batch-size is 0"),
    ("gpt2", "--batch-size -3", "--batch-size is -3"),
    ("gpt2", "--batch-size 1.5", "--batch-size is 1.5, but it must be a whole number"),
    ("gpt2", "--lora-alpha much", "--lora-alpha is 'much', but it must be a number"),
    ("gpt2", "--seq-len 2048", "1024 positions."),
    ("llama-2-7b", "--seq-len 32768", "4096 positions: for more, give a copy of its config.json"),
    ("gpt2", "--precision bf17", "'bf16-mixed'"),
    ("gpt2", "--optim adamw_nice", "'adamw_torch'"),
    ("gpt2", "--optim adam", "(did you mean 'adamw_torch'?)."),
    ("gpt2", "--attention spda", "(did you mean 'sdpa'?)."),
    ("gpt2", "--optim-args momentum", "momentum=0.9"),
    ("gpt2", "--lora-r 0", "--lora-r is 0"),
    ("gpt2", "--lora-target nothing", "nothing"),
    ("gpt2", "--quantization nf4", "lora=LoRA"),
    ("gpt2", "--quantization int3 --lora-r 8", "'nf4', 'fp4', 'int8'"),
    ("gpt2", "--stage 4", "--stage is 4"),
    ("gpt2", "--stage 1 --engine fsdp", "has stage 2 or 3"),
    ("gpt2", "--world-size 2 --engine horovod", "'ddp'"),
    ("gpt2", "--loop while", "'trainer'"),
    ("gpt2", "--task knitting", "'causal-lm'"),
    ("gpt2", "--precision bf16-mixed --gpu T4", "7.5"),
    ("gpt2", "--precision tf32 --gpu V100", "7.0"),
    ("gpt2", "--gpu T5", "not in the table"),
]


@pytest.mark.parametrize(("model", "words", "why"), WRONG)
def test_wrong_request_is_one_sentence_and_status_2(asked, model, words, why):
    result = run("predict", model, *words.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert (
        why in result.stderr and result.stderr.count("\n") == 1 and "Traceback" not in result.output
    )
    assert asked.recipes == [], "refused before anything was computed"


@pytest.mark.parametrize(
    ("command", "words", "why"),
    [
        ("evaluate", "--predict-with-generate --samples 4", "for compute_metrics only"),
        ("evaluate", "--generation-num-beams 4", "belongs to predict_with_generate"),
        ("evaluate", "--include-for-metrics outputs", "'inputs', 'loss'"),
        ("evaluate", "--bf16-full-eval", "does not depend on it"),
        ("predict", "--learning-rate 1e-4", "what predict answers does not depend on it"),
        ("simulate", "--full-determinism", "cuBLAS workspaces of another size"),
        ("measure", "--per-device-train-batch-size 4", "say --batch-size"),
    ],
)
def test_a_trainers_argument_that_is_no_option_is_one_sentence(command, words, why):
    result = run(command, "gpt2", *words.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert why in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("plan gpt2 --gpu T4 --fp16", "say --precision"),
        ("plan gpt2 --gpu T4 --gpus two", "--gpus is 'two', but it must be a whole number"),
        ("plan gpt2 --gpu T4 --write .", "--write is '.', but it must be the name of a file"),
        ("plan gpt2 --gpu T4 --write none/train.py", "in a folder that can be written to"),
        (
            "run --gpu T4 --report none/report.json -- python train.py",
            "--report is 'none/report.json'",
        ),
        ("evaluate gpt2 --samples few", "--samples is 'few'"),
        ("evaluate gpt2 --target gpu", "allowed are 'cuda' and 'cpu'"),
        ("measure gpt2 --repeats 0", "--repeats is 0"),
        ("explain gpt2 --fp16", "say --precision"),
        ("explain alone.json", "MODEL is ''"),
        ("plan mine.py --gpu T4", "it is a script: vramlab explain mine.py reads it"),
        (
            "explain gpt2 arguments.json",
            "'training_arguments' is {'per_device_train_batch_size': 4, 'optim': 'best'}",
        ),
        ("explain none.py gpt2", "none.py: it must be a Python file"),
        ("simulate gpt2 --tiled-mlp", "put it there yourself, and simulate(model=…) runs it"),
        ("simulate gpt2 --ep-size 2", "a rank holds the tokens that the router sends it"),
        ("predict gpt2 --context-parallel-size 2", "say --cp-size"),
        ("plan gpt2 --gpu T4 --sp-size 2", "MODEL --sp-size N --world-size M --stage 3 --engine d"),
        ("diff gpt2 gpt2 --gpu T4", "no option --gpu: diff compares bytes"),
        ("predict gpt2 --load-in-4bit", "say --quantization nf4"),
        ("generate gpt2 --cache-backend fp8", "and only 'quantized' has a backend"),
    ],
)
def test_each_command_names_the_field_and_its_value(words, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arguments.json").write_text('{"per_device_train_batch_size": 4, "optim": "best"}')
    (tmp_path / "mine.py").write_text("import torch")
    (tmp_path / "alone.json").write_text('{"per_device_train_batch_size": 4}')
    result = run(*words.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert why in result.stderr and result.stderr.count("\n") == 1


def test_an_option_of_a_recipe_that_plan_does_not_take_is_said_to_be_anothers():
    result = run("plan", "gpt2", "--gpu", "T4", "--torch-compile")
    said = "no option --torch-compile: plan orders recipes by formulas, which do not know what"
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["--gpu", "--use-liger-kernel=3"])
def test_an_option_with_no_value_or_one_too_many_is_a_sentence(option):
    result = run("predict", "gpt2", option)
    assert result.exit_code == 2 and f"Option '{option.partition('=')[0]}'" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "gpt2"],
        ["simulate", "gpt2", "--torch-compile"],
        ["explain", "gpt2", "--torch-compile"],
        ["diff", "gpt2 --torch-compile", "gpt2"],
    ],
)
def test_a_compiled_simulation_says_first_that_it_takes_long(words, monkeypatch):
    def stopped(recipe, **granted):
        raise RecipeError("model", recipe.model, "nothing is simulated here")

    monkeypatch.setattr("vramlab.simulation.simulate.simulate", stopped)
    result = run(*words)
    how_long = "compiles each of 12 layers for the card, as it would there: about 24 s"
    compiles = "--torch-compile" in " ".join(words)
    assert (how_long in result.stderr) == compiles and "nothing is" in result.stderr


@pytest.mark.parametrize(
    "words", ["doctor --fp16", "share --optim sgd", "plan gpt2 --per-device-train-batch-size 4"]
)
def test_an_option_of_other_commands_is_not_advised(words):
    result = run(*words.split())
    assert (
        result.exit_code == 2 and "No such option" in result.stderr and " say " not in result.stderr
    )


def test_an_empty_quantization_is_no_quantization_that_is_left_out(asked):
    result = run("predict", "gpt2", "--lora-r", "8", "--quantization", "")
    assert result.exit_code == 2 and "'nf4'" in result.stderr and asked.recipes == []


GARBAGE = [
    "",
    "{",
    "[1, 2]",
    "null",
    "[" * 100_000,
    "\x00",
    '[{"model": null}]',
    '[{"model": "gpt2", "lora": 5}]',
]


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_a_garbage_list_is_one_sentence(text, tmp_path):
    (tmp_path / "list.json").write_text(text)
    result = run("record", str(tmp_path / "list.json"), "--dry-run", "--folder", str(tmp_path))
    assert result.exit_code == 2 and result.stdout == ""
    assert (
        "list.json" in result.stderr
        and result.stderr.count("\n") == 1
        and "Traceback" not in result.output
    )


@pytest.mark.parametrize(
    "error", [MeasurementError("The child was killed."), RecordError("There is no record.")]
)
def test_the_packages_own_errors_are_sentences(stand_in, error):
    def fail(recipe, **options):
        raise error

    stand_in("measure", fail)
    result = run("measure", "gpt2")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{error}\n")


def test_errors_that_are_bugs_are_not_hidden(stand_in):
    def fail(recipe, **options):
        raise ZeroDivisionError

    stand_in("predict", fail)
    assert isinstance(run("predict", "gpt2").exception, ZeroDivisionError)


def test_unknown_option_is_refused(asked):
    result = run("predict", "gpt2", "--batchsize", "4")
    assert result.exit_code == 2 and "--batchsize" in result.output and asked.recipes == []


@pytest.mark.parametrize(("status", "code"), [("oom", 1), ("error", 1), ("ok", 0)])
@pytest.mark.parametrize("style", [[], ["--json"]])
def test_status_of_the_report_is_the_exit_status_and_the_report_is_shown(
    stand_in, status, code, style
):
    ran = report("measured", status=status, message="asked for 2 GiB, 1 GiB was free")
    stand_in("measure", lambda recipe, repeats: ran)
    result = run("measure", "gpt2", *style)
    assert result.exit_code == code
    shown = json.dumps({"schema": 1, **ran.to_dict()}, indent=2) if style else str(ran)
    assert result.stdout.strip() == shown
    assert ("asked for 2 GiB" in result.stdout) or (status == "ok" and not style)


INTERRUPTED = """
import sys, time, types, vramlab.interfaces.cli
def forever(recipe, **options):
    print("started", flush=True)
    time.sleep(60)
sys.modules["vramlab.formulas.predict"] = types.SimpleNamespace(predict=forever)
sys.argv = ["vramlab", "predict", "gpt2"]
vramlab.interfaces.cli.app(prog_name="vramlab")
"""


@pytest.mark.skipif(
    os.name == "nt", reason="Windows sends Ctrl-C to the whole console, pytest included"
)
def test_ctrl_c_stops_cleanly():
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "started\n"
        begun = time.monotonic()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert (child.returncode, out, err) == (130, "", "Stopped.\n")
    assert time.monotonic() - begun < 20


LOADING = """
import builtins, sys, time
real = builtins.__import__
def slow(name, *args, **options):
    if name == "typer":
        print("started", flush=True)
        time.sleep(60)
    return real(name, *args, **options)
builtins.__import__ = slow
import runpy
sys.argv = ["vramlab", "predict", "gpt2"]
runpy.run_module("vramlab", run_name="__main__")
"""


@pytest.mark.skipif(
    os.name == "nt", reason="Windows sends Ctrl-C to the whole console, pytest included"
)
def test_ctrl_c_while_it_loads_is_no_traceback():
    child = subprocess.Popen(
        [sys.executable, "-c", LOADING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "started\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert (child.returncode, out, err) == (130, "", "Stopped.\n")


# ── the other commands
# ──────────────────────────────────────────────────────────────────────────────────────────────


def test_doctor_is_shown_and_its_verdict_is_the_exit_status(monkeypatch):
    from vramlab.interfaces import doctor
    from vramlab.interfaces.doctor import Check

    monkeypatch.setattr(doctor, "LOOKS", {"x": lambda: [Check("python", "ok", "3.12")]})
    result = run("doctor")
    assert result.exit_code == 0 and result.stdout == "python  ok       3.12\n"
    lacks = [Check("torch", "missing", "none", "pip install torch", required=True)]
    monkeypatch.setattr(doctor, "LOOKS", {"x": lambda: lacks})
    result = run("doctor", "--json")
    assert (
        result.exit_code == 1
        and json.loads(result.stdout)["checks"][0]["advice"] == "pip install torch"
    )


def test_record_hands_everything_on(monkeypatch):
    asked, missing = [], [(Recipe("gpt2"), 20.0)]

    class Done:
        def __init__(self):
            self.missing = missing

        def __str__(self):
            return "1 recipe missing"

    from vramlab.interfaces import measure_and_record

    def recorded(*given, **options):
        options.pop("progress")("12.0 s  gpt2")
        asked.append((given, options))
        return Done()

    monkeypatch.setattr(measure_and_record, "_record", recorded)
    result = run("record")
    assert (result.exit_code, result.stdout) == (0, "12.0 s  gpt2\n1 recipe missing\n")
    words = ["a.json", "b.json", "--minutes", "2.5", "--dry-run", "--folder", "x", "--json"]
    shown = json.loads(run("record", *words).stdout)
    assert [Recipe(**fields) for fields in shown] == [Recipe("gpt2")]
    given = {
        "estimate": measure_and_record.peak_bytes,
        "beside": measure_and_record.simulated_beside,
    }
    assert asked == [
        ((None,), {"minutes": 8, "folder": None, "dry_run": False, **given}),
        (
            ([Path("a.json"), Path("b.json")],),
            {"minutes": 2.5, "folder": Path("x"), "dry_run": True, **given},
        ),
    ]


def test_version():
    assert run("--version").stdout == f"vramlab {vramlab.__version__}\n"


LOADED = """
import runpy, sys
sys.argv = ["vramlab", *sys.argv[1:]]
try:
    runpy.run_module("vramlab", run_name="__main__")
except SystemExit:
    pass
print(*sorted(name for name in sys.modules if not name.startswith("_")), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        (
            ["simulate", "gpt2", "--num-layers", "2"],
            ["bitsandbytes", "peft", "datasets", "matplotlib", "torch._inductor.compile_fx"],
        ),
        (["predict", "gpt2"], ["torch", "transformers", "numpy", "psutil"]),
        (
            ["plan", "gpt2", "--gpu", "T4", "--method", "lora", "--no-confirm"],
            ["torch", "transformers", "numpy", "psutil"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_commands_load_only_what_they_need(command, unwanted):
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *command], capture_output=True, text=True, check=True
    )
    assert done.stdout and not set(unwanted) & set(done.stderr.split())


def test_doctor_loads_no_torch_where_no_gpu_is():
    from vramlab.interfaces.doctor import may_have_gpu

    if may_have_gpu():
        pytest.skip("torch is asked about the GPU of this machine")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, "doctor"], capture_output=True, text=True, check=True
    )
    assert "torch build" in done.stdout and not {"torch", "bitsandbytes"} & set(done.stderr.split())


def test_a_card_is_asked_for_in_a_sentence_and_a_dry_run_lists_what_is_left(tmp_path):
    entries = [{"kind": "context", "worth": 1, "why": "", "loaded": ["bare", "cuBLAS"]}]
    (tmp_path / "list.json").write_text(json.dumps(entries))
    from vramlab.interfaces.doctor import may_have_gpu

    listed = run("card", str(tmp_path / "list.json"), "--dry-run", "--folder", str(tmp_path))
    assert listed.exit_code == 0
    assert listed.stdout.splitlines()[:2] == [
        "    15 s  context · loaded bare",
        "    15 s  context · loaded cuBLAS",
    ]
    if may_have_gpu():
        pytest.skip("torch is asked about the GPU of this machine")
    refused = run("card", str(tmp_path / "list.json"))
    assert (refused.exit_code, refused.stdout) == (
        2,
        "",
    ) and "there is no CUDA device here" in refused.stderr


def test_help_names_every_command_and_costs_no_torch():
    code = (
        "import sys, vramlab.interfaces.cli; print(sorted({'torch', 'transformers', 'pynvml'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    text = run("--help").stdout
    for command in ("predict", "simulate", "measure", "record", "card", "doctor", "run"):
        assert command in text
        assert run(command, "-h").exit_code == 0


# ── the real witnesses
# ──────────────────────────────────────────────────────────────────────────────────────────────

SMALL = ["gpt2", "--num-layers", "2", "--batch-size", "2", "--seq-len", "32"]
RECIPE = Recipe("gpt2", num_layers=2, batch_size=2, seq_len=32)


def test_real_simulation_equals_the_function():
    from vramlab.simulation.simulate import simulate

    shown = Report.from_json(run("simulate", *SMALL, "--target", "cpu", "--json").stdout)
    assert (shown.source, shown.target, shown.title) == ("simulated", "cpu", str(RECIPE))
    assert (
        shown.peak == simulate(RECIPE, target="cpu").peak and shown.peak.parameters > 4 * 50_000_000
    )


def test_real_prediction_equals_the_function():
    from vramlab.formulas.predict import predict

    shown = Report.from_json(run("predict", *SMALL, "--json").stdout)
    assert shown.source == "predicted" and shown.peak == predict(RECIPE).peak
    assert run("predict", *SMALL, "--gpu", "T4").stdout.splitlines()[-1].startswith("safe: T4")
    too_much = run("predict", "llama-3.1-70b", "--gpu", "T4")
    assert too_much.exit_code == 1 and too_much.stdout.splitlines()[-1].startswith(
        "does not fit: T4"
    )


def test_real_measurement_on_this_machine(tmp_path, monkeypatch):
    """In this process: tests/measurement/test_measure.py has the one of its own."""
    from vramlab.measurement import worker

    monkeypatch.setattr(
        "vramlab.measurement.measure.run_here", lambda order, *_: worker.run(**order)
    )
    model = tmp_path / "config.json"
    model.write_text(json.dumps(config("gpt2")))
    result = run("measure", str(model), *SMALL[1:], "--repeats", "1", "--json")
    assert result.exit_code == 0, result.output
    shown = Report.from_json(result.stdout)
    assert shown.source == "measured" and shown.speed.repeats == 1
    assert shown.peak.parameters > 4 * 96 * 1000


def test_models_and_cards_are_listed_by_a_filter():
    found = json.loads(run("models", "llama-3.3", "--json").output)["models"]
    assert [one["name"] for one in found] == ["llama-3.1-70b"] and found[0][
        "parameters"
    ] == 70_553_706_496
    assert "llama-3.3-70b" in run("models", "llama-3.1-70b").output
    found = json.loads(run("gpus", "a100 80", "--json").output)["gpus"]
    assert [one["name"] for one in found] == ["A100 80GB", "A100 80GB PCIe"]
    assert found[0]["flops"]["bf16"] == 312e12 and 0 < found[0]["usable"] <= found[0]["total"]
    assert "T4" in run("gpus").output
    assert all("none has that" in run(name, "zx81").output for name in ("models", "gpus"))


def test_a_list_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    lines = run("models").output.split("\n")
    assert max(map(len, lines)) <= 90


def test_a_shared_architecture_is_said_and_leaves_json_alone():
    found = run("predict", "gemma-3-4b-it", "--json")
    assert "note: gemma-3-4b-it has the architecture of gemma-3-4b" in found.stderr
    assert json.loads(found.stdout)["title"].startswith("gemma-3-4b ·")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("predict gpt2 --tokens 8k", "--seq-len is 8192, but gpt2 has 1024 positions"),
        ("predict gpt2 --lora-r 0", "--lora-r is 0"),
        ("predict gpt2 --batch-size 0", "--batch-size is 0"),
        ("predict gpt9", "MODEL is 'gpt9', but no model"),
        ("plan gpt2 --gpu T4 --global-batch 0", "--global-batch is 0"),
        ("plan gpt2 --gpu 24GB --memory 24GB", "--gpu is '24GB', but it is a size"),
        (
            "evaluate gpt2 --compute-metrics",
            "--samples is None, but with compute_metrics all of them",
        ),
        ("predict gpt2 --gpu T4 --other-memory x", "--other-memory is 'x'"),
        (
            "plan gpt2 --gpu T4 --trainer ppo",
            "--trainer is 'ppo', but it generates while it trains",
        ),
        ("predict gpt2 --trainer ppo", "--trainer is 'ppo', but it generates while it trains"),
        ("predict gpt2 --num-generations 8", "--num-generations: only trainer 'grpo' and 'rloo'"),
        ("predict gpt2 --precision fp8", "--precision is 'fp8', but training in 8 or 4 bits"),
        ("predict gpt2 --quantization mxfp4", "--quantization is 'mxfp4', but transformers trains"),
        (
            "plan gpt2 --gpu T4 --precision fp8",
            "--precision is 'fp8', but training in 8 or 4 bits (accelerate's fp8, Transformer "
            "Engine's formats) multiplies in them, and keeps weights, gradients and states as "
            "'bf16-mixed' does: take that, and WatchCallback() in its Trainer measures what "
            "differs.",
        ),
        ("predict gpt2 --trainer grpo", "--trainer is 'grpo', but the formulas do not know what"),
        (
            "simulate gpt2 --trainer grpo --num-generations 3 --batch-size 4",
            "--num-generations is 3, but 4 completions are sampled at once",
        ),
        ("simulate gpt2 --trainer grpo --completion 0", "--completion is 0"),
        ("simulate gpt2 --trainer grpo --use-vllm --vllm-mode rpc", "--vllm-mode is 'rpc'"),
        (
            "simulate gpt2 --trainer grpo --use-vllm --vllm-gpu-memory-utilization 1.3",
            "--vllm-gpu-memory-utilization is 1.3",
        ),
        (
            "predict qwen3-0.6b --use-liger-kernel --world-size 8",
            "--world-size 8: the formulas do not know what FSDP keeps of the head",
        ),
    ],
)
def test_an_error_names_the_flag(line, said):
    found = run(*line.split())
    assert found.exit_code == 2 and said in found.output, found.output
    assert "Recipe field" not in found.output


def test_adapters_on_what_peft_takes_by_itself_are_named(tmp_path):
    """The title is that of adapters on all layers, as in what plan answers."""
    words = ["predict", "qwen3-0.6b", "--lora-r", "8"]
    assert "q_proj, v_proj have adapters, PEFT's default for qwen3" in run(*words).output
    others = run(*words, "--lora-target", "all-linear").output
    assert "have adapters" not in others
    # transformers 5 takes the dtype of the published weights where none is said
    assert "note: float32 base counted; transformers 5 loads the published bfloat16" in others
    for said in (["--dtype", "bfloat16"], ["--dtype", "float32"], ["--quantization", "nf4"]):
        assert "transformers 5 loads" not in run(*words, *said).output
    assert "transformers 5 loads" not in run("predict", "gpt2").output
    # a file that a transformers before 4.56 wrote says it under the old name
    config = read_shape("gpt2").config
    config["torch_dtype"] = config.pop("dtype").replace("float32", "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "loads the published bfloat16" in run("predict", str(tmp_path)).output


@pytest.mark.parametrize("tokens", ["8k", "8,192"])
def test_tokens_are_said_as_people_say_them(tokens):
    words = ["qwen3-0.6b", "--tokens", tokens, "--precision", "bf16", "--attention", "eager"]
    shown = run("predict", *words).output
    assert "8192 tokens · bf16-mixed · adamw_torch · eager" in shown


def test_flags_are_said_as_people_say_them(tmp_path):
    card = run("predict", "gpt2", "--gpu", "24GB")
    assert (
        "24GB is taken as L4, the table's least card" in card.stderr
        and "safe: L4 has" in card.stdout
    )
    options = ("--seq-len", "64", "--no-confirm", "--json")
    by_size = run("plan", "gpt2", "--gpu", "24GB", *options)
    assert by_size.stdout == run("plan", "gpt2", "--memory", "24GB", *options).stdout
    wanted = (
        "--attn-implementation",
        "eager",
        "--no-use-liger-kernel",
        "--precision",
        "bf16",
        "--method",
        "full",
    )
    answer = json.loads(run("plan", "gpt2", "--gpu", "RTX 4090", *wanted, *options).stdout)
    recipe = answer["choices"][0]["recipe"]
    assert recipe["attn_implementation"] == "eager" and recipe["precision"] == "bf16-mixed"
    assert not recipe.get("use_liger_kernel")


def test_predict_and_plan_take_the_same_lengths(tmp_path, monkeypatch):
    """Chats are counted by the model's tokenizer in both."""
    from vramlab.interfaces import cli

    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 4)
    monkeypatch.setattr(cli, "tokens_of", lambda model, pretrained, rows: [32] * len(rows))
    said = [run("predict", "gpt2", flag, str(file)).output for flag in ("--lengths", "--dataset")]
    assert said[0] == said[1] and "over the run: 4 micro-batches" in said[0]
    plans = [
        run("plan", "gpt2", "--gpu", "T4", "--no-confirm", f, str(file)).output
        for f in ("--lengths", "--dataset")
    ]
    assert plans[0] == plans[1] and "gpt2" in plans[0]


def test_a_record_says_first_whose_figures_it_has(stand_in):
    seen = {
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "transformers": "5.23.0",
        "driver": "580.1",
        "date": "2026-11-01",
    }
    stand_in("measure", lambda recipe, repeats: report("recorded", environment=seen))
    first = run("measure", "gpt2").stdout.splitlines()[0]
    words = "recorded on NVIDIA H200, torch 2.11.0, transformers 5.23.0, driver 580.1, 2026-11-01"
    assert first == f"{words}: another machine's figures, not this one's"
    assert json.loads(run("measure", "gpt2", "--json").stdout)["notes"][0] == first
    stand_in("measure", lambda recipe, repeats: report("measured", environment=seen))
    assert "recorded" not in run("measure", "gpt2").stdout


def test_the_verdict_says_what_host_memory_it_supposes():
    shown = run(
        "predict", "llama-3.2-1b", "--gpu", "RTX 4090", "--precision", "bf16-true"
    ).stdout.splitlines()[-1]
    assert "RTX 4090 has" in shown and shown.endswith(", and 2.3 GiB of host memory are free")
    assert "host memory" not in run("predict", *SMALL, "--gpu", "T4").stdout


def test_a_plan_stands_at_once_where_somebody_watches(monkeypatch):
    from vramlab.interfaces import cli

    words = ("plan", "gpt2", "--gpu", "T4", "--seq-len", "32", "--method", "lora")
    whole = run(*words).stdout
    assert "by formula" not in whole, "a pipe gets the answer alone"
    monkeypatch.setattr(cli, "is_watched", lambda: True)
    shown = CliRunner().invoke(app, list(words), color=True).stdout
    first, second, rest = re.split("\x1b\\[\\d+F\x1b\\[J", shown)
    assert rest == whole and first.startswith("method") and "lora" in first
    assert first.endswith("░ 0 of 1 confirmed by simulation, the rest by formula\n")
    assert second.endswith("█ 1 of 1 confirmed by simulation, the rest by formula\n")
    assert run(*words, "--json").stdout.startswith("{")


def test_plans_unprepared_base_can_be_asked_of_predict_too():
    words = ["predict", "qwen3-0.6b", "--lora-r", "8", "--quantization", "nf4", "--precision"]
    words += ["bf16-mixed", "--json"]
    said = [
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout)
        for more in ([], ["--no-prepare"])
    ]
    assert [each["recipe"]["quantization"]["prepare"] for each in said] == [True, False]
    assert said[1]["peak"]["total"] < said[0]["peak"]["total"]
    without = json.loads(CliRunner().invoke(app, ["predict", "gpt2", "--json"]).stdout)
    assert without["recipe"]["quantization"] is None
