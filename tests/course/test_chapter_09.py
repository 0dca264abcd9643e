"""What chapter 09 prints for a reader to start: here it runs on two CPU ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch
from peft import LoraConfig, get_peft_model
from told import text_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vramlab_course.chapters import cut, pipe
from vramlab_course.chapters.chapter_04 import on_ranks
from vramlab_course.chapters.chapter_09 import Stage
from vramlab_course.figures.figures_09 import stage_order

# In the program's place: counts the collectives of a step, too.
COUNTED = """    from vramlab_course.collectives import Collectives

    with Collectives() as counting:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    if "all_reduce" in counting.seen:
        print(f"sums {counting.seen['all_reduce'].calls} in {len(model.model.layers)} layers")
"""


def command(words: str) -> list[str]:
    """The arguments of the torchrun that the chapter prints with these words."""
    text = text_of("09_")
    (found,) = re.findall(rf"torchrun (.* -m vramlab_course.chapters.{words}.*)", text, re.M)
    return found.split()


def changed(arguments: list[str], **options: str) -> list[str]:
    """The arguments with other values of options, or with more of them."""
    arguments = list(arguments)
    for name, value in options.items():
        option = f"--{name}"
        if option in arguments:
            at = arguments.index(option)
            arguments[at + 1] = value
        else:
            arguments += [option, value]
    return arguments


def printed(arguments: list[str]) -> str:
    """What the ranks print."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def losses(arguments: list[str]) -> list[str]:
    """The losses that the ranks print."""
    return re.findall(r"loss ([\d.]+)", printed(arguments))


@pytest.mark.slow
def test_a_model_cut_by_transformers_trains_as_one_process_does(tmp_path):
    arguments = command("cut$")
    script = Path(cut.__file__).read_text()
    step = "        loss = model(input_ids=ids, labels=ids).loss\n        loss.backward()\n"
    assert step in script
    counted = tmp_path / "counted.py"
    counted.write_text(script.replace(step, indent(COUNTED, "    ")))
    text = printed([*arguments[: arguments.index("-m")], str(counted)])
    alone = losses(changed(arguments, nproc_per_node="1"))
    assert len(alone) == 5 and len(set(alone)) == 5  # it learns
    both = re.findall(r"loss ([\d.]+)", text)
    assert sorted(both) == sorted(alone * 2)  # both ranks print, in any order
    # Four sums a layer, and two outside of the layers.
    found = re.findall(r"sums (\d+) in (\d+) layers", text)
    assert found and all(int(sums) == 4 * int(layers) + 2 for sums, layers in found)


@pytest.mark.slow
def test_experts_cut_by_transformers_train_as_one_process_with_both_batches(tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    experts = dict(num_experts=4, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=1000)
    folder = tmp_path / "mixture"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(folder)
    arguments = command("cut --experts")
    # A random model learns slowly.
    options = dict(nproc_per_node="2", model=str(folder), lr="1e-3")
    both = losses(changed(arguments, **options))

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
    assert sorted(both) == sorted(alone)


@pytest.mark.slow
def test_the_printed_pipeline_trains_adapters_of_a_stack_that_does_not_divide(tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=5, vocab_size=1000)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    folder = tmp_path / "five_layers"
    model.save_pretrained(folder)
    # One rank holds three layers and the other two.
    arguments = command("pipe")
    at = arguments.index("--layers")
    arguments[at + 1 : at + 3] = ["3", "2"]
    found = losses(changed(arguments, model=str(folder), lr="1e-3"))

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alone = []
    for ids in 5 * [torch.randint(1000, (4, 256))]:
        losses_of_parts = [model(input_ids=part, labels=part).loss for part in ids.split(1)]
        loss = torch.stack(losses_of_parts).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    assert len(set(alone)) == 5
    assert [float(each) for each in found] == pytest.approx(alone, abs=2e-4)


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
        schedule = Schedule1F1B(stage, 4, loss_fn=pipe.loss_of)
        schedule.step(*([ids] if rank == 0 else []), target=ids)
        return stage.passes

    for rank, found in enumerate(on_ranks(passes)):
        assert list(found) == stage_order("1f1b", rank, 2, 4)
