"""`trainer="sft"` is what TRL's SFTTrainer does: one of its real steps, watched, against the simulation."""

import datasets
import pytest
import torch
import transformers
from test_trainer_loop import SCALARS
from tiny_models import config
from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError, Sharding, WatchCallback, simulate
from vramlab.recipe.families import TASKS
from vramlab.report.data import data_path
from vramlab.report.report import CATEGORIES
from vramlab.training.models import build_model

pytestmark = pytest.mark.usefixtures("quiet")

SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2, "trainer": "sft"}
CASES = {
    "llama": ("llama", {}),
    "gpt2 checkpointing bf16-mixed": ("gpt2", {"gradient_checkpointing": True, "precision": "bf16-mixed"}),
    "qwen3 tied LoRA": ("qwen3", {"lora": LoRA(r=4), "precision": "bf16-true"}),
    "gemma2 eager accumulation": ("gemma2", {"gradient_accumulation_steps": 2}),
    "mixtral": ("mixtral", {"precision": "bf16-mixed"}),
    "phi with a head's bias": ("phi", {"optim": "sgd"}),
    "llama nf4": (
        "llama",
        {"lora": LoRA(r=4), "precision": "bf16-true", "quantization": Quantization("nf4", prepare=False)},
    ),
}


def make(name: str) -> Recipe:
    family, fields = CASES[name]
    return Recipe(config(family), **{**SIZES, **fields})


def real(recipe: Recipe, out, *callbacks):
    """TRL's own trainer on the recipe's base model; the adapters are given to it as a configuration."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    lora = recipe.lora if recipe.quantization else None  # no recipe has a quantized base alone
    model, peft = build_model(recipe.replace(trainer="transformers", lora=lora), "cpu"), None
    if recipe.lora:
        peft = LoraConfig(r=4, target_modules=recipe.lora.target_modules, task_type=TASKS["causal-lm"].peft)
    if lora:
        model = model.unload()
        model.is_quantized = False  # by `from_pretrained`, whose quantizer the Trainer asks
    said, names = recipe.training_arguments(str(out)).to_dict(), ("optim", "bf16", "use_cpu", "report_to")
    arguments = SFTConfig(
        str(out),
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        gradient_checkpointing=recipe.gradient_checkpointing,
        max_steps=3,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        dataloader_pin_memory=False,
        **{name: said[name] for name in names},
    )
    rows = recipe.batch_size * recipe.gradient_accumulation_steps * 3
    ids = torch.randint(0, 1000, (rows, recipe.seq_len)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": ids})
    tokenizer = transformers.AutoTokenizer.from_pretrained(data_path("base_model"))
    return SFTTrainer(
        model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=peft, callbacks=list(callbacks)
    )


@pytest.mark.parametrize("name", CASES)
def test_a_real_sft_step_is_what_simulate_says(name, tmp_path):
    recipe, seen = make(name), WatchCallback()
    real(recipe, tmp_path, seen).train()
    simulated = simulate(recipe, target="cpu", full=True)
    for phase in ("forward", "backward", "step", "between_steps"):
        for moment in ("peak", "end"):
            ran, said = (getattr(report.phases[phase], moment) for report in (seen.report, simulated))
            for category in CATEGORIES:
                difference = getattr(ran, category) - getattr(said, category)
                assert abs(difference) <= SCALARS, f"{phase} {moment} {category}: {difference:+,} bytes"


@pytest.mark.parametrize(
    "family, fields, field",
    [
        ("bert", {}, "trainer"),
        ("llama", {"loop": "plain"}, "loop"),
        ("llama", {"loop": Loop(use_cache=True)}, "loop"),
        ("llama", {"sharding": Sharding(world_size=2, engine="deepspeed")}, "sharding.engine"),
        ("llama", {"lora": LoRA(), "quantization": Quantization()}, "quantization.prepare"),
        ("llama", {"lora": LoRA(target_modules=("q_proj", "lm_head"))}, "lora.target_modules"),
    ],
)
def test_what_it_does_not_train_is_refused(family, fields, field):
    with pytest.raises(RecipeError) as caught:
        Recipe(config(family), **{**SIZES, **fields})
    assert caught.value.field == field


def test_keys_of_before_stay():
    """A recipe that is transformers' own Trainer's is said, and stored, as before there was a choice."""
    recipe = Recipe("gpt2")
    assert "trainer" not in recipe.to_dict() and recipe.replace(trainer="transformers").key == recipe.key
    other = recipe.replace(trainer="sft")
    assert other.key != recipe.key and Recipe.from_json(other.to_json()) == other and "SFTTrainer" in str(other)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral"])
def test_deepened_is_the_whole_depth(family):
    recipe = Recipe(config(family), **{**SIZES, "num_layers": 12}, precision="bf16-mixed", gradient_checkpointing=True)
    deepened, whole = simulate(recipe), simulate(recipe, full=True)
    assert (deepened.phases, deepened.peak) == (whole.phases, whole.peak)


def test_on_a_gpu_the_head_adds_a_tile_and_sums_in_fp32():
    """The formula of the chapter's section: 4,096 × 32,768 logits, and V·h + T·h fp32 numbers going back."""
    recipe = Recipe("llama-3.2-1b", 4, 2048, num_layers=1, precision="bf16-true", optim="sgd", trainer="sft")
    ops = {(t.op, t.shape, t.dtype) for t in simulate(recipe).largest}
    assert {("empty", (4096, 32768), "bfloat16"), ("zeros", (128256, 2048), "float32")} <= ops
