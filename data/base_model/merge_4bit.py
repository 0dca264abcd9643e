"""Train adapters next to the base model in 4 bits and merge them in four ways. Writes
`merge_4bit.json`.

    python data/base_model/merge_4bit.py --hardware "2 CPU cores"

The loop, the texts, the steps and the measure are those of `quality_4bit.py`: what is merged is its
run "nf4 double".
"""

import argparse
import copy
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
from vramlab_course.finetuning import adapted, finetune

STEPS, BATCH_SIZE, CONTEXT, RANK, SCALE = 60, 4, 128, 8, 2
SEEDS = 5
RATE = 1e-2  # quality.json's best for rank 8
WINDOW = 256
BASE = Quantization("nf4", double=True, prepare=False)


def merged(trained: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The trained model, and its adapters merged in four ways.

    Before any of them writes: on some CPUs bitsandbytes packs the codes anew for that.
    """
    published, numbers = load_base_model(), load_base_model()
    narrow = load_base_model("bfloat16")
    for name, layer in trained.base_model.model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            update = layer.get_delta_weight("default")
            codes = layer.base_layer.weight
            unpacked = bitsandbytes.functional.dequantize_4bit(codes.data, codes.quant_state)
            published.get_submodule(name).weight.data += update
            narrow.get_submodule(name).weight.data += update  # the sum is rounded to bf16
            numbers.get_submodule(name).weight.data = unpacked + update
    return {
        "adapters next to the codes": trained,
        "codes as numbers": numbers,
        "published base": published,
        "published base in bf16": narrow,
        "codes": copy.deepcopy(trained).merge_and_unload(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "merge_4bit.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0 on")
    parser.add_argument("--hardware", default="CPU", help="for the record")
    args = parser.parse_args(argv)
    train = [text for i, text in enumerate(finetuning_texts("train")) if i % 10]
    held_out = finetuning_texts("held_out")
    untrained = bits_per_byte(load_base_model(quantization=BASE), held_out, stride=WINDOW)
    runs: dict[str, list[float]] = {"untrained": []}
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, bitsandbytes)}
    facts = {
        "about": "Adapters trained next to the base model in NF4 and merged in four ways, made by "
        "merge_4bit.py; bits per byte on held-out text, of each seed.",
        "hardware": args.hardware,
        "date": datetime.date.today().isoformat(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "recipe": f"{args.steps} steps × {BATCH_SIZE} × {CONTEXT} tokens, AdamW at {RATE:g}, "
        f"r = {RANK} on all linear layers, α / r = {SCALE}, bf16 autocast, "
        "NF4 with double quantization",
        "runs": runs,
    }
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        trained = adapted(load_base_model(quantization=BASE), RANK, lora_alpha=SCALE * RANK)
        finetune(trained, train, args.steps, RATE, BATCH_SIZE, CONTEXT, seed, autocast=True)
        runs["untrained"].append(round(untrained, 4))
        for name, model in merged(trained).items():
            bits = round(bits_per_byte(model, held_out, stride=WINDOW), 4)
            runs.setdefault(name, []).append(bits)
            print(name, seed, bits, flush=True)
        args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
