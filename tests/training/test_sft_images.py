"""SFTTrainer on images: a real step of TRL's own trainer, with its collator and a processor of
transformers', watched, against the simulation.
"""

import datasets
import pytest
from PIL import Image
from quick import params
from test_trainer_loop import assert_same_but_for_scalars
from tiny_image_models import SMALL
from transformers import AutoTokenizer, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vramlab import LoRA, Quantization, Recipe, WatchCallback, simulate
from vramlab.base.data import data_path
from vramlab.training.models import build_model

pytestmark = pytest.mark.usefixtures("quiet")

SPECIAL = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
TEMPLATE = (
    "{% for turn in messages %}{% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
LANGUAGE = LoRA(r=4, target_modules=r".*language_model.*(q|v)_proj")
CASES = {
    "all of it": {"precision": "bf16-mixed"},
    "recomputed": {"precision": "bf16-mixed", "gradient_checkpointing": True},
    "tower frozen": {"precision": "bf16-mixed", "freeze": ("vision_tower",)},
    "LoRA on language": {"precision": "bf16-mixed", "lora": LANGUAGE},
    "LoRA in 4 bits, recomputed": {
        "precision": "bf16-mixed",
        "lora": LANGUAGE,
        "quantization": Quantization("nf4", prepare=False),
        "gradient_checkpointing": True,
    },
}


def processor() -> Gemma3Processor:
    tokenizer = AutoTokenizer.from_pretrained(data_path("base_model"), extra_special_tokens=SPECIAL)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=16)


def sample() -> dict:
    turns = [
        {"role": "user", "content": "return none for each of them"},
        {"role": "assistant", "content": "while it is true"},
    ]
    return {"messages": turns, "images": [Image.new("RGB", (40, 24)) for _ in range(2)]}


def recipe_of(made: Gemma3Processor, **fields) -> Recipe:
    tokenizer = made.tokenizer
    ids = {
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "image_token_index": tokenizer.image_token_id,
    }
    plain = SMALL["gemma3"]
    text = plain["text_config"] | {"vocab_size": len(tokenizer)}
    (row,) = DataCollatorForVisionLanguageModeling(made)([sample()])["input_ids"]
    return Recipe(
        plain | ids | {"text_config": text},
        batch_size=2,
        seq_len=len(row),
        images=2,
        image_size="40x24",
        trainer="sft",
        **fields,
    )


@pytest.mark.parametrize("name", params(CASES, ["LoRA in 4 bits, recomputed"]))
def test_a_real_step_is_what_simulate_says(name, tmp_path):
    from trl import SFTConfig, SFTTrainer

    made = processor()
    recipe = recipe_of(made, **CASES[name])
    model = build_model(recipe.replace(trainer="transformers"), "cpu")
    if recipe.lora:  # in TRL's dtype beside a quantized base
        model.is_quantized = False
    said = recipe.training_arguments(str(tmp_path)).to_dict()
    assert said["max_length"] is None
    names = ("optim", "bf16", "use_cpu", "report_to", "max_length", "gradient_checkpointing")
    arguments = SFTConfig(
        str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=3,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        dataloader_pin_memory=False,
        **{name: said[name] for name in names},
    )
    rows = [sample() for _ in range(6)]
    seen = WatchCallback()
    SFTTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=made,
        callbacks=[seen],
    ).train()
    simulated = simulate(recipe, target="cpu", full=True)
    assert_same_but_for_scalars(seen.report, simulated)
