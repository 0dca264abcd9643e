"""Adapters on the base model in fp32 and in 4 bits, and all its weights, trained alike. Writes
`quality_4bit.json`.

    python data/base_model/quality_4bit.py --hardware "2 CPU cores"

All runs see the same batches of documentation. Those with adapters have the same learning rate and
start from the same adapters; what differs is the base.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import bitsandbytes
import peft
import torch
import transformers
from vramlab import Quantization
from vramlab_course.base_model import bits_per_byte, finetuning_texts, load_base_model
from vramlab_course.finetuning import ALPHA, adapted, finetune

STEPS, BATCH_SIZE, CONTEXT, RANK, LEARNING_RATE, SEED = 150, 4, 256, 8, 3e-3, 0
FULL_RATE = 1e-3  # all weights want smaller steps than a few new ones
BASES = {
    "fp32": None,
    "nf4": Quantization("nf4"),
    "nf4 double": Quantization("nf4", double=True),
    "fp4": Quantization("fp4"),
}


def one(
    quantization: Quantization | None,
    rank: int | None,
    steps: int,
    train: list[str],
    held_out: list[str],
) -> dict[str, float]:
    """Bits per byte on `held_out` before and after `steps` of training; `rank` None trains all
    weights.
    """
    model = load_base_model(quantization=quantization)
    if quantization:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    before = bits_per_byte(model, held_out)
    torch.manual_seed(SEED)
    model = model if rank is None else adapted(model, rank)
    finetune(model, train, steps, LEARNING_RATE if rank else FULL_RATE, BATCH_SIZE, CONTEXT, SEED)
    return {"before": round(before, 4), "after": round(bits_per_byte(model, held_out), 4)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "quality_4bit.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--documents", type=int, help="topics to use of each split; all of them by default"
    )
    parser.add_argument("--hardware", default="CPU", help="for the record")
    args = parser.parse_args(argv)
    texts = [finetuning_texts(split)[: args.documents] for split in ("train", "held_out")]
    runs = {}
    for name, quantization, rank in [
        ("full", None, None),
        *((name, q, RANK) for name, q in BASES.items()),
    ]:
        runs[name] = one(quantization, rank, args.steps, *texts)
        print(name, runs[name], flush=True)
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, bitsandbytes)}
    facts = {
        "about": "LoRA and QLoRA of the base model on documentation, made by quality_4bit.py; "
        "bits per byte, held-out text.",
        "hardware": args.hardware,
        "date": datetime.date.today().isoformat(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "recipe": f"{args.steps} steps × {BATCH_SIZE} × {CONTEXT} tokens, AdamW at "
        f"{LEARNING_RATE:g} ({FULL_RATE:g} for all "
        f"weights), r = {RANK} on all linear layers, lora_alpha {ALPHA}, computed in fp32, seed "
        f"{SEED}",
        "runs": runs,
    }
    args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
