"""The scripts that chapters print whole: they train, and say what the chapter says of them."""

import json
import re
import runpy
import sys
from collections.abc import Iterator

import nbformat
import pytest
import settings
import torch
from bitsandbytes.nn import Linear4bit
from vramlab.interfaces.script import recipe_of_script
from vramlab_course.base_model import base_model_folder


def scripts(number: str) -> Iterator[str]:
    """The blocks of Python in a chapter's text."""
    notebook = nbformat.read(next(settings.NOTEBOOKS.glob(f"{number}_*.ipynb")), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield from re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)


@pytest.fixture(scope="module")
def t4_script() -> str:
    (found,) = (script for script in scripts("06") if "max_memory_allocated" in script)
    return found


def test_the_t4_script_trains_adapters_on_a_4_bit_base(t4_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["train_t4.py"])
    rows = [json.dumps({"text": f"def number_{i}():\n    return {i}\n"}) for i in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    here = {
        '"meta-llama/Llama-3.1-8B"': repr(str(base_model_folder())),
        "torch.float16": "torch.float32",  # what only a GPU multiplies
        "fp16=True": "use_cpu=True",
        "max_length=2048": "max_length=32",
    }
    script = t4_script
    for old, new in here.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train_t4.py").write_text(script)
    model = runpy.run_path("train_t4.py")["model"]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.dtype == torch.float32 for p in trained)
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 4 * 7 and all(each.weight.dtype == torch.uint8 for each in layers)
    moved = [p.any().item() for name, p in model.named_parameters() if "lora_B" in name]
    assert len(moved) == len(layers) and all(moved)
    assert (tmp_path / "qlora-t4" / "adapter_model.safetensors").exists()


def test_vramlab_reads_the_t4_script_as_the_run_that_the_chapter_simulates(t4_script, tmp_path):
    path = tmp_path / "train_t4.py"
    path.write_text(t4_script)
    recipe, _ = recipe_of_script(path)
    assert (recipe.name, recipe.batch_size, recipe.seq_len) == ("llama-3.1-8b", 1, 2048)
    assert (recipe.precision, recipe.dtype) == ("fp16-mixed", "float16")
    assert recipe.attn_implementation == "sdpa_repeated"
    assert recipe.gradient_checkpointing and recipe.lora.r == 16
    assert recipe.quantization.double and not recipe.quantization.prepare


def test_vramlab_reads_the_script_with_trl_as_the_run_that_the_chapter_says(tmp_path):
    (found,) = (script for script in scripts("06") if "trainer.train()" in script)
    path = tmp_path / "train.py"
    path.write_text(found)
    recipe, notes = recipe_of_script(path)
    assert (recipe.trainer, recipe.seq_len, recipe.dtype) == ("sft", 2048, "bfloat16")
    assert (recipe.batch_size, recipe.gradient_accumulation_steps) == (2, 8)
    assert recipe.quantization.double and not recipe.quantization.prepare
    assert notes == []


@pytest.mark.slow  # imports TRL
def test_the_lines_of_chapter_05_train_and_save_an_adapter(tmp_path, monkeypatch):
    from datasets import Dataset
    from peft import AutoPeftModelForCausalLM, LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    monkeypatch.chdir(tmp_path)
    (lines,) = (script for script in scripts("05") if "SFTTrainer(" in script)
    here = {
        '"meta-llama/Llama-3.1-8B"': repr(str(base_model_folder())),
        "bf16=True": "use_cpu=True, bf16=True, max_steps=1",
        "max_length=2048": "max_length=32",
    }
    for old, new in here.items():
        assert old in lines
        lines = lines.replace(old, new)
    texts = Dataset.from_dict({"text": ["def number():\n    return 1\n"] * 2})
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "LoraConfig": LoraConfig,
        "SFTConfig": SFTConfig,
        "SFTTrainer": SFTTrainer,
        "texts": texts,
    }
    exec(lines, names)
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    moved = [p.any().item() for name, p in saved.named_parameters() if "lora_B" in name]
    assert len(moved) == 4 * 7 and all(moved)
