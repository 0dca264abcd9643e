"""Source E's experiment for two GPUs: what the link between them costs a step of DDP (chapter 11).

    torchrun --standalone --nproc_per_node 2 -m vramlab_course.chapters.two_ranks
    NCCL_P2P_DISABLE=1 torchrun --standalone --nproc_per_node 2 -m vramlab_course.chapters.two_ranks

With two GPUs it trains GPT-2 in fp32 on 4 × 1,024 tokens a GPU over NCCL, as E does. With fewer it
trains two layers of 64 channels in CPU processes over gloo: the same bytes a parameter, no NVLink.
Prints one line of JSON.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

TINY = dict(
    vocab_size=1000,
    n_positions=64,
    n_embd=64,
    n_head=2,
    n_layer=2,
    bos_token_id=0,
    eos_token_id=0,
)


def experiment(steps: int) -> dict[str, Any]:
    """Train `steps` steps with and as many without averaging gradients; return what this rank saw.

    Seconds are medians of steps. `sent_buckets`: bytes that DDP hands to the all-reduce in a step.
    `parameters`: their number. `link_gb_per_second`: 10**9 bytes that a rank sends in a second of
    an all-reduce as large as the gradients, with nothing else going on. Needs torchrun's
    environment.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2Config, GPT2LMHeadModel

    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    # NCCL needs a card for each rank.
    cuda = torch.cuda.device_count() >= world
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    # The same weights on all ranks; DDP would send rank 0's to the others anyway.
    torch.manual_seed(0)
    ddp = DistributedDataParallel(GPT2LMHeadModel(GPT2Config(**({} if cuda else TINY))).to(device))
    buckets = count_buckets(ddp)
    torch.manual_seed(int(os.environ["RANK"]))  # each rank reads text of its own
    tokens = torch.randint(
        ddp.module.config.vocab_size,
        (4, 1024) if cuda else (1, 32),
        device=device,
    )
    step = timed_step(ddp, tokens)
    step()  # DDP rebuilds its buckets after the first step
    buckets.clear()
    together = [step() for _ in range(steps)]
    sent = sum(buckets) // steps
    # The same computing without the all-reduce: the difference is what the link costs.
    with ddp.no_sync():
        alone = [step() for _ in range(steps)]
    parameters = sum(p.numel() for p in ddp.parameters())
    exchange = all_reduce_seconds(torch.zeros(parameters, device=device), steps)
    facts = {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "backend": dist.get_backend(),
        "p2p_disabled": os.environ.get("NCCL_P2P_DISABLE") == "1",
        "parameters": parameters,
        "sent_buckets": sent,
        "step_seconds": median(together),
        "alone_seconds": median(alone),
        # In a ring each of N ranks sends 2 (N - 1) / N times what is added up.
        "link_gb_per_second": 2 * (world - 1) / world * 4 * parameters / exchange / 1e9,
    }
    # Before the group: DDP as its last owner would join gloo's threads while it holds the GIL, for
    # which they may wait (torch 2.13; pytorch/pytorch issue 56297).
    del step, ddp
    gc.collect()
    dist.destroy_process_group()
    return facts


def count_buckets(ddp: Any) -> list[int]:
    """A list that gets the bytes of each bucket that `ddp` hands to the all-reduce."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sizes: list[int] = []

    def hook(state, bucket):  # DDP refuses other annotations than its own
        sizes.append(bucket.buffer().nbytes)
        # DDP's own averaging, which registering a hook replaces.
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    return sizes


def timed_step(ddp: Any, tokens: Any) -> Callable[[], float]:
    """A function that trains one step with AdamW and returns its seconds."""
    import torch

    optimizer = torch.optim.AdamW(ddp.parameters())
    # Kernels are issued ahead: without waiting the clock would measure the issuing.
    wait = torch.cuda.synchronize if tokens.is_cuda else lambda: None

    def step() -> float:
        wait()
        start = time.perf_counter()
        optimizer.zero_grad()
        ddp(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        wait()
        return time.perf_counter() - start

    return step


def all_reduce_seconds(buffer: Any, times: int) -> float:
    """The median of the seconds that an all-reduce of `buffer` takes, after a first one."""
    import torch
    import torch.distributed as dist

    wait = torch.cuda.synchronize if buffer.is_cuda else lambda: None
    seconds = []
    for _ in range(times + 1):
        dist.barrier()  # or the rank that comes first would count its waiting for the other
        wait()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def main() -> None:
    """Run the experiment on this rank; rank 0 prints what it saw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start it with torchrun --standalone --nproc_per_node 2 -m "
            "vramlab_course.chapters.two_ranks"
        )
    found = experiment(given.steps)
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
