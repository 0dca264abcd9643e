"""What a plan writes trains: each kind of program on a tiny model, a few steps, then on from its checkpoint."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from quick import params
from settings import ROOT
from test_trainer_loop import assert_same_but_for_scalars
from tiny_models import config
from vramlab import WatchCallback, plan, simulate
from vramlab.report.data import data_path

TOKENS = 32
ASKED = dict(seq_len=TOKENS, global_batch=4, optims="adamw_torch", attention="sdpa", confirm=False, offload=False)
CASES = {
    "full": dict(method="full", precisions="bf16-true"),
    "full packed": dict(method="full", precisions="fp32", packing=True),
    "lora packed": dict(method="lora", precisions="bf16-mixed", packing=True, checkpointing=True),
    "qlora packed": dict(method="qlora", precisions="bf16-mixed", packing=True),
    "sft": dict(method="full", precisions="bf16-mixed", trainer="sft"),
    "sft lora packed": dict(method="lora", precisions="bf16-mixed", trainer="sft", packing=True),
    "sft qlora": dict(method="qlora", precisions="bf16-mixed", trainer="sft"),
    "dpo lora": dict(method="lora", precisions="bf16-mixed", trainer="dpo"),
    "reward": dict(method="full", precisions="bf16-mixed", trainer="reward"),
}
SLOW = {"full", "sft", "sft qlora", "dpo lora", "reward"}
WORDS = ["def", "word", "in", "text", "return", "none", "for", "each", "of", "them", "while", "it", "is", "true", "or"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A folder with a tiny Llama and the course's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = str(tmp_path_factory.mktemp("base"))
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(data_path("base_model"))
    tokenizer.save_pretrained(folder)
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    tiny = config("llama", vocab_size=len(tokenizer), **sizes)  # whole blocks of 64 numbers in 4 bits
    LlamaForCausalLM(LlamaConfig(**tiny)).save_pretrained(folder)
    return folder


def samples(trainer: str) -> list[dict]:
    """Forty samples of many lengths."""
    texts = [" ".join(WORDS[i % 7 :][: 3 + i % 9] * 3) for i in range(40)]
    if trainer in ("dpo", "reward"):
        return [{"prompt": "if ", "chosen": text, "rejected": text[::-1]} for text in texts]
    return [{"text": text} for text in texts]


def written(base: str, folder: Path, **asked) -> tuple:
    """The plan's best recipe, and the program that it wrote, with data beside it."""
    found = plan(base, "RTX 4090", **{**ASKED, **asked})
    rows = samples(asked.get("trainer", "transformers"))
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return found.best.recipe, found.write(folder / "train.py")


def state(folder: Path, step: int) -> dict:
    return json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())


@pytest.mark.parametrize("name", params(CASES, CASES.keys() - SLOW))
def test_the_program_trains_saves_resumes_and_evaluates(name, base, tmp_path, monkeypatch):
    recipe, (script,) = written(base, tmp_path, **CASES[name])
    seen = []

    class Kept(WatchCallback):
        def __init__(self):
            super().__init__()
            seen.append(self)

    monkeypatch.setattr("vramlab.WatchCallback", Kept)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for steps in (3, 4):
        monkeypatch.setattr(sys, "argv", ["train.py", "--data", "train.jsonl", "--max-steps", str(steps), "--watch"])
        runpy.run_path(str(script), run_name="__main__")
    first, last = state(tmp_path, 3), state(tmp_path, 4)
    assert [row["eval_loss"] > 0 for row in last["log_history"] if "eval_loss" in row]
    assert last["log_history"][: len(first["log_history"])] == first["log_history"]
    weights = "adapter_model.safetensors" if recipe.lora else "model.safetensors"
    assert (tmp_path / "out" / weights).exists()
    # Rows of other programs differ in length; on the CPU bitsandbytes packs 4-bit weights anew after an evaluation.
    if "packed" in name and not recipe.quantization:
        assert_same_but_for_scalars(seen[0].report, simulate(recipe, target="cpu", full=True))


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_laid_out_and_says_the_recipe(name, tmp_path):
    recipe, (script,) = written("llama-3.2-1b", tmp_path, **CASES[name])
    text = script.read_text()
    compile(text, str(script), "exec")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(script)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
    assert f"default={'2e-4' if recipe.lora else '2e-5'}" in text or recipe.trainer in ("dpo", "reward")
    assert "expandable_segments:True" in text and "$" not in text


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_two_ranks_train_by_fsdp_and_go_on(method, base, tmp_path):
    asked = dict(gpus=2, engines="fsdp", precisions="bf16-mixed" if method == "lora" else "fp32", method=method)
    recipe, files = written(base, tmp_path, packing=True, **asked)
    assert {path.name for path in files} == {"train.py", "train.fsdp.json", "train.sbatch"}
    assert recipe.sharding.world_size == 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    for steps in (2, 3):
        words = [
            "--nproc-per-node",
            "2",
            "--standalone",
            "train.py",
            "--data",
            "train.jsonl",
            "--max-steps",
            str(steps),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert any("eval_loss" in row for row in state(tmp_path, 3)["log_history"])
