"""sdpa on keys and values that are repeated for the query heads that share them.

Without a mask transformers hands shared keys to torch as they are (`use_gqa_in_sdpa`,
integrations/sdpa_attention.py), and before Ampere torch has no fused kernel for that: "math"
computes in fp32 and keeps all scores. Repeated keys go to the memory-efficient kernel, as those of
a padded batch do, which transformers repeats itself.
"""

from types import SimpleNamespace
from typing import Any

from ..base.errors import needing
from ..recipe.options import REPEATED


@needing("repeat_shared_keys")
def repeat_shared_keys() -> str:
    """Register such attention with transformers; return its name, an `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(REPEATED, _attention)
    AttentionMaskInterface.register(REPEATED, sdpa_mask)
    return REPEATED


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    """transformers' own sdpa, for a module whose query heads share no keys."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = module.num_key_value_groups
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    # a module, as far as that function reads one
    alone: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(alone, query, key, value, attention_mask, **options)
