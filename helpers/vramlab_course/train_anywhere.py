"""Train a causal language model on a laptop, on all GPUs of a node, or on many nodes.

Copy this one file to use it:

    python train_anywhere.py                                                        # one process
    torchrun --standalone --nproc_per_node 4 train_anywhere.py                      # one node
    torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d \\
        --rdzv_endpoint HEAD_NODE:29500 --rdzv_id 1 train_anywhere.py               # on each node

It needs torch, transformers, a model's folder (config.json, weights, tokenizer) and text; the
defaults are the course's base model and the source code of Python's standard library. Any number of
processes trains on the same global batches and can continue from any other number's checkpoint.
Rank 0 prints a line of JSON per step.
"""

import argparse
import contextlib
import gc
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
BASE_MODEL = next(  # in an installation or a checkout; a copy of this file elsewhere needs --model
    (
        folder
        for folder in (HERE.parent / "vramlab_base_model", HERE.parent.parent / "data/base_model")
        if folder.exists()
    ),
    None,
)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=BASE_MODEL,
        help="folder with config.json, weights and tokenizer",
    )
    add(
        "--from-scratch",
        action="store_true",
        help="random weights, the same on all ranks, instead of the folder's",
    )
    add(
        "--text",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder whose files are the text",
    )
    add("--pattern", default="*.py", help="which files of it, in all its subfolders")
    add("--megabytes", type=float, default=2.0, help="of text at most")
    add(
        "--sharding",
        choices=["fsdp", "ddp"],
        default="fsdp",
        help="ZeRO stage 3 by FSDP2, or a replica on each rank",
    )
    add(
        "--steps",
        type=int,
        default=20,
        help="optimizer steps in all, those before a restart included",
    )
    add("--batch-size", type=int, default=8, help="rows of the global batch, over all ranks")
    add(
        "--micro-batch",
        type=int,
        default=None,
        help="rows at a time on a rank; default: all of its share",
    )
    add("--context", type=int, default=128, help="tokens in a row")
    add("--lr", type=float, default=1e-3)
    add(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="bf16: computed in it, weights kept in fp32",
    )
    add("--checkpointing", action="store_true", help="recompute activations")
    add("--seed", type=int, default=0)
    add(
        "--checkpoint",
        type=Path,
        default=None,
        help="folder, seen by all nodes; training goes on from its newest",
    )
    add("--save-every", type=int, default=10, help="steps")
    add(
        "--export",
        type=Path,
        default=None,
        help="folder for the trained model, as from_pretrained reads it",
    )
    return parser.parse_args()


@contextlib.contextmanager
def process_group() -> Iterator[tuple[torch.device, int, int]]:
    """Give (device, rank, world size), under torchrun or for a single process."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if "RANK" not in os.environ:
        yield device, 0, 1
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    yield device, dist.get_rank(), dist.get_world_size()
    # DDP's reducer goes first: if it is the last to hold the group, gloo can wait for ever (torch
    # 2.13)
    gc.collect()
    dist.destroy_process_group()  # not after an error: the others may wait in a collective


def tokens_of(given: argparse.Namespace) -> torch.Tensor:
    """All text as one row of tokens. Every rank reads the same files in the same order."""
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = []
    room = int(given.megabytes * 1e6)
    for path in sorted(given.text.rglob(given.pattern)):
        if room <= 0 or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")[:room]
        room -= len(text.encode())
        # A start token between texts, so that none is read as the continuation of another.
        ids += [tokenizer.bos_token_id or 0, *tokenizer(text, verbose=False)["input_ids"]]
    if len(ids) <= given.context:
        raise SystemExit(
            f"{given.text} has {len(ids)} tokens in files {given.pattern}; over {given.context} "
            f"are needed."
        )
    return torch.tensor(ids)


def rows_of(
    tokens: torch.Tensor,
    step: int,
    given: argparse.Namespace,
    rank: int,
    world: int,
) -> torch.Tensor:
    """This rank's rows of the global batch, which depends only on seed and step."""
    # By seed and step alone, so that a run goes on with the same rows after a restart, on any
    # number of ranks.
    generator = torch.Generator().manual_seed(given.seed * 1_000_003 + step)
    starts = torch.randint(
        len(tokens) - given.context,
        (given.batch_size, 1),
        generator=generator,
    )
    # Every world-th row from its own rank on, and for each row a window of the text.
    return tokens[starts[rank::world] + torch.arange(given.context)]


def build(given: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model in fp32, sharded or replicated if there is a process group."""
    # Random weights have to be equal on all ranks; DDP would send rank 0's, FSDP would not.
    torch.manual_seed(given.seed)
    if given.from_scratch:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(given.model),
            dtype=torch.float32,
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model = model.to(device).train()
    if given.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not dist.is_initialized():
        return model
    if given.sharding == "ddp":
        return DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
        )
    half = (
        torch.bfloat16 if given.precision == "bf16" else None
    )  # gathered and computed in bf16, summed in fp32
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    # transformers names the classes of a model's layers there; each layer is a unit, so one is
    # gathered at a time.
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, mp_policy=policy)
    # What is in no layer, as the embedding and the head, belongs to the outermost unit.
    fully_shard(model, mp_policy=policy)
    return model


def train_step(
    model,
    optimizer,
    rows: torch.Tensor,
    given: argparse.Namespace,
) -> torch.Tensor:
    """Run one optimizer step on this rank's rows; returns their mean loss."""
    parts = rows.split(given.micro_batch or len(rows))
    total = torch.zeros((), device=rows.device)
    autocasts = given.precision == "bf16" and not hasattr(
        model,
        "set_requires_gradient_sync",
    )  # FSDP has its own way
    for number, part in enumerate(parts):
        last = number == len(parts) - 1  # gradients are averaged over ranks once, after the last
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        quiet = (
            model.no_sync() if hasattr(model, "no_sync") and not last else contextlib.nullcontext()
        )
        with quiet:
            with torch.autocast(rows.device.type, torch.bfloat16, enabled=autocasts):
                # A micro-batch's mean counts by its rows, so the sum is the mean over all of them.
                loss = model(input_ids=part, labels=part, use_cache=False).loss * (
                    len(part) / len(rows)
                )
            loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def newest(folder: Path | None) -> Path | None:
    """The newest complete checkpoint; incomplete ones are named step-N.part."""
    if folder is None:
        return None
    found = {}
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit():
            found[int(number)] = path
    return found[max(found)] if found else None


def save(
    model,
    optimizer,
    step: int,
    folder: Path,
    rank: int,
) -> None:
    """Write this rank's shards; rank 0 renames the folder once all are there."""
    # Names without the wrappers' prefixes, so that another number of ranks or no wrapper at all can
    # read it.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    part = folder / f"step-{step}.part"
    whole = folder / f"step-{step}"
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=part)
    if rank == 0:
        part.rename(whole)


def load(model, optimizer, folder: Path) -> int:
    """Load a checkpoint into model and optimizer; returns the number of steps done."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # dcp.load reads into the tensors that are there, each rank its own shards.
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(folder.name[5:])


def train(
    given: argparse.Namespace,
    device: torch.device,
    rank: int,
    world: int,
) -> None:
    """Train from the newest checkpoint, or from the start, to step `given.steps`."""
    if given.model is None or not (given.model / "config.json").exists():
        raise SystemExit(
            f"--model must be a folder with config.json, weights and tokenizer, not {given.model}."
        )
    if given.batch_size % world:
        raise SystemExit(f"--batch-size {given.batch_size} cannot be divided among {world} ranks.")
    tokens = tokens_of(given)
    model = build(given, device)
    # After sharding, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.0)
    found = newest(given.checkpoint)
    start = load(model, optimizer, found) if found else 0
    for step in range(start, given.steps):
        begun = time.perf_counter()
        torch.manual_seed(
            given.seed + step * world + rank
        )  # of dropout: also the same after a restart
        loss = train_step(
            model,
            optimizer,
            rows_of(tokens, step, given, rank, world).to(device),
            given,
        )
        if world > 1:
            # For the line that is printed alone; gradients have been averaged in backward.
            dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        if rank == 0:
            seconds = round(time.perf_counter() - begun, 4)
            line = {
                "step": step + 1,
                "loss": loss.item() / world,
                "seconds": seconds,
                "world_size": world,
            }
            print(json.dumps(line), flush=True)
        done = step + 1
        is_due = done % given.save_every == 0 or done == given.steps
        if given.checkpoint and is_due:
            save(model, optimizer, done, given.checkpoint, rank)
    if given.export:
        # All ranks take part in gathering, though only rank 0 keeps the result.
        whole = get_model_state_dict(
            model,
            options=StateDictOptions(full_state_dict=True, cpu_offload=True),
        )
        if rank == 0:
            # DDP holds the model as its `module`.
            getattr(model, "module", model).save_pretrained(given.export, state_dict=whole)
            AutoTokenizer.from_pretrained(given.model).save_pretrained(given.export)


def main() -> None:
    """Train as the command line says, on this rank."""
    given = arguments()
    with process_group() as (device, rank, world):
        train(given, device, rank, world)


if __name__ == "__main__":
    main()
