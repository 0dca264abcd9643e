"""Which products with a 4-bit weight bitsandbytes computes without unpacking it.

`data/fused_4bit.json` has its rule, which asks for the card, the shape and the format.
"""

import json
import operator
from collections.abc import Sequence
from functools import cache
from math import ceil

from ..base.data import data_path
from .gpu import Chip

BLOCK = 64  # weights that share a scale (bitsandbytes.nn.Params4bit, blocksize)
TILE = 64  # outputs that a thread block computes
COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
}
RULES = json.loads(data_path("fused_4bit.json").read_text(encoding="utf-8"))["rows"]


@cache
def is_fused(
    rows: int,
    weight: Sequence[int],
    width: int,
    is_fp16: bool,
    chip: Chip,
    block: int = BLOCK,
) -> bool:
    """Tell whether so many rows, of numbers of `width` bytes, meet a 4-bit weight as it is.

    The weight has the shape (outputs, inputs), and a scale for each `block` of its numbers.
    """
    outputs, inputs = weight
    major, minor = chip.capability
    tiles = ceil(outputs / TILE)
    facts = {
        "N": outputs,
        "K": inputs,
        "N*K": outputs * inputs,
        "K/N": inputs / outputs,
        "beyond_blocks": inputs % block,
        "rows": rows,
        "bytes": width,
        "fp16": is_fp16,
        "capability": 10 * major + minor,
        "multiprocessors": chip.multiprocessors,
        "tiles": tiles,
        "waves": tiles / chip.multiprocessors,
        "K*waves": inputs * tiles / chip.multiprocessors,
    }
    for conditions, most in RULES.items():
        if all(_holds(condition, facts) for condition in conditions.split(", ")):
            return rows <= most
    return False


def _holds(condition: str, facts: dict[str, float]) -> bool:
    name, sign, number = condition.split()
    return COMPARE[sign](facts[name], float(number))
