"""What one rank holds of a model that is cut by tensors or by layers."""


def stage_layers(layers: int, world_size: int) -> list[range]:
    """The layers of each stage, as even as they go: the first stages have one more where it does not divide."""
    least, more = divmod(layers, world_size)
    starts = [rank * least + min(rank, more) for rank in range(world_size + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
