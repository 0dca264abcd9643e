"""The example of chapter 07: a transformer of a million weights, labelled for the profiler."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import record_function


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added to what came in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("attention"):
            x = x + self.attend(self.norm1(x))
        with record_function("feed-forward"):
            return x + self.down(F.gelu(self.up(self.norm2(x))))


def tiny_gpt(vocabulary: int, width: int = 128, layers: int = 2) -> nn.Sequential:
    """Layers between an embedding and scores for each word of the vocabulary, with seed 0; positions are left out."""
    torch.manual_seed(0)
    stack = [Layer(width, heads=4) for _ in range(layers)]
    head = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), *stack, nn.LayerNorm(width), head)
