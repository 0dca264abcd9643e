"""Private parts of DeepSpeed."""

import sys
from typing import Any

import torch

# Of its engine.
TAKE_STEP = "_take_model_step"
SET_MODEL = "_set_client_model"
CAST_MODEL = "_cast_module_mixed_precision"
# Of stages 1 and 2, and of stage 3.
COMPACT_GRADIENTS = "_get_compact_grad_partition_buffer"
FP32_GRADIENTS = "_prepare_fp32_grad_for_sub_group"
AFTER_STEP = "_post_step"


def gathered_by(handle: Any) -> torch.Tensor:
    """Return what one all-gather of stage 3 has gathered."""
    return handle._AllGatherHandle__param.data


def forget_groups() -> None:
    """Let DeepSpeed make its process groups anew, those of one sample's ranks too."""
    from deepspeed.utils import groups

    groups._WORLD_GROUP = None
    groups.mpu = None
    sequences: Any = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    if sequences is not None:
        sequences._SEQUENCE_PARALLEL_GROUP = None
        sequences._SEQUENCE_DATA_PARALLEL_GROUP = None
