"""The calls of the host are those that torch's dispatcher and bitsandbytes' C library get."""

import contextlib
import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vramlab import LoRA, Recipe, simulate
from vramlab.formulas.account import Account
from vramlab.formulas.calls import DORA, FORWARD, NESTED_FORWARD
from vramlab.recipe.options import Quantization
from vramlab.tracking.fake_tracker import FakeTracker
from vramlab.tracking.tracked_operators import DEVICE_QUERY

LORA = LoRA(r=8, target_modules=("q_proj", "v_proj"))
HALF = dict(dtype="bfloat16", lora=LORA)
# bitsandbytes' operators to what a dispatch mode does not see: their kernels in Python, what those
# call, and its functions of autograd.
HIDDEN = {"gemm_4bit": 11, "dequantize_4bit": 4, "dequantize_blockwise": 3}


def of_a_layer(changes, monkeypatch):
    """Return the operators of a layer in both passes, counted by name, and the ledger's calls."""
    counts = []
    calls = []
    for layers in (2, 3):
        recipe = Recipe("llama-3.2-1b", 1, 64, "bf16-mixed", num_layers=layers, **changes)
        found = Counter()

        def dispatch(self, func, *given, found=found, real=FakeTracker.__torch_dispatch__):
            if self.phase in ("forward", "backward") and func is not DEVICE_QUERY:
                found[func.overloadpacket.__name__] += 1
            return real(self, func, *given)

        with monkeypatch.context() as patch:
            patch.setattr(FakeTracker, "__torch_dispatch__", dispatch)
            simulate(recipe, "cuda", gpu="H100", steps=1, full=True)
        counts.append(found)
        calls.append(Account(recipe).calls())
    return counts[1] - counts[0], calls[1] - calls[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        HALF,
        HALF | {"gradient_checkpointing": True},
        {"lora": LORA, "quantization": Quantization(double=True), "gradient_checkpointing": True},
    ],
    ids=("full", "LoRA", "LoRA, checkpointing", "QLoRA"),
)
def test_the_ledger_has_the_calls_that_run(changes, monkeypatch):
    seen, calls = of_a_layer(changes, monkeypatch)
    hidden = sum(HIDDEN.get(name, 0) * count for name, count in seen.items())
    assert calls == pytest.approx(seen.total() + hidden, rel=0.06)


def test_dora_has_so_many_calls_more(monkeypatch):
    lora, _ = of_a_layer(HALF, monkeypatch)
    adapters = dataclasses.replace(LORA, use_dora=True)
    dora, _ = of_a_layer(HALF | {"lora": adapters}, monkeypatch)
    assert dora.total() - lora.total() == len(LORA.target_modules) * sum(DORA)


class Seen(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Library:
    """Counts calls of any function."""

    def __init__(self):
        self.count = 0

    def __getattr__(self, name):
        def call(*args):
            self.count += 1

        return call


@pytest.mark.parametrize("nested", (False, True))
def test_a_product_in_4_bits_has_the_calls_of_its_kernel(nested, monkeypatch):
    """A view, `MatMul4Bit`, the operator and the kernel come before what the kernel calls."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    from bitsandbytes.backends.cuda import ops

    library = Library()
    monkeypatch.setattr(ops, "lib", library)
    monkeypatch.setattr(ops, "_cuda_device_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(ops, "_get_raw_stream", lambda index: 0)
    packed = torch.zeros(64 * 128 // 2, 1, dtype=torch.uint8)
    scales = {}
    if nested:
        scales["absmax_8bit"] = torch.zeros(128, dtype=torch.uint8)
        scales["absmax_code"] = torch.zeros(256)
        scales["absmax_offset"] = torch.zeros(())
    given = torch.zeros(1, 16, 128), packed, (64, 128), torch.zeros(128), 64, "nf4"
    with Seen() as seen:
        ops._dequant_linear_fallback(*given, **scales)
    calls = NESTED_FORWARD if nested else FORWARD
    assert calls["gemm_4bit"] == 4 + seen.count + library.count
