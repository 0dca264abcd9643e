"""Private parts of TRL and of Liger."""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

# Of TRL's chunked head: whether it takes its Triton kernels, these, and what adds to fp32.
USE_TRITON = "_use_triton"
HEAD_KERNELS = ("_forward_kernel", "_backward_kernel")
ADD_PRODUCT = "_addmm_fp32"
# Of Liger's fused head.
CAN_MULTIPLY_IN_PLACE = "_can_use_mm_out"


def trained_state() -> dict[str, Any]:
    """Return what the `__init__` of TRL's trainers makes to count and log."""
    return {
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }


def sampling_state(tokenizer: Any, backend: Any, logs: dict[str, deque]) -> dict[str, Any]:
    """Return what the `__init__` of GRPOTrainer and RLOOTrainer makes besides its arguments."""
    return {
        "_tokenizer": tokenizer,
        "_is_vlm": False,
        "_entropy_bonus_enabled": False,
        "_dist": backend,
        "_step": 0,
        "_buffered_inputs": None,
        "_metrics": {"train": defaultdict(list)},
        "_logs": logs,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }


def vllm_state(backend: Any) -> dict[str, Any]:
    """Return what TRL's way to vLLM makes besides its arguments."""
    return {"_dist": backend, "_weight_metadata": None}


# What scores completions, a micro-batch's number of rows at a time.
SCORE = "_get_per_token_logps_and_entropies"
# The step in which vLLM was last given the weights: none yet.
NO_WEIGHTS_SENT = {"_last_loaded_step": -1}


def next_inputs(trainer: Any, prompts: list, in_phases: Callable[[Callable], Callable]) -> Any:
    """Return a step's batch, sampled if it is time, by `in_phases(the trainer's own sampling)`."""
    trainer._generate = in_phases(trainer._generate)
    batch = trainer._prepare_inputs(prompts)
    del trainer._generate
    trainer._step += 1
    return batch


def leave_out(trainer: Any) -> None:
    """Let the trainer go on to the batch after the next one."""
    trainer._step += 1


def steps_made(trainer: Any) -> int:
    """Return how many batches the trainer has made."""
    return trainer._step


def sampled(trainer: Any) -> Any:
    """Return the completions that the trainer keeps for later batches."""
    return trainer._buffered_inputs
