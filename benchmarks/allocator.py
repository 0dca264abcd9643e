"""Chapter 07's allocator against PyTorch's own: the same requests, compared after each of them.

    # Takes 24 GiB of a GPU.
    python benchmarks/allocator.py
    # Without a GPU, on a stand-in (data/stand_in/README.md).
    vramlab run --gpu H100 -- python benchmarks/allocator.py

With `PYTORCH_ALLOC_CONF=expandable_segments:True` it compares the model of these.
"""

import os

import torch
from vramlab.hardware.allocator import Allocator
from vramlab_course.chapters.chapter_07 import LENGTHS, requests
from vramlab_course.expandable import ExpandableAllocator
from vramlab_course.fragmentation import follow


class Torch:
    """PyTorch's CUDA allocator with the interface of the model."""

    # `follow` reads both of an allocator; PyTorch's are not compared.
    mallocs = given_back = 0

    def malloc(self, size: int) -> list[torch.Tensor]:
        # A list, so that `free` can drop the tensor while the caller still holds the block.
        return [torch.empty(size, dtype=torch.uint8, device="cuda")]

    def free(self, block: list[torch.Tensor]) -> None:
        block.clear()

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def reserved(self) -> int:
        return torch.cuda.memory_reserved()


def main() -> None:
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    model = follow(requests(), LENGTHS, ExpandableAllocator() if expandable else Allocator())
    real = follow(requests(), LENGTHS, Torch())
    # Bytes after each malloc and each free, so that a difference is found where it begins.
    pairs = list(zip(model.reserved, real.reserved, strict=True))
    print(f"reserved at most: model {model.peak_reserved:,}, PyTorch {real.peak_reserved:,} bytes")
    print(f"equal after {sum(a == b for a, b in pairs):,} of {len(pairs):,} events")


if __name__ == "__main__":
    main()
