"""What programs of a plan are written with: ways to train, and what a plan says of them."""

from typing import Any

from vramlab import LoRA, Quantization

PLANNED = {
    "version": "1.0",
    "cards": "T4",
    "peak": "1 GiB",
    "source": "predicted",
    "process": "2 GiB",
    "tier": "safe",
    "usable": "3 GiB",
}
LORA = LoRA(r=4)
CUT = "cut cross-entropy"  # whose kernels run on no CPU
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full in half": {"precision": "bf16-true"},
    "lora": {"lora": LORA, "dtype": "bfloat16"},
    "lora in half": {"lora": LoRA(r=4, autocast_adapter_dtype=False), "precision": "bf16-true"},
    "dora": {"lora": LoRA(r=4, use_dora=True), "dtype": "bfloat16"},
    "ia3": {"peft": "ia3", "dtype": "bfloat16"},
    "qlora": {"lora": LORA, "quantization": Quantization("nf4", double=True)},
    "qlora, not prepared": {"lora": LORA, "quantization": Quantization("nf4", prepare=False)},
    "int8": {"lora": LORA, "quantization": Quantization("int8")},
    "int8, re-entrant": {
        "lora": LORA,
        "quantization": Quantization("int8", prepare=False),
        "use_reentrant": True,
    },
    CUT: {"lora": LORA, "dtype": "bfloat16", "cut_cross_entropy": True},
}
