"""Tasks drawn at random: the tier that `plan` says, the peak simulated, and whether PyTorch's allocator holds the step.

    python benchmarks/plan_tasks.py draw TASKS.json [COUNT SEED TIER]     (adds to TASKS.json; TIER: draw until it is said)
    export LD_PRELOAD=$(python -m vramlab.measurement.stand_in build/stand_in) TRITON_LIBCUDA_PATH=$PWD/build/stand_in
    python benchmarks/plan_tasks.py run TASKS.json
    python benchmarks/plan_tasks.py show [TASKS.json]

Each task is a model, a card, a number of tokens, a method and the least tier that will do. `run` needs PyTorch's CUDA build
(`data/stand_in/README.md`): it trains the recipe on a stand-in for the card, whose memory is the limit, with expandable
segments, as the script that `plan` writes. A padded recipe takes there what rows of one length do: on the stand-in every mask
selects everything, so transformers leaves it out. The process's context is a reading of the card or its like, drawn from
`data/contexts.json`.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

from vramlab import GiB, MiB, Recipe, find_gpu, plan
from vramlab.hardware.contexts import nearest
from vramlab.planning.plan import Plan

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "tests" / "stand_in" / "plan_tasks.json"
MODELS = ("gpt2", "pythia-160m", "qwen2.5-0.5b", "llama-3.2-1b", "polyglot-ko-1.3b", "gemma-2-2b", "llama-3.2-3b",
          "qwen3-4b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b")  # fmt: skip
CARDS = ("T4", "RTX 4070", "RTX 4090", "A100 40GB", "L40S", "H100 SXM")
TOKENS = range(128, 4097, 64)
LONGEST = {"gpt2": 1024, "pythia-160m": 2048, "polyglot-ko-1.3b": 2048}
METHODS = ("full", "lora", "qlora")
TIERS = ("safe", "likely", "tight")
SECONDS = 240  # for one task


def draw(path: Path, count: int = 30, seed: int = 0, said: str = "") -> None:
    """Add `count` tasks to the list at `path`; with `said` such whose answer has that tier."""
    rng, tasks = random.Random(f"{seed}{said}"), json.loads(path.read_text()) if path.exists() else []
    wanted = len(tasks) + count
    while len(tasks) < wanted:
        model, card, tokens, method = map(rng.choice, (MODELS, CARDS, TOKENS, METHODS))
        tier = said or rng.choice(TIERS)
        if tokens > LONGEST.get(model, tokens):
            continue
        asked = {"seq_len": tokens, "method": method, "tier": tier, "offload": False}
        for confirm in (False, True) if said else (True,):  # by formula first, which is quick
            found = plan(model, card, confirm=confirm, **asked)
            if not found.choices or said not in ("", found.best.tier):
                break
        else:
            tasks.append(task_of(found, rng.choice(nearest(find_gpu(card))).size))
            print(tasks[-1]["tier"], card, found.best.recipe, flush=True)
            path.write_text(lines(tasks))


def task_of(found: Plan, context: int) -> dict:
    """What is to be run beside a context of so many bytes, and what `plan` said of it."""
    best = found.best
    recipe = best.recipe.replace(gradient_accumulation_steps=min(2, best.recipe.gradient_accumulation_steps))
    return {
        "card": found.question["gpu"],
        "tier": best.tier,
        "usable": found.usable,
        "context": context,
        "simulated": best.report.allocated,
        "recipe": {name: value for name, value in recipe.to_dict().items() if value is not None},
    }


def run(path: Path) -> None:
    """Train each task's recipe on the stand-in for its card."""
    tasks = json.loads(path.read_text())
    for task in tasks:
        if "allocated" not in task:
            task |= one(task)
            path.write_text(lines(tasks))
            print(task["tier"], task["card"], task.get("allocated", "failed"), flush=True)


def one(task: dict) -> dict:
    """The allocator's peaks in bytes, None where it had no more, of a process of its own; nothing if that takes too long."""
    card = find_gpu(task["card"])
    said = {"CAPABILITY": "".join(map(str, card.compute_capability)), "MULTIPROCESSORS": card.multiprocessors}
    said |= {"BYTES": task["usable"], "CONTEXT": task["context"], "NAME": card.name}
    environment = {f"STAND_IN_{name}": str(value) for name, value in said.items()}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, str(ROOT / "tests" / "stand_in" / "runs.py"), "-"]
    given = json.dumps({"recipe": task["recipe"]})
    try:
        answer = subprocess.run(
            command, input=given, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {}
    if answer.returncode:
        print(answer.stderr[-2000:], file=sys.stderr)
        return {}
    return json.loads(answer.stdout.splitlines()[-1])


def lines(tasks: list[dict]) -> str:
    """JSON with a line for each task."""
    return "[\n" + ",\n".join("  " + json.dumps(task) for task in tasks) + "\n]\n"


def show(path: Path = RESULT) -> None:
    print("tier   | card besides context | simulated | allocated | reserved beyond it | task")
    tasks = [task for task in json.loads(path.read_text()) if "allocated" in task]
    for task in tasks:
        sizes = [f"{size / GiB:6.2f}" for size in (task["usable"] - task["context"], task["simulated"])]
        held = "out of memory     "
        if task["allocated"]:
            held = f"{task['allocated'] / GiB:6.2f} | {(task['reserved'] - task['allocated']) / MiB:5.0f} MiB"
        print(" | ".join([f"{task['tier']:6}", *sizes, held, f"{task['card']}: {Recipe(**task['recipe'])}"]))
    for tier in TIERS:
        of_tier = [task for task in tasks if task["tier"] == tier]
        print(f"{tier}: {len(of_tier)} tasks, {sum(not task['allocated'] for task in of_tier)} out of memory")
    beyond = [(task["reserved"] - task["allocated"]) / MiB for task in tasks if task["allocated"]]
    apart = [abs(task["simulated"] / task["allocated"] - 1) for task in tasks if task["allocated"]]
    print(f"reserved beyond allocated: median {median(beyond):.0f} MiB, at most {max(beyond):.0f}")
    print(f"simulated against allocated: mean {mean(apart):.3%}, at most {max(apart):.3%}")


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    given = [Path(value) if value.endswith(".json") else int(value) if value.isdigit() else value for value in rest]
    {"draw": draw, "run": run, "show": show}[mode](*given)
