"""What a plan writes trains: each kind of program on a tiny model, a few steps, then on from its
checkpoint.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest import mock

import pytest
import vramlab
from quick import params
from settings import ROOT
from test_trainer_loop import SCALARS, assert_same_but_for_scalars
from tiny_models import config
from vramlab import Quantization, Report, Sharding, plan
from vramlab.base.data import data_path
from vramlab.base.files import is_ours
from vramlab.formulas.model_states import tensors_in_order
from vramlab.recipe.cut_head import PACKAGE
from vramlab.recipe.options import IN_BACKWARD
from vramlab.report.report import CATEGORIES
from vramlab.training import cut_cross_entropy
from written_scripts import STEPS, attention_of, differing_dtypes, run_script, simulated, state

TOKENS = 32
ASKED = dict(
    seq_len=TOKENS,
    global_batch=4,
    optims="adamw_torch",
    attention="sdpa",
    confirm=False,
    offload=False,
)
MIXED = dict(precisions="bf16-mixed")
CASES = {
    f"{trainer} {method}": dict(MIXED, method=method, trainer=trainer)
    for trainer in ("transformers", "sft", "dpo", "kto", "reward")
    for method in ("full", "lora", "qlora")
}
CASES |= {
    "full in bf16": dict(method="full", precisions="bf16-true"),
    "lora in bf16": dict(method="lora", precisions="bf16-true", packing=True),
    "qlora in bf16": dict(method="qlora", precisions="bf16-true", packing=True),
    "full in fp32": dict(method="full", precisions="fp32"),
    "lora in fp32": dict(method="lora", precisions="fp32"),
    "packed full, mixed": dict(MIXED, method="full", packing=True),
    "packed full": dict(method="full", precisions="fp32", packing=True),
    "packed lora": dict(MIXED, method="lora", packing=True, checkpointing=True),
    "packed qlora": dict(MIXED, method="qlora", packing=True),
    "packed full in backward": dict(
        MIXED, method="full", packing=True, checkpointing=True, changes={"loop": IN_BACKWARD}
    ),
    "packed int8": dict(
        MIXED, method="qlora", packing=True, changes={"quantization": Quantization("int8")}
    ),
    "packed int8, re-entrant": dict(
        MIXED,
        method="qlora",
        packing=True,
        checkpointing=True,
        changes={"quantization": Quantization("int8"), "use_reentrant": True},
    ),
    "padding-free sft lora": dict(
        MIXED, seq_len=64, method="lora", trainer="sft", changes={"padding_free": True}
    ),
    "packed sft lora": dict(
        MIXED, method="lora", trainer="sft", packing=True, lengths=[6] * 20 + [20] * 20
    ),
}
QUICK = (
    "packed int8, re-entrant",
    "packed full in backward",
    "padding-free sft lora",
    "packed qlora",
    "kto lora",
)
SHARDINGS = {  # FSDP offloads to pinned memory, which takes a GPU
    "ddp": Sharding(0, 2, "ddp"),
    "fsdp stage 2": Sharding(2, 2, "fsdp"),
    "fsdp stage 3": Sharding(3, 2, "fsdp"),
    "fsdp stage 3 offloaded": Sharding(3, 2, "fsdp", offload="parameters"),
    "deepspeed stage 1": Sharding(1, 2, "deepspeed"),
    "deepspeed stage 2": Sharding(2, 2, "deepspeed"),
    "deepspeed stage 2 offloaded": Sharding(2, 2, "deepspeed", offload="optimizer"),
    "deepspeed stage 3": Sharding(3, 2, "deepspeed"),
    "deepspeed stage 3 offloaded": Sharding(3, 2, "deepspeed", offload="parameters"),
    "deepspeed alone, stage 2": Sharding(2, 1, "deepspeed", offload="optimizer"),
    "deepspeed alone, stage 3": Sharding(3, 1, "deepspeed", offload="parameters"),
}
NOT_OFFERED = {  # packed weights, which DeepSpeed neither divides nor moves
    (name, "qlora")
    for name, s in SHARDINGS.items()
    if s.engine == "deepspeed" and (s.stage == 3 or s.offload)
}
SHARDED = [
    (sharding, method, precision)
    for sharding, method in itertools.product(SHARDINGS, ("full", "lora", "qlora"))
    for precision in ("fp32", "bf16-mixed", "bf16-true")
    if (sharding, method) not in NOT_OFFERED
    and not (method == "qlora" and precision == "fp32")
    and not (
        "deepspeed" in sharding and precision == "bf16-true"
    )  # which DeepSpeed's "bf16-mixed" is
]
# TRL's trainer takes several GPUs too, but adapters at DeepSpeed's stage 3
SHARDED += [
    (sharding, f"sft {method}", "bf16-mixed")
    for sharding, method in itertools.product(SHARDINGS, ("full", "lora", "qlora"))
    if (sharding, method) not in NOT_OFFERED
    and SHARDINGS[sharding].world_size > 1
    and not (method == "lora" and "deepspeed stage 3" in sharding)
]
# and so do those of preferences: a reference model beside full training, none beside adapters
SHARDED += [
    ("ddp", "dpo full", "bf16-mixed"),
    ("fsdp stage 3", "dpo lora", "bf16-mixed"),
    ("deepspeed stage 2", "kto lora", "bf16-mixed"),
    ("ddp", "reward qlora", "bf16-mixed"),
    ("deepspeed stage 3", "reward full", "bf16-mixed"),
]
QUICK_SHARDED = [
    ("fsdp stage 3", "lora", "bf16-mixed"),
    ("deepspeed alone, stage 3", "full", "bf16-mixed"),
]
RESUMED = [
    ("full", "fp32"),
    ("lora", "bf16-mixed"),
    ("qlora", "bf16-mixed"),
]  # once for each sharding and method
SIZES = dict(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
WORDS = [
    "def",
    "word",
    "in",
    "text",
    "return",
    "none",
    "for",
    "each",
    "of",
    "them",
    "while",
    "it",
    "is",
    "true",
    "or",
]


@pytest.fixture(autouse=True)
def _same_environment():
    """What a program sets for its process ends with the test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return tiny_base(str(tmp_path_factory.mktemp("base")))


def tiny_base(folder: str, **sizes: int) -> str:
    """A folder with a tiny Llama and the course's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(data_path("base_model"))
    tokenizer.save_pretrained(folder)
    tiny = config(
        "llama", vocab_size=len(tokenizer), num_hidden_layers=2, **SIZES | sizes
    )  # whole blocks of 64 in 4 bits
    LlamaForCausalLM(LlamaConfig(**tiny)).save_pretrained(folder)
    return folder


def samples(trainer: str) -> list[dict]:
    """Forty samples of many lengths.

    RewardTrainer leaves out what is longer than a sample may be.
    """
    texts = [
        " ".join(WORDS[i % 7 :][: 3 + i % 9] * (1 if trainer == "reward" else 3)) for i in range(40)
    ]
    if trainer == "kto":
        return [
            {"prompt": "if ", "completion": text, "label": i % 2 == 0}
            for i, text in enumerate(texts)
        ]
    if trainer in ("dpo", "reward"):
        return [
            {"prompt": "if ", "chosen": text, "rejected": " ".join(text.split()[::-1])}
            for text in texts
        ]
    return [{"text": text} for text in texts]


def written(
    base: str,
    folder: Path,
    sharding: Sharding | None = None,
    changes: dict | None = None,
    **asked,
) -> tuple:
    """The recipe of the program that the plan's best answer, or the same with `sharding` or
    `changes`, was written as; its files.
    """
    found = plan(
        base, "A100 80GB", **{"liger": False, **ASKED, **asked}
    )  # Triton compiles for no CPU
    choice = found.best
    changed = choice.recipe.replace(sharding=sharding, **(changes or {}))
    choice = dataclasses.replace(choice, recipe=changed)
    rows = samples(asked.get("trainer", "transformers"))
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = found.write(folder / "train.py", choice)
    assert is_ours(files[0]), "or the next plan would not replace it"
    return choice.recipe, files


def test_a_program_loads_what_fsdp_offloads_on_the_host_and_clips_it_over_gloo(base, tmp_path):
    """Over NCCL alone a Trainer that `torchrun` starts finds no backend for a gradient's shard."""
    asked = {"method": "qlora", "precisions": "bf16-mixed"}
    on_host = 'device_map={"": "cpu"}'
    for sharding, is_offloaded in (("fsdp stage 3", False), ("fsdp stage 3 offloaded", True)):
        written(base, tmp_path, SHARDINGS[sharding], **asked)
        text = (tmp_path / "train.py").read_text()
        assert (on_host in text) is is_offloaded
        before, _, _ = text.partition("import torch")
        assert ('os.environ["FSDP_OFFLOAD_PARAMS"] = "true"' in before) is is_offloaded


def test_a_program_with_repeated_keys_trains(base, tmp_path):
    """As for a T4: its recipe has that kernel, which the program registers."""
    asked = dict(attention="sdpa_repeated", method="lora", precisions="fp32")
    recipe, files = written(base, tmp_path, **asked)
    assert (
        recipe.attn_implementation == "sdpa_repeated"
        and 'AttentionInterface.register("sdpa_repeated", repeated)' in files[0].read_text()
    )
    (seen,) = run_script(tmp_path, "--watch", steps=STEPS[:1])
    assert differing_dtypes(seen, simulated(recipe, 2)) == {}


@pytest.mark.parametrize(("capability", "runs_triton"), [((8, 0), True), ((7, 5), False)])
def test_trls_loss_is_plain_pytorchs_where_triton_does_not_run(
    capability, runs_triton, base, tmp_path, monkeypatch
):
    import torch
    import trl.kernels
    from transformers import utils

    written(base, tmp_path, method="lora", trainer="sft", **MIXED)
    there = utils.is_triton_available
    monkeypatch.setattr(utils, "is_triton_available", there)  # set back at the end
    monkeypatch.setattr(trl, "kernels", trl.kernels)
    for name in ("trl.kernels", "trl.kernels.chunked_logprob"):
        monkeypatch.delitem(sys.modules, name)  # so that it is loaded, as by a process that starts
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    loss = runpy.run_path(str(tmp_path / "train.py"))["chunked_logprob"]
    uses_triton = runs_triton and there()
    assert loss._TRITON_AVAILABLE is uses_triton
    tokens = loss.TOKEN_CHUNK_SIZE
    assert tokens == (4096 if uses_triton else 256)


def test_activations_are_offloaded_where_there_is_a_card(base, tmp_path):
    """TRL offloads from an accelerator; on a CPU the same program trains without."""
    changes = {"activation_offloading": True, "gradient_checkpointing": True}
    asked = dict(MIXED, method="lora", trainer="sft", changes=changes)
    _, files = written(base, tmp_path, **asked)
    program = files[0].read_text()
    assert "activation_offloading=torch.cuda.is_available()," in program
    assert "simulate(" in program
    assert len(run_script(tmp_path, "--watch", steps=STEPS[:1])) == 1


def test_ligers_kernels_are_on_where_there_is_a_card(base, tmp_path):
    # Of a model as small as this the host issues the head's chunks more slowly than plain kernels
    # run, so plan takes them for memory alone.
    changes = {"use_liger_kernel": True}
    recipe, files = written(base, tmp_path, changes=changes, method="lora")
    program = files[0].read_text()
    assert recipe.use_liger_kernel and "use_liger_kernel=torch.cuda.is_available()," in program
    assert "liger-kernel==" in program and "peft==" in program


def test_a_program_asks_simulate_of_what_formulas_do_not_know(base, tmp_path):
    recipe, _ = written(
        base, tmp_path, method="lora", lora={"r": 4, "use_dora": True}, packing=True
    )
    assert recipe.lora.use_dora
    assert "needed = simulate(recipe).peak.total" in (tmp_path / "train.py").read_text()
    run_script(tmp_path, "--watch", watched=2)


CUT = dict(
    method="lora",
    packing=True,
    changes={"dtype": "bfloat16", "cut_cross_entropy": True},
    **MIXED,
)


def test_a_program_of_cut_cross_entropy_says_that_its_package_is_not_here(
    base, tmp_path, monkeypatch
):
    written(base, tmp_path, **CUT)
    text = (tmp_path / "train.py").read_text()
    assert f'\n    pip install "{PACKAGE}"\n' in text and "needed = simulate(recipe)" in text
    monkeypatch.setitem(sys.modules, "cut_cross_entropy.transformers", None)
    with pytest.raises(SystemExit, match="is made by a package that is not here: pip install"):
        runpy.run_path(str(tmp_path / "train.py"))["load"](base)


@pytest.mark.slow
def test_a_program_cuts_cross_entropy_by_the_package(base, tmp_path, monkeypatch):
    """What the package's host code allocates, which `test_cut_cross_entropy.py` holds against it,
    stands for its kernels.
    """

    def cce_patch(model):
        plain = model.forward

        @functools.wraps(type(model).forward)  # the Trainer reads its arguments
        def forward(self, labels=None, **inputs):
            if labels is None:
                return plain(**inputs)
            return cut_cross_entropy._forward(self, labels, **inputs)

        model.forward = MethodType(forward, model)

    package = SimpleNamespace(cce_patch=cce_patch)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "cut_cross_entropy.transformers", package)
    recipe, _ = written(base, tmp_path, **CUT)
    (seen,) = run_script(tmp_path, "--watch", steps=STEPS[:1])
    said = simulated(recipe, 2)
    assert differing_dtypes(seen, said) == {}
    assert_same_but_for_scalars(seen, said)


def test_a_program_trains_by_another_of_pefts_methods(base, tmp_path):
    _, files = written(base, tmp_path, method="lora", peft="ia3", packing=True)
    program = files[0].read_text()
    assert "ADAPTERS = IA3Config(" in program and "import IA3Config, get_peft_model" in program
    assert "merge_and_unload" not in program
    run_script(tmp_path, "--watch", watched=2)


def test_a_program_packs_experts_as_they_are_loaded(base, tmp_path):
    """A mixture's, which transformers' loader leaves in 16 bits."""
    import torch
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

    mixture = str(tmp_path / "mixture")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(mixture)
    tiny = config("mixtral", vocab_size=len(tokenizer), num_hidden_layers=2, **SIZES)
    MixtralForCausalLM(MixtralConfig(**tiny)).to(torch.bfloat16).save_pretrained(mixture)
    found = plan(mixture, "A100 80GB", liger=False, method="qlora", packing=True, **ASKED | MIXED)
    packed = dataclasses.replace(found.best.recipe.quantization, experts="loading")
    recipe = found.best.recipe.replace(quantization=packed)
    choice = dataclasses.replace(found.best, recipe=recipe)
    rows = samples("transformers")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found.write(tmp_path / "train.py", choice)
    (seen,) = run_script(tmp_path, "--watch", watched=1, steps=STEPS[:1])
    assert_same_but_for_scalars(seen, simulated(recipe, 1))


def assert_trained(folder: Path, recipe) -> None:
    """It saved, went on from what it had saved, and evaluated."""
    first, last = state(folder, 3), state(folder, 4)
    assert all(row["eval_loss"] > 0 for row in last["log_history"] if "eval_loss" in row)
    assert any("eval_loss" in row for row in last["log_history"])
    assert last["log_history"][: len(first["log_history"])] == first["log_history"]
    weights = "adapter_model.safetensors" if recipe.lora else "model.safetensors"
    assert (folder / "out" / weights).exists()


@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_the_program_trains_saves_resumes_and_evaluates(name, base, tmp_path):
    recipe, _ = written(base, tmp_path, **CASES[name])
    steps = (
        1 if recipe.quantization else 2
    )  # on the CPU bitsandbytes packs 4-bit weights anew in an evaluation
    seen, _ = run_script(tmp_path, "--watch", watched=steps)
    assert_trained(tmp_path, recipe)
    said = simulated(recipe, steps)
    assert differing_dtypes(seen, said) == {}
    if "packed" in name:  # rows of other programs differ in length
        assert_same_but_for_scalars(seen, said)
    with pytest.raises(SystemExit, match=r"^out holds this run, finished after 4 steps: name"):
        run_script(tmp_path, steps=STEPS[1:])


# Names of models and files stand in a program's lines, so it has more room than our own code.
WIDTHS = ("line-length = 120", "lint.pycodestyle.max-line-length = 126")


@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_the_program_is_laid_out_and_says_the_recipe(name, tmp_path):
    recipe, (script,) = written("llama-3.2-1b", tmp_path, **CASES[name])
    text = script.read_text()
    compile(text, str(script), "exec")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "--config",
                str(ROOT / "pyproject.toml"),
                *(word for width in WIDTHS for word in ("--config", width)),
                str(script),
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
    assert f"default={'2e-4' if recipe.lora else '2e-5'}" in text or recipe.trainer in (
        "dpo",
        "kto",
        "reward",
    )
    assert "expandable_segments:True" in text and "$" not in text


def test_a_program_that_cuts_no_sample_refuses_a_longer_one(base, tmp_path):
    asked = CASES["padding-free sft lora"] | {"seq_len": 16}
    _, (script,) = written(base, tmp_path, **asked)
    assert "max_length=None," in script.read_text()
    with pytest.raises(SystemExit, match=r"has \d\d tokens, and this was planned for 16 at most"):
        run_script(tmp_path)


def test_a_configurations_name_is_not_run(tmp_path, monkeypatch, capsys):
    named = config("llama") | {
        "_name_or_path": 'x"""\nimport os\nos.mkdir("taken")\n"""%(prog)s %d'
    }
    plan(named, "T4", **ASKED, method="lora").write(tmp_path / "train.py")
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    assert "os.mkdir" in capsys.readouterr().out
    assert not (tmp_path / "taken").exists()


def test_a_package_that_is_not_installed_is_not_pinned(tmp_path, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    assert "With vramlab beside them" in written("gpt2", tmp_path)[1][0].read_text()
    monkeypatch.setattr(metadata, "version", absent)
    text = written("gpt2", tmp_path)[1][0].read_text()
    assert "git+" not in text and f"Written by vramlab {vramlab.__version__}." in text


def test_the_program_stops_before_loading_where_it_does_not_fit(base, tmp_path, monkeypatch):
    import psutil

    written(base, tmp_path, method="full", precisions="fp32")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained",
        lambda *_, **__: pytest.fail("it loads"),
    )
    with pytest.raises(
        SystemExit, match=r"batch .* needs 0\.\d\d GiB, and 0\.00 GiB are free here"
    ):
        run_script(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("trainer", "row", "needed"),
    [
        (
            "transformers",
            {"prompt": "a", "answer": "b"},
            "train.jsonl has no column text: it has prompt, answer, and a sample needs text, or "
            "messages.",
        ),
        (
            "dpo",
            {"prompt": "a", "chosen": "b"},
            "train.jsonl has no column rejected: it has prompt, chosen, and a sample needs "
            "prompt and chosen and rejected, or chosen and rejected.",
        ),
    ],
)
def test_a_column_that_is_missing_is_named(trainer, row, needed, base, tmp_path):
    written(base, tmp_path, method="lora", trainer=trainer)
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(SystemExit, match=re.escape(needed)):
        runpy.run_path(str(tmp_path / "train.py"))["read"](str(tmp_path / "train.jsonl"), None)


def test_the_first_ctrl_c_saves_a_checkpoint_to_go_on_from(base, tmp_path, monkeypatch, capsys):
    """And only the same run goes on from it; what must not be forgotten was evaluated before."""
    from transformers import Trainer

    written(base, tmp_path, method="lora")
    (tmp_path / "keep.jsonl").write_text(json.dumps({"text": "while it is true"}))
    step = Trainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", interrupted)
    with pytest.raises(SystemExit, match=r"^130$"):
        run_script(tmp_path, "--keep", "keep.jsonl", steps=(4,))
    assert "stopped after step 2: the same command goes on" in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").exists()
    assert not (tmp_path / "out" / "checkpoint-3").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    log = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    first = {row["step"] for row in log["log_history"] if "eval_keep_loss" in row}
    assert 0 in first and any("eval_task_loss" in row for row in log["log_history"])
    refused = r"^out holds a run with --learning-rate 0\.0002 and --seed 42\. Say that again to"
    with pytest.raises(SystemExit, match=refused):
        run_script(tmp_path, "--learning-rate", "1e-3", "--seed", "1", steps=(4,))


def test_a_program_ends_with_answers_and_how_to_use_what_it_trained(base, tmp_path, capsys):
    written(base, tmp_path, method="lora")
    run_script(tmp_path, steps=(10,))
    shown = capsys.readouterr().out
    for word in ("asked:  ", "before: ", "after:  "):
        assert shown.count(f"\n{word}") == 3
    code = shown.partition("To use it:")[2].replace("and as a model without adapters:", "")
    names: dict = {}
    exec(code.replace('"out', f'"{tmp_path}/out'), names)
    assert names["model"].get_input_embeddings() is not None
    assert (tmp_path / "out-merged" / "model.safetensors").exists()
    assert not (tmp_path / "out-merged" / "adapter_model.safetensors").exists()
    logged = [row for row in state(tmp_path, 10)["log_history"] if "loss" in row]
    assert logged and all(row["tokens_per_second"] > 0 for row in logged)


CHAT = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{{ eos_token }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"
# As those that leave out earlier thoughts
FORGETS = CHAT.replace(
    "turn.content",
    "turn.content if loop.last or turn.role == 'user' else turn.content[:4]",
)


def labels_of(base, folder, template) -> tuple:
    """The tokenizer, and the one row of ids and labels that a program makes of a chat."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"for each {role}"} for role in roles]
    (folder / "train.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 2))
    path = str(folder / "train.jsonl")
    program = runpy.run_path(str(folder / "train.py"))
    row, _ = program["samples"](path, tokenizer, program["read"](path, tokenizer))
    return tokenizer, row


@pytest.mark.parametrize("trainer", ["transformers", "sft"])
@pytest.mark.parametrize(("template", "answers"), [(CHAT, 2), (FORGETS, 1)])
def test_of_a_chat_the_assistants_answers_count(trainer, template, answers, base, tmp_path):
    written(base, tmp_path, method="full", precisions="fp32", trainer=trainer, seq_len=128)
    tokenizer, row = labels_of(base, tmp_path, template)
    counted = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(counted) == f"for each assistant{tokenizer.eos_token}" * answers
    pairs = zip(row["labels"], row["input_ids"], strict=True)
    assert all(label in (-100, token) for label, token in pairs)


def test_samples_longer_than_a_row_are_joined_whole(base, tmp_path):
    from transformers import AutoTokenizer

    asked = {"method": "full", "precisions": "fp32", "packing": True}
    recipe, _ = written(base, tmp_path, **asked)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHAT
    path = tmp_path / "train.jsonl"
    program = runpy.run_path(str(tmp_path / "train.py"))

    def made_of(sample: dict) -> list[dict]:
        path.write_text("\n".join([json.dumps(sample)] * 2))
        data = program["read"](str(path), tokenizer)
        return list(program["samples"](str(path), tokenizer, data))

    text = " ".join(WORDS * recipe.seq_len)
    rows = made_of({"text": text})
    joined = tokenizer([text + tokenizer.eos_token] * 2)["input_ids"]
    assert len(rows) == sum(map(len, joined)) // recipe.seq_len
    assert {len(row["input_ids"]) for row in rows} == {recipe.seq_len}
    turns = [{"role": role, "content": text} for role in ("user", "assistant")]
    of_chats = made_of({"messages": turns})
    assert 0 < len(of_chats) < 2 * len(rows), "rows of the prompts alone are left out"
    assert all(max(row["labels"]) >= 0 for row in of_chats), "the loss of others is 0/0"


def test_a_twentieth_is_evaluated_and_of_much_a_hundred(base, tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer

    written(base, tmp_path, method="full", precisions="fp32")
    program = runpy.run_path(str(tmp_path / "train.py"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = SimpleNamespace(data="train.jsonl", keep=None, seed=0)
    for there, evaluated in {10: 1, 60: 3, 2_100: 100}.items():
        data = Dataset.from_dict({"text": ["for each"] * there})
        found = [len(part) for part in program["parts"](asked, tokenizer, data)]
        assert found == [there - evaluated, evaluated]


def test_of_texts_all_counts_and_chats_need_a_template(base, tmp_path):
    written(base, tmp_path, method="full", precisions="fp32")
    program = runpy.run_path(str(tmp_path / "train.py"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    path = str(tmp_path / "train.jsonl")
    row = program["samples"](path, tokenizer, program["read"](path, tokenizer))[0]
    assert row["labels"] == row["input_ids"]
    tokenizer.chat_template = None
    with pytest.raises(SystemExit, match="has no chat template: take a model that has one"):
        labels_of_chat = {"messages": [{"role": "user", "content": "for each"}]}
        (tmp_path / "train.jsonl").write_text(json.dumps(labels_of_chat))
        program["read"](path, tokenizer)


def test_the_program_trains_on_one_card_where_there_are_more(base, tmp_path, monkeypatch):
    written(base, tmp_path, method="full", precisions="fp32")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    runpy.run_path(str(tmp_path / "train.py"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.slow  # a process that loads all libraries
def test_the_program_trains_without_vramlab(base, tmp_path):
    """In a process of its own, in which vramlab cannot be imported."""
    written(base, tmp_path, method="lora")
    hidden = tmp_path / "hidden" / "vramlab"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, "train.py", "--data", "train.jsonl", "--max-steps", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(hidden.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


# --- ranks


@pytest.mark.skipif(
    "not __import__('importlib.util').util.find_spec('deepspeed')", reason="no deepspeed"
)
@pytest.mark.parametrize(("sharding", "method", "precision"), params(SHARDED, QUICK_SHARDED))
def test_ranks_train_and_go_on_and_hold_what_simulate_says(
    sharding, method, precision, launcher, base, tmp_path
):
    *trainer, method = method.split()
    asked = dict(method=method, precisions=precision)
    if trainer:  # rows differ in length, and a checkpoint would keep their masks
        asked["trainer"] = trainer[0]
    else:
        asked |= {"packing": True, "checkpointing": method == "lora"}
    goes_on = (method, precision) in RESUMED and not trainer
    recipe, files = written(
        base, tmp_path, SHARDINGS[sharding], **{"checkpointing": False, **asked}
    )
    engine, world = recipe.sharding.engine, recipe.sharding.world_size
    steps = 1 if recipe.quantization else 2  # as above
    order = {"folder": str(tmp_path), "watched": steps, "steps": STEPS if goes_on else STEPS[:1]}
    ranks = launcher.run(
        "written_scripts:work", order, world, timeout=150, preload="written_scripts:preload"
    )
    names = {
        "train.py",
        *([f"train.{engine}.json"] if engine != "ddp" else []),
        *(["train.sbatch"] * (world > 1)),
    }
    assert {path.name for path in files} == names
    if goes_on:
        assert_trained(tmp_path, recipe)
    for index, ran in enumerate(map(Report.from_json, ranks)):
        here = recipe.replace(sharding=dataclasses.replace(recipe.sharding, rank=index))
        said = simulated(here, steps)
        if "bnb_4bit_quant_storage=torch.bfloat16" in files[0].read_text():
            held = said.environment["dtypes"]["held"]
            held["parameters bfloat16"] += held.pop("parameters uint8")
        assert differing_dtypes(ran, said) == {}
        if not trainer:
            assert_held(ran, said, recipe)


MESHES = {
    "a ring": ({"cp_size": 2}, {"packing": True, "seq_len": 2 * TOKENS}),  # as many on a rank
    "a ring of SFTTrainer": ({"cp_size": 2}, {"trainer": "sft"}),
    "copies": ({"dp_replicate_size": 2}, {"packing": True}),
    "Ulysses": ({"sp_size": 2, "world_size": 2}, {"packing": True, "seq_len": 2 * TOKENS}),
    "two groups of Ulysses": ({"sp_size": 2, "world_size": 4}, {"packing": True}),
    "Ulysses of SFTTrainer": ({"sp_size": 2, "world_size": 2}, {"trainer": "sft"}),
}


@pytest.mark.slow  # their text is in test_written_programs
@pytest.mark.parametrize("name", MESHES)
def test_ranks_of_a_mesh_train_and_hold_what_simulate_says(name, launcher, tmp_path):
    """No kernel on CPUs takes keys that heads share, so none are."""
    sizes, asked = MESHES[name]
    folder = tiny_base(str(tmp_path / "base"), num_key_value_heads=4)
    world = 2 * sizes.get("dp_replicate_size", 1)
    engine = "deepspeed" if "sp_size" in sizes else "fsdp"
    sharding = Sharding(**{"stage": 3, "world_size": world, "engine": engine, **sizes})
    asked = {**MIXED, "method": "full", "checkpointing": False, **asked}
    recipe, _ = written(folder, tmp_path, sharding, **asked)
    in_ring = "cp_size" in sizes
    if "sp_size" in sizes:  # gloo gathers rows of one length only
        rows = [{"text": " ".join(WORDS * 3)}] * 40
        (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    order = {"folder": str(tmp_path), "watched": 2, "steps": STEPS[:1], "in_ring": in_ring}
    ranks = launcher.run(
        "written_scripts:work",
        order,
        sharding.world_size,
        timeout=150,
        preload="written_scripts:preload",
    )
    for index, ran in enumerate(map(Report.from_json, ranks)):
        here = recipe.replace(sharding=dataclasses.replace(sharding, rank=index))
        with attention_of(in_ring):
            said = simulated(here, 2)
        assert differing_dtypes(ran, said) == {}
        # the positions and shifted labels of whole rows, which a ring is given
        rows = 8 * (1 + recipe.batch_size) * recipe.seq_len if in_ring else 0
        if recipe.trainer == "transformers" or "sp_size" in sizes:
            assert_held(ran, said, recipe, rows)


def assert_held(ran: Report, simulated: Report, recipe, rows: int = 0) -> None:
    """Each category of each phase, and under DeepSpeed, whose own part of the backward pass comes
    after autograd's, the peak; but for the row's bytes, which ranks free sooner, or as activations
    (`rows`) later, and DDP's flags for each tensor, which nothing leads to."""
    if recipe.sharding.engine == "deepspeed":
        peaks = [
            max(p.peak.total - p.peak.inputs for p in report.phases.values())
            for report in (ran, simulated)
        ]
        assert abs(peaks[0] - peaks[1]) <= SCALARS, peaks
        return
    flags = (
        4 * sum(row.trained for row in tensors_in_order(recipe))
        if recipe.sharding.engine == "ddp"
        else 0
    )
    for phase, moment in itertools.product(("forward", "backward", "step"), ("peak", "end")):
        real, said = (getattr(report.phases[phase], moment) for report in (ran, simulated))
        more = {
            name: getattr(real, name) - getattr(said, name)
            for name in CATEGORIES
            if name != "inputs"
        }
        more["activations"] -= rows if more["activations"] > SCALARS else 0
        assert all(abs(n) <= SCALARS + flags for n in more.values()), f"{phase} {moment}: {more}"
