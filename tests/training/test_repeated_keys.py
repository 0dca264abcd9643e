"""sdpa with repeated keys trains what sdpa trains, takes what is predicted, and has a kernel before
Ampere.
"""

import pytest
import torch
from tiny_models import config
from transformers import LlamaConfig
from vramlab import Recipe, RecipeError, plan, predict, simulate
from vramlab.planning.question import Question
from vramlab.planning.search_space import families
from vramlab.simulation.as_run import simulate_as_run
from vramlab.training.training import build, train_step

SHARED = dict(num_layers=2, batch_size=3, seq_len=64, attn_implementation="sdpa_repeated")


@pytest.mark.parametrize("lengths", [None, (64, 50, 10)])
def test_losses_are_those_of_sdpa(lengths):
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64)
    tiny = LlamaConfig(**config("llama", **sizes))
    recipe = Recipe(tiny, **SHARED, lengths=lengths)
    losses = []
    for name in ("sdpa", "sdpa_repeated"):
        torch.manual_seed(0)
        training = build(recipe.replace(attn_implementation=name), "cpu")
        torch.manual_seed(1)
        losses.append([float(train_step(training)) for _ in range(2)])
        assert training.model.config._attn_implementation == name
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
@pytest.mark.parametrize("lengths", [None, (64, 50, 10)])
def test_its_bytes_are_those_of_a_script_that_repeats_them(precision, lengths):
    recipe = Recipe("qwen3-0.6b", precision=precision, **SHARED, lengths=lengths)
    simulated = simulate(recipe, gpu="T4").peak.total
    plain = recipe.replace(attn_implementation="sdpa")
    assert simulated == simulate_as_run(plain, "repeated keys", gpu="T4").peak.total
    assert predict(recipe, gpu="T4").peak.total == pytest.approx(simulated, rel=0.001)


def test_only_keys_that_are_shared_are_repeated():
    for model in ("gpt2", "gemma-2-2b", "falcon-7b"):
        with pytest.raises(RecipeError, match="sdpa_repeated"):
            Recipe(model, attn_implementation="sdpa_repeated")


def test_a_t4_gets_the_kernel_that_its_batches_have(tmp_path):
    """For 2,048 tokens of Qwen3 0.6B plan took eager attention, which keeps all scores."""
    found = plan("qwen3-0.6b", "T4", seq_len=2048, confirm=False)
    assert {choice.recipe.attn_implementation for choice in found.choices} == {"sdpa_repeated"}
    eager = plan("qwen3-0.6b", "T4", seq_len=2048, attention="eager", confirm=False)
    assert found.best.time.tokens_per_second > 1.5 * eager.best.time.tokens_per_second
    program = found.write(tmp_path / "train.py")[0].read_text(encoding="utf-8")
    assert 'attn_implementation="sdpa_repeated",' in program
    assert 'AttentionInterface.register("sdpa_repeated", repeated)' in program
    question = Question(
        "qwen3-0.6b", "RTX 4090", seq_len=2048
    )  # which has a kernel for shared keys
    assert {family.attn_implementation for family in families(question, "full")} == {
        "sdpa",
        "eager",
    }
