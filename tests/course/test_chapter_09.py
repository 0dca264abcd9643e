"""What chapter 09 prints for a reader to start: here it runs on two CPU ranks."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vramlab_course.base_model import base_model_folder
from vramlab_course.chapters.chapter_04 import on_ranks
from vramlab_course.chapters.chapter_09 import Stage, loss_of
from vramlab_course.figures.figures_09 import stage_order

CHAPTER = "09_more_than_data_parallel.ipynb"
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ONE_RANK = [*TWO_RANKS[:-1], "1"]
# In the printed script's place: counts the collectives of a step, too.
COUNTED = """    from vramlab_course.collectives import Collectives

    with Collectives() as counting:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    if "all_reduce" in counting.seen:
        print(f"sums {counting.seen['all_reduce'].calls} in {len(model.model.layers)} layers")
"""


def printed_script(root, word: str) -> str:
    """The chapter's Python block that has the word, for the course's base model."""
    cells = nbformat.read(root / "notebooks" / CHAPTER, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", text, re.S) if word in each]
    return re.sub(r'"Qwen/[^"]+"', repr(str(base_model_folder())), block)


def printed(script: str, path, ranks: list[str]) -> str:
    """What the ranks print."""
    path.write_text(script)
    run = subprocess.run(
        [sys.executable, *ranks, str(path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def losses(script: str, path, ranks: list[str]) -> list[str]:
    """The losses that the ranks print."""
    return re.findall(r"loss ([\d.]+)", printed(script, path, ranks))


@pytest.mark.slow
def test_a_model_cut_by_transformers_trains_as_one_process_does(pytestconfig, tmp_path):
    script = printed_script(pytestconfig.rootpath, "tp_plan")
    step = "    loss = model(input_ids=ids, labels=ids).loss\n    loss.backward()\n"
    assert step in script
    text = printed(script.replace(step, COUNTED), tmp_path / "cut.py", TWO_RANKS)
    alone = losses(script, tmp_path / "cut.py", ONE_RANK)
    assert len(alone) == 5 and len(set(alone)) == 5  # it learns
    cut = re.findall(r"loss ([\d.]+)", text)
    assert sorted(cut) == sorted(alone * 2)  # both ranks print, in any order
    # Four sums a layer, and two outside of the layers.
    found = re.findall(r"sums (\d+) in (\d+) layers", text)
    assert found and all(int(sums) == 4 * int(layers) + 2 for sums, layers in found)


@pytest.mark.slow
def test_experts_cut_by_transformers_train_as_one_process_with_both_batches(pytestconfig, tmp_path):
    script = printed_script(pytestconfig.rootpath, "tp_plan")
    for line in printed_script(pytestconfig.rootpath, "ep_size").splitlines():
        # The printed lines stand in place of those that begin alike.
        begin = line.split("(")[0].split("=")[0]
        script, replaced = re.subn(rf"^{re.escape(begin)}.*$", line, script, flags=re.M)
        assert replaced == 1
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    experts = dict(num_experts=4, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=1000)
    folder = tmp_path / "mixture"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(folder)
    script = re.sub(r"^name = .*$", f"name = {str(folder)!r}", script, flags=re.M)
    script = script.replace("fsdp_size=8, ep_size=8", "fsdp_size=2, ep_size=2")
    script = script.replace("lr=1e-5", "lr=1e-3")  # a random model learns slowly
    cut = losses(script, tmp_path / "experts.py", TWO_RANKS)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = []
    for rank in range(2):
        torch.manual_seed(rank)
        batches.append(torch.randint(1000, (2, 256)))
    alone = []
    for _ in range(5):
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 2).backward()  # FSDP averages over the ranks
            alone.append(f"{loss.item():.4f}")
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(alone)) == 10
    assert sorted(cut) == sorted(alone)


@pytest.mark.slow
def test_the_printed_pipeline_trains_all_layers_of_a_stack_that_does_not_divide(
    pytestconfig, tmp_path
):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=5, vocab_size=1000)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    folder = tmp_path / "five_layers"
    model.save_pretrained(folder)
    script = printed_script(pytestconfig.rootpath, "Schedule1F1B")
    script, replaced = re.subn(r"^name = .*$", f"name = {str(folder)!r}", script, flags=re.M)
    assert replaced == 1
    script = script.replace("lr=1e-5", "lr=1e-3")  # a random model learns slowly
    cut = losses(script, tmp_path / "pipe.py", TWO_RANKS)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    ids = torch.randint(1000, (8, 256))
    alone = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(f"{loss.item():.4f}")
    assert len(set(alone)) == 5
    assert cut == alone


class Recorded(PipelineStage):
    """A stage that keeps the order of its passes, as ("forward" or "backward", micro-batch)."""

    passes = ()

    def forward_one_chunk(self, m, *given, **named):
        self.passes += (("forward", m),)
        return super().forward_one_chunk(m, *given, **named)

    def backward_one_chunk(self, m, *given, **named):
        self.passes += (("backward", m),)
        return super().backward_one_chunk(m, *given, **named)


@pytest.mark.slow
def test_pytorchs_schedule_has_the_order_that_the_reader_writes():
    def passes(rank, world):
        ids = torch.arange(4 * 32).view(4, 32)
        stage = Recorded(Stage(rank, world), rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
        schedule.step(*([ids] if rank == 0 else []), target=ids)
        return stage.passes

    for rank, found in enumerate(on_ranks(passes)):
        assert list(found) == stage_order("1f1b", rank, 2, 4)
