"""Private parts of torch's compiler: dynamo, AOTAutograd and Inductor.

It loads none of them, which takes a second.
"""

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Of dynamo's `eval_frame`: what compiles a frame, by the stance of the thread.
CALLBACK = "_callback_from_stance"
# Of dynamo's `pgo`: sizes that other steps had, which would make this one's dynamic.
SIZES_SEEN = "_CODE_STATE"


def dynamo(name: str) -> Any:
    """Return a module of dynamo."""
    return importlib.import_module(f"torch._dynamo.{name}")


def inductor(name: str) -> Any:
    """Return a module of Inductor."""
    return importlib.import_module(f"torch._inductor.{name}")


def functorch_config() -> Any:
    """Return AOTAutograd's settings."""
    return importlib.import_module("torch._functorch.config")


def triton_of_torch() -> Any:
    """Return what torch knows of Triton."""
    return importlib.import_module("torch.utils._triton")


def loaded_frames() -> ModuleType | None:
    """Return dynamo's module that compiles frames, if it was imported."""
    return sys.modules.get("torch._dynamo.eval_frame")


def no_sizes() -> Any:
    """Return an empty table of sizes, for `SIZES_SEEN`."""
    return defaultdict(dynamo("pgo").CodeState)


def not_compiled() -> Any:
    """Return what a callback answers of a frame that shall run as it is written."""
    return dynamo("types").ConvertFrameReturn()


def stands_for(callback: Any, own: Callable) -> None:
    """Give `callback` the mark by which torch tells whose compiled code is whose."""
    callback._torchdynamo_orig_backend = own
