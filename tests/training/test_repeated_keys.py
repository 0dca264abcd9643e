"""sdpa with repeated keys trains what sdpa trains, takes what is predicted, and has a kernel before
Ampere.
"""

import os
import runpy

import pytest
import torch
from quick import params
from tiny_image_models import SMALL
from tiny_models import config
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from vramlab import Recipe, RecipeError, plan, predict, simulate
from vramlab.planning.image_search import ImageSearch
from vramlab.planning.question import Question
from vramlab.planning.search_space import families
from vramlab.simulation.as_run import simulate_as_run
from vramlab.training.training import build, train_step

IMAGE_READERS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_vl"]
SHARED = dict(num_layers=2, batch_size=3, seq_len=64, attn_implementation="sdpa_repeated")


@pytest.mark.parametrize("lengths", [None, (64, 50, 10)])
def test_losses_are_those_of_sdpa(lengths):
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64)
    tiny = LlamaConfig(**config("llama", **sizes))
    recipe = Recipe(tiny, **SHARED, lengths=lengths)
    losses = [losses_of(recipe, name) for name in ("sdpa", "sdpa_repeated")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def losses_of(recipe: Recipe, name: str) -> list[float]:
    """The losses of two steps with attention `name`."""
    torch.manual_seed(0)
    training = build(recipe.replace(attn_implementation=name), "cpu")
    torch.manual_seed(1)
    losses = [float(train_step(training)) for _ in range(2)]
    assert training.model.config._attn_implementation == name
    return losses


@pytest.mark.parametrize("family", params(IMAGE_READERS, IMAGE_READERS[-1:]))
def test_a_model_that_reads_images_repeats_its_texts_keys(family):
    recipe = Recipe(SMALL[family], 1, seq_len=170, images=1, image_size="40x24")
    losses = [losses_of(recipe, name) for name in ("sdpa", "sdpa_repeated")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("family", "card", "expected"),
    [("qwen3_vl", "T4", "sdpa_repeated"), ("qwen3_vl", "A100", "sdpa"), ("gemma3", "T4", "sdpa")],
)
def test_a_plan_for_images_repeats_keys_where_no_kernel_shares_them(family, card, expected):
    asked = {"method": "lora", "trainer": "sft", "images": 1, "image_size": "40x24"}
    search = ImageSearch(Question(SMALL[family], gpu=card, **asked))
    (way,) = search._ways("lora")
    assert way.attn_implementation == expected


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
@pytest.mark.parametrize("lengths", [None, (64, 50, 10)])
def test_its_bytes_are_those_of_a_script_that_repeats_them(precision, lengths):
    recipe = Recipe("qwen3-0.6b", precision=precision, **SHARED, lengths=lengths)
    simulated = simulate(recipe, gpu="T4").peak.total
    plain = recipe.replace(attn_implementation="sdpa")
    assert simulated == simulate_as_run(plain, "repeated keys", gpu="T4").peak.total
    assert predict(recipe, gpu="T4").peak.total == pytest.approx(simulated, rel=0.001)


def test_only_keys_that_are_shared_are_repeated():
    for model in ("gpt2", "gemma-2-2b", "falcon-7b", "gemma-3-4b-vision"):
        with pytest.raises(RecipeError, match="sdpa_repeated"):
            Recipe(model, attn_implementation="sdpa_repeated")


def test_a_t4_gets_the_kernel_that_its_batches_have(tmp_path, monkeypatch):
    """For 2,048 tokens of Qwen3 0.6B plan took eager attention, which keeps all scores."""
    found = plan("qwen3-0.6b", "T4", seq_len=2048, confirm=False)
    assert {choice.recipe.attn_implementation for choice in found.choices} == {"sdpa_repeated"}
    eager = plan("qwen3-0.6b", "T4", seq_len=2048, attention="eager", confirm=False)
    assert found.best.time.tokens_per_second > 1.5 * eager.best.time.tokens_per_second
    path = found.write(tmp_path / "train.py")[0]
    program = path.read_text(encoding="utf-8")
    assert 'attn_implementation="sdpa_repeated",' in program
    assert 'AttentionInterface.register("sdpa_repeated", repeated)' in program
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the program sets some
    repeated = runpy.run_path(str(path))["repeated"]
    q, k, v = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    for is_causal in (True, False):  # a tower's is not
        found, _ = repeated(None, q, k, v, None, is_causal=is_causal)
        expected = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        assert torch.allclose(found.transpose(1, 2), expected, atol=1e-6)
    question = Question(
        "qwen3-0.6b", "RTX 4090", seq_len=2048
    )  # which has a kernel for shared keys
    assert {family.attn_implementation for family in families(question, "full")} == {
        "sdpa",
        "eager",
    }
