"""Catalogue shapes scaled down until a real step takes a fraction of a second, with every
architecture's quirks.
"""

from typing import Any

from vramlab.recipe.shapes import read_shape

# Per family: the catalogue model whose configuration is scaled, and the sizes that are changed.
# Odd ratios are kept where an architecture has them: grouped-query attention (llama, qwen2,
# mistral, mixtral), a head wider than hidden/heads (gemma2, qwen3), one key head for all (falcon),
# a partly rotated head (phi, gpt_neox).
_CAUSAL = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "intermediate_size": 256,
    "vocab_size": 1000,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 96, "n_head": 6, "vocab_size": 1000, "n_positions": 128}),
    "bert": ("bert-base", {**_CAUSAL, "max_position_embeddings": 128}),
    "gpt_neox": ("polyglot-ko-1.3b", _CAUSAL),
    "llama": ("llama-3.1-8b", {**_CAUSAL, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma2": (
        "gemma-2-2b",
        {**_CAUSAL, "num_key_value_heads": 3, "head_dim": 32, "sliding_window": 16},
    ),
    "falcon": ("falcon-7b", {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 1000}),
    "phi": ("phi-2", {**_CAUSAL, "num_key_value_heads": 6}),
    "opt": (
        "opt-125m",
        {
            "hidden_size": 96,
            "word_embed_proj_dim": 96,
            "num_attention_heads": 6,
            "ffn_dim": 256,
            "vocab_size": 1000,
        }
        | {"max_position_embeddings": 128},
    ),
    "qwen2": ("qwen2.5-0.5b", {**_CAUSAL, "num_key_value_heads": 2}),
    "qwen3": ("qwen3-0.6b", {**_CAUSAL, "num_key_value_heads": 2, "head_dim": 32}),
    "mistral": ("mistral-7b", {**_CAUSAL, "num_key_value_heads": 2, "head_dim": 16}),
    "mixtral": ("mixtral-8x7b", {**_CAUSAL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "t5": (
        "t5-small",
        {"d_model": 96, "num_heads": 6, "d_kv": 16, "d_ff": 256, "vocab_size": 1000},
    ),
    "vit": (
        "vit-base",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "intermediate_size": 256,
            "image_size": 64,
            "num_labels": 10,
        },
    ),
}


def config(family: str, **changes: Any) -> dict[str, Any]:
    """The scaled configuration of `family`, with `changes`."""
    name, sizes = TINY[family]
    return {**read_shape(name).config, **sizes, **changes}
