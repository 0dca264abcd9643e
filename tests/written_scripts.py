"""Run programs that a plan wrote, unmodified, in this process or on real ranks over gloo, and keep
what they watched.
"""

import gc
import io
import json
import os
import runpy
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import Report
from vramlab.simulation.simulate import trace
from vramlab.tracking.history import History, to_report

STEPS = (3, 4)  # of the first run, and of the one that goes on from its checkpoint
TRAINED = ("parameters", "gradients", "optimizer_states")  # whose dtype is what a precision means
INDICES = ("activations int64",)  # as large as rows, which differ in length
LEAST = 1024  # bytes of a dtype that is no matter of counters, flags and norms


def run_script(
    folder: Path, *words: str, watched: int = 2, steps: Sequence[int] = STEPS
) -> list[Any]:
    """Run `train.py` of `folder` once for each of `steps`, each time on from the last checkpoint;
    the `watched` step.
    """
    import torch
    from accelerate.state import AcceleratorState
    from torch.nn.parallel import DistributedDataParallel
    from transformers import core_model_loading, modeling_utils

    seen = []
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ),
    ):  # in which a Trainer leaves variables
        patch.setattr("vramlab.WatchCallback", lambda: seen.append(_watch(watched)) or seen[-1])
        patch.setattr(
            DistributedDataParallel, "__init__", _seen_buckets(DistributedDataParallel.__init__)
        )
        if not torch.cuda.is_available():
            patch.setattr(
                torch.Tensor, "pin_memory", lambda tensor: tensor
            )  # as FSDP does with what it offloads
        # What a program changes for itself is not for later tests.
        for module, name in (
            (core_model_loading, "set_param_for_module"),
            (modeling_utils, "caching_allocator_warmup"),
        ):
            patch.setattr(module, name, getattr(module, name))
        patch.setattr(AcceleratorState, "__init__", _sharding_on_cpus(AcceleratorState.__init__))
        patch.setattr(torch.distributed, "scatter", _scatter_in_group(torch.distributed.scatter))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
            patch.delenv(name)  # what another test's Trainer has left
        patch.chdir(folder)
        for count in steps:
            patch.setattr(
                sys,
                "argv",
                ["train.py", "--data", "train.jsonl", "--max-steps", str(count), *words],
            )
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
    return [each.report for each in seen]


def simulated(recipe: Recipe, steps: int) -> Report:
    """What `simulate` says of all layers on a CPU, with `dtypes` of it."""
    history = trace(recipe, "cpu", None, steps, full=True)
    report = to_report(history, "simulated", recipe, "cpu")
    report.environment["dtypes"] = dtypes(history)
    return report


def dtypes(history: History) -> dict[str, dict[str, int]]:
    """Bytes by category and dtype: "held" after the last step, and "made" in it."""
    log, step = history.log, history.last_step
    made = Counter()
    for at in range(step[0][1], step[-1][2]):
        if (size := int(log.sizes[at])) > 0:
            storage = log.storage(at)
            made[f"{storage.category or 'temporaries'} {storage.dtype}"] += size
    held = Counter()
    for group in history.largest(step[-1][2], count=sys.maxsize):
        held[f"{group.category} {group.dtype}"] += group.size * group.count
    return {"held": dict(held), "made": dict(made)}


def differing_dtypes(ran: Report, said: Report) -> dict[str, Any]:
    """Where a program and a simulation differ in what they hold of weights, gradients and states by
    dtype, and in the dtypes of what they make."""
    ours, theirs = ran.environment["dtypes"], said.environment["dtypes"]
    found = {}
    for name in ours["held"].keys() | theirs["held"].keys():
        sizes = [each["held"].get(name, 0) for each in (ours, theirs)]
        if name.startswith(TRAINED) and abs(sizes[0] - sizes[1]) > LEAST:
            found[f"held {name}"] = sizes
    for category in (*TRAINED, "activations"):
        made = [
            {
                name
                for name, n in each["made"].items()
                if name.startswith(category) and n > LEAST and name not in INDICES
            }
            for each in (ours, theirs)
        ]
        if made[0] != made[1]:
            found[f"made {category}"] = made
    return found


def _watch(step: int) -> Any:
    """A `WatchCallback` that also names what DeepSpeed and DDP hold without a parameter."""
    from vramlab.interfaces.callback import WatchCallback
    from vramlab.interfaces.watch import watch

    class Kept(WatchCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            watched = self._entered
            super().on_step_end(*args, **options)
            if isinstance(watched, watch):
                self.report.environment["dtypes"] = dtypes(watched.history)

        def _enter(self, watched: Any) -> None:
            super()._enter(watched)
            if not isinstance(watched, watch):
                return
            wrapped = _trainer().model_wrapped
            if hasattr(wrapped, "zero_optimization"):
                from vramlab.training.engines.deepspeed import DeepSpeed

                stage = SimpleNamespace(stage=wrapped.zero_optimization_stage())
                engine = SimpleNamespace(sharding=stage)
                follows = DeepSpeed.follow(engine, SimpleNamespace(model=wrapped), watched.tracker)
                watched._stack.enter_context(follows)
            storages = [
                storage for seen in getattr(wrapped, "seen_buckets", ()) if (storage := seen())
            ]
            watched.tracker.claim_buckets(storages)

    return Kept(step)


def _trainer() -> Any:
    """The Trainer that calls this callback."""
    frame = sys._getframe()
    while not hasattr(found := frame.f_locals.get("self"), "model_wrapped"):
        frame = frame.f_back
    return found


def _seen_buckets(plain: Any) -> Any:
    """DDP's constructor, which leaves weak references to its buckets."""
    from vramlab.training.engines.ddp import _Buckets

    def init(self, *args, **options):
        seen = []
        with _Buckets(seen):
            plain(self, *args, **options)
        self.seen_buckets = seen

    return init


def _sharding_on_cpus(plain: Any) -> Any:
    """accelerate shards by FSDP on accelerators only, and takes DDP on CPUs without a word: say
    that these are some.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def init(self, *args, **options):
        known, cpus = PartialState._shared_state, DistributedType.MULTI_CPU
        if (
            known.get("distributed_type") == cpus
            and os.environ.get("ACCELERATE_USE_FSDP") == "true"
        ):
            known["distributed_type"] = DistributedType.MULTI_GPU
        plain(self, *args, **options)

    return init


def _scatter_in_group(plain: Any) -> Any:
    """Over gloo torch's differentiable gathering (`torch.distributed.nn.functional._AlltoAll`) asks
    a rank of the world for what the one of that index in its group has.
    """

    def scatter(tensor, tensors=None, src=None, group=None, **options):
        where = {"src": src} if group is None or src is None else {"group_src": src}
        return plain(tensor, tensors, group=group, **where, **options)

    return scatter


def state(folder: Path, step: int) -> dict[str, Any]:
    """What the Trainer wrote beside a checkpoint."""
    return json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())


def preload(**unused: Any) -> None:
    """Import once what the ranks need."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401
    import transformers
    from vramlab.training.engines.deepspeed import library

    library()
    for name in (
        "LlamaForCausalLM",
        "Trainer",
        "AutoTokenizer",
        "AutoModelForCausalLM",
        "BitsAndBytesConfig",
    ):
        getattr(transformers, name)


def attention_of(in_ring: bool) -> AbstractContextManager:
    """What a ring's attention runs in on CPUs."""
    from ring_ranks import flash_on_cpu

    return flash_on_cpu() if in_ring else nullcontext()


def work(folder: str, watched: int, steps: list[int], in_ring: bool = False) -> str:
    """On a rank: the report of the first run as JSON."""
    import torch
    from vramlab.training.engines.deepspeed import library
    from vramlab.training.process_group import one_gloo_thread

    library()  # or DeepSpeed compiles its collectives
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # a launcher of one rank leaves out what torchrun says
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            port = str(reserved.getsockname()[1])
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
    with (
        one_gloo_thread(),
        attention_of(in_ring),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        seen = run_script(Path(folder), "--watch", watched=watched, steps=steps)
        torch.distributed.barrier()
        # destructors of tensors sent wait for Python, which waits for gloo's thread to end
        gc.collect()
        torch.distributed.destroy_process_group()
    return seen[0].to_json()
