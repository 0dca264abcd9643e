"""The course's base model, and how well it predicts text.

It is a small Llama trained on Python's standard library.

`data/base_model/train.py` trains it; `data/base_model/README.md` says on what and how well. It
works offline: weights, tokenizer and texts are in the repository and in the distribution
`vramlab-base-model`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramlab.base.data import data_path
from vramlab.base.errors import RecipeError, RecordError
from vramlab.recipe.recipe import Quantization
from vramlab.report.report import repository

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CONTEXT = 256  # tokens that the model was trained on at a time
DTYPES = ("float32", "float16", "bfloat16")


def base_model_path(*parts: str) -> Path:
    """The path of a file of the base model, in a checkout or in `vramlab-base-model`."""
    folder = data_path("base_model")
    # A checkout has the folder; a wheel of vramlab has not, as the weights are a distribution of
    # their own.
    if not folder.is_dir() and (installed := find_spec("vramlab_base_model")):
        folder = Path(next(iter(installed.submodule_search_locations)))
    return folder.joinpath(*parts)


def base_model_folder() -> Path:
    """The model's folder for `from_pretrained` and `Recipe(folder)`.

    Raises RecordError if it is missing.
    """
    folder = base_model_path()
    if not folder.is_dir():
        # The metadata of an installed package has the repository's address, a bare checkout may
        # not.
        address = repository() or "ADDRESS"
        raise RecordError(
            f"The base model is not installed: pip install "
            f"'git+{address}#subdirectory=data/base_model'."
        )
    if not (folder / "model.safetensors").exists():
        raise RecordError(
            f"The base model is missing: run {folder / 'train.py'}, which trains it in about an "
            f"hour."
        )
    return folder


def load_base_model(
    dtype: str = "float32",
    quantization: "Quantization | str | None" = None,
    device: str = "cpu",
    attn_implementation: str = "sdpa",
) -> "PreTrainedModel":
    """The base model in evaluation mode, a `LlamaForCausalLM`.

    Args:
        dtype: of the weights (of those that are not quantized): one of DTYPES. The file holds fp16.
        quantization: "nf4", "fp4" or a `Quantization`: bitsandbytes' 4-bit linear layers in place
            of all but the head. Four-bit layers compute in `quantization.compute_dtype`, by default
            in `dtype`.
    Raises:
        RecipeError: a value that is not known.
    """
    import torch
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    folder = base_model_folder()
    if dtype not in DTYPES:
        raise RecipeError("dtype", dtype, "allowed are " + ", ".join(map(repr, DTYPES)))
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": attn_implementation,
    }
    if isinstance(quantization, str):
        quantization = Quantization(quantization)
    if quantization is not None:
        if quantization.quant_type not in ("nf4", "fp4"):
            allowed = "the base model is packed as 'nf4' or 'fp4'"
            raise RecipeError("quantization", quantization.quant_type, allowed)
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization.quant_type,
            bnb_4bit_use_double_quant=quantization.double,
            bnb_4bit_compute_dtype=getattr(torch, quantization.compute_dtype or dtype),
        )
        # Quantized weights are loaded where they stay: `.to` below moves only what is not
        # quantized.
        options["device_map"] = {"": device}
    with _no_progress_bar():
        model = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    for module in model.modules():
        # On a CPU with AVX-512 BF16 bitsandbytes 0.50 repacks weights when they are evaluated, for
        # a kernel without a gradient: what is trained after that learns next to nothing, and
        # figures would depend on the processor.
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
    return model.to(device).eval() if quantization is None else model.eval()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading takes a tenth of a second: no bar in the notebook."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_base_tokenizer() -> "PreTrainedTokenizerFast":
    """The base model's tokenizer, a byte-level BPE.

    So every text can be encoded and comes back unchanged.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(base_model_folder(), local_files_only=True)


def _texts(name: str, limit: int | None) -> list[str]:
    # The JSON maps a file's name to its text.
    texts = list(json.loads((base_model_folder() / name).read_text(encoding="utf-8")).values())
    if limit is None:
        return texts
    kept = []
    room = limit
    for text in texts:
        # the cut may fall into a character of several bytes
        piece = text.encode()[:room].decode(errors="ignore")
        if piece:
            kept.append(piece)
        room -= len(piece.encode())
    return kept


def held_out(limit: int | None = None) -> list[str]:
    """Programs of the standard library that the base model was not trained on.

    Where a `limit` is given, only the first so many bytes are returned.
    """
    return _texts("held_out.json", limit)


def finetuning_texts(split: str = "train", limit: int | None = None) -> list[str]:
    """The second domain, prose: topics of Python's language reference, as `help()` shows them.

    Args:
        split: "train" or "held_out"; no paragraph is in both.
        limit: keep the first so many bytes.
    """
    if split not in ("train", "held_out"):
        raise RecipeError("split", split, "allowed are 'train' and 'held_out'")
    return _texts(f"documentation_{split}.json", limit)


def bits_per_byte(
    model: "torch.nn.Module",
    texts: Sequence[str],
    context: int = CONTEXT,
    stride: int | None = None,
    batch_size: int = 8,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
) -> float:
    """Bits that the model needs for a byte of `texts`.

    That is Σ −log₂ p(token | what stands before it) / Σ bytes.

    It is the output of an arithmetic coder driven by the model, so it compares with zlib and lzma
    and does not depend on the tokenizer. Each text starts with the start token alone.

    Args:
        context: tokens that the model sees at most.
        stride: new tokens predicted per window; None takes `context` // 2, so that every token but
            a text's first ones sees at least the other half. `stride=context` is twice as fast and
            slightly worse.
    Raises:
        RecipeError: a stride that is not between 1 and `context`.
    """
    import torch

    stride = context // 2 if stride is None else stride
    if not 1 <= stride <= context:
        raise RecipeError("stride", stride, f"it must be between 1 and the context, {context}")
    windows = _windows(tokenizer or load_base_tokenizer(), texts, context, stride)
    device = next(model.parameters()).device
    training = model.training
    nats = 0.0
    model.eval()
    with torch.no_grad():
        for first in range(0, len(windows), batch_size):
            ids, labels = _padded(windows[first : first + batch_size])
            # The last position predicts what comes after the window, and the softmax is taken in
            # fp32.
            outputs = model(input_ids=ids.to(device), use_cache=False)
            logits = outputs.logits[:, :-1].float()
            nats += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1),
                labels[:, 1:].flatten().to(device),
                reduction="sum",
            ).item()
    model.train(training)
    count = sum(len(text.encode()) for text in texts)
    # Cross-entropy is in nats, and ln 2 nats are one bit.
    return nats / math.log(2) / count


def _windows(
    tokenizer: "PreTrainedTokenizerFast",
    texts: Sequence[str],
    context: int,
    stride: int,
) -> list[tuple[list[int], int]]:
    """Windows of at most `context` tokens, longest first.

    With each comes how many of the tokens at its end are to be predicted.
    """
    windows = []
    for text in texts:
        tokens = [tokenizer.bos_token_id, *tokenizer(text, verbose=False)["input_ids"]]
        # The start token is given and never predicted.
        done = 1
        while done < len(tokens):
            # The first window predicts a whole context, later ones `stride` tokens each.
            end = min(len(tokens), max(done + stride, context))
            start = max(0, end - context)
            windows.append((tokens[start:end], end - done))
            done = end
    # windows of like length come into one batch, so little of it is padding
    return sorted(windows, key=lambda window: -len(window[0]))


def _padded(batch: Sequence[tuple[list[int], int]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Token ids and labels, padded at the end, where a causal model does not look.

    Labels are −100 where nothing is predicted.
    """
    import torch

    # The batch is sorted by length, so its first window is the longest.
    ids = torch.zeros(
        len(batch),
        len(batch[0][0]),
        dtype=torch.long,
    )
    labels = torch.full_like(ids, -100)
    for row, (tokens, new) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        first = len(tokens) - new
        labels[row, first : len(tokens)] = torch.tensor(tokens[first:])
    return ids, labels
