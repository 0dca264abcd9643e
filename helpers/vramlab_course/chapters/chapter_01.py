"""Chapter 01: a network deep enough for fp16 to lose its gradients."""

import itertools

import torch
from torch import Tensor, nn


def deep_network(layers: int = 20) -> tuple[nn.Module, Tensor, Tensor]:
    """A plain network of `layers` hidden layers of 32 units as nn.Linear initialises them, and 256 labelled points.

    Each such layer makes gradients about 0.4 times as large (uniform weights of variance 1/(3 · 32), half of the units
    off), so that twenty of them reach what fp16 cannot hold. Labels are those of a random network: four classes.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    torch.manual_seed(1)
    first, second = torch.randn(16, 32), torch.randn(32, 4)
    labels = (torch.tanh(x @ first) @ second).argmax(1)
    torch.manual_seed(0)
    sizes = [16] + [32] * layers
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(32, 4)), x, labels


def guessing(labels: Tensor) -> float:
    """The loss of a guess that knows only how frequent each label is: the entropy of the labels, in nats."""
    shares = torch.bincount(labels) / len(labels)
    return float(-(shares * shares.log()).sum())
