"""Which backend `scaled_dot_product_attention` chooses on a GPU."""


def sdp_backend(
    width: int,
    head_dim: int,
    masked: bool,
    grouped: bool,
    bf16: bool,
    capability: tuple[int, int],
    dropout: float = 0.0,
    value_dim: int | None = None,
    broadcast: bool = False,
) -> str:
    """The backend, "flash", "efficient" or "math" (`sdp_utils.cpp`, select_sdp_backend).

    Flash: half precision, no mask, heads up to 256 wide, compute capability 8.0 (consumer cards of 8.6 to 8.9 and 12.x
    have no backward for 193 to 224 channels, or more with dropout). Memory-efficient: no bf16 below 8.0, no shared heads
    of keys (torch up to 2.13), multiples of 16 bytes a head where tensor cores multiply. Else "math".

    Args:
        width: bytes per element.
        grouped, broadcast: fewer heads of keys, with and without `enable_gqa` (check_batch_size_and_num_heads_dense).
    """
    if broadcast:
        return "math"
    half, major, value_dim = width == 2, capability[0], value_dim or head_dim
    consumer = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    trainable = not consumer or head_dim <= 192 or (head_dim > 224 and not dropout)
    if half and head_dim == value_dim and head_dim <= 256 and major >= 8 and trainable and not masked:
        return "flash"
    if (half and bf16 and major < 8) or grouped:
        return "math"
    aligned = (8 if half else 4) if major >= 8 or (half and major == 7) else 1
    return "math" if head_dim % aligned or value_dim % aligned else "efficient"
