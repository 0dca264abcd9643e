"""Chapter 08: run a written program in the notebook, on a small card too; what it learns from."""

import ast
import json
import os
import runpy
import signal
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import vramlab
from vramlab.base.data import data_path
from vramlab.report.report import MiB, Report

from .small_card import Card

HUB = "https://huggingface.co"
LINE = 100  # characters


def run(program: Path, *options: str, stop_in: int = 0) -> Report:
    """Run `python program options… --watch` in this process, without its output.

    In the update `stop_in` it gets a Ctrl-C; 0 is none. Return what it saw of its memory.
    """
    from IPython.utils.capture import capture_output
    from transformers.utils import logging

    seen = []

    # the program makes its callback itself: its class is replaced, to get hold of it
    class Kept(vramlab.WatchCallback):
        def __init__(self):
            super().__init__()
            seen.append(self)

        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            if state.global_step + 1 == stop_in:
                signal.raise_signal(signal.SIGINT)

    logging.set_verbosity_error()
    # datasets would fill the reader's own cache with files of a folder that is soon gone.
    os.environ["HF_DATASETS_CACHE"] = str(program.parent / "cache")
    own = sys.argv, vramlab.WatchCallback
    sys.argv = [str(program), *options, "--watch"]
    vramlab.WatchCallback = Kept
    # The program hides other GPUs by a variable, which comes too late where CUDA has begun here:
    # the Trainer would copy the model to all that it counts (`nn.DataParallel`).
    count = min(torch.cuda.device_count(), 1)
    one_gpu = patch.object(torch.cuda, "device_count", lambda: count)
    try:
        with capture_output(), patch.dict(os.environ), one_gpu:
            # With its own globals, so that nothing of the notebook is seen by the program.
            runpy.run_path(str(program), run_name="__main__")
    except SystemExit:
        if not stop_in:
            raise
    finally:
        sys.argv, vramlab.WatchCallback = own
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
    # the fraction is of the whole card, and what is reserved already counts towards it
    total = torch.cuda.get_device_properties(0).total_memory
    share = (torch.cuda.memory_reserved() + limit) / total
    # PyTorch's allocator raises its own OutOfMemoryError beyond this share of the card.
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def typed_heads(folder: Path | None = None) -> list[str]:
    """The head of each function of one parameter under `folder` that names both types, each once.

    Such as "def usable(card: Gpu) -> int:". Longer ones than a line are left out. None is those
    that vramlab had on 27 November 2026, stored so that a count after training stays what it is.
    """
    if folder is None:
        lines = data_path("house_rule.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines]
    heads = {}
    for path in sorted(folder.rglob("*.py")):
        # Read and not imported, as importing all of a package would load every library.
        for function in _functions(path.read_text(encoding="utf-8")):
            head = ast.unparse(function)
            # A dictionary keeps the order, and each head once.
            if all(_types(function)) and len(head) <= LINE:
                heads[head] = True
    return list(heads)


def untyped_heads(texts: Iterable[str], count: int) -> list[str]:
    """Heads without a type, as "def normpath(path):", of `count` public functions of one parameter.

    They are spread over the programs `texts`.
    """
    heads = []
    for text in texts:
        for function in _functions(text):
            head = ast.unparse(function)
            is_plain = not any(_types(function)) and not function.args.defaults
            if is_plain and not function.name.startswith("_") and head not in heads:
                heads.append(head)
    return heads[:: len(heads) // count][:count]


def chat(head: str) -> list[dict[str, str]]:
    """A head as a chat: without its types it is the question, with them the answer."""
    (function,) = _functions(f"{head} ...")
    function.returns = None
    for each in function.args.args:
        each.annotation = None
    plain = ast.unparse(function)
    return [{"role": "user", "content": plain}, {"role": "assistant", "content": head}]


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    """The functions of a program that have one parameter, without `self` and without body."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        args = node.args
        args.args = [each for each in args.args if each.arg not in ("self", "cls")]
        others = args.posonlyargs or args.kwonlyargs or args.vararg or args.kwarg
        if len(args.args) == 1 and not others:
            node.body = []
            node.decorator_list = []
            yield node


def _types(function: ast.FunctionDef) -> list[ast.expr | None]:
    """The types of parameters and result, None where there is none."""
    return [each.annotation for each in function.args.args] + [function.returns]


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
