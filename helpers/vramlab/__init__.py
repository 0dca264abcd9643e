"""VRAM Lab: predict, simulate and measure the GPU memory of training, every byte accounted for.

    from vramlab import Recipe, predict, simulate, compare
    recipe = Recipe("gpt2", batch_size=8, seq_len=512, precision="bf16-mixed")
    print(compare(predict(recipe), simulate(recipe)))

Everything is loaded when it is first used, so the import is quick.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

from .quiet import silence

__version__ = "0.1.0"

_HOME = {
    "Recipe": "recipe",
    "Loop": "options",
    "LoRA": "options",
    "Quantization": "options",
    "Sharding": "options",
    "RecipeError": "errors",
    "MeasurementError": "errors",
    "RecordError": "errors",
    "ReportError": "errors",
    "VramLabError": "errors",
    "Report": "report",
    "Bytes": "report",
    "Phase": "report",
    "GiB": "report",
    "MiB": "report",
    "format_bytes": "report",
    "predict": "predict",
    "simulate": "simulate",
    "measure": "measure",
    "find_record": "records",
    "compare": "compare",
    "plan": "plan",
    "Plan": "plan",
    "step_time": "step_time",
    "watch": "watch",
    "WatchCallback": "callback",
    "doctor": "doctor",
    "environment_stamp": "doctor",
    "find_gpu": "gpu",
    "gpu_names": "gpu",
    "model_names": "shapes",
    "read_shape": "shapes",
    "load_base_model": "base_model",
    "held_out": "base_model",
    "bits_per_byte": "base_model",
    "live": "live",
    "plot": "",
    "exercises": "",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from . import exercises, plot
    from .base_model import bits_per_byte, held_out, load_base_model
    from .callback import WatchCallback
    from .compare import compare
    from .doctor import doctor, environment_stamp
    from .errors import MeasurementError, RecipeError, RecordError, ReportError, VramLabError
    from .gpu import find_gpu, gpu_names
    from .live import live
    from .measure import measure
    from .options import Loop, LoRA, Quantization, Sharding
    from .plan import Plan, plan
    from .predict import predict
    from .recipe import Recipe
    from .records import find_record
    from .report import Bytes, GiB, MiB, Phase, Report, format_bytes
    from .shapes import model_names, read_shape
    from .simulate import simulate
    from .step_time import step_time
    from .watch import watch


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'vramlab' has no attribute {name!r}")
    home = _HOME[name]
    value = (
        getattr(importlib.import_module(f".{home}", __name__), name)
        if home
        else importlib.import_module(f".{name}", __name__)
    )
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """Importing the submodule `vramlab.compare` sets it on the package; there the function of that name stays."""

    def __setattr__(self, name, value):
        if _HOME.get(name) == name and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
silence()


def __dir__():
    return __all__


def load_ipython_extension(ipython) -> None:
    """`%load_ext vramlab` gives the cell magic `%%watch`."""
    from .magic import WatchMagic

    ipython.register_magics(WatchMagic)
