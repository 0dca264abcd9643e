"""How many calls the host makes for an operator, each of which takes it about as long.

They are those of torch's dispatcher, views and the autograd engine's included, as a dispatch mode
counts them, and where a library is written in Python those that cross over to it and from it to its
C library (`tests/formulas/test_calls.py`). An operator that no table here has is one call, and so
is its backward formula.
"""

# A projection of batch × tokens rows: `t`, `view`, `mm`, `_unsafe_view`. A batched product expands
# and views both factors first. Attention also takes heads apart and puts them together: five views
# and four transposes, which come with the softmax where it is written out. Rotation has a view of
# cos or sin with each `neg`; `repeat_kv` views, expands and copies, and views the copy.
FORWARD = {
    "linear": 4,
    "bmm": 6,
    "flash_attention": 11,
    "efficient_attention": 10,
    "softmax": 9,
    "neg": 2,
    "repeat_kv": 4,
    # bitsandbytes: a view of the packed weight, `MatMul4Bit`, its operator and the kernel of it in
    # Python, which makes room for the weight, unpacks it by the C library and multiplies
    # (`backends/cuda/ops.py`, `_dequant_linear_fallback`).
    "gemm_4bit": 10,
}
# (once, for each gradient that it makes); a sum and a cast to fit an input come on top.
BACKWARD = {
    "add": (0, 0),
    "mul": (0, 1),
    "cat": (0, 1),
    "clone": (0, 0),
    "mean": (2, 0),
    "pow": (3, 0),
    "rsqrt": (4, 0),
    "linear": (1, 3),
    "bmm": (1, 3),
    "flash_attention": (14, 0),
    "efficient_attention": (10, 0),
    "softmax": (9, 0),
    "repeat_kv": (3, 0),
    # `MatMul4Bit.backward`, `dequantize_4bit` and its kernel in Python, the weight's room, the C
    # library; then the product of rows.
    "gemm_4bit": (8, 0),
}
# Nested scales are unpacked before: room, the C library and an addition; backward by an operator of
# their own.
NESTED_FORWARD = FORWARD | {"gemm_4bit": 13}
NESTED_BACKWARD = BACKWARD | {"gemm_4bit": (13, 0)}
ONE = (1, 0)
# DoRA's for each adapted module, forward and backward, over LoRA's (peft, lora/dora.py).
DORA = (21, 17)
# Of a chunk of Liger's head (liger_kernel/ops/fused_linear_cross_entropy.py), and of a tile of
# TRL's, forward and backward (trl/kernels/chunked_logprob.py).
LIGER_CHUNK = 20
FUSED_TILE = 27
