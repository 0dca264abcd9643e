"""The families of 2025 at tiny sizes: simulated as really allocated on this CPU, and the same from
a shallow run.

Those that read more than text have no recipe: the sentence that says so says what to do, and that
is done here.
"""

import copy

import pytest
import torch
import transformers
from quick import params
from vramlab import LoRA, Recipe, RecipeError, simulate
from vramlab.recipe.recipe import Loop
from vramlab.tracking.history import History, to_report
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.engine import Training
from vramlab.training.training import build

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
OTHERS = {
    "DeepseekV3Config": dict(
        EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
        num_key_value_heads=4,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "Gemma3TextConfig": dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "Gemma4TextConfig": dict(
        head_dim=8, global_head_dim=16, sliding_window=4, hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=16,
    ),
    "Gemma4TextConfig with shared keys": dict(
        head_dim=8, global_head_dim=16, sliding_window=4, hidden_size_per_layer_input=8,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=96, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "Glm4MoeConfig": dict(EXPERTS, n_routed_experts=4, head_dim=8, first_k_dense_replace=1),
    "GptOssConfig": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    "GraniteConfig": dict(embedding_multiplier=2.0, residual_multiplier=0.5, logits_scaling=4.0),
    "Olmo2Config": {},
    "Olmo3Config": dict(sliding_window=4),
    "Phi3Config": {},
    "Qwen3MoeConfig": dict(EXPERTS, num_experts=4, head_dim=8),
    "SmolLM3Config": {},
}  # fmt: skip
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)  # fmt: skip
VISION = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, patch_size=14
)
ROPE = dict(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4})
IDS = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
TOWER = dict(VISION, depth=2, num_heads=2, out_hidden_size=32)
WITH_IMAGES = {
    "LlavaConfig": dict(
        vision_config=dict(VISION, image_size=28, model_type="clip_vision_model"),
        image_token_index=90,
    ),
    "Gemma3Config": dict(
        vision_config=dict(VISION, image_size=56), mm_tokens_per_image=4, image_token_index=90
    ),
    "Qwen2_5_VLConfig": dict(IDS, vision_config=dict(TOWER, fullatt_block_indexes=[1])),
    "Qwen3VLConfig": dict(IDS, vision_config=dict(TOWER, deepstack_visual_indexes=[0])),
}


def images(name: str) -> tuple[torch.nn.Module, dict]:
    """A tiny model of `name` that reads an image of four tokens, and its batch."""
    fields = WITH_IMAGES[name]
    text = SIZES | {"num_hidden_layers": 2, "head_dim": 8, "model_type": "llama"}
    if name.startswith("Qwen"):
        text |= ROPE
        text.pop("model_type")
        made = dict(
            pixel_values=torch.randn(16, 3 * 2 * 14 * 14), image_grid_thw=torch.tensor([[1, 4, 4]])
        )
    else:
        side = fields["vision_config"]["image_size"]
        made = dict(pixel_values=torch.randn(1, 3, side, side))
    if name == "Gemma3Config":
        text["model_type"] = "gemma3_text"
    configured = getattr(transformers, name)(text_config=text, **fields)
    if name == "LlavaConfig":  # the others are recipes too: `test_simulate_images.py`
        with pytest.raises(
            RecipeError, match=r"'text_config' .* simulate\(model=..., batch=..., optimizer=...\)"
        ):
            Recipe(configured)
    ids = torch.randint(3, 80, (1, 24))
    ids[0, 1:6] = torch.tensor([92, 90, 90, 90, 90])
    made |= {"input_ids": ids, "labels": ids.clone()}
    if name != "LlavaConfig":
        made["token_type_ids" if name == "Gemma3Config" else "mm_token_type_ids"] = (
            ids == 90
        ).long()
    return transformers.AutoModelForImageTextToText.from_config(configured).train(), made


def configuration(name: str, layers: int) -> dict:
    return getattr(transformers, name.split()[0])(
        **{**SIZES, **OTHERS[name], "num_hidden_layers": layers}
    ).to_dict()


@pytest.mark.parametrize("name", params(list(OTHERS), ["Gemma3TextConfig", "Qwen3MoeConfig"]))
@pytest.mark.parametrize(
    "options", [{}, {"lora": LoRA(target_modules=("o_proj",)), "gradient_checkpointing": True}]
)
def test_what_is_simulated_is_allocated(name, options):
    recipe = Recipe(configuration(name, 4), batch_size=2, seq_len=8, **options)
    torch.manual_seed(0)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    real = to_report(History(tracker.log, tracker.marks), "measured", recipe, "cpu")
    simulated = simulate(recipe, target="cpu")
    assert simulated.phases == real.phases and simulated.peak_phase == real.peak_phase


@pytest.mark.parametrize("name", params([n for n in OTHERS if "shared" not in n], ["GptOssConfig"]))
def test_a_shallow_run_says_what_the_whole_one_does(name):
    recipe = Recipe(configuration(name, 12), seq_len=8, precision="bf16-mixed")
    assert simulate(recipe).phases == simulate(recipe, full=True).phases


@pytest.mark.parametrize("name", params(list(WITH_IMAGES), ["Qwen2_5_VLConfig"]))
def test_a_model_with_images_is_simulated_as_the_sentence_says(name):
    model, batch = images(name)
    simulated = simulate(model=model, batch=batch, optimizer=torch.optim.AdamW, target="cpu")
    training = Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        batch=copy.deepcopy(batch),
        device=torch.device("cpu"),
        multi_tensor=False,
        loop=Loop.named("plain"),
        precision="fp32",
    )
    tracker = run_tracked(training, Tracker("cpu"), 2, "cpu")
    assert simulated.phases == History(tracker.log, tracker.marks).phases() and not simulated.notes


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true", "lora": LoRA(r=4, target_modules=("q_proj", "out_proj"))},
    ],
)
def test_linear_attention_runs_its_own_kernels_host_code(options, monkeypatch):
    """Kernels write where host code has allocated, so they are not launched: what is compared does
    not depend on values.
    """
    pytest.importorskip(
        "fla",
        reason="flash-linear-attention, with which no CPU runs a Qwen3-Next, is not installed",
    )
    from triton.runtime.jit import KernelInterface

    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None
    )
    model = transformers.Qwen3NextConfig(**SIZES | LINEAR, num_hidden_layers=4).to_dict()
    recipe = Recipe(model, batch_size=2, seq_len=64, **options)
    tracker = run_tracked(build(recipe, "cpu", target="cpu"), Tracker("cpu"), 2, "cpu")
    simulated = simulate(recipe, target="cpu")
    assert simulated.phases == History(tracker.log, tracker.marks).phases()
    assert not any("chunk_gated_delta_rule" in note for note in simulate(recipe).notes)
