"""A slow data set for the data loader's section. It is a module so that worker processes can import it."""

import time

import torch
from torch.utils.data import Dataset


class SlowRows(Dataset):
    """`count` samples of random tokens, each of which takes `seconds` to fetch, as from a slow disk."""

    def __init__(self, count: int, seconds: float, tokens: int = 32, words: int = 2048):
        self.count, self.seconds = count, seconds
        self.ids = torch.randint(words, (count, tokens), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        time.sleep(self.seconds)
        return {"input_ids": self.ids[index], "labels": self.ids[index]}
