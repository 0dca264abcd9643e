"""Recipes drawn at random over all knobs, each reproducible by its seed and number, held by predict
and simulate.

Run as a script it draws and prints what goes wrong, a line for each: `python tests/drawn_recipes.py
SEED COUNT [FIRST]`.
"""

import random
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError, Sharding, predict, simulate
from vramlab.recipe.knobs import python_arguments
from vramlab.recipe.options import ATTENTION, DTYPES, LOOPS, PRECISIONS
from vramlab.recipe.recipe import OPTIMIZERS
from vramlab.report.report import Report

BOUND, PHASE_BOUND = (
    0.04,
    0.05,
)  # of the simulated peak; of a phase's, or for one rank of many of the peak
CUT = (
    4  # times as much where the model has so few layers that what stands beside them is most of it
)
UNSPLIT = (
    10 << 20
)  # bytes of blocks that the allocator does not split, and of a workspace of cuBLAS
MODELS = (  # one of each kind of layer, small ones more often
    *(
        "gpt2",
        "gpt2",
        "pythia-160m",
        "opt-125m",
        "qwen3-0.6b",
        "qwen2.5-0.5b",
        "bert-base",
        "bert-base",
        "vit-base",
    ),
    *(
        "llama-3.2-1b",
        "gemma-3-270m",
        "gemma-2-2b",
        "olmo-2-1b",
        "phi-2",
        "falcon-7b",
        "smollm3-3b",
        "phi-3-mini",
    ),
    *("granite-3.3-2b", "mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"),
)
TRAINERS = ("transformers", "transformers", "transformers", "sft", "sft", "dpo", "kto", "reward")
OPTIM_ARGS = ("amsgrad=True", "momentum=0.9", "momentum=0.9,nesterov=True", "centered=True")
ENGINES = (
    *(("ddp", 0, None), ("fsdp", 2, None), ("fsdp", 3, None), ("fsdp", 3, "parameters")),
    *(("deepspeed", 1, None), ("deepspeed", 2, None), ("deepspeed", 3, None)),
    *(("deepspeed", 2, "optimizer"), ("deepspeed", 3, "optimizer"), ("deepspeed", 3, "parameters")),
    *(("deepspeed", 0, None), ("ddp", 1, None), ("tensor", 0, None), ("pipeline", 0, None)),
)


class Outcome(NamedTuple):
    """What the witnesses said of a recipe."""

    recipe: Recipe
    fault: str = ""  # "" where nothing is wrong
    error: float | None = None  # of the peak, relative; None where one of them refused


def drawn(seed: int, number: int) -> Recipe:
    """Return the recipe `number` of `seed`: the first valid one of its draws."""
    draw = random.Random(f"{seed} {number}")
    while True:
        try:
            return Recipe(**_fields(draw))
        except RecipeError:
            continue


def _fields(draw: random.Random) -> dict[str, Any]:
    pick = draw.choice
    tokens = pick((1, 2, 16, 37, 128, 256, 512))
    fields = {
        "model": pick(MODELS),
        "num_layers": pick((None, None, None, 1, 2, 3)),
        "batch_size": pick((1, 1, 2, 3, 4, 8, 32)),
        "seq_len": tokens,
        "precision": pick(PRECISIONS),
        "dtype": pick((None, None, None, *DTYPES)),
        "optim": pick(("adamw_torch", "adamw_torch", *OPTIMIZERS)),
        "optim_args": pick((None, None, None, None, *OPTIM_ARGS)),
        "task": pick((None, None, None, "sequence-classification", "masked-lm")),
        "gradient_accumulation_steps": pick((1, 1, 1, 2, 3)),
        "gradient_checkpointing": pick((False, True)),
        "attn_implementation": pick((None, None, *ATTENTION)),
        "trainer": pick(TRAINERS),
        "precompute_ref_log_probs": pick((False, False, False, True)),
        "use_liger_kernel": pick((False, False, False, True)),
        "torch_compile": draw.random() < 0.05,
        "activation_offloading": draw.random() < 0.1,
        "loop": _loop(draw),
    }
    if fields["model"] == "vit-base":
        fields["seq_len"] = None
    if pick((True, False)):
        fields |= _adapters(draw)
    if pick((True, False, False)):
        fields["sharding"] = _sharding(draw)
    if pick((True, False, False)):
        fields |= _samples(draw, tokens)
    return fields


def _loop(draw: random.Random) -> Any:
    if draw.random() < 0.6:
        return draw.choice(("trainer", "trainer", *LOOPS))
    changes = {
        "zero_grad": draw.choice(("start", "before_backward", "end")),
        "set_to_none": draw.choice((True, True, False)),
        "keep_outputs": draw.choice((False, "backward", "step", True)),
        "use_cache": draw.choice((None, True, False)),
        "foreach": draw.choice((None, None, False)),
        "max_grad_norm": draw.choice((None, 1.0)),
        "empty_cache_steps": draw.choice((None, None, 1, 2)),
    }
    return Loop.named(draw.choice(("trainer", "plain")), **changes)


def _adapters(draw: random.Random) -> dict[str, Any]:
    rare = (False, False, False, False, True)
    lora = LoRA(
        r=draw.choice((1, 4, 16, 64)),
        lora_dropout=draw.choice((0.0, 0.1)),
        target_modules=draw.choice((None, None, "all-linear")),
        bias=draw.choice(("none", "none", "all", "lora_only")),
        use_rslora=draw.choice(rare),
        modules_to_save=draw.choice((None, None, None, ("lm_head",))),
        autocast_adapter_dtype=draw.choice((True, True, False)),
        use_dora=draw.choice(rare),
        lora_bias=draw.choice(rare),
    )
    if draw.random() < 0.6:
        return {"lora": lora}
    kind, double, prepare = (
        draw.choice(("nf4", "fp4")),
        draw.choice((False, True)),
        draw.choice((False, True)),
    )
    compute = draw.choice((None, None, *DTYPES))
    return {"lora": lora, "quantization": Quantization(kind, double, compute, prepare)}


def _sharding(draw: random.Random) -> Sharding:
    engine, stage, offload = draw.choice(ENGINES)
    ranks = draw.choice((1, 2, 2, 3, 8, 64))
    return Sharding(stage, ranks, engine, offload, rank=draw.choice((0, 0, ranks - 1)))


def _samples(draw: random.Random, tokens: int) -> dict[str, Any]:
    lengths = tuple(draw.randint(1, tokens) for _ in range(draw.choice((1, 2, 3, 5))))
    kind = draw.choice(("lengths", "packing", "padding_free", "labels", "multiple"))
    labels = tuple(draw.randint(1, length) for length in lengths)
    of_kind = {
        "lengths": {"lengths": lengths},
        "packing": {"packing": True, "trainer": "sft"},
        "padding_free": {"padding_free": True, "lengths": lengths, "trainer": "sft"},
        "labels": {"lengths": lengths, "completion_lengths": labels, "trainer": "sft"},
        "multiple": {"pad_to_multiple_of": draw.choice((8, 64))},
    }[kind]
    return {"batch_size": len(lengths)} | of_kind


def held(recipe: Recipe, bound: float = BOUND, phase_bound: float = PHASE_BOUND) -> Outcome:
    """Predict and simulate `recipe`; tell what is wrong with what they say, or with how they
    refuse.
    """
    predicted, simulated = (_said(witness, recipe) for witness in (predict, simulate))
    for said in (predicted, simulated):
        if isinstance(said, str) and said:
            return Outcome(recipe, said)
    if not predicted or not simulated:
        return Outcome(recipe)
    if recipe.num_layers:
        bound, phase_bound = CUT * bound, CUT * phase_bound
    truth = simulated.peak.total
    error = predicted.peak.total / truth - 1
    if simulated.notes or predicted.reserved is None:
        return Outcome(recipe, "", error)
    if abs(error) > bound and abs(predicted.peak.total - truth) > UNSPLIT:
        return Outcome(
            recipe, f"peak {100 * error:+.2f} %: {_differing(predicted, simulated)}", error
        )
    for name, phase in simulated.phases.items():
        size, exact = predicted.phases[name].peak.total, phase.peak.total
        whole = truth if recipe.sharding else exact
        if abs(size - exact) > max(phase_bound * whole, UNSPLIT):
            text = f"{name} {100 * (size / exact - 1):+.2f} %: {_differing(predicted, simulated)}"
            return Outcome(recipe, text, error)
    return Outcome(recipe, "", error)


def _said(witness: Callable[[Recipe], Report], recipe: Recipe) -> Report | str | None:
    """Return the report, None for a refusal in one sentence, or what went wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return witness(recipe)
    except RecipeError as error:
        bare = ("AssertionError", "IndexError", "KeyError", "TypeError", "object has no attribute")
        text = str(error)
        if "\n" in text or any(word in text for word in bare):
            return f"{witness.__name__} refuses with {text[:300]!r}"
    except Exception as error:  # any other is a fault
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{witness.__name__} {type(error).__name__} {error} at {place.filename}:{place.lineno}"[
                :300
            ]
        )
    return None


def _differing(predicted: Report, simulated: Report) -> str:
    """The categories of each phase that are over a MiB apart, as predicted/simulated MiB."""
    found = []
    for name, phase in simulated.phases.items():
        sizes = dict(phase.peak.items())
        for category, size in predicted.phases[name].peak.items():
            if abs(size - sizes[category]) > 1 << 20:
                found.append(f"{name}.{category} {size >> 20}/{sizes[category] >> 20}")
    return ", ".join(found)


def line(recipe: Recipe) -> str:
    """`recipe` as one line of Python that builds it."""
    fields = python_arguments(
        recipe, Recipe("gpt2"), ("seq_len", "num_layers", "attn_implementation")
    )
    return f"Recipe({', '.join([repr(recipe.model), *fields])})"


def smaller(recipe: Recipe, fails: Callable[[Recipe], Any]) -> Recipe:
    """Return a recipe that still fails, with as many knobs as can be at their defaults."""
    usual = Recipe("gpt2")
    fields = [
        name for name in vars(usual) if name not in ("model", "shape", "seq_len", "num_layers")
    ]
    for name in fields:
        try:
            plainer = recipe.replace(**{name: getattr(usual, name)})
        except RecipeError:
            continue
        if plainer != recipe and fails(plainer):
            recipe = plainer
    return recipe


def main(seed: int, count: int, first: int = 0) -> None:
    """Hold `count` recipes and print a line for each fault, then how many there were."""
    errors, faults = [], 0
    for number in range(first, first + count):
        outcome = held(drawn(seed, number))
        if outcome.fault:
            faults += 1
            print(f"{seed} {number} {line(outcome.recipe)}\n    {outcome.fault}", flush=True)
        if outcome.error is not None:
            errors.append(abs(outcome.error))
    mean = sum(errors) / max(len(errors), 1)
    worst = max(errors, default=0)
    print(
        f"{count} drawn, {len(errors)} comparable, mean {100 * mean:.3f} %, worst "
        f"{100 * worst:.2f} %, {faults} faults"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
