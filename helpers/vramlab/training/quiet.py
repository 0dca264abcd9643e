"""Silence known, harmless messages of other packages by their text; any other is still shown."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

KNOWN_WARNINGS = (
    # tqdm in a notebook without ipywidgets: it falls back to plain text, and widgets would not render on GitHub.
    "IProgress not found",
    # torch 2.13 about its own code, when fake tensors run it.
    "`torch.jit.script_method` is deprecated",
    # PEFT 0.21 asks transformers 5.23 by the older of two names.
    "`is_gradient_checkpointing` is deprecated",
)
KNOWN_LOGS = (
    # bitsandbytes on a CPU looks for a faster kernel on the hub; its own one gives the same bytes.
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward"),
    # A model class that names no loss takes the causal one, which is the one that is meant.
    ("transformers.modeling_utils", "`loss_type=None` was set in the config"),
    # The Trainer compiles on a CPU as well; that is slow, and the chapter says so.
    ("transformers.training_args", "The speedups for torchdynamo mostly come with GPU"),
    # Liger looks for kernels of other vendors, and asks transformers by an older name; it takes Triton's all the same.
    ("liger_kernel.backends.registry", "Backend impl 'liger_kernel.ops.backends._"),
    ("transformers.configuration_utils", "`use_return_dict` is deprecated"),
    # accelerate asks DeepSpeed, where it is installed, whatever is trained.
    ("DeepSpeed", "Setting accelerator to CPU. If you have GPU"),
)


@contextlib.contextmanager
def compilers_silent() -> Iterator[None]:
    """Drop what child processes write to file 2, which in a notebook is not the `sys.stderr` that libraries silence."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def silence() -> None:
    """Drop the known messages in this process from now on."""
    for start in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=start)
    for name, start in KNOWN_LOGS:
        logging.getLogger(name).addFilter(lambda record, start=start: not record.getMessage().startswith(start))
