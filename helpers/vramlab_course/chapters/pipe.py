"""Train a model's LoRA adapters as a pipeline, one stage a rank (chapter 09).

    torchrun --standalone --nproc_per_node 2 -m vramlab_course.chapters.pipe --layers 2 2

For two machines with one card each, type on both, in place of --standalone: --nnodes 2
--nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint FIRST:29500. Five steps, with checkpointing.
The model's own weights are frozen, in bf16; adapters are fp32.

To train on your data, copy this file and put your token numbers into `batches`: at least one
sample for each micro-batch, all batches of one shape and the same on all ranks. To keep the result,
let each rank end with

    for layer in model.base.layers:
        trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        torch.save(trained, f"layer{layer.self_attn.layer_idx}.pt")

One process then makes `whole` and `adapted` as `main` does, and collects all files:

    for number, layer in enumerate(whole.model.layers):
        layer.load_state_dict(torch.load(f"layer{number}.pt"), strict=False)
    adapted.save_pretrained("adapter")
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vramlab_course.base_model import base_model_folder


class Stage(torch.nn.Module):
    """This rank's layers of `whole`, of which stage s has `layers[s]`.

    The first one takes tokens and embeds them, the last one has norm and head and gives logits.
    """

    def __init__(self, whole: Any, layers: Sequence[int], rank: int):
        super().__init__()
        self.base = whole.model
        self.head = whole.lm_head
        first = sum(layers[:rank])
        self.base.layers = self.base.layers[first : first + layers[rank]]
        if rank > 0:
            self.base.embed_tokens = torch.nn.Identity()
        if rank < len(layers) - 1:
            self.base.norm = torch.nn.Identity()
            self.head = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next rank takes, of tokens or of what the rank before gave."""
        x = self.base.embed_tokens(x)
        return self.head(self.base(inputs_embeds=x, use_cache=False).last_hidden_state)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens, in the last stage."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT.float(), ids[:, 1:])


def main() -> None:
    """Train this rank's stage; the last rank prints the losses."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(base_model_folder()))
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="of each stage")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    given = parser.parse_args()
    cards = torch.cuda.is_available()
    dist.init_process_group("nccl" if cards else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if cards:
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # all ranks draw the same adapters and tokens
    whole = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    adapted = get_peft_model(whole, LoraConfig(r=16, target_modules="all-linear"))
    adapted.gradient_checkpointing_enable()
    world = dist.get_world_size()
    if (len(given.layers), sum(given.layers)) != (world, len(whole.model.layers)):
        parser.error(f"--layers: {world} numbers with a sum of {len(whole.model.layers)}")
    model = Stage(whole, given.layers, rank).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    stage = PipelineStage(model, rank, world, device)
    schedule = Schedule1F1B(stage, given.micro_batches, loss_fn=loss_of)
    batches = 5 * [torch.randint(1000, (given.micro_batches, 256), device=device)]
    for ids in batches:
        first = [ids] if rank == 0 else []  # the others take what the stage before gives
        losses: list[torch.Tensor] = []
        schedule.step(*first, target=ids, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:  # in the last stage only
            print(f"loss {torch.stack(losses).mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
