"""Chapter 01: what a model writes and needs, and a network too deep for fp16."""

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.utils import logging
from vramlab import GiB, Quantization, Recipe, measure

from ..base_model import bits_per_byte, load_base_tokenizer
from ..published import timed_on


def continued(model: nn.Module, *beginnings: str, tokens: int = 12) -> list[str]:
    """Each beginning with the `tokens` tokens that the model thinks likeliest after it.

    Each is one line.
    """
    tokenizer = load_base_tokenizer()
    lines = []
    for beginning in beginnings:
        # The start token first, as in training; a batch of one.
        written = torch.tensor([[tokenizer.bos_token_id, *tokenizer(beginning)["input_ids"]]])
        for _ in range(tokens):
            with torch.no_grad():
                likeliest = model(input_ids=written, use_cache=False).logits[0, -1].argmax()
            written = torch.cat([written, likeliest.reshape(1, 1)], 1)
        # Token by token it may not split as the beginning does, but decoded it begins the same.
        text = tokenizer.decode(written[0, 1:]).removeprefix(beginning)
        lines.append(f"{beginning} → {text!r}")
    return lines


def bits_by_piece(model: nn.Module, texts: Sequence[str], length: int = 600) -> Tensor:
    """Bits per byte of each piece of `length` characters by itself.

    The rest of a text is a piece if it is longer than half of that.
    """
    tokenizer = load_base_tokenizer()
    needs = []
    for text in texts:
        for at in range(0, len(text) - length // 2, length):
            piece = [text[at : at + length]]
            needs.append(bits_per_byte(model, piece, stride=256, tokenizer=tokenizer))
    return torch.tensor(needs)


def windows_of(text: str, name: str) -> Tensor:
    """Tokens of `text` in eight windows or more of at most 1,024, each a batch of one."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    length = min(1024, ids.numel() // 8)
    # The last window would be shorter, so it is left out.
    return ids.unfold(1, length, length).transpose(0, 1)


def size_and_bits(
    load: Callable[[object], Any], config: object, windows: Tensor
) -> tuple[int, Tensor]:
    """Bytes of the weights that `load` gives for `config`, and bits a token of each window.

    The bytes are without NF4's scales, 3 % of them.
    """
    logging.disable_progress_bar()
    # What an earlier call loaded leaves the card, or both are there at once.
    gc.collect()
    torch.cuda.empty_cache()
    model = load(config)
    with torch.no_grad():
        losses = [model(input_ids=each, labels=each).loss.item() for each in windows]
    return model.get_memory_footprint(), torch.tensor(losses) / math.log(2)


def updates(run: Recipe, packed: Quantization) -> list[tuple]:
    """GiB allocated and seconds of an update in 16 bits and `packed`: H200, and a 7B on a T4."""
    rows = []
    for batch in (1, 4):
        whole = run.replace(batch_size=batch, precision="bf16-mixed", dtype="bfloat16")
        kinds = whole, whole.replace(quantization=packed)
        seen = [measure(kind, recorded=True) for kind in kinds]
        sizes = [each.peak.total / GiB for each in seen]
        name = f"H200, 8B, {batch} × 1,024 tokens"
        rows.append((name, *sizes, *(each.speed.median for each in seen)))
    t4 = next(run for run in timed_on("T4") if run.recipe.model == "qwen2.5-7b")
    rows.append(("T4, 7B, prepared, 1 × 1,024", "too large", t4.allocated / GiB, "", t4.seconds))
    return rows


def best_seconds(work: Callable[[], object], times: int = 3) -> float:
    """Return the fewest seconds that `work` takes; before it, one call to warm up."""
    # Python does not wait for a GPU by itself.
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = []
    for _ in range(times + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def error(way: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> float:
    """Root of the mean squared change in a matrix's standard deviations, averaged over matrices."""
    errors = [(way(each) - each).square().mean().sqrt() / each.std() for each in matrices]
    return sum(errors).item() / len(errors)


def deep_network(layers: int = 20) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of `layers` hidden layers of 32 units, 256 points and their labels.

    The weights are nn.Linear's initial ones.

    Each layer scales gradients by about 0.4 (uniform weights of variance 1/(3 · 32), half of the
    ReLUs off), so that twenty of them leave the range of fp16. A random network gives the labels,
    four classes.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    # Other numbers than the points', or the labels would follow from the same draw.
    torch.manual_seed(1)
    first = torch.randn(16, 32)
    second = torch.randn(32, 4)
    labels = (torch.tanh(x @ first) @ second).argmax(1)
    # nn.Linear draws its weights from the global generator.
    torch.manual_seed(0)
    sizes = [16] + [32] * layers
    hidden: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        hidden += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(32, 4)), x, labels


def guessing(labels: Tensor) -> float:
    """The loss of a guess by the frequency of the labels: their entropy, in nats."""
    shares = torch.bincount(labels) / len(labels)
    return float(-(shares * shares.log()).sum())
