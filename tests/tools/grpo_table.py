"""What GRPO takes, as the calculator's page shows it: simulated, since no formula knows what is
sampled, and stored in `site/grpo.json`, since a page cannot simulate.

    python tests/tools/grpo_table.py    # simulates all of it again: two minutes
"""

import json
from typing import Any

from settings import ROOT
from vramlab import GiB, LoRA, Recipe, RecipeError, Rollouts, find_gpu, simulate
from vramlab.hardware.gpu import usable_memory
from vramlab.report.report import Interval, Report, installed

STORED = ROOT / "site" / "grpo.json"
MODELS = ("qwen3-0.6b", "qwen3-4b", "llama-3.1-8b")
CARDS = ("RTX 4090", "H100 SXM")
# What samples, and the fields of `Rollouts` that say so.
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vLLM on the card, asleep": {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": True,
    },
    "vLLM on a server": {"use_vllm": True, "vllm_mode": "server"},
}
LIBRARIES = ("torch", "transformers", "trl", "peft")


def recipe_of(model: str, engine: str) -> Recipe:
    """Return GRPO with LoRA: one group of 8 completions in a step, sampled by `engine`."""
    return Recipe(
        model,
        8,
        precision="bf16-mixed",
        optim="adamw_torch_fused",
        dtype="bfloat16",
        gradient_checkpointing=True,
        lora=LoRA(r=16, target_modules="all-linear"),
        trainer="grpo",
        rollouts=Rollouts(8, 512, 1024, **ENGINES[engine]),
    )


def asked(model: str, engine: str, card: str) -> Report | str:
    """Return the simulation, or why the engine does not start there."""
    try:
        return simulate(recipe_of(model, engine), gpu=card)
    except RecipeError as error:
        return error.allowed


def answer_of(report: Report | str) -> list[Any] | str:
    """Return what is stored of an answer: the phase of the peak, its bytes, the process's."""
    if isinstance(report, str):
        return report
    need = report.process
    return [report.peak_phase, report.peak.total, need.low, need.value, need.high]


def stored() -> dict[str, Any]:
    """Return the stored answers by model, engine and card, and the versions that gave them."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def grpo_answers() -> str:
    """Return the stored answers as a Markdown table, each with its tier."""
    found = stored()
    lines = [f"| model | sampled by | {' | '.join(CARDS)} |", "|---" * (len(CARDS) + 2) + "|"]
    for model in MODELS:
        for engine in ENGINES:
            answers = found["answers"][model][engine]
            cells = [_cell(answers[card], card) for card in CARDS]
            lines.append(f"| {model} | {engine} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join(lines) + f"\n\nSimulated with {versions}.\n"


def _cell(answer: list[Any] | str, card: str) -> str:
    if isinstance(answer, str):
        return answer
    phase, _, *process = answer
    need = Interval(*process)
    tier = need.verdict(usable_memory(find_gpu(card)))
    return f"{need.value / GiB:.1f} {tier} ({phase})"


def main() -> None:
    """Simulate every answer, and store them."""
    answers: dict[str, Any] = {}
    for model in MODELS:
        answers[model] = {}
        for engine in ENGINES:
            answers[model][engine] = {}
            for card in CARDS:
                answers[model][engine][card] = answer_of(asked(model, engine, card))
                print(model, engine, card, answers[model][engine][card], flush=True)
    versions = {name: (installed(name) or "").partition("+")[0] for name in LIBRARIES}
    text = json.dumps({"versions": versions, "answers": answers}, indent=1)
    STORED.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
