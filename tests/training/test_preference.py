"""`trainer="dpo"`, "kto" and "reward" are what TRL's trainers do: their real steps, watched,
against the simulation.
"""

import datasets
import pytest
import torch
import transformers
from quick import params
from test_trainer_loop import SCALARS
from tiny_models import config
from vramlab import Loop, LoRA, Quantization, Recipe, RecipeError, Sharding, WatchCallback, simulate
from vramlab.base.data import data_path
from vramlab.recipe.families import TASKS
from vramlab.recipe.options import TRL
from vramlab.report.report import CATEGORIES
from vramlab.tracking.tensors import tensors_in
from vramlab.tracking.tracked import claim_model
from vramlab.tracking.tracker import REFERENCE
from vramlab.training.models import build_model

pytestmark = pytest.mark.usefixtures("quiet")

SIZES = {"batch_size": 2, "seq_len": 32, "num_layers": 2}
# The watch takes the labels that TRL makes in the forward pass for inputs, as the model is called
# with them.
MERGED = dict.fromkeys(("inputs", "temporaries"), ("inputs", "temporaries"))
MIXED = {"precision": "bf16-mixed"}
CASES = {
    "dpo gpt2": ("dpo", "gpt2", {}),
    "dpo llama bf16-mixed checkpointing": (
        "dpo",
        "llama",
        {**MIXED, "gradient_checkpointing": True},
    ),
    "dpo llama accumulation": ("dpo", "llama", {"gradient_accumulation_steps": 2}),
    "dpo qwen3 LoRA": (
        "dpo",
        "qwen3",
        {"lora": LoRA(r=4, lora_dropout=0.1), "precision": "bf16-true"},
    ),
    "dpo gpt2 LoRA checkpointing": (
        "dpo",
        "gpt2",
        {**MIXED, "lora": LoRA(r=4), "gradient_checkpointing": True},
    ),
    "dpo llama precomputed": ("dpo", "llama", {**MIXED, "precompute_ref_log_probs": True}),
    "dpo mixtral": ("dpo", "mixtral", MIXED),
    "kto gpt2 bf16-mixed": ("kto", "gpt2", MIXED),
    "kto llama LoRA of three": ("kto", "llama", {"lora": LoRA(r=4), "batch_size": 3}),
    "reward llama bf16-mixed": ("reward", "llama", MIXED),
    "reward gpt2 LoRA checkpointing accumulation": (
        "reward",
        "gpt2",
        {"lora": LoRA(r=4), "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    ),
}

# Each trainer; a reference that is a model of its own, none, and the adapters' base; a mixture's
# balancing loss.
QUICK = (
    "dpo mixtral",
    "dpo gpt2 LoRA checkpointing",
    "dpo llama accumulation",
    "dpo llama precomputed",
    "kto llama LoRA of three",
    "reward gpt2 LoRA checkpointing accumulation",
)


class Seen(WatchCallback):
    """Also knows the reference model, and all of the batch: neither is what the watched model is
    called with.
    """

    def on_step_begin(self, *args, **kwargs):
        super().on_step_begin(*args, **kwargs)
        if watched := self._entered:
            watched.tracker.claim(tensors_in(self.batches), "inputs")
            if reference := getattr(self.trainer, "ref_model", None):
                claim_model(watched.tracker, reference, REFERENCE)

    def follow(self, trainer):
        self.trainer, fetch = trainer, trainer.get_batch_samples

        def get_batch_samples(*args, **kwargs):
            self.batches, items = fetch(*args, **kwargs)
            return self.batches, items

        trainer.get_batch_samples = get_batch_samples


def make(name: str) -> Recipe:
    trainer, family, fields = CASES[name]
    return Recipe(config(family), trainer=trainer, **{**SIZES, **fields})


def real(recipe: Recipe, out, *callbacks):
    """TRL's own trainer on the recipe's base model; the adapters are given to it as a
    configuration.
    """
    import trl
    from peft import LoraConfig

    plain = recipe.replace(lora=None, gradient_checkpointing=False)
    if recipe.trainer != "reward":
        plain = plain.replace(trainer="transformers", precompute_ref_log_probs=False)
    model, reference = build_model(plain, "cpu"), {}
    peft = recipe.lora and LoraConfig(
        r=4, lora_dropout=recipe.lora.lora_dropout, task_type=TASKS[recipe.shape.task].peft
    )
    if recipe.has_reference:
        reference = {"ref_model": build_model(plain, "cpu").eval()}
    said, names = (
        recipe.training_arguments(str(out)).to_dict(),
        ("optim", "bf16", "use_cpu", "report_to"),
    )
    arguments = getattr(trl, TRL[recipe.trainer].replace("Trainer", "Config"))(
        str(out),
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        gradient_checkpointing=recipe.gradient_checkpointing,
        max_steps=3,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        dataloader_pin_memory=False,
        **{"precompute_ref_log_probs": True} if recipe.precompute_ref_log_probs else {},
        **{name: said[name] for name in names},
    )
    return getattr(trl, TRL[recipe.trainer])(
        model,
        args=arguments,
        train_dataset=samples(recipe),
        processing_class=transformers.AutoTokenizer.from_pretrained(data_path("base_model")),
        peft_config=peft,
        callbacks=list(callbacks),
        **reference,
    )


def samples(recipe: Recipe) -> datasets.Dataset:
    """Tokenized samples of three steps, of which each micro-batch has half its samples liked."""
    rows, n = recipe.batch_size * recipe.gradient_accumulation_steps * 3, recipe.seq_len

    def ids(length: int) -> list:
        return torch.randint(1, 1000, (rows, length)).tolist()

    if recipe.trainer == "reward":
        return datasets.Dataset.from_dict({"chosen_ids": ids(n), "rejected_ids": ids(n)})
    if recipe.trainer == "dpo":
        return datasets.Dataset.from_dict(
            {"prompt_ids": ids(1), "chosen_ids": ids(n - 1), "rejected_ids": ids(n - 1)}
        )
    answers = {"completion_ids": ids(n - 1), "KL_completion_ids": ids(n - 1)}
    label = [2 * (row % recipe.batch_size) < recipe.batch_size for row in range(rows)]
    return datasets.Dataset.from_dict({"prompt_ids": ids(1), **answers, "label": label})


@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_a_real_step_is_what_simulate_says(name, tmp_path, monkeypatch):
    import trl

    recipe, seen = make(name), Seen()
    for kind in (trl.DPOTrainer, trl.KTOTrainer):  # samples are tokenized
        monkeypatch.setattr(kind, "_prepare_dataset", lambda self, dataset, *others: dataset)
    seen.follow(trainer := real(recipe, tmp_path, seen))
    trainer.train()
    simulated = simulate(recipe, target="cpu", full=True)
    assert (getattr(trainer, "ref_model", None) is not None) == recipe.has_reference
    wrong, moments = (
        [],
        [(p, m) for p in ("forward", "backward", "step", "between_steps") for m in ("peak", "end")],
    )
    if (
        recipe.lora and recipe.gradient_checkpointing
    ):  # the watch's step begins while the graph holds the embedded tokens
        moments = [
            moment for moment in moments if moment not in (("backward", "end"), ("step", "peak"))
        ]
    for phase, moment in moments:
        ran, said = (getattr(report.phases[phase], moment) for report in (seen.report, simulated))
        for category in CATEGORIES:
            difference = sum(
                getattr(ran, name) - getattr(said, name)
                for name in MERGED.get(category, (category,))
            )
            if abs(difference) > SCALARS:
                wrong.append(f"{phase} {moment} {category}: {difference:+,} bytes")
    assert not wrong, wrong


@pytest.mark.parametrize(
    "name",
    params(
        ["dpo llama bf16-mixed checkpointing", "dpo qwen3 LoRA", "kto gpt2 bf16-mixed"],
        ["dpo qwen3 LoRA"],
    ),
)
def test_deepened_is_the_whole_depth(name):
    recipe = make(name).replace(num_layers=8)
    deepened, whole = simulate(recipe), simulate(recipe, full=True)
    assert (deepened.phases, deepened.peak, deepened.notes) == (whole.phases, whole.peak, [])


@pytest.mark.parametrize(
    "trainer, family, fields, field",
    [
        ("dpo", "bert", {}, "trainer"),
        ("reward", "llama", {"task": "causal-lm"}, "trainer"),
        ("dpo", "llama", {"loop": "plain"}, "loop"),
        ("kto", "llama", {"loop": Loop(use_cache=True)}, "loop"),
        ("kto", "llama", {"batch_size": 1}, "batch_size"),
        ("dpo", "llama", {"sharding": Sharding(world_size=2)}, "sharding.engine"),
        ("dpo", "llama", {"lora": LoRA(), "quantization": Quantization()}, "quantization.prepare"),
        (
            "dpo",
            "llama",
            {"lora": LoRA(target_modules=("q_proj", "lm_head"))},
            "lora.target_modules",
        ),
        (
            "dpo",
            "llama",
            {"lora": LoRA(autocast_adapter_dtype=False)},
            "lora.autocast_adapter_dtype",
        ),
        ("reward", "llama", {"precompute_ref_log_probs": True}, "precompute_ref_log_probs"),
        ("sft", "llama", {"precompute_ref_log_probs": True}, "precompute_ref_log_probs"),
    ],
)
def test_what_they_do_not_train_is_refused(trainer, family, fields, field):
    with pytest.raises(RecipeError) as caught:
        Recipe(config(family), trainer=trainer, **{**SIZES, **fields})
    assert caught.value.field == field and "\n" not in str(caught.value)


def test_a_sample_is_a_pair():
    plain = Recipe(config("gpt2"), **SIZES)
    assert [
        plain.replace(trainer=t).tokens // plain.tokens for t in ("sft", "dpo", "kto", "reward")
    ] == [1, 2, 1, 2]
    recipe = plain.replace(trainer="dpo", precompute_ref_log_probs=True)
    assert Recipe.from_json(
        recipe.to_json()
    ) == recipe and "DPOTrainer · reference precomputed" in str(recipe)
    assert "precompute_ref_log_probs" not in plain.to_dict()
    assert recipe.replace(trainer="reward", precompute_ref_log_probs=False).shape.num_labels == 1
