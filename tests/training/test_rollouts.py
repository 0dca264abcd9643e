"""`trainer="grpo"` and "rloo" are what TRL's trainers do: their real steps on this CPU, followed by
a tracker, against the simulation, phase by phase.
"""

import contextlib
import dataclasses
import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import tokenizers
import transformers
import trl
from quick import params
from test_trainer_loop import SCALARS
from tiny_models import config
from transformers import AutoTokenizer
from vramlab import (
    LoRA,
    Quantization,
    Recipe,
    RecipeError,
    Rollouts,
    Sharding,
    measure,
    plan,
    simulate,
)
from vramlab.base.data import data_path
from vramlab.planning.work import told_of_work
from vramlab.recipe.families import TASKS
from vramlab.recipe.options import TRL
from vramlab.report.report import CATEGORIES, GiB, Report
from vramlab.simulation.completions import left_out
from vramlab.tracking.history import History
from vramlab.tracking.tensors import tensors_in
from vramlab.tracking.tracked import claim_model, claim_states, gradients_named
from vramlab.tracking.tracker import REFERENCE, Tracker
from vramlab.training.models import build_model
from written_scripts import differing_dtypes, run_script, simulated

pytestmark = pytest.mark.usefixtures("quiet")

SIZES = {"num_layers": 2, "batch_size": 4}
SHORT = {"num_generations": 4, "prompt_length": 8, "max_completion_length": 6}
CYCLES = 2
PHASES = ("generate", "score", "forward", "backward", "step", "between_steps")
# The tracker of the real run is not told which tensors are a cache's.
MERGED = dict.fromkeys(("kv_cache", "temporaries"), ("kv_cache", "temporaries"))
CASES = {
    "grpo qwen3": ("grpo", "qwen3", {}, {}),
    "grpo llama beta": ("grpo", "llama", {"precision": "bf16-mixed"}, {"beta": 0.1}),
    "grpo qwen3 LoRA checkpointing": (
        "grpo",
        "qwen3",
        {"lora": LoRA(r=4), "gradient_checkpointing": True, "precision": "bf16-mixed"},
        {},
    ),
    "grpo llama LoRA beta": ("grpo", "llama", {"lora": LoRA(r=4)}, {"beta": 0.1}),
    "grpo qwen3 bf16-true, two iterations": (
        "grpo",
        "qwen3",
        {"precision": "bf16-true", "gradient_accumulation_steps": 2},
        {"num_iterations": 2},
    ),
    "grpo gpt2 four steps a generation": (
        "grpo",
        "gpt2",
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"steps_per_generation": 4},
    ),
    "grpo llama two generations a step": (
        "grpo",
        "llama",
        {"gradient_accumulation_steps": 4},
        {"steps_per_generation": 2},
    ),
    "grpo mixtral": ("grpo", "mixtral", {"precision": "bf16-mixed"}, {}),
    "grpo llama nf4": (
        "grpo",
        "llama",
        {
            "lora": LoRA(r=4),
            "precision": "bf16-true",
            "quantization": Quantization("nf4", prepare=False),
        },
        {},
    ),
    "grpo llama LoRA beta, vLLM elsewhere": (
        "grpo",
        "llama",
        {"lora": LoRA(r=4), "precision": "bf16-mixed", "gradient_checkpointing": True},
        {"beta": 0.1, "use_vllm": True, "vllm_mode": "server"},
    ),
    "rloo qwen3": ("rloo", "qwen3", {}, {}),
    "rloo llama LoRA beta": (
        "rloo",
        "llama",
        {"lora": LoRA(r=4), "precision": "bf16-mixed", "gradient_accumulation_steps": 2},
        {"beta": 0.1},
    ),
}
QUICK = (
    "grpo qwen3 LoRA checkpointing",
    "grpo llama LoRA beta, vLLM elsewhere",
    "rloo llama LoRA beta",
)


def make(name: str) -> Recipe:
    trainer, family, fields, sampled = CASES[name]
    rollouts = Rollouts(**SHORT | sampled)
    return Recipe(config(family), trainer=trainer, rollouts=rollouts, **SIZES | fields)


def phased(kind: type, tracker: Tracker) -> type:
    """Return TRL's trainer `kind`, which tells `tracker` as its phases begin."""

    class Phased(kind):
        def _generate(self, *args, **more):
            tracker.begin("generate")
            made = super()._generate(*args, **more)
            tracker.begin("score")
            return made

        def compute_loss(self, *args, **more):
            tracker.claim(tensors_in(self._buffered_inputs), "inputs")
            tracker.begin("forward")
            return super().compute_loss(*args, **more)

        def training_step(self, *args, **more):
            loss = super().training_step(*args, **more)
            if self.accelerator.sync_gradients:
                tracker.begin("step")
            return loss

    return Phased


class Ended(transformers.TrainerCallback):
    def __init__(self, tracker: Tracker):
        self.tracker = tracker

    def on_step_end(self, args, state, control, optimizer=None, **more):
        claim_states(self.tracker, [optimizer.optimizer], "cpu")
        self.tracker.begin("between_steps")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="b", eos_token="c", unk_token="a"
    )


def real(recipe: Recipe, out, tracker: Tracker):
    """Return TRL's own trainer on the recipe's base model, to which it gives adapters itself."""
    import trl
    from peft import LoraConfig

    in_bits = recipe.quantization
    bare = recipe.replace(
        trainer="transformers",
        rollouts=None,
        lora=recipe.lora if in_bits else None,
        gradient_checkpointing=False,
    )
    model = build_model(bare, "cpu")
    if in_bits:
        model = model.unload()
        model.is_quantized = False  # by `from_pretrained`, whose quantizer the Trainer asks
    if recipe.has_reference:  # which TRL loads
        model.save_pretrained(out / "reference")
        model.config._name_or_path = str(out / "reference")
    peft = None
    if recipe.lora:
        peft = LoraConfig(r=4, task_type=TASKS["causal-lm"].peft)
    rollouts = recipe.rollouts
    said = {name: getattr(rollouts, name) for name in vars(rollouts) if name != "prompt_length"}
    arguments = getattr(trl, TRL[recipe.trainer].replace("Trainer", "Config"))(
        str(out),
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        gradient_checkpointing=recipe.gradient_checkpointing,
        bf16=recipe.precision == "bf16-mixed",
        max_steps=CYCLES * steps_of(recipe),
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        optim="adamw_torch",
        dataloader_pin_memory=False,
        **said,
    )
    prompts = {"prompt": [" ".join("a" * rollouts.prompt_length) for _ in range(64)]}
    trainer = phased(getattr(trl, TRL[recipe.trainer]), tracker)(
        model,
        reward_funcs=lambda completions, **more: [float(i % 2) for i, _ in enumerate(completions)],
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(prompts),
        processing_class=tokenizer(),
        peft_config=peft,
        callbacks=[Ended(tracker)],
    )
    # no token ends a completion
    never = [recipe.shape.vocab_size]
    trainer.eos_token_ids = never
    if not rollouts.use_vllm:
        trainer.generation_config.eos_token_id = never
    backward = trainer.accelerator.backward

    def in_phase(loss, **more):
        tracker.begin("backward")
        backward(loss, **more)

    trainer.accelerator.backward = in_phase
    return trainer


def vllm_elsewhere(recipe: Recipe, monkeypatch) -> None:
    """Let TRL find a server that samples completions of full length."""
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer import grpo_trainer

    class Server:
        def get_server_info(self):
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def update_named_params(self, metadata, named):
            assert len(metadata) == len(list(named))

        def reset_prefix_cache(self):
            pass

        def generate(self, prompts, n, max_tokens, **more):
            rows = len(prompts) * n
            return {
                "prompt_ids": prompts,
                "completion_ids": [[1] * max_tokens] * rows,
                "logprobs": [[[0.0]] * max_tokens] * rows,
            }

    def connect(self):
        self.vllm_client = Server()

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", connect)
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


def steps_of(recipe: Recipe) -> int:
    """Return the optimizer steps of a cycle."""
    rollouts = recipe.rollouts
    accumulation = recipe.gradient_accumulation_steps
    micro_batches = (rollouts.steps_per_generation or accumulation) * rollouts.num_iterations
    return max(1, micro_batches // accumulation)


def followed(recipe: Recipe, out) -> History:
    """Return the history of real cycles."""
    tracker = Tracker("cpu")
    trainer = real(recipe, out, tracker)
    claim_model(tracker, trainer.model)
    reference = getattr(trainer, "ref_model", None)
    assert (reference is not None) == recipe.has_reference
    if reference is not None:
        claim_model(tracker, reference, REFERENCE)
    with contextlib.ExitStack() as stack:
        stack.enter_context(gradients_named(tracker, trainer.model))
        stack.enter_context(tracker.modules(trainer.model, reference))
        stack.enter_context(tracker)
        trainer.train()
    tracker.finish()
    return History(tracker.log, tracker.marks)


@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_a_real_cycle_is_what_simulate_says(name, tmp_path, monkeypatch):
    recipe = make(name)
    if recipe.rollouts.use_vllm:
        vllm_elsewhere(recipe, monkeypatch)
    ran = followed(recipe, tmp_path).phases()
    said = simulate(recipe, target="cpu", full=True).phases
    wrong = []
    for phase in PHASES:
        for moment in ("peak", "end"):
            of_run = getattr(ran[phase], moment)
            simulated = getattr(said[phase], moment)
            for category in CATEGORIES:
                difference = 0
                for name in MERGED.get(category, (category,)):
                    difference += getattr(of_run, name) - getattr(simulated, name)
                if abs(difference) > SCALARS:
                    wrong.append(f"{phase} {moment} {category}: {difference:+,} bytes")
    assert not wrong, wrong


@pytest.mark.parametrize("family", params(["qwen3", "gemma2", "mixtral"], ["qwen3"]))
def test_tokens_that_are_skipped_change_no_peak(family):
    """Nor do the parts that are scored and the micro-batches that are left out."""
    rollouts = Rollouts(4, 5, 20, beta=0.1)
    sizes = {"num_layers": 2, "batch_size": 1, "gradient_accumulation_steps": 4}
    recipe = Recipe(config(family), trainer="grpo", rollouts=rollouts, **sizes)
    assert left_out(recipe) == range(2, 4)
    whole = simulate(recipe, target="cpu", full=True)
    skipping = simulate(recipe, target="cpu")
    for phase in PHASES:
        ran = whole.phases[phase]
        said = skipping.phases[phase]
        # ids of the tokens that were not sampled
        lost = 8 * rollouts.num_generations * rollouts.max_completion_length
        slack = lost if phase == "generate" else 0
        assert abs(ran.peak.total - said.peak.total) <= slack, phase
        assert ran.end == said.end


@pytest.mark.slow
def test_deepened_is_the_whole_depth():
    recipe = make("grpo qwen3 LoRA checkpointing").replace(num_layers=8)
    deepened = simulate(recipe)
    whole = simulate(recipe, full=True)
    assert (deepened.notes, deepened.peak) == ([], whole.peak)
    assert deepened.phases == whole.phases


@pytest.mark.slow
def test_a_step_on_a_real_card():
    """TRL's GRPOTrainer with LoRA on an H200, whose process had cuBLAS's workspaces already."""
    runs = json.loads(data_path("phase_peaks.json").read_text())["runs"]
    (run,) = (run for run in runs if run["kind"] == "grpo")
    recipe = Recipe(
        run["model"],
        trainer="grpo",
        precision="bf16-mixed",
        gradient_checkpointing=True,
        lora=LoRA(r=16, target_modules="all-linear"),
        rollouts=Rollouts(8, run["prompt_tokens"][1], run["completion_tokens"]),
    )
    said = simulate(recipe, gpu="H200")
    measured = {}
    for mark in run["marks"]:
        if mark["step"] == 2:
            measured[mark["phase"]] = mark["peak"]["allocated"]
    measured["step"] = measured["optimizer"]
    for phase in PHASES[:-1]:
        assert said.phases[phase].peak.total == pytest.approx(measured[phase], rel=0.002), phase
    reserved = run["marks"][-1]["peak"]["reserved"]
    assert said.reserved.low < reserved < said.reserved.high


def test_what_the_trainers_do_not_sample_is_refused():
    usual = {"trainer": "grpo", **SIZES}
    for fields, field in (
        ({"batch_size": 3}, "rollouts.num_generations"),
        ({"sharding": Sharding(3, 2, "deepspeed")}, "sharding.stage"),
        ({"sharding": Sharding(0, 2, "tensor")}, "sharding.engine"),
        ({"sharding": Sharding(3, 2, cp_size=2)}, "sharding.cp_size"),
        (
            {"sharding": Sharding(3, 2), "rollouts": Rollouts(4, 8, use_vllm=True)},
            "rollouts.use_vllm",
        ),
        ({"batch_size": 2, "sharding": Sharding(0, 3, "ddp")}, "rollouts.num_generations"),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of"),
        ({"seq_len": 64}, "seq_len"),
        ({"trainer": "sft"}, "rollouts"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"activation_offloading": True}, "activation_offloading"),
    ):
        with pytest.raises(RecipeError) as caught:
            Recipe(config("llama"), **{**usual, "rollouts": Rollouts(4, 8, 6), **fields})
        assert caught.value.field == field
        assert "\n" not in str(caught.value)


def test_a_recipe_of_rollouts_comes_back():
    recipe = Recipe(config("llama"), trainer="grpo", num_layers=2)
    assert (recipe.batch_size, recipe.seq_len) == (8, 256 + 512)
    assert Recipe.from_json(recipe.to_json()) == recipe
    longer = recipe.replace(rollouts=Rollouts(8, 100, 28, beta=0.5))
    assert longer.seq_len == 128
    assert longer.has_reference and not longer.replace(lora=LoRA()).has_reference
    assert "8 generations of 100 + 28 tokens · beta 0.5" in str(longer)


def test_vllm_takes_its_share_of_the_card():
    recipe = Recipe(
        "qwen3-0.6b",
        trainer="grpo",
        num_layers=4,
        precision="bf16-mixed",
        lora=LoRA(r=4),
        rollouts=Rollouts(4, 16, 16, use_vllm=True, vllm_mode="server"),
    )
    elsewhere = simulate(recipe, gpu="T4")
    share = math.ceil(0.3 * elsewhere.usable)

    def beside(**said: object) -> Report:
        rollouts = dataclasses.replace(recipe.rollouts, vllm_mode="colocate", **said)
        return simulate(recipe.replace(rollouts=rollouts), gpu="T4")

    awake = beside()
    asleep = beside(vllm_enable_sleep_mode=True)
    for phase in PHASES:
        without = elsewhere.phases[phase].peak.total
        assert awake.phases[phase].peak.total - without == share
        assert (asleep.phases[phase].peak.total - without == share) == (phase == "generate")
    assert awake.usable == asleep.usable == elsewhere.usable
    assert awake.process.value == elsewhere.process.value + share
    assert asleep.process.value < awake.process.value
    assert asleep.peak_phase == "generate"
    with pytest.raises(RecipeError, match=r"vllm_gpu_memory_utilization.*a cache has to follow"):
        beside(vllm_gpu_memory_utilization=0.01)
    with pytest.raises(RecipeError, match="name one"):
        simulate(Recipe(**awake.recipe))
    with pytest.raises(RecipeError, match=r"use_vllm.*simulate"):
        measure(recipe, device="cpu", recorded=False)


def base_that_never_ends(folder: Path) -> tuple[str, str]:
    """Return a folder with a tiny model whose end no completion has, and a prompt of 8 tokens."""
    words = AutoTokenizer.from_pretrained(data_path("base_model"))
    tiny = config("llama", vocab_size=len(words), num_hidden_layers=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny))
    for said in (model.config, model.generation_config):
        said.eos_token_id = None
    model.save_pretrained(folder)
    words.add_special_tokens({"eos_token": "<never>"})
    words.save_pretrained(folder)
    prompt = "if"
    while len(words(prompt)["input_ids"]) < SHORT["prompt_length"]:
        prompt += " if"
    return str(folder), prompt


@pytest.mark.slow  # the fast tests of real cycles run the same trainer
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_plan_writes_a_program_that_samples(method, tmp_path):
    folder, prompt = base_that_never_ends(tmp_path / "model")
    found = plan(
        folder,
        "RTX 4090",
        trainer="grpo",
        method=method,
        precisions="bf16-mixed",
        optims="adamw_torch",
        global_batch=4,
        rollouts=Rollouts(**SHORT, beta=0.1),
        confirm=False,
    )
    recipe = found.best.recipe
    rows = [json.dumps({"prompt": prompt, "answer": "if"})] * 16
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    found.write(tmp_path / "train.py")
    assert "sampling the completions" in str(found)
    seen, _ = run_script(tmp_path, "--watch", steps=(2, 3))
    said = simulated(recipe, 2)
    assert differing_dtypes(seen, said) == {}
    for phase in PHASES[2:]:
        ran = seen.phases[phase].peak.total
        assert abs(ran - said.phases[phase].peak.total) <= SCALARS, phase


def test_a_plan_for_several_cards_shares_a_group(tmp_path):
    asked = dict(
        trainer="grpo",
        method="lora",
        precisions="bf16-mixed",
        optims="adamw_torch_fused",
        num_layers=2,
        global_batch=8,
        rollouts=Rollouts(8, 64, 32),
    )
    said: list[str] = []
    with told_of_work(said.append):
        found = plan("qwen3-0.6b", "RTX 4090", 2, **asked)
    best = found.best
    recipe = best.recipe
    assert any(str(recipe) in line for line in said)
    assert (recipe.sharding.engine, recipe.sharding.world_size) == ("ddp", 2)
    # a rank's four completions are half a group
    assert recipe.batch_size * recipe.gradient_accumulation_steps == 4
    assert best.report.source == "simulated"
    assert best.report.peak.total == simulate(recipe, gpu="RTX 4090").peak.total
    path, batch = found.write(tmp_path / "train.py")
    program = path.read_text()
    compile(program, "train.py", "exec")
    assert "torchrun --nproc-per-node 2 train.py" in program and batch.name == "train.sbatch"
    assert 'Sharding(stage=0, world_size=2, engine="ddp")' in program
    with pytest.raises(RecipeError, match=r"engines.*'ddp', whose ranks sample whole"):
        plan("qwen3-0.6b", "RTX 4090", 2, engines="fsdp", **asked)
    with pytest.raises(RecipeError, match="6 completions are sampled at once"):
        plan("qwen3-0.6b", "RTX 4090", 2, **asked | {"global_batch": 6})


def test_a_plan_whose_attention_is_eager_says_why():
    found = plan(
        "qwen3-0.6b",
        "RTX 4090",
        trainer="grpo",
        method="lora",
        precisions="fp32",
        attention="eager",
        num_layers=2,
        global_batch=8,
        rollouts=Rollouts(8, 64, 32),
    )
    assert "sdpa has no fused kernel" in str(found)


def test_a_plan_with_vllm_names_the_card_in_its_program(tmp_path, monkeypatch):
    found = plan(
        "qwen3-0.6b",
        "RTX 4090",
        trainer="grpo",
        method="lora",
        precisions="bf16-true",
        num_layers=4,
        global_batch=8,
        rollouts={"use_vllm": True, "vllm_enable_sleep_mode": True},
        confirm=False,
    )
    needs = found.best.needs
    # what vLLM takes besides its share is not known
    assert needs.high - needs.low > 1.4 * GiB
    (path,) = found.write(tmp_path / "train.py")
    program = path.read_text()
    assert 'simulate(recipe, gpu="RTX 4090")' in program
    assert "vllm_enable_sleep_mode=True," in program and "vllm" in program.split('"""')[1]
    # TRL takes the arguments as they are, and a trainer with them gets as far as vLLM
    monkeypatch.chdir(tmp_path)
    words = SimpleNamespace(output="out", epochs=1, max_steps=1, learning_rate=1e-6, seed=0)
    arguments = runpy.run_path("train.py")["training_arguments"](words)
    assert type(arguments) is trl.GRPOConfig
    rollouts = found.best.recipe.rollouts
    shared = ("vllm_mode", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization")
    for name in ("use_vllm", "num_generations", "max_completion_length", *shared):
        assert getattr(arguments, name) == getattr(rollouts, name), name
    folder, _ = base_that_never_ends(tmp_path / "model")
    with pytest.raises(ImportError, match="vLLM is not available"):
        rows = datasets.Dataset.from_list([{"prompt": "if"}] * 8)
        trl.GRPOTrainer(folder, reward_funcs=len, args=arguments, train_dataset=rows)
