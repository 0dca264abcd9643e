"""How many bits per byte the base model needs with its layers' matrices in each format. Writes
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
    "as trained": lambda matrix: matrix,
    "int4": lambda matrix: absmax(matrix, 4, 64).dequantize(),
    "NF4": lambda matrix: blockwise(matrix, NF4, 64).dequantize(),
    "NVFP4": nvfp4,
    "MXFP4": mxfp4,
    "FP8": fp8,
}


def by_piece(texts: list[str]) -> dict[str, list[float]]:
    """Bits per byte of each piece of the texts, by format."""
    found = {}
    for name, way in WAYS.items():
        model = load_base_model()
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.dim() == 2 and "embed" not in key:
                    p.copy_(way(p))
        found[name] = [round(bits, 6) for bits in bits_by_piece(model, texts).tolist()]
        print(name, sum(found[name]) / len(found[name]), flush=True)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "formats.json")
    args = parser.parse_args(argv)
    facts = {
        "about": "Bits per byte of each piece of 600 characters of the held-out programs, with the "
        "layers' matrices of the base model in each format; made by formats.py.",
        "hardware": "CPU",
        "date": datetime.date.today().isoformat(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "bits per byte": by_piece(held_out()),
    }
    args.out.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
