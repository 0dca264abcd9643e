"""What chapter 02's tracker is held against: a few operators whose storages are known."""

import sys
from collections.abc import Callable
from typing import Any

SIZE = 4000  # bytes of the tensor that everything begins with


def followed(tracker: Callable[..., Any]) -> dict[str, int]:
    """Bytes by a reader's `tracker` of a tensor of SIZE bytes and what is made of it, in multiples.

    "given": before any operator; "view", "part": after a view of all of it and of a half; "made",
    "freed": with another tensor, and without it again; "tail": with a later part of that tensor;
    "saved": with what autograd alone holds; "left": what a step leaves; "top": the most. "failed":
    how many of the tracker's finalizers raised, which Python only prints.
    """
    failed: list[type | None] = []
    hook = sys.unraisablehook
    sys.unraisablehook = lambda error: failed.append(error.exc_type)
    try:
        sizes = _sizes(tracker)
    finally:
        sys.unraisablehook = hook
    return sizes | {"failed": len(failed)}


def _sizes(tracker: Callable[..., Any]) -> dict[str, int]:
    import torch

    x = torch.ones(SIZE // 4)
    sizes = {}
    with tracker(x) as seen:
        sizes["given"] = seen.now()
        whole = x.view(-1, 10)
        sizes["view"] = seen.now()
        y = x * 2
        sizes["made"] = seen.now()
        tail = y[10:]  # begins at another address than its storage
        sizes["tail"] = seen.now()
        del y, tail
        sizes["freed"] = seen.now()
        z = (x + 1) * (x + 2)
        del z, whole
        values, places = x.sort()  # one operator makes two
        del values, places
        x.view(-1)  # an operator that makes nothing
        sizes["left"] = seen.now()
        sizes["top"] = seen.top
    leaf = torch.ones(SIZE // 4, requires_grad=True)
    with tracker(leaf) as seen:
        total = leaf.exp().sum()  # the exponentials have no name, and backward needs them
        sizes["saved"] = seen.now() - total.nbytes
    half = torch.ones(SIZE // 2)[: SIZE // 4]  # a view whose storage has twice its bytes
    sizes["part"] = tracker(half).now()
    return sizes
