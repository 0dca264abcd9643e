"""Chapter 09: how PyTorch's tensor parallelism cuts a Llama's layer."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


def cuts(by_tokens: bool) -> dict[str, ParallelStyle]:
    """Return how each module of a layer is cut, for `parallelize_module`.

    Queries, keys, values, gate and up are cut by columns, and the outputs of both blocks by rows.
    `by_tokens` adds sequence parallelism: what lies between the blocks is cut by tokens.
    """
    columns = [f"self_attn.{name}_proj" for name in "qkv"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    cut: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    # Shard(1): each rank keeps some tokens.
    output = Shard(1) if by_tokens else Replicate()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        cut[name] = RowwiseParallel(output_layouts=output)
    if by_tokens:
        norm = SequenceParallel()
        cut["input_layernorm"] = norm
        cut["post_attention_layernorm"] = norm
        cut["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        cut["mlp"] = PrepareModuleInput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
        )
    return cut
