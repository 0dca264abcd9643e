"""Chapter 08: run a written program in the notebook, on a small card too; what it learns from."""

import ast
import os
import runpy
import signal
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import vramlab
from vramlab.report.report import MiB, Report

from .small_card import Card

HUB = "https://huggingface.co"


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


def package_texts(most: int) -> list[str]:
    """The first `most` characters of vramlab's own source, file by file."""
    texts = []
    for path in sorted((Path(vramlab.__file__).parent / "recipe").glob("*.py")):
        # What is left of `most`: nothing for files past it.
        left = most - sum(map(len, texts))
        texts.append(path.read_text(encoding="utf-8")[:left])
    return [text for text in texts if text]


def questions() -> list[list[dict[str, str]]]:
    """What each public function of vramlab does, as chats.

    A chat is a question, and the beginning of the docstring as the answer.
    """
    chats = []
    for path in sorted(Path(vramlab.__file__).parent.rglob("*.py")):
        # Read and not imported, as importing all of the package would load every library.
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            said = ast.get_docstring(node)
            if said:
                asked = f"What does vramlab's `{node.name}` do?"
                # The first paragraph alone: a small model learns a sentence, no list of arguments.
                chats.append([_turn("user", asked), _turn("assistant", said.split("\n\n")[0])])
    return chats


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


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
