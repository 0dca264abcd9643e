"""Fine-tune the base model on documentation: all weights, and LoRA by rank and target, with seeds.
Writes `quality.json`.

    python data/base_model/quality.py --hardware "2 CPU cores"

Each setting has its own learning rate, chosen with a seed apart on every tenth training topic,
which is then not trained on. What is reported is on the held-out topics and programs, which no
choice has seen. `--longer 600` also trains all weights and rank 8 for so many steps, one seed each,
at the rates that were chosen for the short runs.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import peft
import torch
import transformers
from vramlab_course.base_model import CONTEXT, bits_per_byte, finetuning_texts, held_out
from vramlab_course.finetuning import finetune, fresh

STEPS, BATCH_SIZE, TOKENS = 60, 4, 128
SEEDS, CHOOSING = (
    (0, 1, 2, 3, 4),
    5,
)  # of the runs that are reported, and of those that choose the rate
RANKS = (1, 8, 64)
SCALE = 2.0  # α / r, the same for all ranks
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIRST = {
    "full": (0, 1, 2),
    "LoRA": (2, 3, 4),
}  # of RATES: more are tried while the best is the lowest or the highest
QUERY_VALUE = "q_proj, v_proj"  # PEFT's default for Llama
MLP = "gate_proj, up_proj, down_proj"
LOWER = ((None, "all"), (8, "all-linear"), (64, "all-linear"), (8, MLP))
PROGRAM_BYTES = 10_000

Setting = tuple[int | None, str, float | None]  # rank (None: all weights), targets, α / r


def settings(ranks: tuple[int, ...] = RANKS) -> list[Setting]:
    """What is compared."""
    return [
        (None, "all", None),
        *((r, "all-linear", SCALE) for r in ranks),
        *((8, targets, SCALE) for targets in (QUERY_VALUE, MLP)),
    ]


def texts_of(documents: int | None, program_bytes: int) -> dict[str, list[str]]:
    """The texts to train on, to choose the rate by, and to report."""
    topics = finetuning_texts("train")[:documents]
    return {
        "train": [text for i, text in enumerate(topics) if i % 10],
        "tuning": topics[::10],
        "documentation": finetuning_texts("held_out")[:documents],
        "programs": held_out(program_bytes),
    }


def one(
    setting: Setting,
    rate: float,
    seed: int,
    steps: int,
    texts: Mapping[str, list[str]],
    *judged: str,
) -> dict:
    """Train once; bits per byte of each `judged` text, and how many numbers were trained."""
    r, targets, scale = setting
    where = targets if targets in ("all-linear", "all") else targets.split(", ")
    model = fresh(r, where, seed, **({"lora_alpha": scale * r} if r else {}))
    finetune(model, texts["train"], steps, rate, BATCH_SIZE, TOKENS, seed, autocast=True)
    bits = {name: round(bits_per_byte(model, texts[name], stride=CONTEXT), 4) for name in judged}
    print(setting, f"{rate:g} seed {seed}", bits, flush=True)
    return {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad), **bits}


def chosen(setting: Setting, steps: int, texts: Mapping[str, list[str]]) -> dict[float, float]:
    """Bits per byte of the texts for the choice, by rate, until the best is neither the lowest nor
    the highest tried.
    """
    wanted = list(FIRST["LoRA" if setting[0] else "full"])
    tried: dict[int, float] = {}  # by the rate's index
    while wanted:
        index = wanted.pop(0)
        tried[index] = one(setting, RATES[index], CHOOSING, steps, texts, "tuning")["tuning"]
        best = min(tried, key=tried.__getitem__)
        if not wanted and best in (min(tried), max(tried)):
            beyond = best - 1 if best == min(tried) else best + 1
            wanted = [beyond] if 0 <= beyond < len(RATES) else []
    return {RATES[index]: tried[index] for index in sorted(tried)}


def compared(
    setting: Setting, steps: int, seeds: tuple[int, ...], documents: int | None, program_bytes: int
) -> dict:
    """A setting with its best rate: mean and spread over the seeds, and what each of them found."""
    texts = texts_of(documents, program_bytes)
    tried = chosen(setting, steps, texts)
    rate = min(tried, key=tried.__getitem__)
    found = trained_at(rate, setting, steps, seeds, texts)
    return {**found, "tried": {f"{each:g}": bits for each, bits in tried.items()}}


def trained_at(
    rate: float,
    setting: Setting,
    steps: int,
    seeds: tuple[int, ...],
    texts: Mapping[str, list[str]],
) -> dict:
    """A setting at one rate: mean and spread over the seeds, and what each of them found."""
    names = ("documentation", "programs")
    runs = [one(setting, rate, seed, steps, texts, *names) for seed in seeds]
    r, targets, scale = setting
    found = {name: [run[name] for run in runs] for name in names}
    return {
        "r": r,
        "targets": targets,
        "scale": scale,
        "trained": runs[0]["trained"],
        "learning_rate": rate,
        **{name: round(mean(bits), 4) for name, bits in found.items()},
        "deviation": round(stdev(found["documentation"]), 4) if len(seeds) > 1 else 0.0,
        "seeds": found,
    }


def lower(
    steps: int,
    runs: list[dict],
    seeds: tuple[int, ...],
    texts: Mapping[str, list[str]],
    known: list[dict],
) -> list[dict]:
    """Some settings once more, at the next lower rate: those of LOWER.

    Whether fewer numbers or smaller steps forget less shows only at several rates. What is `known`
    is not run again.
    """
    found = []
    for run in runs:
        setting = (run["r"], run["targets"], run["scale"])
        if setting[:2] in LOWER:
            rate = RATES[RATES.index(run["learning_rate"]) - 1]
            again = [each for each in known if (each["r"], each["targets"]) == setting[:2]]
            found += again or [trained_at(rate, setting, steps, seeds, texts)]
    return found


def longer(steps: int, runs: list[dict], texts: Mapping[str, list[str]]) -> list[dict]:
    """All weights, and rank 8 in all linear layers, trained for `steps` steps, one seed each."""
    found = []
    for run in runs:
        if (run["r"], run["targets"]) in ((None, "all"), (8, "all-linear")):
            setting = (run["r"], run["targets"], run["scale"])
            rate = run["learning_rate"]
            bits = one(setting, rate, SEEDS[0], steps, texts, "documentation", "programs")
            found.append({"r": run["r"], "steps": steps, "learning_rate": rate, **bits})
    return found


def sweep(
    steps: int, processes: int, wanted: list[Setting], seeds: tuple[int, ...], *sizes: int | None
) -> Iterator[dict]:
    """All settings, several at a time."""
    if processes == 1:
        yield from (compared(setting, steps, seeds, *sizes) for setting in wanted)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        waiting = [pool.submit(compared, setting, steps, seeds, *sizes) for setting in wanted]
        yield from (each.result() for each in waiting)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "quality.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many, from 0 on")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument(
        "--documents", type=int, help="topics to use of each split; all of them by default"
    )
    parser.add_argument("--program-bytes", type=int, default=PROGRAM_BYTES)
    parser.add_argument("--longer", type=int, help="steps of the long runs; none by default")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hardware", default="CPU", help="for the record")
    parser.add_argument(
        "--only-lower",
        action="store_true",
        help="keep what --out has, and run only what its lower rates lack",
    )
    args = parser.parse_args(argv)
    texts = texts_of(args.documents, args.program_bytes)
    if args.only_lower:
        facts = json.loads(args.out.read_text(encoding="utf-8"))
        seeds = SEEDS[: args.seeds]
        facts["lower"] = lower(args.steps, facts["runs"], seeds, texts, facts["lower"])
        args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return
    names = ("documentation", "programs")
    base = {
        name: round(bits_per_byte(fresh(None), texts[name], stride=CONTEXT), 4) for name in names
    }
    sizes = (args.documents, args.program_bytes)
    wanted = settings(tuple(args.ranks))
    runs = list(sweep(args.steps, args.processes, wanted, SEEDS[: args.seeds], *sizes))
    facts = {
        "about": "Fine-tuning of the base model on documentation, made by quality.py; bits per "
        "byte on held-out text: "
        "means over the seeds, and the standard deviation of the documentation's.",
        "hardware": args.hardware,
        "date": datetime.date.today().isoformat(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, peft "
        f"{peft.__version__}",
        "recipe": f"{args.steps} steps × {BATCH_SIZE} × {TOKENS} tokens, AdamW, fp32 weights "
        f"under bf16 autocast, "
        f"{args.seeds} seeds, each setting at the best of the rates tried",
        "base": base,
        "runs": runs,
        "lower": lower(args.steps, runs, SEEDS[: args.seeds], texts, []),
        "longer": longer(args.longer, runs, texts) if args.longer else [],
    }
    args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
