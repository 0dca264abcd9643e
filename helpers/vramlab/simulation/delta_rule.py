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
    """Compute `torch_chunk_gated_delta_rule` of transformers 5.12 in training.

    After transformers/models/qwen3_next/modeling_qwen3_next.py, from no earlier state, with
    normalized queries and keys. Names are used again where the original does, as that frees
    tensors.

    Args:
        query, key: batch × tokens × heads × channels; keys that value heads share are repeated.
        value: batch × tokens × value heads × channels.
        g, beta: batch × tokens × value heads: the logarithm of the decay, and what a token writes.
    Returns:
        The result, batch × tokens × value heads × channels in the dtype of `query`, and the last
        state, or None unless it is asked for.
    """
    initial_dtype = query.dtype
    length = query.shape[1]
    groups = value.shape[2] // key.shape[2]
    if groups > 1:
        query = query.repeat_interleave(groups, dim=2)
        key = key.repeat_interleave(groups, dim=2)
    repeated = query, key  # the caller held them
    query, key, value, g, beta, k_beta, v_beta = _in_chunks(query, key, value, g, beta, chunk_size)
    batch_size, heads, _, _, key_width = key.shape
    mask = torch.triu(
        torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device),
        diagonal=0,
    )

    # The decay from the begin of a chunk to each token, as a logarithm, and from it that between
    # any two tokens of a chunk: batch × heads × chunks × 64 × 64, like `attn` below.
    g = g.cumsum(dim=-1)
    decay_mask = ((g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().float()).tril()
    attn = -((k_beta @ key.transpose(-1, -2)) * decay_mask).masked_fill(mask, 0)
    # Row i of the inverse of a triangular matrix from the rows above it. Written in place, so
    # autograd keeps the copies of every row; transformers 5.17 asks `solve_triangular` instead.
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(chunk_size, dtype=attn.dtype, device=attn.device)
    # What each token writes inside its chunk, as if the state before the chunk were zero;
    # `k_cumdecay` takes off what that state holds already.
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
    # Chunk after chunk; the state, channels × channels of every head, is made anew in each, and
    # autograd keeps them all.
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


def _in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, ...]:
    """Return what the rule works on in fp32, padded: batch × heads × chunks × tokens of a chunk.

    Queries are scaled; the last two are keys and values times `beta`. `beta` itself is returned
    without chunks, because the original's name holds it to the end.
    """
    query = _normalized(query)
    key = _normalized(key)
    query, key, value, beta, g = [
        x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)
    ]
    padding = -key.shape[2] % chunk_size
    # A new tensor even where nothing is missing: `F.pad` copies as the original does.
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
    g = g.reshape(g.shape[0], g.shape[1], -1, chunk_size)
    return query, key, value, g, beta, k_beta, v_beta


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """Divide each head's channels by their length (`l2norm` of the same file)."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
