"""VRAM Lab: predict, simulate and measure the GPU memory of training, every byte accounted for.

    from vramlab import Recipe, predict, simulate, compare
    recipe = Recipe("gpt2", batch_size=8, seq_len=512, precision="bf16-mixed")
    print(compare(predict(recipe), simulate(recipe)))

Everything is loaded when it is first used, so the import is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .base import __version__ as __version__
from .base.errors import needing
from .training.quiet import no_collection, silence

# Module to the names that come from it.
_PUBLIC = {
    "recipe.recipe": "Recipe",
    "recipe.options": "Loop LoRA Quantization Rollouts Sharding",
    "recipe.evaluation": "Evaluation",
    "recipe.diffusion": "Diffusion",
    "recipe.generation": "Generation",
    "recipe.shapes": "model_names read_shape",
    "base.errors": "MeasurementError RecipeError RecordError ReportError VramLabError",
    "report.report": "Bytes GiB MiB Phase Report format_bytes",
    "report.compare": "compare diff",
    "formulas.predict": "predict",
    "formulas.whole_run": "predict_run",
    "simulation.simulate_diffusion": "simulate_diffusion",
    "simulation.simulate_generation": "simulate_generation",
    "simulation.simulate": "simulate simulate_evaluation",
    "measurement.measure": "measure_generation",
    "measurement.records": "find_record",
    "measurement.share": "share",
    "training.repeated_keys": "repeat_shared_keys",
    "planning.plan": "Plan plan",
    "planning.step_time": "step_time",
    "hardware.gpu": "find_gpu gpu_names",
    "interfaces": "plot",
    "interfaces.callback": "WatchCallback",
    "interfaces.doctor": "doctor environment_stamp",
    "interfaces.explain": "assert_fits explain",
    "interfaces.measure_and_record": "measure record run_card",
    "interfaces.watch": "watch",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .base.errors import MeasurementError, RecipeError, RecordError, ReportError, VramLabError
    from .formulas.predict import predict
    from .formulas.whole_run import predict_run
    from .hardware.gpu import find_gpu, gpu_names
    from .interfaces import plot
    from .interfaces.callback import WatchCallback
    from .interfaces.doctor import doctor, environment_stamp
    from .interfaces.explain import assert_fits, explain
    from .interfaces.measure_and_record import measure, record, run_card
    from .interfaces.watch import watch
    from .measurement.measure import measure_generation
    from .measurement.records import find_record
    from .measurement.share import share
    from .planning.plan import Plan, plan
    from .planning.step_time import step_time
    from .recipe.diffusion import Diffusion
    from .recipe.evaluation import Evaluation
    from .recipe.generation import Generation
    from .recipe.options import Loop, LoRA, Quantization, Rollouts, Sharding
    from .recipe.recipe import Recipe
    from .recipe.shapes import model_names, read_shape
    from .report.compare import compare, diff
    from .report.report import Bytes, GiB, MiB, Phase, Report, format_bytes
    from .simulation.simulate import simulate, simulate_evaluation
    from .simulation.simulate_diffusion import simulate_diffusion
    from .simulation.simulate_generation import simulate_generation
    from .training.repeated_keys import repeat_shared_keys


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vramlab' has no attribute {name!r}")
    with needing(name), no_collection(before=False):
        module = importlib.import_module(f".{_HOME[name]}", __name__)
    # `plot` is a module itself
    value = (
        importlib.import_module(f".{name}", module.__name__)
        if name == "plot"
        else getattr(module, name)
    )
    # Found there from now on, so that this function is not asked again.
    globals()[name] = value
    return value


# Before any library is loaded, as some warn while they load.
silence()


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext vramlab` gives the cell magic `%%watch`."""
    with needing("%%watch"):
        from .interfaces.magic import WatchMagic

    ipython.register_magics(WatchMagic)
