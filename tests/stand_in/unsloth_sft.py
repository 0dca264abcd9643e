"""Unsloth's own way to train an adapter, as its README shows it, on a model in a local folder.

Nothing here models Unsloth, which replaces the models' and trainers' code; it is run as it is:

    vramlab run --gpu "RTX 4090" -- python tests/stand_in/unsloth_sft.py FOLDER BITS BATCH LENGTH
"""

import sys

from unsloth import FastLanguageModel  # before transformers and TRL, which it patches

import torch  # isort: skip
from datasets import Dataset  # isort: skip
from trl import SFTConfig, SFTTrainer  # isort: skip

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Train three steps of two micro-batches, and print what torch allocated and reserved."""
    folder, bits, batch, length = sys.argv[1:]
    model, tokenizer = FastLanguageModel.from_pretrained(
        folder, max_seq_length=int(length), load_in_4bit=bits == "4"
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        target_modules=TARGETS,
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    texts = ["def f(x):\n    return x + 1\n" * int(length)] * 32
    arguments = SFTConfig(
        per_device_train_batch_size=int(batch),
        gradient_accumulation_steps=2,
        max_length=int(length),
        max_steps=3,
        optim="adamw_8bit",
        report_to=[],
        save_strategy="no",
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": texts}),
        args=arguments,
    )
    trainer.train()
    allocated = torch.cuda.max_memory_allocated() / 2**30
    reserved = torch.cuda.max_memory_reserved() / 2**30
    print(f"{allocated:.3f} GiB allocated, {reserved:.3f} reserved")


if __name__ == "__main__":
    main()
