"""Recipes trained by PyTorch's CUDA build on a stand-in for a GPU: what its own allocator held,
next to `simulate`.

    export LD_PRELOAD=$(python -m vramlab.measurement.stand_in build/stand_in)
    python tests/stand_in/runs.py LIST.json OUT.json

LIST is what `vramlab record --dry-run --json` prints, or has objects with a "recipe" and what is to
be done besides training: "evaluation" (arguments of `Evaluation`) or "loading" (of its base from a
checkpoint), or with "diffusion" in place of a recipe, the fields of a `Diffusion`.
STAND_IN_CAPABILITY and its neighbours (`data/stand_in/README.md`) say which card. What is there
already is not run again. Each recipe has a process of its own. In place of the package flash-attn,
which needs a GPU to be of use, torch's own copy of its host code runs.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import masking_utils
from vramlab import Recipe
from vramlab.hardware.nvml import nvml_snapshot
from vramlab.measurement.measurement_passes import clean_pass
from vramlab.measurement.records import write_atomically
from vramlab.measurement.worker import import_libraries
from vramlab.recipe.diffusion import Diffusion
from vramlab.recipe.evaluation import Evaluation
from vramlab.simulation.flash_attn import flash_attention
from vramlab.training.diffusion import build_diffusion
from vramlab.training.engines import engine_of
from vramlab.training.evaluation_loop import evaluate
from vramlab.training.models import build_model, weight_dtype
from vramlab.training.process_group import one_rank_of
from vramlab.training.training import build, make_batch, train_step

MINUTES = 5
LIBRARIES = ("torch", "transformers", "bitsandbytes", "deepspeed")


warnings.filterwarnings("ignore")
torch.backends.cuda.enable_cudnn_sdp(False)  # no stand-in for cuDNN: flash attention in its place
CHOSEN: dict[int, int] = {}  # how many a mask of so many elements selects, where not all
HELD: list["Integers"] = []  # entered where masks have values


class Integers(TorchDispatchMode):
    """Integers and masks on the card have values: their operators run on the host too.

    No kernel computes here, but copies from and to the card are made. Models that read images need
    to know where those are among the tokens, and how they are cut.
    """

    def __enter__(self):
        HELD.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        HELD.clear()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in given}
        has_values = not any(map(is_float, given))
        args_of_host, of_host = tree_map(on_host, (args, kwargs or {})) if has_values else ((), {})
        made = func(*args, **kwargs or {})
        outputs = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        if has_values and any(each.is_cuda for each in outputs) and not any(map(is_float, outputs)):
            said = func(*args_of_host, **of_host)
            values = [each for each in tree_leaves(said) if isinstance(each, torch.Tensor)]
            if any(a.shape != b.shape for a, b in zip(outputs, values, strict=True)):
                # as long as values say, such as `repeat_interleave`
                return tree_map_only(torch.Tensor, torch.Tensor.cuda, said)
            for output, value in zip(outputs, values, strict=True):
                is_view = output.untyped_storage().data_ptr() in storages
                if output.is_cuda and output.numel() and (func._schema.is_mutable or not is_view):
                    write(output, value)
        return made


def is_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds no integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's storage in one row: only such is copied without a kernel."""
    return torch.empty(0, dtype=tensor.dtype, device="cuda").set_(tensor.untyped_storage())


def on_host(each):
    """The same on the host: a tensor of the card with its values, or the host for the card."""
    if isinstance(each, torch.device):
        return torch.device("cpu")
    if not isinstance(each, torch.Tensor) or not each.is_cuda:
        return each
    return whole(each).cpu().as_strided(each.size(), each.stride(), each.storage_offset())


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Put values into a tensor of the card."""
    row = whole(tensor)
    host = row.cpu()
    place = host.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    place.copy_(values)
    row.copy_(host)


def chosen(mask: torch.Tensor) -> torch.Tensor:
    """What `nonzero` gives of a mask: as many rows as it selects, here mostly all."""
    if HELD:
        found = on_host(mask).nonzero().t().contiguous()
        rows = torch.zeros(found.shape, dtype=torch.int64, device=mask.device)
        return rows.copy_(found).t()
    count = CHOSEN.get(mask.numel(), mask.numel())
    return torch.zeros((mask.dim(), count), dtype=torch.int64, device=mask.device).t()


full = torch.library.Library("aten", "IMPL")  # every mask is: those of labels choose all tokens
full.impl("nonzero", chosen, "CUDA")
_ignore_mask = masking_utils._ignore_causal_mask_sdpa


def _ignore_mask_of_no_batch(padding_mask, *args, **options):
    """transformers leaves a mask out that selects everything, as every mask does here: a batch's
    own stays.
    """
    return padding_mask is None and _ignore_mask(None, *args, **options)


assert "libcudart" in os.environ.get("LD_PRELOAD", ""), "the stand-in is not loaded"


def main(wanted: Path, out: Path) -> None:
    """Run what is wanted and not yet in `out`."""
    empty = {name: version(name) for name in LIBRARIES} | {
        "date": str(datetime.date.today()),
        "runs": [],
    }
    found = json.loads(out.read_text()) if out.exists() else empty
    done = {identity(each) for each in found["runs"]}
    for each in json.loads(wanted.read_text()):
        each = each if {"recipe", "diffusion"} & each.keys() else {"recipe": each}
        if identity(each) not in done:
            what = asked_in(each)
            named = {"recipe": changed(what)} if isinstance(what, Recipe) else {}
            found["runs"].append(each | named | apart(each))
            print(what, found["runs"][-1], flush=True)
            write_atomically(out, text(found))


def asked_in(each: dict) -> Recipe | Diffusion:
    """What a run trains."""
    return Diffusion(**each["diffusion"]) if "diffusion" in each else Recipe(**each["recipe"])


def identity(each: dict) -> tuple:
    """What tells one run from the others."""
    if "diffusion" in each:
        return (json.dumps(each["diffusion"], sort_keys=True),)
    return Recipe(**each["recipe"]).key, "loading" in each, json.dumps(each.get("evaluation"))


def text(found: dict) -> str:
    """JSON with a line for each run."""
    runs = ",\n".join("  " + json.dumps(run) for run in found["runs"])
    return json.dumps({**found, "runs": []})[:-2] + f"\n{runs}\n]}}\n"


def apart(each: dict) -> dict:
    """The allocator's peaks in bytes, from a process of its own; None for what could not be run.

    It is no fork: what reads a model of images or PEFT's configuration may have used the card.
    """
    command = [sys.executable, __file__, "-"]
    try:
        asked = json.dumps(each)
        done = subprocess.run(
            command, input=asked, stdout=subprocess.PIPE, text=True, timeout=60 * MINUTES
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return dict.fromkeys(PEAKS)


def peaks(recipe: Recipe | Diffusion, each: dict) -> dict:
    """The allocator's peaks of training, of an evaluation after one step, or of loading. Where
    samples of several lengths are padded, attention gets their mask."""
    if isinstance(recipe, Diffusion):
        training = build_diffusion(recipe, "cuda", "cuda")
        for _ in range(2):
            train_step(training)
        stats = torch.cuda.memory_stats()
        return {name: stats[f"{name}_bytes.all.peak"] for name in PEAKS}
    is_padded = recipe.lengths and not recipe.joins
    masking_utils._ignore_causal_mask_sdpa = _ignore_mask_of_no_batch if is_padded else _ignore_mask
    if "loading" in each:
        load(recipe)
    elif "evaluation" in each:
        training = build(recipe, "cuda")
        train_step(training)
        torch.cuda.reset_peak_memory_stats()
        evaluation = Evaluation(**each["evaluation"])
        evaluate(
            training,
            evaluation,
            lambda size: make_batch(recipe.replace(batch_size=size), "cuda"),
            full=True,
        )
    else:
        import_libraries(recipe)
        try:
            with (
                sampled(recipe) if recipe.rollouts else nullcontext(),
                Integers() if recipe.images else nullcontext(),
                flash_attention(torch.cuda.get_device_capability()),
                one_rank_of(recipe.sharding),
                engine_of(recipe).without_peers("cpu"),
            ):
                stats = clean_pass(recipe, 1, 2, "cuda", nvml_snapshot()).stats
        except torch.OutOfMemoryError as error:
            return dict.fromkeys(PEAKS) | {"out_of_memory": str(error).split(". ")[0]}
        return {name: stats[f"{name}_bytes.all.peak"] for name in PEAKS}
    stats = torch.cuda.memory_stats()
    return {name: stats[f"{name}_bytes.all.peak"] for name in PEAKS}


@contextmanager
def sampled(recipe: Recipe) -> Iterator[None]:
    """What TRL reads of values in GRPO and RLOO: each completion has a reward and all its tokens,
    and the head is computed of these alone.
    """
    rollouts = recipe.rollouts
    tokens = recipe.batch_size * rollouts.max_completion_length
    CHOSEN[recipe.batch_size * (recipe.seq_len - 1)] = tokens
    move, is_nan = torch.Tensor.cpu, torch.isnan

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        moved = move(tensor)
        return moved.fill_(True) if moved.dtype == torch.bool and tensor.is_cuda else moved

    def isnan(tensor: torch.Tensor) -> torch.Tensor:
        is_reward = tensor.dim() == 2 and tensor.shape[1] == 1
        return torch.zeros(tensor.shape, dtype=torch.bool) if is_reward else is_nan(tensor)

    with mock.patch.object(torch.Tensor, "cpu", cpu), mock.patch.object(torch, "isnan", isnan):
        yield
    CHOSEN.clear()


def load(recipe: Recipe) -> None:
    """Load the quantized base of `recipe` from a checkpoint of zeros, as a script does."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    import_libraries(recipe)
    asked, dtype = recipe.quantization, weight_dtype(recipe)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=asked.quant_type,
        bnb_4bit_use_double_quant=asked.double,
        bnb_4bit_compute_dtype=dtype,
    )
    with tempfile.TemporaryDirectory() as folder:
        precision = {torch.float16: "fp16-true", torch.bfloat16: "bf16-true"}.get(dtype, "fp32")
        plain = {
            "quantization": None,
            "lora": None,
            "dtype": recipe.weights_dtype,
            "precision": precision,
        }
        model = build_model(recipe.replace(**plain))
        copies = {
            name: tensor.clone() for name, tensor in model.state_dict().items()
        }  # not shared: all are stored
        model.save_pretrained(folder, state_dict=copies if recipe.shape.stores_tied_head else None)
        options = {"quantization_config": config, "dtype": dtype, "device_map": {"": 0}}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if asked.prepare:
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def changed(recipe: Recipe) -> dict:
    """The fields of `recipe` that are not their defaults."""
    usual = Recipe(recipe.model, recipe.batch_size).to_dict()
    return {
        name: value
        for name, value in recipe.to_dict().items()
        if value != usual.get(name) or name in NAMED
    }


PEAKS = ("allocated", "requested", "reserved")
NAMED = ("model", "batch_size", "seq_len")

if __name__ == "__main__":
    if sys.argv[1] == "-":  # one run from the standard input, its peaks to the standard output
        each = json.load(sys.stdin)
        print(json.dumps(peaks(asked_in(each), each)))
    else:
        main(*map(Path, sys.argv[1:3]))
