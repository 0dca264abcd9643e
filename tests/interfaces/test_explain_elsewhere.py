"""Messages whose traceback shows that no training step asked: DeepSpeed's start, an evaluation,
vLLM.
"""

import pytest
from typer.testing import CliRunner
from vramlab import LoRA, MiB, Recipe, Sharding, explain, predict
from vramlab.interfaces.cli import app
from vramlab.interfaces.explain_message import sized
from vramlab.planning.question import RANK
from vramlab.simulation.colocated import bytes_of_token

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity "
    "of 23.69 GiB of which 2.31 GiB is free. Of the allocated memory 20.11 GiB is allocated by "
    "PyTorch, and 194.00 MiB is reserved by PyTorch but unallocated."
)
# The lines of tracebacks as the libraries' sources name them.
ENGINE = 'File "/lib/site-packages/deepspeed/runtime/{}", line 9, in {}\n'
EVALUATION = 'File "/lib/site-packages/transformers/trainer.py", line 3031, in evaluation_loop\n'
KEPT = 'File "/lib/transformers/trainer_pt_utils.py", line 128, in {}\n'
SHORT = "The model's max seq len (4096) is larger than the maximum number of tokens that can be "
SHORT += "stored in KV cache (3664). Try increasing `gpu_memory_utilization`"
NEEDED = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (18.00 GiB "
    "KV cache is needed, which is larger than the available KV cache memory (11.32 GiB). Based on "
    "the available memory, the estimated maximum model length is 82416. Try increasing"
)


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("zero/stage3.py", "_create_fp32_partitions"),
        ("zero/stage_1_and_2.py", "initialize_optimizer_states"),
        ("engine.py", "_configure_zero_optimizer"),
        ("engine.py", "_configure_bf16_optimizer"),
    ],
)
def test_deepspeed_died_before_any_batch(file, function):
    text = ENGINE.format(file, function) + OOM.format("2.82 GiB")
    said = str(explain(text))
    assert "before the first batch" in said and "offload_optimizer" in said
    assert "halve" not in said and "use_liger_kernel" not in said


def test_what_a_rank_keeps_is_said_of_the_model_that_deepspeed_had():
    text = ENGINE.format("zero/stage3.py", "_create_fp32_partitions") + OOM.format("2.82 GiB")
    sharding = Sharding(stage=3, world_size=8, engine="deepspeed")
    recipe = Recipe("llama-3.1-8b", precision="fp16-mixed", sharding=sharding)
    found = explain(text, recipe)
    wider = Sharding(stage=3, world_size=16, engine="deepspeed")
    offloaded = Sharding(stage=3, world_size=8, engine="deepspeed", offload="optimizer")
    for changed in (sharding, wider, offloaded):
        kept = predict(recipe.replace(sharding=changed)).phases["between_steps"].end.total
        line = f"a rank keeps {sized(kept)} between two steps with {changed.words()}"
        assert line in found.lines
    assert not found.contradictions and not found.changes
    assert "--engine deepspeed" in str(explain(text, "llama-3.1-8b"))
    # A step's frames are DeepSpeed's too.
    step = explain(ENGINE.format("engine.py", "backward") + OOM.format("2.82 GiB"))
    assert "halve per_device_train_batch_size" in str(step)


CALLS_STEP = 'File "/lib/torch/optim/optimizer.py", line 493, in wrapper\n    func(self)\n'
MAKES_STATES = 'File "/lib/torch/optim/adamw.py", line 180, in _init_group\n'
MAKES_STATES += '    state["exp_avg_sq"] = torch.zeros_like(\n'
OFFLOADS = ENGINE.format("zero/stage3.py", "_optimizer_step") + "    self.optimizer.step()\n"
CLOSURE = 'File "/lib/lightning/optimizer.py", line 9, in closure\n    model(batch)\n'
LINEAR = 'File "/lib/torch/nn/functional.py", line 9, in linear\n'


@pytest.mark.parametrize(
    ("frames", "is_update"),
    [
        (CALLS_STEP + MAKES_STATES, True),
        (OFFLOADS, True),
        (OFFLOADS + ENGINE.format("ops/adam/fused_adam.py", "step"), True),
        (CALLS_STEP + CLOSURE, False),
        (CALLS_STEP + LINEAR, False),
    ],
)
def test_the_update_asks_for_states_and_not_for_activations(frames, is_update):
    text = frames + OOM.format("2.82 GiB")
    said = str(explain(text))
    assert ("its states are made in the first update" in said) is is_update
    assert ("halve per_device_train_batch_size" in said) is not is_update


def test_what_the_update_holds_is_said_of_the_model():
    recipe = Recipe("qwen2.5-1.5b", 4, precision="bf16-mixed", optim="adamw_torch_fused")
    lines = explain(CALLS_STEP + MAKES_STATES + OOM.format("2.82 GiB"), recipe).lines
    for changed in (recipe, recipe.replace(optim="adamw_bnb_8bit"), recipe.replace(lora=RANK)):
        peak = predict(changed).phases["step"].peak.total
        assert f"the update holds {sized(peak)}: {changed}" in lines


def test_predictions_that_stay_on_the_card_are_no_lack_of_the_training():
    text = EVALUATION + KEPT.format("nested_concat") + OOM.format("9.27 GiB")
    alone = str(explain(text))
    assert "eval_accumulation_steps" in alone and "preprocess_logits_for_metrics" in alone
    assert "per_device_train_batch_size" not in alone
    recipe = Recipe("qwen2.5-1.5b", seq_len=1024, precision="fp16-mixed", lora=LoRA())
    found = explain(text, recipe)
    assert "take 593.50 MiB: it asked for 16.0" in str(found) and "vramlab evaluate qwen2.5" in str(
        found
    )
    assert not found.contradictions and not found.changes
    forward = str(explain(EVALUATION + OOM.format("9.27 GiB")))
    assert "a smaller per_device_eval_batch_size (8" in forward


def test_a_kv_cache_is_computed_from_the_model():
    assert bytes_of_token(Recipe("llama-2-7b").shape) == MiB // 2
    found = str(explain(SHORT, "llama-2-7b"))
    assert "max_model_len=3664" in found and "512.00 KiB" in found and "predicted" not in found
    assert (
        "longest: 4,096 tokens take 2.00 GiB" in found and "room: 3,664 tokens take 1.79" in found
    )
    found = str(explain(NEEDED, "qwen3-4b"))
    assert "max_model_len=82416" in found, "the message's own remedy"
    # vLLM's own figures, computed from the model
    assert "131,072 tokens take 18.00 GiB" in found and "82,416 tokens take 11.32" in found
    assert "keep less than the keys and values" in str(explain(NEEDED, "gpt-oss-20b"))
    left = "INFO: Available KV cache memory: -1.05 GiB\nNo available memory for the cache blocks."
    assert "−1.05 GiB were left" in str(explain(left))


DISPATCHED = "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have"


def run(*words):
    return CliRunner().invoke(app, ["explain", DISPATCHED, *words])


def test_quantized_weights_that_found_no_room_are_explained_without_adapters_said():
    found = run("llama-3.1-8b", "--gpu", "T4", "--quantization", "nf4")
    assert found.exit_code == 0 and "found no room on the card" in found.output
    assert "note: --lora-r 16 taken" in found.output
    assert "cannot fit" not in found.output
    # A recipe's own error names its part as the title does.
    error = CliRunner().invoke(app, ["predict", "gpt2", "--quantization", "nf4"])
    assert error.output.startswith("--quantization is nf4, but quantized weights cannot be trained")


def test_that_nothing_fits_is_said():
    found = run("llama-3.1-70b", "--gpu", "RTX 4090", "--quantization", "nf4", "--lora-r", "16")
    assert "this cannot fit RTX 4090: its weights in 4 bits alone take 36.87 GiB" in found.output
    again = "vramlab plan llama-3.1-70b --gpu 'RTX 4090' --tokens 512 tries whole recipes"
    assert again in found.output


def test_options_without_a_model_are_one_sentence():
    found = run("--lora-r", "64")
    assert found.exit_code == 2
    assert found.output == "MODEL is '', but name one before its options.\n"


def test_a_share_by_which_vllm_cannot_start_is_said_after_the_message():
    sampling = ("qwen3-8b", "--trainer", "grpo", "--use-vllm", "--gpu", "RTX 4090")
    found = CliRunner().invoke(app, ["explain", NEEDED, *sampling])
    said = "\nvllm_gpu_memory_utilization is 0.3, but vLLM's weights take 15.256 GiB"
    assert found.exit_code == 0 and said in found.stdout
    assert found.stdout.startswith("vLLM's KV cache is too small")
