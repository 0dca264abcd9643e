"""The formulas behind `vramlab.predict`: no torch, no model.

stored      what stays: parameters, gradients, optimizer states, buffers, inputs
nearest     decoders that nobody wrote down, and what is refused
model       embeddings, stacks, head and loss
layer       one layer by the roles of its parts
attention   the attention kernels
operators   what PyTorch's operators keep and need, linear layers with LoRA and in few bits
ledger      blocks that come and go, forward and backward
graph       who holds a block: tensors, weights, operators that wait for a gradient
account     the peaks read off, for all layers
step        the optimizer step's temporaries
shards      one rank of many: exact shares by engine
units       FSDP in the ledger, and what DDP and DeepSpeed do to gradients and outputs there
zero_terms  DeepSpeed's flat partitions
reserved    segments of the allocator, and what lies outside it
asked       what readers ask for by name
"""

from .asked import activation_bytes_per_layer, largest_batch, logits_bytes
from .stored import bytes_per_parameter, gradient_bytes, optimizer_state_bytes, parameter_bytes

__all__ = [
    "activation_bytes_per_layer",
    "bytes_per_parameter",
    "gradient_bytes",
    "largest_batch",
    "logits_bytes",
    "optimizer_state_bytes",
    "parameter_bytes",
]
