"""Configurations of small models that read images, one of each architecture."""

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 16384,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
IDS = {
    "image_token_id": 290,
    "video_token_id": 291,
    "vision_start_token_id": 292,
    "vision_end_token_id": 293,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
SMALL = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {**TEXT, "rope_parameters": ROTARY},
        "vision_config": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        **IDS,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {**TEXT, "rope_parameters": {**ROTARY, "mrope_interleaved": True}},
        "vision_config": {
            **TOWER,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **IDS,
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {
            **TEXT,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 16,
        "boi_token_index": 290,
        "eoi_token_index": 291,
        "image_token_index": 292,
    },
}
SMALL["paligemma"] = {
    "model_type": "paligemma",
    "text_config": SMALL["gemma3"]["text_config"] | {"model_type": "gemma2"},
    "vision_config": SMALL["gemma3"]["vision_config"] | {"image_size": 16, "projection_dim": 64},
    "projection_dim": 64,
    "image_token_index": 292,
}
SMALL["qwen2_vl"] = SMALL["qwen2_5_vl"] | {
    "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SMALL["qwen3_vl_moe"] = SMALL["qwen3_vl"] | {
    "model_type": "qwen3_vl_moe",
    "text_config": SMALL["qwen3_vl"]["text_config"] | EXPERTS,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 16,
}
LLAMA = TEXT | {"model_type": "llama"}
SMALL["llava"] = {
    "model_type": "llava",
    "text_config": LLAMA,
    "vision_config": CLIP,
    "image_seq_length": 16,
    "image_token_index": 290,
}
SMALL["llava_next"] = {
    "model_type": "llava_next",
    "text_config": LLAMA,
    "vision_config": CLIP,
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
    "image_token_index": 290,
}
SMALL["llava_onevision"] = {
    "model_type": "llava_onevision",
    "text_config": TEXT | {"model_type": "qwen2"},
    "vision_config": SMALL["gemma3"]["vision_config"]
    | {"model_type": "siglip_vision_model", "image_size": 16},
    "image_grid_pinpoints": [[16 * i, 16 * j] for i in range(1, 5) for j in range(1, 5)],
    "image_token_index": 290,
    "video_token_index": 291,
}
SMALL["gemma4"] = {
    "model_type": "gemma4",
    "text_config": {
        **TEXT,
        "global_head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 2,
        "position_embedding_size": 640,
    },
    "boi_token_id": 290,
    "eoi_token_id": 291,
    "image_token_id": 292,
    "video_token_id": 293,
    "audio_token_id": 294,
    "boa_token_id": 295,
    "eoa_token_index": 296,
}
SMALL["llama4"] = {
    "model_type": "llama4",
    "text_config": {
        **TEXT,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "moe_layers": [1],
        "attention_chunk_size": 4096,
        "no_rope_layers": [1, 0],
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "vision_output_dim": 48,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
    },
    "boi_token_index": 290,
    "eoi_token_index": 291,
    "image_token_index": 292,
}
