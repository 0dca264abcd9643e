"""Train a model whose matrices, or whose experts, are cut over all ranks (chapter 09).

    torchrun --standalone --nproc_per_node 2 -m vramlab_course.chapters.cut

Trains in fp32, five steps. To train on your data, copy this file and put your token numbers into
`ids`.
"""

import argparse
import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vramlab_course.base_model import base_model_folder


def share(layer: Any) -> None:
    """Let a block's matrices share their input, so that its gradient is summed once.

    Norms stand before blocks.
    """
    mesh = layer.self_attn.o_proj.weight.device_mesh
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.register_forward_hook(lambda norm, given, y: DTensor.from_local(y, mesh))


def main() -> None:
    """Train this rank's part; each rank prints the losses."""
    from transformers import AutoModelForCausalLM, DistributedConfig

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(base_model_folder()))
    parser.add_argument("--experts", action="store_true", help="cut those, and FSDP the rest")
    parser.add_argument("--lr", type=float, default=1e-5)
    given = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    cut = {"fsdp_size": world, "ep_size": world} if given.experts else {"tp_plan": "auto"}
    model = AutoModelForCausalLM.from_pretrained(
        given.model,
        dtype=torch.float32,
        distributed_config=DistributedConfig(**cut),
    )
    torch.manual_seed(0)  # all ranks of a cut layer get the same batch
    if given.experts:
        torch.manual_seed(int(os.environ["RANK"]))  # each rank has a batch of its own
    elif world > 1:
        for layer in model.model.layers:
            share(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    ids = torch.randint(1000, (2, 256), device=model.device)
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
