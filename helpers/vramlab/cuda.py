"""Where CUDA differs from CPU, in one place: how `target="cuda"` is simulated on fake CPU tensors.

Fake tensors of device "cuda" need a CUDA build of PyTorch, so the step runs on fake CPU tensors and everything
that would be different on a GPU is put in place here:

- attention goes to the kernel that `sdp_utils.cpp` would choose, which decides what is saved for the backward pass;
- dropout is the fused `native_dropout`, which saves a mask of one byte an element (CPU saves the scaled noise);
- autocast runs the operators of CUDA's fp32 list in fp32 (`autocast_mode.h`, AT_FORALL_FP32), which CPU's list lacks;
- kernels allocate scratch memory while they run (`kernel_scratch`), and cuBLAS keeps a workspace per handle;
- the caching allocator rounds every block up to 512 bytes (`CUDACachingAllocator.cpp`, kMinBlockSize).

Multi-tensor optimizers are CUDA's default too: `training.build(target="cuda")` asks for them.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .overhead import cublas_workspace

ALLOCATION_UNIT = 512
FACTORIES = (torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.linspace)
HALF = (torch.float16, torch.bfloat16)
# aten/src/ATen/autocast_mode.h: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, by the names Python calls them
FP32_OPERATORS = frozenset(
    ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow", "softplus", "layer_norm", "group_norm", "norm", "nuclear_norm", "cosine_similarity", "cosine_embedding_loss", "nll_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample", "interpolate", "cross_entropy", "__pow__", "__rpow__"]
)
FP32_BY_DTYPE = frozenset(["prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"])


def cublas_workspaces(card=None) -> dict[str, int]:
    """Phase to bytes: each cuBLAS handle keeps a workspace from its first matmul on, one in the thread that runs the
    forward pass and one in autograd's (`overhead.cublas_workspace`; 8.125 MiB each where no card is named)."""
    size = card.cublas_workspace if card else cublas_workspace((8, 0))
    return {"forward": size, "backward": size}


def attention_kernel(
    dtype: torch.dtype, head_dim: int, value_dim: int, masked: bool, compute_capability: tuple[int, int] = (8, 0)
) -> str:
    """"flash", "efficient" or "math": what `scaled_dot_product_attention` runs (`sdp_utils.cpp`, select_sdp_backend).

    Hopper and data-centre Blackwell prefer cuDNN's kernel, which saves what flash saves; it is counted as flash.
    """
    same = head_dim == value_dim
    ampere = compute_capability >= (8, 0)
    if dtype in HALF and same and head_dim <= 256 and ampere and not masked:
        return "flash"
    if dtype == torch.bfloat16 and not ampere:
        return "math"
    return "efficient" if head_dim % (8 if dtype in HALF else 4) == 0 else "math"


class CudaKernels(TorchFunctionMode):
    """While entered, functions called from Python do on (fake) CPU tensors what they would do on CUDA ones.

    Args:
        compute_capability: of the GPU described; (8, 0) stands for all that have flash attention.

    Attributes:
        on_host: told of tensors that were made without a device, which on a GPU machine are the host's.
    """

    def __init__(self, compute_capability: tuple[int, int] = (8, 0)):
        super().__init__()
        self.compute_capability = compute_capability
        self.on_host: Callable[[list[torch.Tensor]], None] = lambda tensors: None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return dropout(*args, **kwargs)
        if func in FACTORIES and kwargs.get("device") is None:
            result = func(*args, **kwargs)
            self.on_host([result])
            return result
        if func is torch.Tensor.backward:
            return self.backward(args[0])
        if torch.is_autocast_enabled("cpu") and (name in FP32_OPERATORS or name in FP32_BY_DTYPE):
            return in_fp32(func, name, args, kwargs)
        return func(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()` with this mode still entered, because a checkpoint recomputes the forward pass in there.

        Python's wrappers leave the mode and would come back here, so autograd's engine is called as they call it.
        """
        with self:
            start = torch.ones_like(loss, memory_format=torch.preserve_format)
            _engine_run_backward((loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """`F.scaled_dot_product_attention` with CUDA's saved tensors."""
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (t.to(dtype) for t in (query, key, value))
        dims = query.shape[-1], value.shape[-1]
        kernel = attention_kernel(query.dtype, *dims, attn_mask is not None, self.compute_capability)
        if kernel == "math":
            return torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if kernel == "flash":
            scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
            query, key, value = (_pad_head(t, 8) for t in (query, key, value))
            out = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return out[..., : dims[1]]
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        bias = _additive_mask(attn_mask, query, key)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]


def _pad_head(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """The head dimension padded with zeros to `multiple` (attention.cpp, pad_last_dim)."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _additive_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask becomes 0 / -inf in the query's dtype, its last dimension padded to 16 (attention.cpp, pad_bias)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
    length, missing = mask.shape[-1], -mask.shape[-1] % 16
    if missing:
        mask = F.pad(mask, (0, missing))[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """CUDA's dropout: one fused kernel that returns the result and a mask of booleans (Dropout.cpp, is_fused_kernel_acceptable)."""
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def in_fp32(func, name: str, args: tuple, kwargs: dict):
    """Call `func` as CUDA's autocast does: half-precision tensors are cast to fp32, or the result is asked for in fp32."""
    halves = any(isinstance(a, torch.Tensor) and a.dtype in HALF for a in (*args, *kwargs.values()))
    with torch.autocast("cpu", enabled=False):
        if not halves:
            return func(*args, **kwargs)
        if name in FP32_BY_DTYPE:
            return func(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})
        args = [a.float() if isinstance(a, torch.Tensor) and a.dtype in HALF else a for a in args]
        kwargs = {k: v.float() if isinstance(v, torch.Tensor) and v.dtype in HALF else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def kernel_scratch(name: str, args: Sequence) -> int:
    """Bytes that the CUDA kernel of operator `name` allocates besides its results, while it runs.

    - flash attention's backward accumulates dQ in fp32 over padded sizes, and with fewer key heads than query heads it
      makes dK and dV for every query head before summing (`flash_api.cpp`, mha_bwd);
    - memory-efficient attention's backward does the first too in half precision (`kernel_backward.h`, workspace);
    - the embedding's backward sorts the indices when there are more than 3,072 (`Embedding.cu`, embedding_dense_backward).
    """
    if name == "_scaled_dot_product_flash_attention_backward":
        _, query, key, value = args[:4]
        batch, heads, length, dim = query.shape
        rows, width = _up(length, 128), _up(dim, 32)
        scratch = 4 * batch * heads * rows * (width + 1)
        if key.shape[1] != heads:
            scratch += 2 * batch * heads * key.shape[2] * dim * key.element_size()
        return scratch
    if name == "_scaled_dot_product_efficient_attention_backward":
        _, query, _, value = args[:4]
        batch, heads, length, dim = query.shape
        delta = 4 * batch * heads * length
        return delta + (4 * batch * heads * length * _up(dim, 32) if query.dtype in HALF else 0)
    if name == "embedding_dense_backward":
        gradient, indices = args[:2]
        count = indices.numel()
        if count <= 3072:
            return 0
        # sorted and original positions (int64, in and out of the radix sort), and one fp32 row per partial segment
        return 4 * 8 * count + 4 * min(count, args[2]) * gradient.shape[-1]
    if name in ("gemm_4bit", "bitsandbytes::gemm_4bit"):
        activation, shape = args[0], args[2]
        # the weight is dequantized whole and multiplied by cuBLAS, except for a handful of rows (bitsandbytes 0.50, backends/cuda)
        rows = activation.numel() // activation.shape[-1]
        nested = 4 * math.ceil(math.prod(shape) / args[4]) if len(args) > 7 and args[7] is not None else 0
        return math.prod(shape) * activation.element_size() + 2 * nested if rows > 8 else 0
    return 0
