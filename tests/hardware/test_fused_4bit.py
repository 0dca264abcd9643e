"""Which products bitsandbytes computes from the codes: the table against its own function."""

import ast
import importlib.util
import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from quick import params
from vramlab.base.data import data_path
from vramlab.hardware.fused_4bit import BLOCK, is_fused
from vramlab.hardware.gpu import Chip

RULE = "_gemm_4bit_use_custom_cuda"
MOST_ROWS = 1536  # `_gemm_4bit_custom_max_m` on CUDA
ROWS = (1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 23, 24, 32, 33, 48, 49, 64, 65, 96, 97, 128)
ROWS += (129, 192, 193, 256, 257, 320, 321, 384, 385, 512, 513, 1535, 1536, 1537, 4096)
SIDES = (64, 128, 512, 704, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 8192, 11008, 14336)
SIDES += (28672, 128256)
FORMATS = (torch.float16, torch.float16, torch.bfloat16, torch.float32)
UNLISTED = [(7, 0, 80), (8, 7, 16), (8, 0, 14), (10, 0, 148), (11, 0, 20), (12, 1, 48), (9, 0, 78)]


@cache
def of_the_library():
    """The library's function, of its source: its module cannot be imported without CUDA."""
    pytest.importorskip("bitsandbytes")
    folder = Path(importlib.util.find_spec("bitsandbytes").origin).parent
    source = (folder / "backends" / "cuda" / "ops.py").read_text()
    [function] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == RULE
    ]
    function.decorator_list = []
    about = {"torch": torch, "_GEMM_4BIT_CUSTOM_FLOOR_M": 4, "_gpu_dispatch_props": lambda it: it}
    exec(compile(ast.Module([function], []), "ops.py", "exec"), about)
    return about[RULE]


def wanted(card, dtype, rows, outputs, inputs):
    """What `gemm_4bit` comes to, which asks for the rows and the blocks before."""
    if rows > MOST_ROWS or inputs % BLOCK:
        return False
    return of_the_library()(card, dtype, rows, outputs, inputs)


def cards():
    gpus = json.loads(data_path("gpus.json").read_text(encoding="utf-8"))["gpus"]
    listed = set()
    for gpu in gpus:
        major, minor = gpu["compute_capability"]
        listed.add((major, minor, gpu["multiprocessors"]))
    return sorted({*listed, *UNLISTED})


def differences(draws):
    wrong = []
    for (major, minor, count), dtype, rows, outputs, inputs in draws:
        chip = Chip((major, minor), count)
        truth = wanted((count, major, minor), dtype, rows, outputs, inputs)
        shape = (outputs, inputs)
        found = is_fused.__wrapped__(rows, shape, dtype.itemsize, dtype == torch.float16, chip)
        if found != truth:
            wrong.append((chip, dtype, rows, shape, truth))
    return wrong


@pytest.mark.parametrize("count", params([8_000, 400_000], [8_000]))
def test_the_table_says_what_the_library_does(count):
    draw = random.Random(0)
    listed = cards()
    # squares of which half a dozen rows are unpacked, and few or many are not
    draws = [((8, 0, 108), torch.bfloat16, rows, 4096, 4096) for rows in ROWS]
    draws += [((9, 0, 132), torch.bfloat16, rows, 5120, 5120) for rows in ROWS]
    for _ in range(count):
        side = 64 * draw.randint(1, 240)
        shapes = [
            (draw.choice(SIDES), draw.choice(SIDES)),
            (draw.randint(1, 16_000), side),
            (side, side),
            (side, side + draw.choice((1, 64))),
        ]
        draws.append(
            (draw.choice(listed), draw.choice(FORMATS), draw.choice(ROWS), *draw.choice(shapes))
        )
    assert differences(draws)[:5] == []


def test_inputs_that_end_within_a_block_are_unpacked():
    assert not is_fused(1, (4096, 4100), 2, False, Chip((8, 0), 108))
    assert is_fused(1, (4096, 4096), 2, False, Chip((8, 0), 108))


def test_up_to_how_many_rows_by_card():
    """Llama 3.1 8B's matrices, as everybody fine-tunes it."""
    cards = {"T4": (Chip((7, 5), 40), True), "4090": (Chip((8, 9), 128), False)}
    cards["H200"] = (Chip((9, 0), 132), False)
    most = {}
    for name, (chip, is_fp16) in cards.items():
        for shape in ((4096, 4096), (14336, 4096), (4096, 14336)):
            fused = [rows for rows in range(1, 600) if is_fused(rows, shape, 2, is_fp16, chip)]
            most[name, shape] = max(fused)
    assert [most["T4", shape] for shape in ((4096, 4096), (14336, 4096))] == [64, 128]
    assert [most["4090", shape] for shape in ((4096, 4096), (14336, 4096))] == [8, 128]
    assert most["H200", (14336, 4096)] == 32
    assert most["H200", (4096, 4096)] < 8
