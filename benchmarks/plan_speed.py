"""How many recipes a plan considers a second, beside predicting each of them.

    python benchmarks/plan_speed.py [MODEL GPU GPUS SEQ_LEN]

Both run in fresh processes, so that neither finds the other's cached layers. Seconds are the
processor's own (other programs do not count). They depend on the machine; the ratio, what the
pruning is worth, hardly does. `predict` itself shares a walk through the layers among recipes that
differ in optimizer or sharding, so the ratio falls with many GPUs.
"""

import subprocess
import sys

CASES = (
    ("llama-3.1-8b", "T4", 1, 1024),
    ("polyglot-ko-1.3b", "RTX 4070", 1, 256),
    ("llama-3.1-8b", "RTX 4090", 8, 2048),
)
SETUP = """
import sys, time
from vramlab import plan, predict
from vramlab.planning.candidate import WAYS
from vramlab.planning.search import Search
from vramlab.planning.question import Question
model, gpu, gpus, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
predict(Question("gpt2", gpu).plain, gpu)
start = time.process_time()
"""
PLANNED = """
found = plan(model, gpu, gpus, seq_len=tokens, confirm=False)
taken = time.process_time() - start
first = str(found.choices[0].recipe) if found.choices else "nothing"
print(found.considered, found.predicted, taken, first)
"""
EACH = """
candidates = Search(Question(model, gpu, gpus, seq_len=tokens)).candidates
reports = [candidate.report for candidate in candidates]
best = "nothing"
for offload, tier in WAYS:
    divided = [(c, c.recipe.sharding) for c in candidates]
    ways = [c for c, sharding in divided if bool(sharding and sharding.offload) is offload]
    if fitting := [c for c in ways if c.over(tier) <= 0]:
        best = str(min(fitting, key=lambda c: c.rank).recipe)
        break
taken = time.process_time() - start
print(len(candidates), len(reports), taken, best)
"""


def run(script: str, case: tuple) -> tuple[int, int, float, str]:
    """Run `script` in a process of its own.

    Return the recipes considered, those predicted, seconds, and the fastest that fits.
    """
    words = [sys.executable, "-c", SETUP + script, *map(str, case)]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    considered, predicted, seconds, best = said.strip().split(" ", 3)
    return int(considered), int(predicted), float(seconds), best


def main() -> None:
    given = sys.argv[1:]
    cases = [(given[0], given[1], int(given[2]), int(given[3]))] if given else CASES
    for case in cases:
        considered, predicted, seconds, best = run(PLANNED, case)
        # The same space, and every recipe of it predicted, as without pruning.
        _, _, each, same = run(EACH, case)
        print(
            f"{case[0]} on {case[2]} × {case[1]}, {case[3]} tokens: {considered:,} recipes, "
            f"{predicted} predicted"
        )
        print(
            f"  {considered / seconds:,.0f} a second in {seconds:.2f} s; predicting each: "
            f"{considered / each:,.0f} a second"
        )
        print(f"  {each / seconds:.1f} times as fast; the same best recipe: {best == same}")


if __name__ == "__main__":
    main()
