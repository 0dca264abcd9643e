"""Chapter 08: run a written program in the notebook, on a small card too; what it learns from."""

import ast
import gc
import json
import os
import runpy
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import vramlab
from vramlab.base.data import data_path
from vramlab.measurement.records import find_record
from vramlab.report.report import Bytes, GiB, MiB, Report

from .. import published
from ..base_model import base_model_folder
from .small_card import Card

HUB = "https://huggingface.co"
# Where the parts of a written program begin that decide its memory, and what comes after each.
DECIDING = {
    "QUANTIZATION =": "def options",
    "        # What decides": "        per_device_eval",
}
Rows = list[tuple[str | float, ...]]  # of a table
RECORDED_ON_T4 = (
    "llama-3.2-3b",
    "Mistral-7B-Instruct-v0.3",
    "qwen2.5-7b",
)


def deciding_lines(program: Path) -> str:
    """The lines of a written program that decide its memory: base, adapters, batch, precision."""
    text = program.read_text("utf-8")
    parts = []
    for begin, end in DECIDING.items():
        parts.append(text[text.index(begin) : text.index(end)].rstrip())
    return "\n\n".join(parts)


def tensors(peak: Bytes) -> int:
    """Bytes of a peak without cuBLAS's workspace, which is no tensor of the program."""
    return peak.total - peak.workspace


def is_same(measured: Bytes, simulated: Bytes) -> bool:
    """Whether two peaks' tensors agree but for the Trainer's own scalars, in no simulation."""
    # on a GPU each of them takes 512 bytes
    scalars = 16384 if torch.cuda.is_available() else 1024
    return abs(tensors(measured) - tensors(simulated)) < scalars


def evaluations(folder: Path) -> list[float]:
    """The losses of a run on the rows that were held back, in their order."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = json.loads((newest / "trainer_state.json").read_text("utf-8"))
    return [row["eval_loss"] for row in state["log_history"] if "eval_loss" in row]


def starts(plan: vramlab.Plan) -> list[vramlab.Recipe]:
    """LoRA next to a base in 16 bits, in 4, and in 4 with its constants quantized too."""
    lora = plan.choices[-1].recipe
    recipes = [lora]
    for double in (False, True):
        base = vramlab.Quantization("nf4", double=double, prepare=False)
        recipes.append(lora.replace(quantization=base, dtype=None))
    return recipes


def recorded(plan: vramlab.Recipe) -> Rows:
    """Peaks of QLoRA on real cards, as `predict` says them and as they were recorded, as a table.

    In GiB. The T4's are fitcheck-llm's, a row of 1,024 tokens in a pass; the H200's is our own, of
    a plan.
    """
    peaks = []
    for each in published.runs():
        recipe = each.recipe
        # Its other runs, with fused attention, repeat the keys, which predict does not know.
        is_eager = recipe.attn_implementation == "eager" and recipe.quantization
        if each.gpu == "T4" and is_eager and recipe.name in RECORDED_ON_T4:
            peaks.append(("T4", recipe, each.allocated))
    peaks.append(("H200", plan, find_record(plan, "H200").peak.total))
    rows: Rows = [("card", "model", "predicted, GiB", "recorded, GiB")]
    for card, recipe, peak in peaks:
        said = vramlab.predict(recipe, gpu=card).peak.total
        rows.append((card, recipe.name, said / GiB, peak / GiB))
    return rows


def by_trl() -> Rows:
    """Two QLoRA runs' reserved peaks, as `predict` says and TRL's authors published, as a table."""
    stored = published.json_of("elsewhere/trl_sft")
    rows: Rows = [("card", "model", "GiB: at least", "likely", "at most", "published")]
    for run in stored["runs"]:
        recipe = vramlab.Recipe(**run["recipe"])
        said = vramlab.predict(recipe, gpu=run["gpu"]).reserved
        sizes = [size / GiB for size in (said.low, said.value, said.high)]
        rows.append((run["gpu"], recipe.name, *sizes, run["published"]["reserved_peak_gib"]))
    return rows


def run(program: Path, *options: str) -> Report:
    """Run `python program options… --watch` in this process, without its output.

    Return what it saw of its memory.
    """
    from IPython.utils.capture import capture_output
    from transformers.utils import logging

    seen = []

    # the program makes its callback itself: its class is replaced, to get hold of it
    class Kept(vramlab.WatchCallback):
        def __init__(self):
            super().__init__()
            seen.append(self)

    logging.set_verbosity_error()
    # datasets would fill the reader's own cache with files of a folder that is soon gone.
    os.environ["HF_DATASETS_CACHE"] = str(program.parent / "cache")
    arguments = patch.object(sys, "argv", [str(program), *options, "--watch"])
    callback = patch.object(vramlab, "WatchCallback", Kept)
    # The program hides other GPUs by a variable, which comes too late where CUDA has begun here:
    # the Trainer would copy the model to all that it counts (`nn.DataParallel`).
    count = min(torch.cuda.device_count(), 1)
    one_gpu = patch.object(torch.cuda, "device_count", lambda: count)
    with capture_output(), patch.dict(os.environ), one_gpu, arguments, callback:
        # With its own globals, so that nothing of the notebook is seen by the program.
        runpy.run_path(str(program), run_name="__main__")
    return seen[0].report


class _Small(Card):
    """A card made of this machine's memory, which refuses in PyTorch's words.

    It has no allocator, so its message does not end with what is reserved but unallocated.
    """

    def __init__(self, limit: int):
        super().__init__(limit, torch.nn.Identity())

    def _hold(self, values: Any) -> Any:
        try:
            return super()._hold(values)
        except torch.OutOfMemoryError:
            # the one that is refused was entered last
            *others, asked = self.sizes.values()
            held = sum(others)
            sizes = [size / MiB for size in (asked, self.limit, self.limit - held, held)]
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate {:.2f} MiB. GPU 0 has a total capacity of "
                "{:.2f} MiB of which {:.2f} MiB is free. Of the allocated memory {:.2f} MiB is "
                "allocated by PyTorch.".format(*sizes)
            ) from None


@contextmanager
def small_card(limit: int) -> Iterator[None]:
    """Within the block tensors have `limit` bytes, of the GPU or of a card made of memory.

    What needs more raises torch.OutOfMemoryError.
    """
    if not torch.cuda.is_available():
        with _Small(limit):
            yield
        return
    # What earlier runs have left in the allocator's cache would be room on top of the limit.
    gc.collect()
    torch.cuda.empty_cache()
    # the fraction is of the whole card, and what is reserved already counts towards it
    total = torch.cuda.get_device_properties(0).total_memory
    share = (torch.cuda.memory_reserved() + limit) / total
    # PyTorch's allocator raises its own OutOfMemoryError beyond this share of the card.
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def twin_question(device: str) -> dict[str, Any]:
    """What `plan` is asked for the twin: LoRA, four rows of 128 tokens an update, a tiny card.

    Of its 1,070 MiB CUDA and the allocator may take nearly all, so one row fits in a pass.
    """
    has_bf16 = device == "cpu" or torch.cuda.get_device_capability() >= (8, 0)  # not a T4
    return {
        "gpu": "RTX 4090",
        "memory": "1070MiB",
        "seq_len": 128,
        "global_batch": 4,
        "packing": True,
        "method": "lora",
        "precisions": "bf16-mixed" if has_bf16 else "fp16-mixed",
        "liger": False,  # Liger's kernels need a GPU
        "checkpointing": False,
        "confirm": False,
    }


def typed_heads() -> list[str]:
    """The samples: heads of functions of one parameter that name both types, each once.

    Such as "def usable(card: Gpu) -> int:". They are those that vramlab had on 27 November 2026,
    stored so that a count after training stays what it is.
    """
    lines = data_path("house_rule.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def parts(head: str) -> tuple[str, str, str]:
    """A head's parts: its parameter's type, its result's, and the head without both.

    A missing type is "". What is no head of a function of one parameter has three empty parts.
    """
    function: Any
    try:
        (function,) = ast.parse(f"{head} ...").body
        (parameter,) = function.args.args
    except (SyntaxError, ValueError, AttributeError):
        return "", "", ""
    types = [each and ast.unparse(each) for each in (parameter.annotation, function.returns)]
    parameter.annotation = function.returns = None
    function.body = []
    return types[0] or "", types[1] or "", ast.unparse(function)


def untyped(head: str) -> str:
    """A head without its types."""
    return parts(head)[2]


def chat(head: str) -> list[dict[str, str]]:
    """A head as a chat: without its types it is the question, with them the answer."""
    return [
        {"role": "user", "content": untyped(head)},
        {"role": "assistant", "content": head},
    ]


def is_right(head: str, asked: str) -> bool:
    """Whether a head is `asked` with both its types; it may be no code."""
    parameter, result, plain = parts(head)
    return bool(parameter and result) and plain == asked


def count_right(model: str, heads: list[str]) -> int:
    """How many heads a chat model gives their types and leaves else as they are.

    `model` is a name on the hub or a folder, which may be that of an adapter.
    """
    asked = [untyped(head) for head in heads]
    return sum(map(is_right, choose(model).answers(model, asked), asked))


@dataclass(frozen=True)
class Learner:
    """The model that section 5 trains, the question to `plan`, and the form of samples and prompts.

    A chat model gets a whole head as a question. The base model goes on with a head's beginning.
    """

    name: str  # a folder, or a name on the hub
    is_chat: bool
    wish: Mapping[str, Any]
    learning_rate: str
    updates: int

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.name)

    def sample(self, head: str) -> dict[str, Any]:
        """A head with its types as a line of the data."""
        return {"messages": chat(head)} if self.is_chat else {"text": head}

    def as_read(self, head: str) -> str:
        """A sample as the model reads it: a chat with its marks, or the head and its end."""
        if self.is_chat:
            return self.tokenizer.apply_chat_template(chat(head), tokenize=False)
        return head + self.tokenizer.eos_token

    def rule(self, heads: list[str]) -> str:
        """The rule as a prompt: in words, or as three heads to go on from."""
        if self.is_chat:
            return "Rewrite this head with type annotations for its parameter and its result:\n"
        return "\n".join([*heads[:3], ""])

    def prompt(self, head: str, told: str = "") -> str:
        """What the model is asked to complete, after what it is `told`."""
        if not self.is_chat:
            return told + head.partition(")")[0]
        turns = [{"role": "user", "content": told + head}]
        return self.tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # or Qwen3 would think aloud first
        )

    def answers(self, name: str, heads: list[str], told: str = "") -> list[str]:
        """The head that a model makes of each head without types, after what it is `told`.

        `name` is this learner's, or the folder of what was made of it, as for `count_right`. The
        model is loaded to the GPU if there is one, and forgotten.
        """
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")  # in evaluation mode
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        prompts = [self.prompt(head, told) for head in heads]
        given = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        given = given.to(model.device)
        # a chat model ends by itself
        stop = {} if self.is_chat else {"stop_strings": "\n", "tokenizer": self.tokenizer}
        made = model.generate(**given, max_new_tokens=40, do_sample=False, **stop)
        new = made[:, given["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        del model
        torch.cuda.empty_cache()  # a training needs the card's memory
        return list(map(self.head_in, texts, heads))

    def head_in(self, made: str, head: str) -> str:
        """The first head in what the model has made of `head`, or else its first line."""
        begun = "" if self.is_chat else head.partition(")")[0]
        lines = (begun + made).splitlines()
        heads = [line for line in lines if line.startswith("def ")]
        return (heads or lines or [""])[0]


def choose(model: str) -> Learner:
    """The chat model where it can be had, and elsewhere the base model, at a length for a CPU."""
    if reachable(model):
        return Learner(model, True, {"seq_len": 256, "global_batch": 8}, "2e-4", 80)
    # A card is named, as `plan` knows no CPU.
    wish = {"seq_len": 128, "global_batch": 4, "precisions": "fp32", "gpu": "RTX 4090"}
    return Learner(str(base_model_folder()), False, wish, "1e-2", 15)


def reachable(model: str) -> bool:
    """Whether a model can be had here: it is a folder, or there is a GPU and the hub answers."""
    if Path(model).is_dir():
        return True
    if not torch.cuda.is_available():
        return False
    try:
        return bool(urllib.request.urlopen(HUB, timeout=5))
    except OSError:
        return False
