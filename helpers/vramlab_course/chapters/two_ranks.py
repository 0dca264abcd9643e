"""Source E's experiment for two GPUs: what the link between them costs a step of DDP (chapter 00).

    torchrun --standalone --nproc_per_node 2 -m vramlab_course.chapters.two_ranks
    NCCL_P2P_DISABLE=1 torchrun --standalone --nproc_per_node 2 -m vramlab_course.chapters.two_ranks

With two GPUs it trains GPT-2 in fp32 on 4 × 1,024 tokens a GPU over NCCL, as E does; with fewer, two layers of 64
channels on CPU processes over gloo, which show the same bytes and no NVLink. Prints one line of JSON.
"""

import argparse
import json
import os
import time
from statistics import median
from typing import Any


def experiment(steps: int) -> dict[str, Any]:
    """Trains `steps` steps with and as many without averaging gradients; returns what rank 0 saw.

    Seconds are medians of steps. `sent_buckets` counts what DDP hands to the all-reduce in one step, in bytes;
    `parameters` are numbers; `same` says that both ranks hold equal weights at the end. Needs torchrun's environment.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2Config, GPT2LMHeadModel

    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= world
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    tiny = dict(vocab_size=1000, n_positions=64, n_embd=64, n_head=2, n_layer=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**({} if cuda else tiny))).to(device)
    ddp = DistributedDataParallel(model)
    buckets: list[int] = []

    def counting(state, bucket):  # DDP refuses other annotations than its own
        buckets.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, counting)
    optimizer = torch.optim.AdamW(ddp.parameters())
    torch.manual_seed(int(os.environ["RANK"]))  # each rank reads text of its own
    tokens = torch.randint(model.config.vocab_size, (4, 1024) if cuda else (1, 32), device=device)

    def step() -> float:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        ddp(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    step()  # the first step builds the buckets
    buckets.clear()
    together = [step() for _ in range(steps)]
    sent = sum(buckets) // steps
    sums = torch.stack([p.detach().double().sum() for p in model.parameters()])
    others = [torch.empty_like(sums) for _ in range(world)]
    dist.all_gather(others, sums)
    with ddp.no_sync():
        alone = [step() for _ in range(steps)]
    found = {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "backend": dist.get_backend(),
        "p2p_disabled": os.environ.get("NCCL_P2P_DISABLE") == "1",
        "parameters": sum(p.numel() for p in model.parameters()),
        "sent_buckets": sent,
        "step_seconds": median(together),
        "alone_seconds": median(alone),
        "same": all(torch.equal(other, sums) for other in others),
    }
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node 2 -m vramlab_course.chapters.two_ranks")
    found = experiment(given.steps)
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
