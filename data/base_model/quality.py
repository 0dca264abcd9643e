"""Fine-tune the base model on documentation: all weights, and LoRA by rank and by target. Writes `quality.json`.

    python data/base_model/quality.py --hardware "2 CPU cores"

Learning rates are chosen on every tenth training topic, which is then not trained on; what is reported is on the
held-out topics and programs, which no choice has seen.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from vramlab_course.base_model import CONTEXT, bits_per_byte, finetuning_texts, held_out
from vramlab_course.finetuning import ALPHA, finetune, fresh

STEPS, BATCH_SIZE, SEED = 100, 4, 0
RANKS = (1, 2, 4, 8, 16, 32, 64)
TRIED = {"full": (3e-4, 1e-3, 3e-3), "LoRA": (3e-3, 1e-2, 3e-2)}
QUERY_VALUE = "q_proj, v_proj"  # PEFT's default for Llama
MLP = "gate_proj, up_proj, down_proj"
PROGRAM_BYTES = 20_000


def one(r: int | None, targets: str, learning_rate: float, texts: dict[str, list[str]], steps: int) -> dict:
    """Train once and evaluate; bits per byte of each held-out text."""
    model = fresh(r, targets if targets in ("all-linear", "all") else targets.split(", "), SEED)
    finetune(model, texts["train"], steps, learning_rate, BATCH_SIZE, seed=SEED, autocast=True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bits = {name: round(bits_per_byte(model, texts[name], stride=CONTEXT), 4) for name in texts if name != "train"}
    print(r or "full", targets, f"{learning_rate:g}", bits, flush=True)
    return {"r": r, "targets": targets, "trained": trained, "learning_rate": learning_rate, **bits}


def tried(r: int | None, targets: str, texts: dict[str, list[str]], steps: int) -> list[dict]:
    """A run for each rate, the best one first, by the texts kept for that choice."""
    runs = [one(r, targets, rate, texts, steps) for rate in TRIED["LoRA" if r else "full"]]
    return sorted(runs, key=lambda run: run["tuning"])


def sweep(steps: int, ranks=RANKS, documents: int | None = None, program_bytes: int = PROGRAM_BYTES) -> dict:
    """All runs. The rate that is best at r = 8 is used for all adapters: alpha / r takes the rank's part in it out."""
    topics = finetuning_texts("train")[:documents]
    texts = {
        "train": [text for i, text in enumerate(topics) if i % 10],
        "tuning": topics[::10],
        "documentation": finetuning_texts("held_out")[:documents],
        "programs": held_out(program_bytes),
    }
    base = fresh(None)
    names = ("documentation", "programs")
    result = {"base": {name: round(bits_per_byte(base, texts[name], stride=CONTEXT), 4) for name in names}}
    rates = [tried(None, "all", texts, steps), tried(8, "all-linear", texts, steps)]
    full, middle = rates[0][0], rates[1][0]
    result["tried"] = [{key: run[key] for key in ("r", "learning_rate", "tuning")} for runs in rates for run in runs]
    runs = [full, middle]
    runs += [one(r, "all-linear", middle["learning_rate"], texts, steps) for r in ranks if r != 8]
    runs += [one(8, targets, middle["learning_rate"], texts, steps) for targets in (QUERY_VALUE, MLP)]
    runs.sort(key=lambda run: (run["targets"], run["r"] or 0))
    result["runs"] = [{key: value for key, value in run.items() if key != "tuning"} for run in runs]
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "quality.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--documents", type=int, help="topics to use of each split; all of them by default")
    parser.add_argument("--program-bytes", type=int, default=PROGRAM_BYTES)
    parser.add_argument("--hardware", default="CPU", help="for the record")
    args = parser.parse_args(argv)
    facts = {
        "about": "Fine-tuning of the base model on documentation, made by quality.py; bits per byte on held-out text.",
        "hardware": args.hardware,
        "date": datetime.date.today().isoformat(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}",
        "recipe": f"{args.steps} steps × {BATCH_SIZE} × {CONTEXT} tokens, AdamW, fp32 weights under bf16 autocast, "
        f"lora_alpha {ALPHA}, seed {SEED}",
        "rates tried": {name: list(rates) for name, rates in TRIED.items()},
        **sweep(args.steps, args.ranks, args.documents, args.program_bytes),
    }
    args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
