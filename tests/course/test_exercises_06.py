"""Chapter 06's exercises: right answers in any form are accepted, and what readers get wrong is
told apart.
"""

import re

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from vramlab import LoRA, Quantization, Recipe
from vramlab_course import blank, exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("06")
LEAN = Quantization("nf4", double=True, prepare=False)


def repaired(**changes):
    fields = {
        "dtype": "bfloat16",
        "lora": LoRA(r=16, target_modules="all-linear"),
        "quantization": LEAN,
    }
    return Recipe(
        "llama-3.1-8b",
        1,
        4096,
        **{"precision": "bf16-mixed", "optim": "adamw_torch_fused", **fields, **changes},
    )


def ready(model, r=8, **options):
    return get_peft_model(model, LoraConfig(r=r, target_modules="all-linear", **options))


def cast(model):
    return ready(prepare_model_for_kbit_training(model, False))


class Packed(torch.nn.Module):
    """A linear layer in NF4, as bitsandbytes quantizes it; `lean` unpacks again in backward."""

    def __init__(self, linear, lean=True, bias=True, kind="nf4"):
        super().__init__()
        codes, self.state = quantize_4bit(linear.weight.data, quant_type=kind)
        self.register_buffer("codes", codes)
        self.register_buffer("bias", linear.bias.data if bias and linear.bias is not None else None)
        self.lean = lean

    def forward(self, x):
        y = Product.apply(x, self) if self.lean else x @ self.unpacked().T
        return y if self.bias is None else y + self.bias

    def unpacked(self):
        return dequantize_4bit(self.codes, self.state)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(context, x, layer):
        context.layer = layer
        return x @ layer.unpacked().T

    @staticmethod
    def backward(context, gradient):
        return gradient @ context.layer.unpacked(), None


def four_bits(model, head=False, depth=9, frozen=True, **options):
    kept = None if head else model.get_output_embeddings()
    for path, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear and child is not kept and path.count(".") < depth:
                setattr(parent, name, Packed(child, **options))
    return model.requires_grad_(False) if frozen else model


def test_there_are_four_with_two_hints_each():
    assert list(FOUND) == [f"06.{i}" for i in range(1, 5)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


@pytest.mark.parametrize(
    "name,answer",
    [
        ("06.1", repaired()),
        ("06.1", repaired(quantization=Quantization("nf4", prepare=False))),
        ("06.2", ready),
        ("06.4", four_bits),
    ],
)
def test_right_answers_are_accepted(name, answer):
    feedback = judge(FOUND[name], answer)
    assert feedback.right, feedback


def test_the_repaired_run_is_shown_what_each_repair_is_worth():
    said = str(judge(FOUND["06.1"], repaired()))
    assert re.search(r"\nas it was +110\.0  121\.7\nautocast +39\.1 +50\.8\nno cast ", said), said


@pytest.mark.parametrize(
    "name,answer,said",
    [
        ("06.1", repaired(quantization=Quantization("nf4", double=True)), "made all else fp32"),
        ("06.1", repaired(precision="bf16-true", dtype=None), "What would compute these products"),
        ("06.1", repaired(precision="fp32", dtype=None), "activations"),
        ("06.1", repaired(gradient_checkpointing=True), "Neither checkpointing"),
        ("06.1", repaired(quantization=None), "stays in NF4"),
        (
            "06.2",
            lambda model: prepare_model_for_kbit_training(ready(model), False),
            "No parameter",
        ),
        ("06.2", cast, "fp32"),
        ("06.2", "ready", "function"),
        ("06.2", lambda model: ready(model, r=4), "157,696"),
        ("06.2", lambda model: ready(model, modules_to_save=["norm"]), "no adapter"),
        ("06.4", lambda model: model, "still an nn.Linear"),
        ("06.4", lambda model: four_bits(model, depth=3), "still an nn.Linear"),
        ("06.4", lambda model: four_bits(model, head=True), "head"),
        ("06.4", lambda model: four_bits(model, frozen=False), "would be trained"),
        ("06.4", lambda model: four_bits(model, lean=False), "unpacked matrix"),
        ("06.4", lambda model: four_bits(model, bias=False), "without their biases"),
        ("06.4", lambda model: four_bits(model, kind="fp4"), "same weights"),
    ],
)
def test_wrong_answers_are_told_apart(name, answer, said):
    feedback = judge(FOUND[name], answer)
    assert not feedback.right and said in feedback.text, feedback


class SavesCodes(torch.autograd.Function):
    """Saves the layer's own buffers, which are there anyway."""

    @staticmethod
    def forward(context, x, layer):
        context.layer = layer
        context.save_for_backward(layer.packed, layer.scales)
        return x @ layer.weight().T

    @staticmethod
    def backward(context, gradient):
        packed, _ = context.saved_tensors
        assert packed is context.layer.packed
        return gradient @ context.layer.weight().to(gradient.dtype), None


def walked(model, layer):
    """Over all parents, as one does without `base_layer` in mind."""
    for part in [*model.modules()]:
        for name, child in [*part.named_children()]:
            if name == "base_layer":
                setattr(part, name, layer(child.weight.data))
    return model


@pytest.mark.parametrize("name,piece", [("Product", SavesCodes), ("in_four_bits", walked)])
def test_a_blank_written_in_another_way_is_right(name, piece):
    feedback = blank.judge(blank.find(f"06.{name}"), piece)
    assert feedback.right, feedback
