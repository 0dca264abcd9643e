"""The gated delta rule as transformers 5.12 to 5.16 computed it without flash-linear-attention."""

from typing import Any

import torch
from torch.nn import functional as F


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`torch_chunk_gated_delta_rule` of transformers 5.12 in training.

    It is that of transformers/models/qwen3_next/modeling_qwen3_next.py, from no earlier state, with
    normalized queries and keys.

    Keys that value heads share were repeated before it. Names are used again where the original
    does, as that frees tensors.
    """
    initial_dtype = query.dtype
    groups = value.shape[2] // key.shape[2]
    if groups > 1:
        query = query.repeat_interleave(groups, dim=2)
        key = key.repeat_interleave(groups, dim=2)
    repeated = query, key  # the caller held them
    query = _normalized(query)
    key = _normalized(key)
    query, key, value, beta, g = [
        x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)
    ]
    batch_size, heads, length, key_width = key.shape
    padding = -length % chunk_size
    query = F.pad(query, (0, 0, 0, padding))
    key = F.pad(key, (0, 0, 0, padding))
    value = F.pad(value, (0, 0, 0, padding))
    beta = F.pad(beta, (0, padding))
    g = F.pad(g, (0, padding))
    query = query * (1 / query.shape[-1] ** 0.5)
    v_beta = value * beta.unsqueeze(-1)
    k_beta = key * beta.unsqueeze(-1)
    query, key, value, k_beta, v_beta = [
        x.reshape(x.shape[0], x.shape[1], -1, chunk_size, x.shape[-1])
        for x in (query, key, value, k_beta, v_beta)
    ]
    g = g.reshape(batch_size, heads, -1, chunk_size)
    mask = torch.triu(
        torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device),
        diagonal=0,
    )

    g = g.cumsum(dim=-1)
    decay_mask = ((g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().float()).tril()
    attn = -((k_beta @ key.transpose(-1, -2)) * decay_mask).masked_fill(mask, 0)
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(chunk_size, dtype=attn.dtype, device=attn.device)
    value = attn @ v_beta
    k_cumdecay = attn @ (k_beta * g.exp().unsqueeze(-1))
    state = torch.zeros(
        batch_size,
        heads,
        key_width,
        value.shape[-1],
        dtype=value.dtype,
        device=value.device,
    )
    result = torch.zeros_like(value)
    for i in range(query.shape[2]):
        q_i = query[:, :, i]
        k_i = key[:, :, i]
        v_i = value[:, :, i]
        attn = q_i @ k_i.transpose(-1, -2) * decay_mask[:, :, i]
        v_prime = k_cumdecay[:, :, i] @ state
        v_new = v_i - v_prime
        attn_inter = (q_i * g[:, :, i, :, None].exp()) @ state
        result[:, :, i] = attn_inter + attn @ v_new
        state = (
            state * g[:, :, i, -1, None, None].exp()
            + (k_i * (g[:, :, i, -1, None] - g[:, :, i]).exp()[..., None]).transpose(-1, -2) @ v_new
        )
    del repeated
    final_state = state if output_final_state else None
    del state
    result = result.reshape(batch_size, heads, -1, result.shape[-1])[:, :, :length]
    return result.transpose(1, 2).contiguous().to(initial_dtype), final_state


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
