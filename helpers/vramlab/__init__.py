"""VRAM Lab: predict, simulate and measure the GPU memory of training, every byte accounted for.

    from vramlab import Recipe, predict, simulate, compare
    recipe = Recipe("gpt2", batch_size=8, seq_len=512, precision="bf16-mixed")
    print(compare(predict(recipe), simulate(recipe)))

Everything is loaded when it is first used, so the import is quick.
"""

import importlib
from typing import TYPE_CHECKING

from .report import __version__ as __version__
from .report.collector import no_collection
from .report.errors import needing
from .training.quiet import silence

_HOME = {
    "Recipe": "recipe.recipe",
    "Loop": "recipe.options",
    "LoRA": "recipe.options",
    "Quantization": "recipe.options",
    "Sharding": "recipe.options",
    "RecipeError": "report.errors",
    "MeasurementError": "report.errors",
    "RecordError": "report.errors",
    "ReportError": "report.errors",
    "VramLabError": "report.errors",
    "Report": "report.report",
    "Bytes": "report.report",
    "Phase": "report.report",
    "GiB": "report.report",
    "MiB": "report.report",
    "format_bytes": "report.report",
    "predict": "formulas.predict",
    "predict_run": "formulas.run",
    "simulate": "simulation.simulate",
    "simulate_evaluation": "simulation.simulate",
    "Evaluation": "recipe.evaluation",
    "measure": "faces.measure",
    "record": "faces.measure",
    "find_record": "measurement.records",
    "share": "faces.share",
    "compare": "report.compare",
    "plan": "planning.plan",
    "Plan": "planning.plan",
    "step_time": "planning.step_time",
    "watch": "faces.watch",
    "WatchCallback": "faces.callback",
    "explain": "faces.explain",
    "assert_fits": "faces.explain",
    "diff": "report.compare",
    "doctor": "faces.doctor",
    "environment_stamp": "faces.doctor",
    "find_gpu": "hardware.gpu",
    "gpu_names": "hardware.gpu",
    "model_names": "recipe.shapes",
    "read_shape": "recipe.shapes",
    "plot": "faces",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .faces import plot
    from .faces.callback import WatchCallback
    from .faces.doctor import doctor, environment_stamp
    from .faces.explain import assert_fits, explain
    from .faces.measure import measure, record
    from .faces.share import share
    from .faces.watch import watch
    from .formulas.predict import predict
    from .formulas.run import predict_run
    from .hardware.gpu import find_gpu, gpu_names
    from .measurement.records import find_record
    from .planning.plan import Plan, plan
    from .planning.step_time import step_time
    from .recipe.evaluation import Evaluation
    from .recipe.options import Loop, LoRA, Quantization, Sharding
    from .recipe.recipe import Recipe
    from .recipe.shapes import model_names, read_shape
    from .report.compare import compare, diff
    from .report.errors import MeasurementError, RecipeError, RecordError, ReportError, VramLabError
    from .report.report import Bytes, GiB, MiB, Phase, Report, format_bytes
    from .simulation.simulate import simulate, simulate_evaluation


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'vramlab' has no attribute {name!r}")
    with needing(name), no_collection(before=False):
        module = importlib.import_module(f".{_HOME[name]}", __name__)
    # `plot` is a module itself
    value = importlib.import_module(f".{name}", module.__name__) if name == "plot" else getattr(module, name)
    globals()[name] = value
    return value


silence()


def __dir__():
    return __all__


def load_ipython_extension(ipython) -> None:
    """`%load_ext vramlab` gives the cell magic `%%watch`."""
    with needing("%%watch"):
        from .faces.magic import WatchMagic

    ipython.register_magics(WatchMagic)
