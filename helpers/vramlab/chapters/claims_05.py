"""The experiments that test what source B says about LoRA (its section 5.4, and its table of LoRA and QLoRA).

B adapts `query_key_value` of polyglot-ko-1.3b at rank 8, in fp16, batch 16, 256 tokens, and prints what is allocated
after loading and after the first step. Its adapters were fp16 like the weights; PEFT keeps them in fp32 since version
0.12 (`get_peft_model(autocast_adapter_dtype=True)`), so figures of both are given.
"""

from functools import cache

from ..claims import Finding
from ..finetuning import recorded_sweep
from ..gpu import find_gpu
from ..overhead import cublas_workspace
from ..predict import predict
from ..recipe import LoRA, Recipe
from ..report import GiB, MiB, format_bytes
from .claims_02 import T4, lecture, old_buffers, witness

ADAPTERS = LoRA(r=8, lora_alpha=32, lora_dropout=0.05, target_modules=("query_key_value",))


def adapted(batch_size: int = 16) -> Recipe:
    """B's recipe with its adapters."""
    return lecture(batch_size, lora=ADAPTERS)


def trained(recipe: Recipe) -> int:
    """Parameters of a recipe's adapters: r · (inputs + outputs) for each adapted module."""
    targets = recipe.shape.lora_targets(recipe.lora.target_modules)
    return sum(recipe.lora.r * (inside + out) for _, inside, out in targets)


def parameters(what: str) -> Finding:
    """Million parameters of B's adapters ("trained"), with the base ("all"), or their share of all ("percent")."""
    recipe = adapted()
    few = trained(recipe)
    every = few + recipe.shape.num_parameters
    value = {"trained": few / 1e6, "all": every / 1e6, "percent": 100 * few / every}[what]
    return Finding(value, "derived", f"{recipe}: 24 × 8 × (2,048 + 6,144)")


def slightly_more_weights() -> Finding:
    """Whether the adapters' weights add something, and less than one part in a hundred."""
    recipe = adapted()
    few, base = 4 * trained(recipe), 2 * recipe.shape.num_parameters
    return Finding(0 < few < 0.01 * base, "derived", f"{format_bytes(few, 'MiB')} beside {format_bytes(base, 'MiB')}")


def part(which: str, width: int) -> Finding:
    """GiB of the adapters' "gradients" or AdamW "optimizer_states", when adapters are `width` bytes wide."""
    recipe = adapted()
    copies = {"gradients": 1, "optimizer_states": 2}[which]
    return Finding(copies * width * trained(recipe) / GiB, "derived", f"{recipe}, adapters of {width} bytes")


def loaded_bytes(width: int) -> int:
    """Bytes allocated after loading with transformers 4.40: weights, its old buffers, workspaces, adapters.

    Beside each of the two tensors as large as the embedding the allocator keeps half a MiB that it does not split off.
    """
    recipe = adapted()
    held = 2 * recipe.shape.num_parameters + sum(old_buffers(recipe)) + width * trained(recipe) + 2 * MiB // 2
    return held + 2 * cublas_workspace(find_gpu(T4).compute_capability)


def loaded(width: int) -> Finding:
    """GiB that B read once the adapted model was loaded."""
    return Finding(loaded_bytes(width) / GiB, "derived", f"{adapted()}, with transformers 4.40's tensors")


def reading(width: int) -> Finding:
    """GiB that B read after the first step: adapters' gradients and states, and the outputs that the loop keeps.

    Logits, keys in fp32, and values that are views of the fused projection, as in chapter 02.
    """
    recipe = adapted()
    shape, tokens = recipe.shape, recipe.batch_size * recipe.seq_len
    outputs = 2 * tokens * shape.vocab_size + (4 + 3 * 2) * shape.num_layers * tokens * shape.hidden_size
    total = loaded_bytes(width) + 3 * width * trained(recipe) + outputs
    return Finding(total / GiB, "derived", f"{recipe}, with transformers 4.40's tensors")


def peak() -> Finding:
    """GiB at the peak of B's LoRA run."""
    report = witness(adapted(), T4)
    return Finding(report.peak.total / GiB, report.source, f"{adapted()}, peak in {report.peak_phase}")


def total_falls(recipe: dict, lora: dict, gpu: str) -> Finding:
    """Whether a recipe's peak is lower with adapters than with all weights trained."""
    full = Recipe(**recipe)
    with_, without = (predict(r, gpu=gpu) for r in (full.replace(lora=lora), full))
    text = f"{format_bytes(with_.peak.total)} and {format_bytes(without.peak.total)}: {full}"
    return Finding(with_.peak.total < without.peak.total, with_.source, text)


def runs_on(gpu: str) -> Finding:
    """Whether the process of B's LoRA run is likely to fit a card."""
    card, recipe = find_gpu(gpu), adapted()
    report = witness(recipe, gpu)
    need = report.process.value if hasattr(report.process, "value") else report.process or report.peak.total
    text = f"{format_bytes(need)} of {format_bytes(card.total)} on {card.name}: {recipe}"
    return Finding(need <= card.total, report.source, text)


def sweep():
    """The recorded fine-tuning sweep. Raises RecordError, as a missing GPU record does."""
    return recorded_sweep()


def small_rank_costs(small: int, large: int) -> Finding:
    """Whether a small rank ends with worse predictions than a larger one, by more than one part in two hundred."""
    a, b = (sweep().run(r).documentation for r in (small, large))
    text = f"base model, bits per byte at r={small}: {a:.3f}, r={large}: {b:.3f}; {_where()}"
    return Finding(a > 1.005 * b, "recorded", text)


def against_full(r: int) -> Finding:
    """Bits per byte after LoRA over those after full fine-tuning, on held-out text of the new domain."""
    lora, full = sweep().run(r).documentation, sweep().run(None).documentation
    return Finding(lora / full, "recorded", f"{lora:.3f} and {full:.3f} bits per byte; {_where()}")


def _where() -> str:
    where = sweep().where
    return f"{where['recipe']}, on {where['hardware']}, {where['date']}"


@cache
def scaling(change: str) -> Finding:
    """By how much PEFT's update grows when alpha is doubled, or r is halved, with the same matrices A and B."""
    import torch
    from peft.tuners.lora import Linear, LoraConfig

    def update(r: int, alpha: int) -> torch.Tensor:
        layer = Linear(
            torch.nn.Linear(16, 16), "default", config=LoraConfig(r=r, lora_alpha=alpha), r=r, lora_alpha=alpha
        )
        torch.nn.init.constant_(layer.lora_A["default"].weight, 1 / r)  # so that B · A is the same at every rank
        torch.nn.init.constant_(layer.lora_B["default"].weight, 1.0)
        return layer.get_delta_weight("default")

    before, after = update(8, 32), update(*{"alpha doubled": (8, 64), "r halved": (4, 32)}[change])
    ratio = (after / before).mean().item()
    return Finding(ratio, "measured", f"PEFT's layer, 16 × 16, r = 8, alpha = 32, then {change}")


EXPERIMENTS = {
    function.__name__: function
    for function in (
        parameters,
        slightly_more_weights,
        part,
        loaded,
        reading,
        peak,
        total_falls,
        runs_on,
        small_rank_costs,
        against_full,
        scaling,
    )
}
