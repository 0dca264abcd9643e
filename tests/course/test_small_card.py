"""The card that chapter 08 makes of this machine's memory."""

import pytest
import torch
from vramlab_course.chapters.small_card import Card


def test_it_counts_what_is_alive():
    model = torch.nn.Linear(256, 255)  # with its bias 256 KiB less a little
    with Card(512 * 2**10, model):
        for _ in range(9):
            kept = torch.zeros(2**15 - 2**10)  # at most two at a time
        with pytest.raises(torch.OutOfMemoryError, match=r"0\.500 MiB"):
            torch.zeros(2**16)
    assert kept.sum() == 0


def test_views_cost_nothing():
    with Card(2**20, torch.nn.Linear(1, 1)):
        x = torch.zeros(2**17)
        assert len([x[i:] for i in range(100)]) == 100
