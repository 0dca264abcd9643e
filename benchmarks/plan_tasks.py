"""Tasks drawn at random: what `plan` says, and whether PyTorch's allocator holds the step.

    # Adds to TASKS.json; with TIER it draws until that is said.
    python benchmarks/plan_tasks.py draw TASKS.json [COUNT SEED TIER]
    export LD_PRELOAD=$(python -m vramlab.measurement.stand_in build/stand_in)
    export TRITON_LIBCUDA_PATH=$PWD/build/stand_in
    python benchmarks/plan_tasks.py run TASKS.json
    python benchmarks/plan_tasks.py show [TASKS.json]

Each task is a model, a card, a number of tokens, a method and the least tier that will do. `run`
needs PyTorch's CUDA build (`data/stand_in/README.md`): it trains the recipe on a stand-in for the
card, whose memory is the limit, with expandable segments, as the script that `plan` writes. Every
mask selects everything there, so transformers would leave a padded batch's out: it is made to keep
it. The process's context is a reading of the card or its like, drawn from `data/contexts.json`.

    # Goes on where it was stopped; LD_PRELOAD and TRITON_LIBCUDA_PATH as above.
    python benchmarks/plan_tasks.py questions OUT.json [COUNT SEED]
    python benchmarks/plan_tasks.py answers [OUT.json]

`questions` asks `plan` by itself, as people do, for all methods or one, also for TRL's trainer, and
trains the best answer with rows of one length and with padded ones, or those that it joins; what
could not run is tried again by the next call. The tokens are drawn as their logarithm, 128 to
4,096: where texts are short the answers have micro-batches of several samples, which can be padded.
In two of three questions the lengths of the samples are known, so that rows may be packed or
joined. Triton's kernels find the driver by TRITON_LIBCUDA_PATH, the stand-in's folder. Of the first
ten with an answer it also tries every recipe of the space: is there one that fits as surely, is as
sound, and faster by more than the error that is stated?
"""

import json
import os
import random
import subprocess
import sys
from math import log2
from pathlib import Path
from statistics import mean, median

from vramlab import GiB, MiB, Recipe, find_gpu, plan
from vramlab.hardware.contexts import nearest
from vramlab.planning.candidate import WAYS, Choice
from vramlab.planning.plan import Plan
from vramlab.planning.question import Question
from vramlab.planning.search import Search

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "tests" / "stand_in" / "plan_tasks.json"
ANSWERS = ROOT / "tests" / "stand_in" / "plan_questions.json"
MODELS = ("gpt2", "pythia-160m", "qwen2.5-0.5b", "llama-3.2-1b", "polyglot-ko-1.3b", "gemma-2-2b",
    "llama-3.2-3b",
          "qwen3-4b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b")  # fmt: skip
CARDS = ("T4", "RTX 4070", "RTX 4090", "A100 40GB", "L40S", "H100 SXM")
TOKENS = range(128, 4097, 64)
LONGEST = {"gpt2": 1024, "pythia-160m": 2048, "polyglot-ko-1.3b": 2048}
METHODS = ("full", "lora", "qlora")
TIERS = ("safe", "likely", "tight")
SECONDS = 900  # for one task
EXHAUSTIVE = 10  # questions
SAMPLES = 200  # of a data set whose lengths are known


def draw(path: Path, count: int = 30, seed: int = 0, said: str = "") -> None:
    """Add `count` tasks to the list at `path`; with `said` such whose answer has that tier."""
    rng = random.Random(f"{seed}{said}")
    tasks = json.loads(path.read_text()) if path.exists() else []
    wanted = len(tasks) + count
    while len(tasks) < wanted:
        model, card, tokens, method = map(rng.choice, (MODELS, CARDS, TOKENS, METHODS))
        tier = said or rng.choice(TIERS)
        if tokens > LONGEST.get(model, tokens):
            continue
        asked = {"seq_len": tokens, "method": method, "tier": tier, "offload": False}
        # By formula first, which is quick.
        passes = (False, True) if said else (True,)
        for confirm in passes:
            found = plan(model, card, confirm=confirm, **asked)
            if not found.choices or said not in ("", found.best.tier):
                break
        # Only where no pass of the loop broke off: by formula, and confirmed, it is the tier that
        # was asked for.
        else:
            tasks.append(task_of(found, rng.choice(nearest(find_gpu(card))).size))
            print(tasks[-1]["tier"], card, found.best.recipe, flush=True)
            # Written after each, as the next ones may be drawn for hours.
            path.write_text(lines(tasks))


def task_of(found: Plan, context: int, recipe: Recipe | None = None) -> dict:
    """Return what is to be run beside a context of so many bytes, and what `plan` said.

    That is the best answer, or the recipe given, with two micro-batches a step at most.
    """
    best = found.best
    recipe = recipe or best.recipe
    # Two micro-batches show what one leaves to the next; more only take time.
    recipe = recipe.replace(gradient_accumulation_steps=min(2, recipe.gradient_accumulation_steps))
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
    """Return the allocator's peaks in bytes, of a process of its own; None where it had no more.

    {} if the process takes too long, or fails.
    """
    card = find_gpu(task["card"])
    said = {
        "CAPABILITY": "".join(map(str, card.compute_capability)),
        "MULTIPROCESSORS": card.multiprocessors,
    }
    said |= {"BYTES": task["usable"], "CONTEXT": task["context"], "NAME": card.name}
    # The stand-in's libraries read these when the process starts.
    environment = {f"STAND_IN_{name}": str(value) for name, value in said.items()}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, str(ROOT / "tests" / "stand_in" / "runs.py"), "-"]
    given = json.dumps({"recipe": task["recipe"]})
    try:
        answer = subprocess.run(
            command,
            input=given,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {}
    if answer.returncode:
        # The end of it, where Python's traceback says what went wrong.
        print(answer.stderr[-2000:], file=sys.stderr)
        return {}
    return json.loads(answer.stdout.splitlines()[-1])


def questions(path: Path, count: int = 60, seed: int = 2027) -> None:
    """Ask `count` questions, of which `path` has the first, and train each best answer."""
    # Two generators, so that how many runs an answer has does not move the next question.
    rng = random.Random(seed)
    contexts = random.Random(f"{seed} contexts")
    found = json.loads(path.read_text()) if path.exists() else []
    for index in range(count):
        model, card = map(rng.choice, (MODELS, CARDS))
        tokens = TOKENS.step * round(2 ** rng.uniform(1, 6))
        asked = {
            "seq_len": min(tokens, LONGEST.get(model, tokens)),
            "method": rng.choice(("any", *METHODS)),
            "trainer": rng.choice(("transformers", "transformers", "sft")),
            "lengths": drawn_lengths(rng, tokens),
            # Of what goes to the host only activations: DeepSpeed would really fill its memory.
            "engines": ("ddp",),
        }
        # Drawn all the same, so that the generator stands where it stood then.
        if index < len(found):
            again(found[index], path, found)
            continue
        answer = plan(model, card, **asked)
        entry = {"model": model, "card": card, "asked": asked, "runs": []}
        if answer.choices:
            best = answer.best
            entry |= {"tier": best.tier, "method": best.method, "simulated": best.report.allocated}
            for recipe in rows_of(Question(model, card, **asked), best.recipe):
                task = task_of(answer, contexts.choice(nearest(find_gpu(card))).size, recipe)
                entry["runs"].append(task | one(task))
            if sum("faster" in each for each in found) < EXHAUSTIVE:
                entry["faster"] = faster(Question(model, card, **asked), best)
        found.append(entry)
        path.write_text(lines(found))
        held = [run.get("allocated", "failed") for run in entry["runs"]]
        print(
            index,
            entry.get("tier", "nothing fits"),
            card,
            model,
            asked,
            held,
            entry.get("faster"),
            flush=True,
        )


def again(entry: dict, path: Path, found: list[dict]) -> None:
    """Train once more what a question's answer could not step with before."""
    for run in entry["runs"]:
        if "allocated" not in run:
            run |= one(run)
            path.write_text(lines(found))
            print(
                "again", entry["card"], entry["model"], run.get("allocated", "failed"), flush=True
            )


def drawn_lengths(rng: random.Random, longest: int) -> list[int] | None:
    """Return the tokens of a data set's samples in two of three questions, None in the others."""
    drawn = [round(2 ** rng.uniform(5, log2(longest))) for _ in range(SAMPLES)]
    return drawn if rng.random() < 2 / 3 else None


def rows_of(question: Question, recipe: Recipe) -> list[Recipe]:
    """The recipe with rows of one length, and with padded ones where it can have them."""
    padded = question.lengths_of(recipe)
    # Rows that are joined have no padding, so their lengths are what they train with.
    lengths = (None, padded) if padded and not recipe.joins else (recipe.lengths,)
    return [recipe.replace(lengths=each) for each in lengths]


def faster(question: Question, best: Choice) -> dict:
    """Return how many recipes of the answer's method were tried, and how much faster one was.

    `least` is the least seconds of those that are as good a way as `best`, over its own: below 1 by
    more than its error, the search has missed one.
    """
    error = best.time.seconds / best.time.low
    tried = 0
    least = 1.0
    for candidate in Search(question).candidates:
        # Other methods train something else, so none of them counts as missed.
        if candidate.method != best.method:
            continue
        tried += 1
        tier = next((name for name in TIERS if candidate.fits(name)), "")
        # WAYS is in order of preference: a faster recipe by a worse way is none that was missed.
        way = (candidate.kind[1], candidate.kind[2], tier)
        if tier and WAYS.index(way) <= best.order[0]:
            least = min(least, candidate.rank[0] / best.time.seconds)
    return {"tried": tried, "least": round(least, 4), "error": round(error, 3)}


def answers(path: Path = ANSWERS) -> None:
    """What became of the questions."""
    found = json.loads(path.read_text())
    for tier in TIERS:
        of_tier = [entry for entry in found if entry.get("tier") == tier]
        runs = [run for entry in of_tier for run in entry["runs"]]
        stepped = [run for run in runs if "allocated" in run]
        joins = [Recipe(**run["recipe"]).joins for run in stepped]
        joined = sum(joins)
        has_lengths = ["lengths" in run["recipe"] for run in stepped]
        # Joined and packed rows have lengths too, and no padding.
        padded = sum(has and not one_row for has, one_row in zip(has_lengths, joins, strict=True))
        died = sum(run["allocated"] is None for run in stepped)
        print(
            f"{tier}: {len(of_tier)} answers, {len(stepped)} steps run, {padded} of them padded, "
            f"{joined} joined or packed, {died} out of memory; {len(runs) - len(stepped)} not run"
        )
    print(f"nothing fits: {sum('tier' not in entry for entry in found)} of {len(found)} questions")
    tried = [entry["faster"] for entry in found if "faster" in entry]
    # Faster by less than the estimate's own error is no difference.
    missed = [each for each in tried if each["least"] < 1 / each["error"]]
    recipes = sum(each["tried"] for each in tried)
    print(
        f"exhaustive: {len(tried)} questions, {recipes:,} recipes, {len(missed)} with one faster "
        f"by more than the error"
    )


def lines(tasks: list[dict]) -> str:
    """JSON with a line for each task."""
    return "[\n" + ",\n".join("  " + json.dumps(task) for task in tasks) + "\n]\n"


def show(path: Path = RESULT) -> None:
    print("tier   | card besides context | simulated | allocated | reserved beyond it | task")
    tasks = [task for task in json.loads(path.read_text()) if "allocated" in task]
    for task in tasks:
        sizes = [
            f"{size / GiB:6.2f}" for size in (task["usable"] - task["context"], task["simulated"])
        ]
        held = "out of memory     "
        if task["allocated"]:
            held = (
                f"{task['allocated'] / GiB:6.2f} | "
                f"{(task['reserved'] - task['allocated']) / MiB:5.0f} MiB"
            )
        print(
            " | ".join(
                [f"{task['tier']:6}", *sizes, held, f"{task['card']}: {Recipe(**task['recipe'])}"]
            )
        )
    for tier in TIERS:
        of_tier = [task for task in tasks if task["tier"] == tier]
        print(
            f"{tier}: {len(of_tier)} tasks, {sum(not task['allocated'] for task in of_tier)} out "
            f"of memory"
        )
    beyond = [(task["reserved"] - task["allocated"]) / MiB for task in tasks if task["allocated"]]
    apart = [abs(task["simulated"] / task["allocated"] - 1) for task in tasks if task["allocated"]]
    print(f"reserved beyond allocated: median {median(beyond):.0f} MiB, at most {max(beyond):.0f}")
    print(f"simulated against allocated: mean {mean(apart):.3%}, at most {max(apart):.3%}")


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    given = [
        Path(value) if value.endswith(".json") else int(value) if value.isdigit() else value
        for value in rest
    ]
    {"draw": draw, "run": run, "show": show, "questions": questions, "answers": answers}[mode](
        *given
    )
