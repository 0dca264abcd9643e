"""`trainer="sft"` is what TRL's SFTTrainer does: one of its real steps, watched, against the
simulation.
"""

import datasets
import pytest
import torch
import transformers
from quick import params
from test_trainer_loop import SCALARS, assert_same_but_for_scalars
from tiny_models import config
from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError, Sharding, WatchCallback, simulate
from vramlab.base.data import data_path
from vramlab.recipe.families import TASKS
from vramlab.training.models import build_model

pytestmark = pytest.mark.usefixtures("quiet")

NAMES = ("optim", "bf16", "use_cpu", "report_to", "use_liger_kernel")
SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2, "trainer": "sft"}
CASES = {
    "llama": ("llama", {}),
    "gpt2 checkpointing bf16-mixed": (
        "gpt2",
        {"gradient_checkpointing": True, "precision": "bf16-mixed"},
    ),
    "qwen3 tied LoRA": ("qwen3", {"lora": LoRA(r=4), "precision": "bf16-true"}),
    "gemma2 eager accumulation": ("gemma2", {"gradient_accumulation_steps": 2}),
    "mixtral": ("mixtral", {"precision": "bf16-mixed"}),
    "phi with a head's bias": ("phi", {"optim": "sgd"}),
    "llama nf4": (
        "llama",
        {
            "lora": LoRA(r=4),
            "precision": "bf16-true",
            "quantization": Quantization("nf4", prepare=False),
        },
    ),
    "llama padded": ("llama", {"batch_size": 3, "lengths": (32, 20, 7)}),
    "llama completions": (
        "llama",
        {"batch_size": 3, "lengths": (32, 20, 7), "completion_lengths": (9, 20, 1)},
    ),
    "llama packed": ("llama", {"packing": True}),
    "gpt2 packed, eager, checkpointing": (
        "gpt2",
        {
            "packing": True,
            "attn_implementation": "eager",
            "gradient_checkpointing": True,
            "precision": "bf16-mixed",
        },
    ),
    "qwen3 padding-free": (
        "qwen3",
        {"lengths": (30, 12), "padding_free": True, "pad_to_multiple_of": 16},
    ),
    "gemma2 packed accumulation": (
        "gemma2",
        {"packing": True, "batch_size": 1, "lengths": (9, 9, 3), "gradient_accumulation_steps": 2},
    ),
    "opt packed": ("opt", {"packing": True}),
}
COMBINED = (
    "llama packed",
    "gpt2 packed, eager, checkpointing",
    "gemma2 packed accumulation",
    "opt packed",
    "llama nf4",
    "llama padded",
)


def make(name: str) -> Recipe:
    family, fields = CASES[name]
    return Recipe(config(family), **{**SIZES, **fields})


def real(recipe: Recipe, out, *callbacks, **more):
    """TRL's own trainer on the recipe's base model; the adapters are given to it as a
    configuration, `more` to SFTConfig.
    """
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    lora = recipe.lora if recipe.quantization else None  # no recipe has a quantized base alone
    without = dict(
        packing=False,
        padding_free=False,
        lengths=None,
        pad_to_multiple_of=None,
        use_liger_kernel=False,
    )
    without["completion_lengths"] = None
    plain = recipe.replace(trainer="transformers", lora=lora, **without)
    model, peft = build_model(plain, "cpu"), None
    if recipe.lora:
        peft = LoraConfig(
            r=4, target_modules=recipe.lora.target_modules, task_type=TASKS["causal-lm"].peft
        )
    if lora:
        model = model.unload()
        model.is_quantized = False  # by `from_pretrained`, whose quantizer the Trainer asks
    said, names = recipe.training_arguments(str(out)).to_dict(), NAMES
    names += ("packing", "padding_free", "pad_to_multiple_of", "max_length")
    samples = [torch.randint(0, 1000, (length,)).tolist() for length in recipe.samples]
    rows = [{"input_ids": sample} for sample in samples]
    if recipe.completion_lengths:
        for row, count in zip(rows, recipe.completion_lengths, strict=True):
            row["labels"] = [-100] * (len(row["input_ids"]) - count) + row["input_ids"][-count:]
    if recipe.packing:  # the dataset as `pack_dataset` returns it
        rows = [
            {
                "input_ids": torch.cat([torch.tensor(sample) for sample in samples]).tolist(),
                "seq_lengths": list(recipe.samples),
            }
        ]
    arguments = SFTConfig(
        str(out),
        per_device_train_batch_size=len(rows),
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        gradient_checkpointing=recipe.gradient_checkpointing,
        max_steps=3,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        **{name: said[name] for name in names},
        **more,
    )
    data = datasets.Dataset.from_list(rows * (recipe.gradient_accumulation_steps * 3))
    tokenizer = transformers.AutoTokenizer.from_pretrained(data_path("base_model"))
    return SFTTrainer(
        model,
        arguments,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=peft,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("name", params(CASES, CASES.keys() - COMBINED))
def test_a_real_sft_step_is_what_simulate_says(name, tmp_path):
    recipe, seen = make(name), WatchCallback()
    real(recipe, tmp_path, seen).train()
    simulated = simulate(recipe, target="cpu", full=True)
    assert_same_but_for_scalars(seen.report, simulated)


def test_dft_moves_no_peak(tmp_path):
    """It keeps a number a token from the loss to its backward, when the head's tile is gone."""
    recipe, seen = make("llama"), WatchCallback()
    real(recipe, tmp_path, seen, loss_type="dft").train()
    simulated = simulate(recipe, target="cpu", full=True)
    for phase in ("forward", "backward", "step"):
        assert (
            abs(seen.report.phases[phase].peak.total - simulated.phases[phase].peak.total)
            <= SCALARS
        )


@pytest.mark.parametrize(
    "family, fields, field",
    [
        ("bert", {}, "trainer"),
        ("llama", {"loop": "plain"}, "loop"),
        ("llama", {"loop": Loop(use_cache=True)}, "loop"),
        ("llama", {"sharding": Sharding(0, 2, engine="tensor")}, "sharding.engine"),
        ("llama", {"lora": LoRA(), "quantization": Quantization()}, "quantization.prepare"),
        (
            "llama",
            {
                "lora": LoRA(),
                "quantization": Quantization(prepare=False),
                "precision": "fp16-mixed",
            },
            "precision",
        ),
        ("llama", {"lora": LoRA(target_modules=("q_proj", "lm_head"))}, "lora.target_modules"),
        ("llama", {"trainer": "transformers", "packing": True}, "packing"),
        ("llama", {"trainer": "transformers", "padding_free": True}, "padding_free"),
        ("llama", {"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ("llama", {"lengths": ()}, "lengths"),
        ("llama", {"lengths": (4, 0)}, "lengths"),
        ("llama", {"lengths": (4, 33)}, "lengths"),
        ("llama", {"lengths": (4, 3, 3)}, "batch_size"),
        ("llama", {"lengths": (30, 30, 30), "packing": True}, "lengths"),
        ("llama", {"completion_lengths": (9,)}, "completion_lengths"),
        ("llama", {"completion_lengths": (9, 33)}, "completion_lengths"),
        ("llama", {"completion_lengths": (9, 0)}, "completion_lengths"),
        ("llama", {"completion_lengths": (9, 9), "trainer": "transformers"}, "completion_lengths"),
        ("llama", {"completion_lengths": (9, 9), "trainer": "dpo"}, "completion_lengths"),
    ],
)
def test_what_it_does_not_train_is_refused(family, fields, field):
    with pytest.raises(RecipeError) as caught:
        Recipe(config(family), **{**SIZES, **fields})
    assert caught.value.field == field


def test_keys_of_before_stay():
    """A recipe that is transformers' own Trainer's is said, and stored, as before there was a
    choice.
    """
    recipe = Recipe("gpt2")
    assert (
        "trainer" not in recipe.to_dict()
        and recipe.replace(trainer="transformers").key == recipe.key
    )
    other = recipe.replace(trainer="sft")
    packed = other.replace(packing=True, lengths=(9, 5))
    for one, word in ((other, "SFTTrainer"), (packed, "packed")):
        assert one.key != recipe.key and Recipe.from_json(one.to_json()) == one and word in str(one)


DEEP = [("qwen3", {}), ("gpt2", {"packing": True}), ("mixtral", {})]


@pytest.mark.parametrize("family, fields", params(DEEP, DEEP[:1]))
def test_deepened_is_the_whole_depth(family, fields):
    fields = {
        **SIZES,
        "num_layers": 8,
        "precision": "bf16-mixed",
        "gradient_checkpointing": True,
        **fields,
    }
    recipe = Recipe(config(family), **fields)
    deepened, whole = simulate(recipe), simulate(recipe, full=True)
    assert (deepened.phases, deepened.peak) == (whole.phases, whole.peak)


def test_joined_samples_need_flash_attention():
    """sdpa and eager get a mask of all pairs of tokens of the micro-batch, in every layer;
    flash-attn has none.
    """
    row = {
        "batch_size": 4,
        "seq_len": 256,
        "num_layers": 2,
        "precision": "bf16-true",
        "trainer": "sft",
    }

    def kept(**fields) -> int:
        return simulate(Recipe(config("qwen3"), **row, **fields)).phases["forward"].end.activations

    pairs = 1024**2  # a byte each in the mask, two in each layer's bias
    assert kept(packing=True) - kept(
        packing=True, attn_implementation="flash_attention_2"
    ) >= pairs * (1 + 2 * 2)


def test_on_a_gpu_the_head_adds_a_tile_and_sums_in_fp32():
    """The formula of the chapter's section: 4,096 × 32,768 logits, and V·h + T·h fp32 numbers going
    back.
    """
    recipe = Recipe(
        "llama-3.2-1b", 4, 2048, num_layers=1, precision="bf16-true", optim="sgd", trainer="sft"
    )
    ops = {(t.op, t.shape, t.dtype) for t in simulate(recipe).largest}
    assert {("empty", (4096, 32768), "bfloat16"), ("zeros", (128256, 2048), "float32")} <= ops
