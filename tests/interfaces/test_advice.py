"""What a refusal or an answer advises can be done, and then there is an answer."""

import itertools
import re

import pytest
import yaml
from typer.testing import CliRunner
from vramlab import GiB, LoRA, Quantization, Recipe, explain, predict
from vramlab.hardware.gpu import cards_of, find_gpu, is_also
from vramlab.interfaces.cli import app
from vramlab.planning.changes import _shares as shares
from vramlab.planning.changes import cheapest_pair
from vramlab.planning.question import Question
from vramlab.planning.search_space import sizes_of

MODEL = "qwen2.5-0.5b"
METHODS = {
    "full": [],
    "lora": ["--lora-r", "16"],
    "lora over bf16": ["--lora-r", "16", "--dtype", "bfloat16"],
    "qlora": ["--lora-r", "16", "--quantization", "nf4"],
}
PRECISIONS = ("bf16-mixed", "bf16-true", "fp16-mixed", "tf32")
TRAINERS = ("sft", "dpo", "transformers")


def run(*words):
    return CliRunner().invoke(app, [*words])


def advised(said: str) -> list[str]:
    """The options that a refusal says to take on a card before Ampere."""
    _, _, taken = said.strip().rpartition("take ")
    _, _, earlier = taken.rpartition("before Ampere ")
    return re.findall(r"(?:--)?[\w-]+", earlier or taken)


@pytest.mark.parametrize(
    ("method", "precision", "trainer"), list(itertools.product(METHODS, PRECISIONS, TRAINERS))
)
def test_what_a_T4_refuses_names_options_that_do(method, precision, trainer):
    """Once refused, the options that the refusal says are answered: no circle of advice."""
    words = ["predict", MODEL, "--gpu", "T4", "--seq-len", "64", *METHODS[method]]
    words += ["--trainer", trainer, "--precision", precision]
    first = run(*words)
    if first.exit_code != 2:
        return
    if first.stderr.endswith("ask simulate.\n"):
        # Of one trainer, for it takes seconds.
        if trainer == "transformers":
            assert run("simulate", *words[1:], "--num-layers", "1").exit_code == 0
        return
    options = advised(first.stderr)
    assert options and options[0].startswith("--"), first.stderr
    # A later option counts before the same one earlier.
    again = run(*words, *options)
    assert again.exit_code != 2, (first.stderr, again.stderr)


def test_what_a_T4_refuses_of_a_trainer_that_samples_names_a_precision():
    """No other trainer samples, so the advice keeps it."""
    words = ["simulate", MODEL, "--gpu", "T4", "--num-layers", "1", *METHODS["qlora"]]
    words += ["--trainer", "grpo", "--num-generations", "2", "--prompt", "4", "--completion", "6"]
    first = run(*words, "--precision", "fp16-mixed")
    options = advised(first.stderr)
    assert first.exit_code == 2 and "--trainer" not in options
    assert run(*words, "--precision", "fp16-mixed", *options).exit_code == 0


def test_a_family_says_which_card_it_is_taken_as():
    assert is_also("A100") == ["A100 40GB PCIe", "A100 80GB", "A100 80GB PCIe"]
    assert is_also("A100 80GB") == is_also("T4") == is_also("NVIDIA GeForce RTX 4090") == []
    said = run("predict", "gpt2", "--gpu", "A100").stderr
    assert "A100 is taken as A100 40GB; there is also A100 40GB PCIe, A100 80GB" in said
    asked = ("--tokens", "64", "--method", "lora", "--no-confirm")
    planned = run("plan", "gpt2", "--gpu", "A100", *asked).stdout
    assert "A100 is taken as A100 40GB; there is also" in " ".join(planned.split())


def test_a_card_is_known_by_what_it_reports():
    for size in ("14.56GiB", "14.74GiB"):
        assert Question("gpt2", memory=size).gpu.name == "T4"
    assert "A10" in [card.name for card in cards_of(int(22.02 * GiB))]
    # Its box says 24 GB as those of cards that report less.
    assert "RTX 4090" in [card.name for card in cards_of(int(23.51 * GiB))]
    assert Question("gpt2", memory="23.51GiB").gpu.total == find_gpu("RTX 4090").total
    message = "CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of "
    message += "14.56 GiB of which 2.00 GiB is free."
    assert "a card that has 14.56 GiB: likely T4 (--gpu)" in explain(message).lines


def test_axolotl_is_graded_with_the_segments_that_it_sets(tmp_path):
    path = tmp_path / "config.yml"
    settings = {"base_model": MODEL, "adapter": "lora", "lora_r": 8, "lora_target_linear": True}
    path.write_text(yaml.safe_dump(settings | {"bf16": True, "sequence_len": 512}))
    for command in ("predict", "explain"):
        shown = run(command, str(path), "--gpu", "RTX 4090", "--json")
        assert "axolotl sets expandable segments" in shown.output
    answer = run("predict", str(path), "--gpu", "RTX 4090", "--json").stdout
    assert '"expandable_segments": true' in answer


def test_explain_names_a_pair_where_no_change_is_enough_alone():
    recipe = Recipe(MODEL, 7, 512, "fp16-mixed")  # a batch that no half divides
    card = find_gpu("T4")
    found = explain(recipe, gpu=card)
    *alone, pair, with_segments = found.changes
    assert len(alone) == 3 and not any(change["enough"] for change in alone)
    assert pair["enough"] and pair["text"].endswith(", enough together")
    assert with_segments["enough"] and with_segments["same"] and not pair["same"]
    assert pair["saves"] > max(change["saves"] for change in alone)
    assert any("Triton, in which it is written, does not support T4" in x for x in found.lines)
    assert cheapest_pair(recipe, card, 1 << 50) is None


def test_a_pair_may_need_expandable_segments_and_weights_that_are_not_prepared():
    recipe = Recipe(
        "qwen3-8b",
        seq_len=32768,
        precision="bf16-mixed",
        dtype="bfloat16",
        lora=LoRA(r=16, target_modules="all-linear"),
        gradient_checkpointing=True,
        optim="adamw_torch_fused",
    )
    *alone, pair = explain(recipe, gpu="RTX 4090").changes
    assert not any(change["enough"] for change in alone)
    assert ", nf4 double, use_liger_kernel=True: " in pair["text"]
    assert "not prepared (--no-prepare)" in pair["text"]
    assert pair["text"].endswith("enough together with PYTORCH_ALLOC_CONF=expandable_segments:True")
    cured = recipe.replace(
        use_liger_kernel=True, quantization=Quantization("nf4", double=True, prepare=False)
    )
    assert predict(cured, gpu="RTX 4090", expandable_segments=True).verdict == "safe"


def test_a_pair_that_keeps_the_training_is_named_though_another_training_is_enough():
    recipe = Recipe("qwen3-4b", 1, 8192, "bf16-true", "adamw_8bit", gradient_checkpointing=True)
    pair = explain(recipe, gpu="RTX 3090").changes[-1]
    assert pair["enough"] and pair["same"]
    assert pair["fields"] == {"use_liger_kernel": True, "optim": "paged_adamw_8bit"}
    cured = recipe.replace(**pair["fields"])
    assert predict(cured, gpu="RTX 3090").verdict in ("safe", "likely")
    paged, lora = explain(recipe.replace(use_liger_kernel=True), gpu="RTX 3090").changes[:2]
    assert paged["fields"] == {"optim": "paged_adamw_8bit"} and paged["same"]
    assert lora["enough"] and not lora["same"]
    *_, another, same = explain(recipe.replace(seq_len=16384), gpu="RTX 3090").changes
    assert another["enough"] and not another["same"]
    assert same["same"] and "enough together with PYTORCH_ALLOC_CONF" in same["text"]


def test_explain_says_first_what_expandable_segments_do():
    recipe = Recipe("polyglot-ko-1.3b", 4, 256, "fp16-true")
    lines = explain(recipe, gpu="T4").lines
    head = next(number for number, line in enumerate(lines) if "cheapest changes" in line)
    assert lines[head + 1].startswith("  PYTORCH_ALLOC_CONF=expandable_segments:True: safe, ")
    with_them = explain(recipe, gpu="T4", expandable_segments=True)
    assert not any(line.startswith("  PYTORCH_ALLOC_CONF") for line in with_them.lines)


def test_a_share_of_the_card_is_tried_for_vllm_that_holds_weights_and_one_batch():
    """16-bit weights of 14.19 GiB and 8 × 768 tokens of 56 KiB take 0.64 of 23.51 GiB."""
    rollouts = {"use_vllm": True, "num_generations": 8, "prompt_length": 256}
    rollouts |= {"max_completion_length": 512, "vllm_gpu_memory_utilization": 0.9}
    asked = {"trainer": "grpo", "global_batch": 8, "method": "lora", "lora": LoRA(r=8)}
    question = Question("qwen2.5-7b", "RTX 4090", rollouts=rollouts, **asked)
    tried = [change["rollouts"].vllm_gpu_memory_utilization for change in shares(question)]
    assert tried == [0.65, 0.7, 0.75]
    unsaid = {key: n for key, n in rollouts.items() if key != "vllm_gpu_memory_utilization"}
    assert not shares(Question("qwen2.5-7b", "RTX 4090", rollouts=unsaid, **asked)), "it is found"
    elsewhere = rollouts | {"vllm_mode": "server"}
    assert not shares(Question("qwen2.5-7b", "RTX 4090", rollouts=elsewhere, **asked))
    # More ranks than samples leave no micro-batch, and no traceback.
    assert sizes_of(question.plain, ()) == ()
