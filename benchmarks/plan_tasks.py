"""Tasks drawn at random: the tier that `plan` says, the peak simulated, and whether the step runs in the card's memory.

    python benchmarks/plan_tasks.py [COUNT SEED]

Each task is a model, a card, a number of tokens and a tier; the plan is by formula. Its recipe is then simulated, and the
requests run through the model of the allocator with expandable segments, limited to what the card has besides a context
of the likely size. No GPU and no stand-in for one ran: both are models, the allocator's after PyTorch's source.
"""

import random
import sys

from vramlab import GiB, find_gpu, plan
from vramlab.hardware.allocator import AllocatorError, _replay
from vramlab.simulation.simulate import trace
from vramlab_course.expandable import ExpandableAllocator

MODELS = ("gpt2", "pythia-160m", "qwen2.5-0.5b", "llama-3.2-1b", "polyglot-ko-1.3b", "gemma-2-2b", "llama-3.2-3b",
          "qwen3-4b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b")  # fmt: skip
CARDS = ("T4", "RTX 4070", "RTX 4090", "A100 40GB", "L40S", "H100 SXM")
TOKENS = (256, 512, 1024, 2048, 4096)
METHODS = ("full", "lora", "qlora")
TIERS = ("safe", "likely", "tight")


def runs(log: list, limit: int) -> bool:
    """Whether the allocator serves every request of `log` in `limit` bytes."""
    try:
        _replay(log, ExpandableAllocator(limit=limit))
    except AllocatorError:
        return False
    return True


def main(count: int = 30, seed: int = 0) -> None:
    draw, done = random.Random(seed), 0
    print("tier said | likely GiB | peak simulated | card besides context | runs | task", flush=True)
    while done < count:
        model, card, tokens, method, tier = map(draw.choice, (MODELS, CARDS, TOKENS, METHODS, TIERS))
        if model == "gpt2" and tokens > 1024:
            continue
        found = plan(model, card, seq_len=tokens, method=method, tier=tier, offload=False, confirm=False)
        if not found.choices:
            continue
        best, done = found.best, done + 1
        steps = min(2, best.recipe.gradient_accumulation_steps)
        gpu = find_gpu(card)
        log = trace(best.recipe.replace(gradient_accumulation_steps=steps), "cuda", gpu).log
        peak, room = _replay(log, ExpandableAllocator()).allocated, found.usable - gpu.context_interval.value
        sizes = " | ".join(f"{size / GiB:6.2f}" for size in (best.needs.value, peak, room))
        outcome = "yes" if runs(log, room) else "OUT"
        print(
            f"{best.tier:6} | {sizes} | {outcome} | {tier} {method} {model} {tokens} {card}: {best.recipe}", flush=True
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
