"""The families of 2025 at tiny sizes: simulated as really allocated on this CPU, and the same from a shallow run."""

import pytest
import torch
import transformers
from quick import params
from vramlab import LoRA, Recipe, simulate
from vramlab.tracking.history import History
from vramlab.tracking.reporting import to_report
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.training import build

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
OTHERS = {
    "DeepseekV3Config": dict(
        EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "Gemma3TextConfig": dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "Glm4MoeConfig": dict(EXPERTS, n_routed_experts=4, head_dim=8, first_k_dense_replace=1),
    "GptOssConfig": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    "GraniteConfig": dict(embedding_multiplier=2.0, residual_multiplier=0.5, logits_scaling=4.0),
    "Olmo2Config": {},
    "Olmo3Config": dict(sliding_window=4),
    "Phi3Config": {},
    "Qwen3MoeConfig": dict(EXPERTS, num_experts=4, head_dim=8),
    "SmolLM3Config": {},
}  # fmt: skip


def configuration(name: str, layers: int) -> dict:
    return getattr(transformers, name)(**{**SIZES, **OTHERS[name], "num_hidden_layers": layers}).to_dict()


@pytest.mark.parametrize("name", params(list(OTHERS), ["Gemma3TextConfig", "Qwen3MoeConfig"]))
@pytest.mark.parametrize("options", [{}, {"lora": LoRA(target_modules=("o_proj",)), "gradient_checkpointing": True}])
def test_what_is_simulated_is_allocated(name, options):
    recipe = Recipe(configuration(name, 4), batch_size=2, seq_len=8, **options)
    torch.manual_seed(0)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    real = to_report(History(tracker.log, tracker.marks), "measured", recipe, "cpu")
    simulated = simulate(recipe, target="cpu")
    assert simulated.phases == real.phases and simulated.peak_phase == real.peak_phase


@pytest.mark.parametrize("name", params(list(OTHERS), ["GptOssConfig"]))
def test_a_shallow_run_says_what_the_whole_one_does(name):
    recipe = Recipe(configuration(name, 12), seq_len=8, precision="bf16-mixed")
    assert simulate(recipe).phases == simulate(recipe, full=True).phases
