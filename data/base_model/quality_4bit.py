"""Adapters on the base model in 4 bits, beside those in fp32 and all its weights. Writes
`quality_4bit.json`.

    python data/base_model/quality_4bit.py --hardware "2 CPU cores"

The loop, the texts, the measure and the rate are those of `quality.py`, whose record gives the runs
in fp32. A seed draws the adapters and the order of the texts, the same for every base: what differs
is the base, and in the last run the type of what is not quantized.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from statistics import mean, stdev

import bitsandbytes
import peft
import torch
import transformers
from vramlab import Quantization
from vramlab_course.base_model import bits_per_byte, finetuning_texts, load_base_model
from vramlab_course.finetuning import adapted, finetune, recorded_quality, recorded_sweep

STEPS, BATCH_SIZE, CONTEXT, RANK, SCALE = 60, 4, 128, 8, 2
SEEDS = 5
RATE = 1e-2  # quality.json's best for rank 8
WINDOW = 256  # new tokens of each window that is judged, as in quality.py
# The 4-bit type, and the dtype of all else: in fp32 as prepare_model_for_kbit_training makes it, in
# bf16 as it is without that function.
BASES = {
    "nf4": (Quantization("nf4"), "float32"),
    "nf4 double": (Quantization("nf4", double=True), "float32"),
    "fp4": (Quantization("fp4"), "float32"),
    "nf4 double, all else in bf16": (Quantization("nf4", double=True), "bfloat16"),
}


def base_of(name: str) -> torch.nn.Module:
    """The base model in 4 bits, ready to be trained."""
    quantization, dtype = BASES[name]
    return load_base_model(dtype, quantization)


def one(name: str, seed: int, steps: int, train: list[str], held_out: list[str]) -> float:
    """Bits per byte on `held_out` after `steps` of training."""
    torch.manual_seed(seed)
    model = adapted(base_of(name), RANK, lora_alpha=SCALE * RANK)
    finetune(model, train, steps, RATE, BATCH_SIZE, CONTEXT, seed, autocast=True)
    return round(bits_per_byte(model, held_out, stride=WINDOW), 4)


def row(before: float, bits: list[float]) -> dict:
    """What is recorded of a base: its bits per byte untuned and tuned, with their spread."""
    return {
        "before": before,
        "after": round(mean(bits), 4),
        "deviation": round(stdev(bits), 4) if len(bits) > 1 else 0.0,
        "seeds": bits,
    }


def in_fp32(seeds: int) -> dict[str, dict]:
    """The runs of `quality.json` with all weights and with rank 8, of as many seeds."""
    sweep = recorded_sweep()
    untuned = sweep.base["documentation"]
    runs = {"full": sweep.run(None), "fp32": sweep.run(RANK)}
    return {name: row(untuned, run.seeds["documentation"][:seeds]) for name, run in runs.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "quality_4bit.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0 on")
    parser.add_argument(
        "--documents", type=int, help="topics to use of each split; all of them by default"
    )
    parser.add_argument(
        "--bases", nargs="+", default=list(BASES), help="which to run; others stay as recorded"
    )
    parser.add_argument("--hardware", default="CPU", help="for the record")
    args = parser.parse_args(argv)
    topics = finetuning_texts("train")[: args.documents]
    train = [text for i, text in enumerate(topics) if i % 10 or len(topics) == 1]
    held_out = finetuning_texts("held_out")[: args.documents]
    before = {}
    for name in args.bases:
        before[name] = round(bits_per_byte(base_of(name), held_out, stride=WINDOW), 4)
    found = {name: [] for name in args.bases}
    for seed in range(args.seeds):
        for name in args.bases:
            found[name].append(one(name, seed, args.steps, train, held_out))
            print(name, seed, before[name], found[name][-1], flush=True)
    runs = in_fp32(args.seeds)
    recorded = {} if found.keys() == BASES.keys() else recorded_quality()["runs"]
    for name in BASES:
        runs[name] = row(before[name], found[name]) if name in found else recorded[name]
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, bitsandbytes)}
    facts = {
        "about": "LoRA and QLoRA of the base model on documentation, made by quality_4bit.py; "
        "bits per byte on held-out text as in quality.json, means over the seeds.",
        "hardware": args.hardware,
        "date": datetime.date.today().isoformat(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "recipe": f"{args.steps} steps × {BATCH_SIZE} × {CONTEXT} tokens, AdamW at {RATE:g} "
        f"(0.001 for all weights), r = {RANK} on all linear layers, α / r = {SCALE}, bf16 "
        f"autocast (4-bit layers compute in the type of all else, fp32 or bf16), "
        f"{args.seeds} seeds",
        "runs": runs,
    }
    args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
