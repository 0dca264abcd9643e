"""Run programs that a plan wrote, unmodified, in this process or on real ranks over gloo, and keep what they watched."""

import gc
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

STEPS = (3, 4)  # of the first run, and of the one that goes on from its checkpoint


def run_script(folder: Path, *words: str, watched: int = 2) -> list[Any]:
    """Run `train.py` of `folder` once for each of STEPS, each time on from the last checkpoint; the `watched` step."""
    import torch
    from accelerate.state import AcceleratorState
    from torch.nn.parallel import DistributedDataParallel

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vramlab.WatchCallback", lambda: seen.append(_watch(watched)) or seen[-1])
        patch.setattr(DistributedDataParallel, "__init__", _seen_buckets(DistributedDataParallel.__init__))
        if not torch.cuda.is_available():
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # as FSDP does with what it offloads
        patch.setattr(AcceleratorState, "__init__", _sharding_on_cpus(AcceleratorState.__init__))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
            patch.delenv(name)  # what a Trainer before has left
        patch.chdir(folder)
        for count in STEPS:
            patch.setattr(sys, "argv", ["train.py", "--data", "train.jsonl", "--max-steps", str(count), *words])
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
    return [each.report for each in seen]


def _watch(step: int) -> Any:
    """A `WatchCallback` that also names what DeepSpeed and DDP hold where no parameter leads to it."""
    from vramlab.faces.callback import WatchCallback
    from vramlab.faces.watch import watch

    class Kept(WatchCallback):
        def _enter(self, watched: Any) -> None:
            super()._enter(watched)
            if not isinstance(watched, watch):
                return
            wrapped = _trainer().model_wrapped
            if hasattr(wrapped, "zero_optimization"):
                from vramlab.training.engines.deepspeed import DeepSpeed

                follows = DeepSpeed.follow(None, SimpleNamespace(model=wrapped), watched.tracker)
                watched._stack.enter_context(follows)
            storages = [storage for seen in getattr(wrapped, "seen_buckets", ()) if (storage := seen())]
            watched.tracker.claim_storages(storages, "workspace", "buckets")

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
    """accelerate shards by FSDP on accelerators only, and takes DDP on CPUs without a word: say that these are some."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def init(self, *args, **options):
        known, cpus = PartialState._shared_state, DistributedType.MULTI_CPU
        if known.get("distributed_type") == cpus and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            known["distributed_type"] = DistributedType.MULTI_GPU
        plain(self, *args, **options)

    return init


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
    for name in ("LlamaForCausalLM", "Trainer", "AutoTokenizer", "AutoModelForCausalLM", "BitsAndBytesConfig"):
        getattr(transformers, name)


def work(folder: str, watched: int) -> str:
    """On a rank: the report of the first run as JSON."""
    import torch
    from vramlab.training.process_group import one_gloo_thread

    torch.set_num_threads(1)
    with one_gloo_thread(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        seen = run_script(Path(folder), "--watch", watched=watched)
        torch.distributed.barrier()
        gc.collect()  # destructors of tensors sent wait for Python, which waits for gloo's thread to end
        torch.distributed.destroy_process_group()
    return seen[0].to_json()
