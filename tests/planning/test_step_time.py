"""The estimate of a step's time reads what the account of its memory reads, and knows the kernel that ran."""

import pytest
from vramlab import LoRA, Recipe, find_gpu, step_time
from vramlab.formulas.account import kept_account
from vramlab.planning.step_time import operations, walk

CARD = find_gpu("RTX 4090")
PLAIN = dict(batch_size=4, seq_len=1024, precision="bf16-mixed", num_layers=3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_liger_kernel": True},
        {"lengths": (1024, 1024, 700, 100)},
        {"trainer": "sft", "padding_free": True},
        {"trainer": "sft", "packing": True},
        {"trainer": "sft", "use_liger_kernel": True},
        {"pad_to_multiple_of": 1000},
    ],
    ids=str,
)
def test_a_walk_keeps_what_the_account_keeps(changes):
    recipe = Recipe("qwen2.5-0.5b", **PLAIN | changes)
    assert walk(recipe, CARD.chip).kept == kept_account(recipe, CARD.chip).phases[2]["activations"]


def test_ligers_kernels_write_less_and_all_chunks_of_the_logits_count():
    """A frozen head has no gradient that each chunk is added to; a trained one of a small model has a hundred chunks."""
    frozen = Recipe("llama-3.2-1b", **PLAIN | {"precision": "bf16-true"}, lora=LoRA(r=8))
    liger = frozen.replace(use_liger_kernel=True)
    assert walk(liger, CARD.chip).written < walk(frozen, CARD.chip).written
    assert step_time(liger, CARD).seconds < step_time(frozen, CARD).seconds
    births = [(n, e) for n, e in kept_account(liger, CARD.chip).births() if e.op == "mm" and e.shape]
    of_logits = [(n, e.size) for n, e in births if e.shape[-1] == liger.shape.vocab_size]
    assert max(n for n, _ in of_logits) > 2
    assert sum(n * size for n, size in of_logits) == 4 * 1024 * liger.shape.vocab_size * 2
    trained = Recipe("qwen2.5-0.5b", **PLAIN, use_liger_kernel=True)
    assert step_time(trained, CARD).seconds > step_time(trained.replace(use_liger_kernel=False), CARD).seconds


def test_a_mask_makes_the_kernel_compare_all_pairs():
    even = Recipe("qwen2.5-0.5b", **PLAIN)
    padded = even.replace(lengths=(1024, 1024, 1024, 1000))
    assert not walk(even, CARD.chip).masked and walk(padded, CARD.chip).masked
    pairs = [sum(operations(recipe, walk(recipe, CARD.chip)).values()) for recipe in (even, padded)]
    half = 4 * 4 * 1024**2 * even.shape.num_heads * even.shape.head_dim * 3 * 3 // 2  # layers, passes
    assert pairs[1] - pairs[0] == half
