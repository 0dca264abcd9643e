"""Architectures outside the recipes' families by `simulate(model=…)`, held against `watch` on this
CPU.
"""

import importlib.util

import pytest
import torch
import transformers
from quick import params
from vramlab import LoRA, Recipe, RecipeError, predict, simulate
from watched_steps import measured


def whisper():
    c = transformers.WhisperConfig(
        vocab_size=100,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(c), {
        "input_features": torch.rand(2, 8, 40),
        "labels": torch.randint(3, 100, (2, 10)),
    }


def sam():
    c = transformers.SamConfig(
        vision_config=dict(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
            output_channels=8,
            mlp_dim=32,
            window_size=2,
            global_attn_indexes=[1],
            num_pos_feats=4,
        ),
        prompt_encoder_config=dict(
            hidden_size=8, image_size=32, patch_size=8, mask_input_channels=4
        ),
        mask_decoder_config=dict(
            hidden_size=8,
            mlp_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            iou_head_hidden_dim=8,
        ),
    )
    return transformers.SamModel(c), {
        "pixel_values": torch.rand(2, 3, 32, 32),
        "input_points": torch.rand(2, 1, 1, 2) * 32,
    }


def wav2vec2():
    c = transformers.Wav2Vec2Config(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
        pad_token_id=0,
    )
    batch = {"input_values": torch.rand(2, 800), "labels": torch.tensor([0, 1])}
    return transformers.Wav2Vec2ForSequenceClassification(c), batch


def swin():
    c = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=4,
        num_labels=3,
    )
    return transformers.SwinForImageClassification(c), {
        "pixel_values": torch.rand(2, 3, 32, 32),
        "labels": torch.tensor([0, 1]),
    }


def convnext():
    c = transformers.ConvNextConfig(
        image_size=32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3
    )
    return transformers.ConvNextForImageClassification(c), {
        "pixel_values": torch.rand(2, 3, 32, 32),
        "labels": torch.tensor([0, 1]),
    }


IDS = torch.randint(3, 60, (2, 8))


def mamba():
    c = transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2)
    return transformers.MambaForCausalLM(c), {"input_ids": IDS, "labels": IDS}


def rwkv():
    c = transformers.RwkvConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, context_length=16
    )
    return transformers.RwkvForCausalLM(c), {"input_ids": IDS, "labels": IDS}


def gemma3n():
    c = transformers.Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=16,
        hidden_size_per_layer_input=4,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_kv_shared_layers=0,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return transformers.Gemma3nForCausalLM(c), {"input_ids": IDS, "labels": IDS}


def outputs_loss(outputs, batch):
    return (
        outputs["loss"]
        if "loss" in outputs
        else outputs["pred_masks"].sum() + outputs["iou_scores"].sum()
    )


ARCHITECTURES = [whisper, sam, wav2vec2, swin, convnext, mamba, rwkv, gemma3n]


# Two models in one, windows over an image, convolutions, recurrence.
@pytest.mark.parametrize(
    "make", params(ARCHITECTURES, [whisper, swin, convnext, mamba]), ids=lambda f: f.__name__
)
def test_an_architecture_is_what_watch_sees(make):
    torch.manual_seed(0)
    model, batch = make()
    said = simulate(
        model=model.train(), batch=batch, loss=outputs_loss, optimizer=torch.optim.SGD, target="cpu"
    )
    seen = measured(model, batch, outputs_loss, torch.optim.SGD(model.parameters()))
    assert said.phases == {name: seen.phases[name] for name in said.phases}


def test_a_kernel_whose_package_is_missing_is_noted():
    """transformers runs its own code, which takes other memory than flash-linear-attention's."""
    sizes = dict(
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config |= {
        "head_dim": 16,
        "vocab_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        **sizes,
    }
    notes = simulate(
        Recipe({**config, "layer_types": ["linear_attention", "full_attention"]}, 1, 16)
    ).notes
    found = [note.split("`")[1] for note in notes if "not installed" in note]
    assert (
        found
        == ["causal_conv1d_fn", "chunk_gated_delta_rule"][
            : 2 - bool(importlib.util.find_spec("fla"))
        ]
    )


def test_adapters_under_names_that_mean_experts_too_are_refused_by_the_formulas():
    recipe = Recipe("glm-4.5-air", num_layers=2, seq_len=16, lora=LoRA(target_modules="all-linear"))
    with pytest.raises(RecipeError, match=r"fused experts too.*ask simulate"):
        predict(recipe)
