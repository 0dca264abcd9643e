"""The recipes on which `predict` is held against `simulate`: every model of the catalogue, every setting, spread out.

Drawn once with a fixed seed and not chosen by how well they fit. Each model gets six recipes, and two more whose weights
have a format of their own under autocast; for every setting the draws go through a shuffled deck of its values, so that
each value comes up equally often.

Run as a script it simulates them all, which takes minutes, and writes `formulas/grid.jsonl`: to be done when simulate is
meant to say something else, such as after a new version of a library.
"""

import json
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError
from vramlab.recipe import liger, lora_modules
from vramlab.recipe.shapes import model_names, read_shape

FOLDER = Path(__file__).parent / "formulas"
RECIPES_A_MODEL, OVER_A_MODEL = 6, 2
LATER = (
    *("deepseek_v3", "gemma3_text", "glm4_moe", "gpt_oss", "granite", "olmo2", "olmo3", "phi3", "qwen3_moe", "smollm3"),
)
OVER = ("bf16-mixed over bfloat16", "bf16-mixed over bfloat16", "fp16-mixed over float16", "bf16-mixed over float32")
PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")
OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_32bit"),
    *("lion_8bit", "sgd", "adagrad", "rmsprop", "adafactor", "adamw_torch", "adamw_torch"),
)
# batch and tokens: from a few tokens to more than fit any card; fake tensors cost nothing
SIZES = ((1, 32), (2, 128), (4, 256), (8, 128), (4, 512), (16, 64), (1, 1024), (8, 512), (32, 128), (2, 2048))
ADAPTERS = (
    *(None, None, None),
    dict(lora=LoRA()),
    dict(lora=LoRA(r=16, lora_dropout=0.05, target_modules="all-linear")),
    dict(lora=LoRA(r=32), quantization=Quantization("nf4", double=True)),
    dict(lora=LoRA(r=8, target_modules="all-linear"), quantization=Quantization("fp4", prepare=False)),
    dict(lora=LoRA(r=4, autocast_adapter_dtype=False)),
)
LOOPS = (
    *("trainer", "trainer", "plain", "optimizer_in_backward"),
    Loop.named("plain", zero_grad="before_backward"),
    Loop.named("trainer", set_to_none=False),
    Loop.named("trainer", keep_outputs=True, use_cache=True, max_grad_norm=None),
    Loop.named("plain", foreach=False),
)

# TRL's fused head: fewer and more tokens than a tile's 4,096, in one tile or several of 32,768 columns
SFT_SIZES = ((1, 32), (2, 128), (8, 512), (1, 2048), (4, 1024), (5, 1024), (16, 512), (3, 2048), (32, 256), (8, 2048))
SFT_ADAPTERS = (
    *(None, None),
    dict(lora=LoRA(r=16)),
    dict(lora=LoRA(r=8, lora_dropout=0.05, target_modules="all-linear", autocast_adapter_dtype=False)),
    dict(lora=LoRA(r=32), quantization=Quantization("nf4", double=True, prepare=False, compute_dtype="bfloat16")),
)


class Deck:
    """Values dealt in random order, each once before any comes again."""

    def __init__(self, values: tuple, draw: random.Random):
        self.values, self.draw, self.left = values, draw, []

    def deal(self):
        """The next value."""
        if not self.left:
            self.left = self.draw.sample(self.values, len(self.values))
        return self.left.pop()


def grid() -> list[Recipe]:
    """The recipes, in the catalogue's order; then those with a dtype; then those of families that came later."""
    first = [*_dealt(20260806, PRECISIONS, RECIPES_A_MODEL), *_dealt(20261122, OVER, OVER_A_MODEL)]
    return [*first, *later_grid()]


def later_grid() -> list[Recipe]:
    """The recipes of `LATER`: the draws of the others stay as they are."""
    dealt = _dealt(20261123, (*PRECISIONS, *OVER), RECIPES_A_MODEL // 2, LATER)
    return [recipe for recipe in dealt if not lora_modules.adapts_experts(recipe.shape, recipe.lora)]


def families(among: tuple[str, ...] | None) -> list[str]:
    """The written-down models of the families `among`; None: of those that are not `LATER`."""
    shapes = {name: read_shape(name) for name in model_names()}
    wanted = (lambda s: s.family not in LATER) if among is None else lambda s: s.family in among
    return [name for name, shape in shapes.items() if shape.layout and wanted(shape)]


def _dealt(seed: int, precisions: tuple[str, ...], a_model: int, among: tuple[str, ...] | None = None) -> list[Recipe]:
    draw = random.Random(seed)
    decks = {
        "precision": Deck(precisions, draw),
        "optim": Deck(OPTIMIZERS, draw),
        "size": Deck(SIZES, draw),
        "adapters": Deck(ADAPTERS, draw),
        "loop": Deck(LOOPS, draw),
        "gradient_checkpointing": Deck((False, False, True), draw),
        "attn_implementation": Deck(("sdpa", "sdpa", "eager"), draw),
        "gradient_accumulation_steps": Deck((1, 1, 1, 1, 2), draw),
        "num_layers": Deck((1, 2, 2, 3, 2), draw),
        "task": Deck((None, None, None, "other"), draw),
    }
    found = []
    for name in families(among):
        count = 0
        while count < a_model:
            settings = {key: deck.deal() for key, deck in decks.items()}
            try:
                one = recipe(name, **settings)
            except RecipeError:
                continue  # a combination that cannot be trained, such as optimizer_in_backward with accumulation
            if any(w.kind == "expert" for w in one.shape.weights()) and lora_modules.adapts_experts(
                one.shape, one.lora
            ):
                continue
            if one.weights_dtype != one.implied_dtype or precisions != OVER:
                found.append(one)
                count += 1
    return found


def sft_grid() -> list[Recipe]:
    """A recipe of TRL's SFTTrainer for each causal model that predict writes down."""
    return _of_trl(20261122, (dict(trainer="sft"),))


def liger_grid() -> list[Recipe]:
    """A recipe with Liger's kernels for each causal model whose family predict knows them in."""
    return _of_trl(20261122, (dict(use_liger_kernel=True),), lambda shape: liger.FAMILIES.get(shape.family))


def preference_grid() -> list[Recipe]:
    """The same of TRL's trainers that learn from preferences."""
    precomputed = [dict(trainer=trainer, precompute_ref_log_probs=True) for trainer in ("dpo", "kto")]
    others = [dict(trainer=trainer) for trainer in ("dpo", "dpo", "dpo", "kto", "reward", "reward")]
    return _of_trl(20261123, (*precomputed, *others))


def _of_trl(seed: int, trainers: tuple[dict, ...], wanted: Callable = bool) -> list[Recipe]:
    draw, trainer = random.Random(seed), Deck(trainers, random.Random(seed))
    decks = {
        "precision": Deck(("fp32", "bf16-mixed", "bf16-mixed", "bf16-true", "fp16-mixed"), draw),
        "optim": Deck(("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "sgd", "adafactor"), draw),
        "size": Deck(SFT_SIZES, draw),
        "adapters": Deck(SFT_ADAPTERS, draw),
        "gradient_checkpointing": Deck((False, True), draw),
        "attn_implementation": Deck(("sdpa", "sdpa", "eager"), draw),
        "gradient_accumulation_steps": Deck((1, 1, 2), draw),
        "num_layers": Deck((2, 3), draw),
    }
    found = []
    for name in families(None):
        shape = read_shape(name)
        while shape.task == "causal-lm" and not shape.experts_per_token and wanted(shape):
            settings = {key: deck.deal() for key, deck in decks.items()}
            if settings["adapters"] and "quantization" in settings["adapters"]:
                settings["precision"] = "bf16-mixed"
            try:
                found.append(recipe(name, task=None, **trainer.deal(), **settings))
                break
            except RecipeError:
                continue
    return found


def packed_grid() -> list[Recipe]:
    """A recipe with padded, joined or packed samples for each model of `sft_grid`."""
    draw = random.Random(20261123)
    names = [one.name for one in sft_grid()]
    decks = {
        "batch": Deck((0, 1, 2, 3, 4, 5, 5), draw),
        "attn_implementation": Deck(("sdpa", "sdpa", "eager", "flash_attention_2"), draw),
        "gradient_checkpointing": Deck((False, True), draw),
        "precision": Deck(("bf16-mixed", "bf16-true"), draw),
        "adapters": Deck((None, dict(lora=LoRA(r=16))), draw),
        "optim": Deck(("adamw_torch", "sgd"), draw),
    }
    found = []
    for name in names:
        while len(found) <= names.index(name):
            settings = {key: deck.deal() for key, deck in decks.items()}
            lengths = tuple(draw.randint(8, 500) for _ in range(draw.randint(2, 8)))
            batch = (
                dict(lengths=lengths),
                dict(lengths=lengths, trainer="sft"),
                dict(lengths=lengths, trainer="sft", pad_to_multiple_of=64),
                dict(lengths=lengths, trainer="sft", padding_free=True),
                dict(lengths=lengths, trainer="sft", packing=True, batch_size=4, seq_len=1000),
                dict(batch_size=draw.randint(1, 4), seq_len=512, trainer="sft", packing=True),
            )[settings.pop("batch")]
            adapters = settings.pop("adapters") or {}
            if name.startswith("gemma") and settings["attn_implementation"] == "sdpa":
                continue
            if settings["attn_implementation"] == "flash_attention_2" and name.startswith("falcon"):
                continue
            found.append(Recipe(name, num_layers=3, **settings, **adapters, **batch))
    return found


def recipe(name: str, size, adapters, task, precision, **settings) -> Recipe:
    """One recipe; sizes and heads that the model does not have are left to its own."""
    shape = read_shape(name)
    settings["precision"], _, dtype = precision.partition(" over ")
    batch, tokens = size
    if shape.image_tokens:
        tokens = None
    elif shape.max_positions:
        tokens = min(tokens, shape.max_positions)
    if task == "other":
        others = {"causal-lm": "sequence-classification", "sequence-classification": "masked-lm"}
        task = others.get(shape.task)
    if shape.attention == "eager":
        settings["attn_implementation"] = "eager"
    if task == "sequence-classification" and shape.family != "bert":
        batch = 1  # without a padding token transformers scores one sequence at a time
    quantization = (adapters or {}).get("quantization")
    if quantization and not quantization.prepare and settings["precision"] == "fp16-mixed":
        raise RecipeError("precision", "fp16-mixed", "loss scaling refuses the fp16 gradients of an unprepared base")
    settings |= {"dtype": dtype or None, **(adapters or {})}
    return Recipe(name, batch_size=batch, seq_len=tokens, task=task, **settings)


def simulated(recipe: Recipe) -> dict:
    """What `simulate` says of a recipe: the peak's total and phase, each phase's peak, reserved bytes."""
    from vramlab.simulation.simulate import simulate

    report = simulate(recipe)
    phases = {name: phase.peak.total for name, phase in report.phases.items()}
    reserved = getattr(report.reserved, "value", report.reserved)
    return {"peak": report.peak.total, "phase": report.peak_phase, "phases": phases, "reserved": reserved}


def versions() -> dict[str, str]:
    """Of the libraries whose code is simulated."""
    return {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes", "deepspeed")}


def stored(name: str) -> dict[str, dict]:
    """What was simulated, by the recipe's key, and "versions"."""
    rows = map(json.loads, (FOLDER / name).read_text(encoding="utf-8").splitlines())
    return {row.pop("recipe"): row for row in rows}


def assert_still_said(name: str, recipe: Recipe, simulated: Callable[[Recipe], dict]) -> None:
    """Hold a recipe's golden bytes; other versions of the libraries may say something else."""
    rows = stored(name)
    if rows["versions"] != versions():
        pytest.skip(f"{name} was made with {rows['versions']}")
    now, before = simulated(recipe), rows[recipe.key]
    assert now == before, f"{now} now, {before} stored"


def store(name: str, recipes: list[Recipe], simulated: Callable[[Recipe], dict]) -> None:
    """Simulate `recipes` and write a line of JSON for each."""
    rows = [{"recipe": "versions", **versions()}, *({"recipe": r.key, **simulated(r)} for r in recipes)]
    (FOLDER / name).write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    store("grid.jsonl", grid(), simulated)
    store("sft_grid.jsonl", sft_grid(), simulated)
    store("preference_grid.jsonl", preference_grid(), simulated)
    store("packed_grid.jsonl", packed_grid(), simulated)
    store("liger_grid.jsonl", liger_grid(), simulated)
