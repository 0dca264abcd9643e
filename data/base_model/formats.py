"""How many more bits per byte the base model needs with its layers' matrices in each format. Writes
`formats.json`, which chapter 01 shows.

    python data/base_model/formats.py

Every piece of 600 characters of the held-out programs is predicted by itself, so that formats are
compared piece by piece. It takes three minutes.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from vramlab_course.base_model import held_out, load_base_model
from vramlab_course.chapters.chapter_01 import bits_by_piece
from vramlab_course.quantizers import NF4, absmax, blockwise, fp8, mxfp4, nvfp4

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int4": lambda matrix: absmax(matrix, 4, 64).dequantize(),
    "NF4": lambda matrix: blockwise(matrix, NF4, 64).dequantize(),
    "NVFP4": nvfp4,
    "MXFP4": mxfp4,
    "FP8": fp8,
}


def costs(texts: list[str]) -> tuple[list[float], dict[str, list[float]]]:
    """Bits per byte of each piece of the texts, and by format how many per cent more they are.

    The per cent are of the mean over all pieces.
    """
    base = bits_by_piece(load_base_model(), texts)
    found = {}
    for name, way in WAYS.items():
        model = load_base_model()
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.dim() == 2 and "embed" not in key:
                    p.copy_(way(p))
        more = 100 * (bits_by_piece(model, texts) - base) / base.mean()
        found[name] = [round(each, 4) for each in more.tolist()]
        print(name, more.mean().item(), flush=True)
    return [round(each, 4) for each in base.tolist()], found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "formats.json")
    args = parser.parse_args(argv)
    trained, more = costs(held_out())
    facts = {
        "about": "Bits per byte of each piece of 600 characters of the held-out programs, and how "
        "many per cent more (of their mean) with the base model's layers in a format.",
        "hardware": "CPU",
        "date": datetime.date.today().isoformat(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "as trained": trained,
        "more": more,
    }
    args.out.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
