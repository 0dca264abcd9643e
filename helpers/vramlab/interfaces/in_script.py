"""What `vramlab run` does inside the script that it started.

Follow the allocator, and leave what it held behind.

A `sitecustomize.py` in a folder of ours calls `install`. torch and transformers are changed when
the script has loaded them.
"""

import atexit
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "VRAMLAB_RUN"  # environment variable: where each process leaves what it held
# environment variable: after so many optimizer steps a process ends, "" never
STEPS = "VRAMLAB_RUN_STEPS"
GENERATION = "transformers.generation.utils"
EVENTS = 100_000  # of the allocator that are kept, the newest
SITE = "import vramlab.interfaces.in_script\nvramlab.interfaces.in_script.install()\n"


class AfterImport:
    """Calls a function with a module once it is loaded."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]):
        self.functions = functions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec, whose loader then calls the function; None for others."""
        if name not in self.functions:
            return None
        # Python's own finders look the module up; ours only wants to know when it has been
        # executed.
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def then(module: ModuleType) -> None:
                load(module)
                self.functions[name](module)

            # Replaced on this spec's loader alone, which belongs to one module.
            loader: Any = spec.loader
            loader.exec_module = then
        return spec


def install() -> None:
    """Wait for the script to load torch and transformers."""
    # what has a report: a WatchCallback for each Trainer, a LoopWatch for a loop without one
    watched: list[Any] = []
    zero = {f"deepspeed.runtime.zero.{name}": step_always for name in ("stage_1_and_2", "stage3")}
    functions: dict[str, Callable[[ModuleType], None]] = {
        "torch": functools.partial(follow, watched=watched),
        "transformers.trainer": functools.partial(watch_trainers, watched=watched),
        GENERATION: answer_in_zeros,
    }
    # First in the list, or the usual finders would answer before this one is asked.
    sys.meta_path.insert(0, AfterImport(functions | zero))


def follow(torch: ModuleType, watched: list[Any]) -> None:
    """Record the allocator's history from the script's first use of CUDA to its end."""
    from ..private import of_torch

    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # its workspace is not known: flash attention in its place
    # its kernel is there as long as the library is
    library = select_all(torch)
    last_a_while(torch)
    end_after(int(os.environ.get(STEPS) or 0))
    LoopWatch(torch, watched).install()
    # it draws until no value lies outside
    setattr(torch.nn.init, of_torch.TRUNC_NORMAL, lambda tensor, *_, **__: tensor)
    of_torch.once_cuda_is_used(functools.partial(of_torch.record_history, EVENTS))
    peaks = {"allocated": 0, "reserved": 0}

    def look() -> None:
        peaks["allocated"] = max(peaks["allocated"], torch.cuda.max_memory_allocated())
        peaks["reserved"] = max(peaks["reserved"], torch.cuda.max_memory_reserved())

    def looking(reset: Callable[..., Any]) -> Callable[..., Any]:
        def first_look(*args: Any) -> Any:
            look()
            return reset(*args)

        return first_look

    # a script may measure by itself
    of_torch.replace_resets_of_peaks(looking)
    # The process is named because a fork inherits these functions and must not write a report of
    # its own.
    atexit.register(leave, torch, peaks, look, os.getpid(), watched, library)


def last_a_while(torch: ModuleType) -> None:
    """Let a step of several ranks last as long as on a GPU.

    NCCL's watchdog looks ten times a second for what was sent.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def last(*_: Any) -> None:
        # Kernels do not run here, so a step is over before the watchdog has looked at its
        # collectives once.
        if torch.distributed.is_initialized():
            time.sleep(0.2)

    register_optimizer_step_post_hook(last)


def end_after(steps: int) -> Any:
    """End the process as its own end would, before the step that follows `steps` of them.

    With 0 never. Return what removes that.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    # By the optimizer's identity, since GANs and the like step several in turn.
    made: dict[int, int] = {}

    def count(optimizer: Any, args: tuple, kwargs: dict) -> None:
        made[id(optimizer)] = made.get(id(optimizer), 0) + 1
        if made[id(optimizer)] > steps:
            # The hook runs before the step, so the step that was asked for last is complete, and
            # `atexit` still runs.
            raise SystemExit(0)

    return register_optimizer_step_pre_hook(count) if steps else None


class LoopWatch:
    """Watches the second optimizer step of a loop of the script's own, for the split by phase.

    The outermost module that is called is taken for the model. A Trainer has its WatchCallback, and
    a process of several ranks or with a compiled model none: a watch would run it otherwise.
    """

    def __init__(self, torch: ModuleType, watched: list[Any]):
        self.torch = torch
        self.watched = watched
        self.report: Any = None
        self.model: Any = None
        self.running: Any = None
        self.ready = False

    def install(self) -> None:
        """Replace the call of all modules, and follow the steps of all optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        # The class and not the model: the script's model does not exist yet.
        module = self.torch.nn.Module
        self.call = module.__call__

        @functools.wraps(self.call)
        def called(model: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_call(model)
            return self.call(model, *args, **kwargs)

        # not a hook: the watch's own hooks on the model may not go while those of one call are gone
        # through
        module.__call__ = called
        self.after = register_optimizer_step_post_hook(self.after_step)
        self.watched.append(self)

    def before_call(self, module: Any) -> None:
        """Note the model; end the watch with the forward pass after the step that was watched."""
        # By then most loops have called zero_grad, wherever it stands in them.
        if self.ready and module is self.model:
            self.end()
        # Modules without parameters that train, such as a frozen encoder or a loss, are not the
        # model.
        elif self.model is None and any(p.requires_grad for p in module.parameters()):
            self.model = module

    def after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        """Begin to watch after the first step, in which states are made."""
        if self.running is not None:
            self.ready = True
        elif self.model is not None and self._alone():
            from .watch import watch

            self.running = watch(
                self.model,
                optimizer,
                title=f"step 2 of the loop: {type(self.model).__name__}",
            )
            self.running.__enter__()

    def _alone(self) -> bool:
        distributed = self.torch.distributed
        several = distributed.is_available() and distributed.is_initialized()
        from ..private.of_torch import original_of

        is_compiled = original_of(self.model) is not self.model
        by_trainer = any(type(other) is not LoopWatch for other in self.watched)
        return not (several or is_compiled or by_trainer or self.report)

    def end(self) -> None:
        """Keep the report of the watched step, and watch no more."""
        # The class is put back, so that the script's other steps take no detour.
        self.torch.nn.Module.__call__ = self.call
        self.after.remove()
        self.ready = False
        if self.running is not None:
            self.running.__exit__(None, None, None)
            self.report = self.running.report()


def select_all(torch: ModuleType) -> Any:
    """Let a mask select everything, as a condition on values holds.

    Without values it would be nothing, or any number. Return the library that does.
    """

    def nonzero(mask: Any) -> Any:
        return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)

    library = torch.library.Library("aten", "IMPL")
    library.impl("nonzero", nonzero, "CUDA", allow_override=True)
    return library


def answer_in_zeros(module: ModuleType) -> None:
    """Let `generate` answer with token 0.

    What it chose has no value here, and may be a number that no tokenizer can decode.
    """
    generate = module.GenerationMixin.generate

    @functools.wraps(generate)
    def answered(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = generate(model, *args, **kwargs)
        tokens = getattr(made, "sequences", made)
        tokens.copy_(tokens.new_zeros(tokens.shape, device="cpu"))
        return made

    patched: Any = module
    patched.GenerationMixin.generate = answered


def step_always(module: ModuleType) -> None:
    """Let DeepSpeed make its optimizer's steps.

    It would find overflows in gradients, as conditions on values hold.
    """
    # The class of stages 1 and 2, or of stage 3, by the module that was loaded.
    optimizer = (
        getattr(module, "DeepSpeedZeroOptimizer", None) or module.DeepSpeedZeroOptimizer_Stage3
    )
    overflowed = optimizer.has_overflow
    # The original is still called for its collectives: a rank that left one out would stop the
    # others.
    optimizer.has_overflow = lambda *args, **kwargs: overflowed(*args, **kwargs) and False
    patched: Any = module
    # Norms have no values here either, and a step with an invalid one is skipped.
    patched.is_invalid_grad_norm = lambda norm: False


def watch_trainers(module: ModuleType, watched: list[Any]) -> None:
    """Give each Trainer a WatchCallback, for the split by phase.

    Not one that compiles, which a watch would run eagerly.
    """
    original = module.Trainer.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # A Trainer on the CPU holds nothing of a card that could be split.
        if not self.args.torch_compile and self.args.device.type == "cuda":
            from .callback import WatchCallback

            watched.append(WatchCallback())
            self.add_callback(watched[-1])

    module.Trainer.__init__ = __init__


def leave(
    torch: ModuleType,
    peaks: dict[str, int],
    look: Callable[[], None],
    process: int,
    watched: list[Any],
    *kept: Any,
) -> None:
    """Write peaks, the last Trainer's watched report and the allocator's history to the folder.

    What is `kept` stays until then.
    """
    from ..private import of_torch

    folder = os.environ.get(FOLDER)
    # Also of a process that used no CUDA, such as a launcher or a data loader's worker.
    if not folder or process != os.getpid() or not torch.cuda.is_initialized():
        return
    look()
    # A script that ends with its second step has no further forward pass that would end the watch.
    for loop in watched:
        if isinstance(loop, LoopWatch) and loop.ready:
            loop.end()
    # From the last Trainer on: a script that trains twice means the later one.
    report = next((seen.report for seen in reversed(watched) if seen.report), None)
    process_facts = {
        **peaks,
        "rank": int(os.environ.get("RANK", 0)),
        "failed_requests": torch.cuda.memory_stats().get("num_ooms", 0),
        "report": report and report.to_dict(),
    }
    # By process number, since every rank of a launcher writes into the same folder.
    of_torch.dump_history(os.path.join(folder, f"{process}.pickle"))
    Path(folder, f"{process}.json").write_text(json.dumps(process_facts))
