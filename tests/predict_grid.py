"""The recipes on which `predict` is held against `simulate`: every model that it knows, every
setting, spread out.

Drawn once with a fixed seed and not chosen by how well they fit. Each model gets six recipes, and
two more whose weights have a format of their own under autocast; for every setting the draws go
through a shuffled deck of its values, so that each value comes up equally often.

Run as a script it simulates them all, which takes minutes, and writes `formulas/grid.jsonl`: to be
done when simulate is meant to say something else, such as after a new version of a library. With
`--only MODEL` it simulates that model's rows and keeps those of the others.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import pytest
from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError
from vramlab.recipe import liger, lora_modules
from vramlab.recipe.families import FAMILIES
from vramlab.recipe.shapes import catalogue, model_names, read_shape

FOLDER = Path(__file__).parent / "formulas"
RECIPES_A_MODEL, OVER_A_MODEL = 6, 2
LATER = (
    *(
        "deepseek_v3",
        "gemma3_text",
        "glm4_moe",
        "gpt_oss",
        "granite",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen3_moe",
        "smollm3",
    ),
)
# Over which the rows were dealt; T5's are left out. A model that came after has rows of its own at
# the end, so that no stored row changes.
DEALT = (
    "bert-base", "bert-large", "deepseek-v3", "falcon-7b", "gemma-2-2b", "gemma-2-9b",
    "gemma-2-27b",
    "gemma-3-270m", "gemma-3-1b", "gemma-3-4b", "gemma-3-27b", "glm-4.5-air", "gpt2", "gpt2-medium",
    "gpt2-large",
    "gpt2-xl", "pythia-70m", "pythia-160m", "pythia-410m", "pythia-1b", "polyglot-ko-1.3b",
    "pythia-1.4b",
    "pythia-2.8b", "pythia-6.9b", "pythia-12b", "gpt-oss-20b", "gpt-oss-120b", "granite-3.3-2b",
    "granite-3.3-8b",
    "tinyllama-1.1b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-3.1-8b", "llama-3.1-70b",
    "llama-3.1-405b", "mistral-7b", "mixtral-8x7b", "olmo-2-1b", "olmo-2-7b", "olmo-3-7b",
    "opt-125m", "opt-1.3b",
    "opt-6.7b", "phi-2", "phi-3-mini", "phi-4", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b", "qwen2.5-32b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b", "qwen3-235b-a22b", "smollm3-3b", "t5-small", "t5-base", "t5-large", "t5-3b",
    "vit-base",
    "vit-large",
)  # fmt: skip
OVER = (
    "bf16-mixed over bfloat16",
    "bf16-mixed over bfloat16",
    "fp16-mixed over float16",
    "bf16-mixed over float32",
)
PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")
OPTIMIZERS = (
    *(
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_bnb_8bit",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
        "lion_32bit",
    ),
    *("lion_8bit", "sgd", "adagrad", "rmsprop", "adafactor", "adamw_torch", "adamw_torch"),
)
# batch and tokens: from a few tokens to more than fit any card; fake tensors cost nothing
SIZES = (
    (1, 32),
    (2, 128),
    (4, 256),
    (8, 128),
    (4, 512),
    (16, 64),
    (1, 1024),
    (8, 512),
    (32, 128),
    (2, 2048),
)
ADAPTERS = (
    *(None, None, None),
    dict(lora=LoRA()),
    dict(lora=LoRA(r=16, lora_dropout=0.05, target_modules="all-linear")),
    dict(lora=LoRA(r=32), quantization=Quantization("nf4", double=True)),
    dict(
        lora=LoRA(r=8, target_modules="all-linear"), quantization=Quantization("fp4", prepare=False)
    ),
    dict(lora=LoRA(r=4, autocast_adapter_dtype=False)),
)
LOOPS = (
    *("trainer", "trainer", "plain", "optimizer_in_backward"),
    Loop.named("plain", zero_grad="before_backward"),
    Loop.named("trainer", set_to_none=False),
    Loop.named("trainer", keep_outputs=True, use_cache=True, max_grad_norm=None),
    Loop.named("plain", foreach=False),
)

# TRL's fused head: fewer and more tokens than a tile's 4,096, in one tile or several of 32,768
# columns
SFT_SIZES = (
    (1, 32),
    (2, 128),
    (8, 512),
    (1, 2048),
    (4, 1024),
    (5, 1024),
    (16, 512),
    (3, 2048),
    (32, 256),
    (8, 2048),
)
SFT_ADAPTERS = (
    *(None, None),
    dict(lora=LoRA(r=16)),
    dict(
        lora=LoRA(r=8, lora_dropout=0.05, target_modules="all-linear", autocast_adapter_dtype=False)
    ),
    dict(
        lora=LoRA(r=32),
        quantization=Quantization("nf4", double=True, prepare=False, compute_dtype="bfloat16"),
    ),
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
    """The recipes, in the catalogue's order; those with a dtype; those of families, then of models,
    that came later.
    """
    first = families(None)
    dealt = [
        *_dealt(20260806, PRECISIONS, RECIPES_A_MODEL, first),
        *_dealt(20261122, OVER, OVER_A_MODEL, first),
    ]
    return [r for r in (*dealt, *later_grid(), *newer_grid()) if not r.shape.num_decoder_layers]


def later_grid() -> list[Recipe]:
    """The recipes of `LATER`: the draws of the others stay as they are."""
    dealt = _dealt(20261123, (*PRECISIONS, *OVER), RECIPES_A_MODEL // 2, families(LATER))
    return [
        recipe for recipe in dealt if not lora_modules.adapts_experts(recipe.shape, recipe.lora)
    ]


def newer_grid() -> list[Recipe]:
    """The recipes of written-down models that are not in `DEALT`: the draw of each depends on its
    name alone.
    """
    names = [name for name in written_down() if name not in DEALT]
    rows = [
        _dealt(f"20261122 {name}", (*PRECISIONS, *OVER), RECIPES_A_MODEL // 2, [name])
        for name in names
    ]
    return [recipe for dealt in rows for recipe in dealt]


def written_down() -> list[str]:
    """The models whose weights are written down; to read the others' off transformers takes
    seconds.
    """
    families = {
        name: FAMILIES.get(json.loads(entry["config"])["model_type"])
        for name, entry in catalogue().items()
    }
    return [
        name for name, family in families.items() if family and family.layout_options is not None
    ]


def families(among: tuple[str, ...] | None) -> list[str]:
    """The models of `DEALT` of the families `among`; None: of those that are not `LATER`."""
    wanted = (
        (lambda family: family not in LATER) if among is None else lambda family: family in among
    )
    return [name for name in DEALT if wanted(read_shape(name).family)]


def _dealt(
    seed: int | str, precisions: tuple[str, ...], a_model: int, names: list[str]
) -> list[Recipe]:
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
    for name in names:
        count = 0
        while count < a_model:
            settings = {key: deck.deal() for key, deck in decks.items()}
            try:
                one = recipe(name, **settings)
            except RecipeError:
                # a combination that cannot be trained, such as optimizer_in_backward with
                # accumulation
                continue
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
    return _of_trl(
        20261122, (dict(use_liger_kernel=True),), lambda shape: liger.FAMILIES.get(shape.family)
    )


def preference_grid() -> list[Recipe]:
    """The same of TRL's trainers that learn from preferences."""
    precomputed = [
        dict(trainer=trainer, precompute_ref_log_probs=True) for trainer in ("dpo", "kto")
    ]
    others = [dict(trainer=trainer) for trainer in ("dpo", "dpo", "dpo", "kto", "reward", "reward")]
    return _of_trl(20261123, (*precomputed, *others))


def _of_trl(seed: int, trainers: tuple[dict, ...], wanted: Callable = bool) -> list[Recipe]:
    draw, trainer = random.Random(seed), Deck(trainers, random.Random(seed))
    decks = {
        "precision": Deck(("fp32", "bf16-mixed", "bf16-mixed", "bf16-true", "fp16-mixed"), draw),
        "optim": Deck(
            ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "sgd", "adafactor"), draw
        ),
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
        raise RecipeError(
            "precision",
            "fp16-mixed",
            "loss scaling refuses the fp16 gradients of an unprepared base",
        )
    settings |= {"dtype": dtype or None, **(adapters or {})}
    return Recipe(name, batch_size=batch, seq_len=tokens, task=task, **settings)


def simulated(recipe: Recipe) -> dict:
    """What `simulate` says of a recipe: the peak's total and phase, each phase's peak, reserved
    bytes.
    """
    from vramlab.simulation.simulate import simulate

    report = simulate(recipe)
    phases = {name: phase.peak.total for name, phase in report.phases.items()}
    reserved = getattr(report.reserved, "value", report.reserved)
    return {
        "peak": report.peak.total,
        "phase": report.peak_phase,
        "phases": phases,
        "reserved": reserved,
    }


def versions() -> dict[str, str]:
    """Of the libraries whose code is simulated."""
    return {
        name: version(name)
        for name in ("torch", "transformers", "peft", "bitsandbytes", "deepspeed")
    }


def stored(name: str) -> dict[str, dict]:
    """What was simulated, by the recipe's key, and "versions"."""
    rows = map(json.loads, (FOLDER / name).read_text(encoding="utf-8").splitlines())
    return {row.pop("recipe"): row for row in rows}


def _without_cache(said: dict) -> dict:
    """Return golden bytes without the KV cache: training has none, and older rows lack it."""
    for splits in said["phases"].values():
        for split in splits if isinstance(splits, list) else ():
            assert split.pop("kv_cache", 0) == 0
    return said


def assert_still_said(name: str, recipe: Recipe, simulated: Callable[[Recipe], dict]) -> None:
    """Hold a recipe's golden bytes; other versions of the libraries may say something else."""
    rows = stored(name)
    if rows["versions"] != versions():
        pytest.skip(f"{name} was made with {rows['versions']}")
    now, before = _without_cache(simulated(recipe)), _without_cache(rows[recipe.key])
    assert now == before, f"{now} now, {before} stored"


def store(
    name: str, recipes: list[Recipe], simulated: Callable[[Recipe], dict], only: str = ""
) -> None:
    """Simulate `recipes` and write a line of JSON for each; `only`: keep those of other models.

    Raises ValueError where one of those is not stored, or is of other versions of the libraries.
    """
    kept = stored(name) if only else {}
    if only and kept["versions"] != versions():
        raise ValueError(f"{name} was made with {kept['versions']}: make all of it again")
    rows = [{"recipe": "versions", **versions()}]
    for recipe in progress(recipes, name):
        if only and recipe.model != only:
            if recipe.key not in kept:
                raise ValueError(f"{name} lacks {recipe}: make all of it again")
            rows.append({"recipe": recipe.key, **kept[recipe.key]})
        else:
            rows.append({"recipe": recipe.key, **simulated(recipe)})
    (FOLDER / name).write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def progress(recipes: list[Recipe], name: str) -> Iterable[Recipe]:
    """The recipes with a bar, where somebody watches."""
    from tqdm import tqdm

    return tqdm(recipes, name, disable=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Simulate the grids again and store them.")
    parser.add_argument("--only", default="", metavar="MODEL", help="keep other models' rows")
    asked = parser.parse_args()
    if asked.only and asked.only not in model_names():
        parser.error(f"{asked.only} is no model of the catalogue")
    store("grid.jsonl", grid(), simulated, asked.only)
    store("sft_grid.jsonl", sft_grid(), simulated, asked.only)
    store("preference_grid.jsonl", preference_grid(), simulated, asked.only)
    store("packed_grid.jsonl", packed_grid(), simulated, asked.only)
    store("liger_grid.jsonl", liger_grid(), simulated, asked.only)
