"""What `try_fresh.py` runs in the new environment.

That has the wheel and what it brings, and nothing of the checkout.

Prints a line for each check, with its seconds. A simulated CPU step must equal the real one to the
byte.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import vramlab
from vramlab import LoRA, Quantization, Recipe, measure, plan, predict, simulate, watch

SMALL = dict(num_layers=2, seq_len=32)
RECIPES = {
    "full": Recipe("gpt2", **SMALL),
    "LoRA": Recipe("gpt2", lora=LoRA(r=8), precision="bf16-mixed", **SMALL),
    "QLoRA": Recipe("gpt2", lora=LoRA(r=8), quantization=Quantization("nf4"), **SMALL),
    "SFT": Recipe("gpt2", trainer="sft", **SMALL),
}


def is_the_wheels() -> None:
    """The package is the one of this environment."""
    assert Path(vramlab.__file__).is_relative_to(sys.prefix), vramlab.__file__


def agrees_with_formulas(name: str) -> None:
    """On a GPU the two that need none say the same, within 2 %."""
    simulated, predicted = (
        look(RECIPES[name], gpu="T4").peak.total for look in (simulate, predict)
    )
    assert abs(predicted / simulated - 1) < 0.02, (predicted, simulated)


def equals_a_real_step(name: str) -> None:
    """To the byte, in every phase and category."""
    # One timed step, since bytes do not depend on how often it is timed.
    real = measure(RECIPES[name], repeats=1)
    simulated = simulate(RECIPES[name], target="cpu")
    assert simulated.peak == real.peak, (simulated.peak, real.peak)
    for phase in real.phases:
        assert simulated.phases[phase] == real.phases[phase], phase


def runs_on_torchs_own_mode() -> None:
    """The quick fake mode fits this torch."""
    from vramlab.simulation.fake_mode import quick_mode_fits

    # Without it everything works and takes longer, which nobody would report.
    assert quick_mode_fits(), "simulations are slower: torch's private parts changed"


def watches_a_module() -> None:
    """A step of one's own, really run: 64 × 64 weights are found in full."""
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as watched:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    peak = watched.report().peak
    assert peak.parameters == 64 * 64 * 4, peak


def plans_with_a_simulation() -> None:
    found = plan("gpt2", "T4", method="lora")
    # A plan tells what it could not simulate, and ends well all the same.
    assert found.not_simulated == {}, found.not_simulated
    assert found.best.report.source == "simulated"


def check(title: str, run: Callable, *args: str) -> None:
    start = time.monotonic()
    run(*args)
    print(f"  {title}: {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    check("vramlab is the wheel's", is_the_wheels)
    check("the quick fake mode fits", runs_on_torchs_own_mode)
    for name in RECIPES:
        check(f"simulate and predict agree, {name}", agrees_with_formulas, name)
    for name in RECIPES:
        check(f"simulate equals a real CPU step to the byte, {name}", equals_a_real_step, name)
    check("watch, on a real module", watches_a_module)
    check("plan simulates its answer", plans_with_a_simulation)


if __name__ == "__main__":
    main()
