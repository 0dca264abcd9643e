"""What judges pieces that change a whole model.

Chapter 05 adapts it, chapter 06 puts it into 4 bits.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ..answers import Feedback
from ..base_model import bits_per_byte, finetuning_texts, load_base_model
from ..finetuning import adapted
from .common import called, random_tensor


def small_models() -> Iterator[Any]:
    """A Llama with a tied head and a GPT-NeoX with biases, none of them zero."""
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

    sizes = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    for config in (LlamaConfig(**sizes, tie_word_embeddings=True), GPTNeoXConfig(**sizes)):
        model = AutoModelForCausalLM.from_config(config).eval()
        # Zeros would hide a bias or a norm that is left out.
        for parameter in model.parameters():
            parameter.data = random_tensor(*parameter.shape) / 8
        yield model


def with_numbers(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer with other numbers than zero in its adapter, whose matrices are called A and B."""
    for matrix in (layer.A, layer.B):
        matrix.data = random_tensor(*matrix.shape)
    return layer


def kept_shapes(layer: torch.nn.Module, x: torch.Tensor) -> set[tuple[int, ...]]:
    """Shapes of what autograd keeps for the backward of an adapted layer.

    The weights of its base are left out.
    """
    base = {parameter.data_ptr() for parameter in layer.base.parameters()}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        # `append` returns None, so `or` hands the tensor on.
        lambda tensor: kept.append(tensor) or tensor,
        lambda tensor: tensor,
    ):
        layer(x.clone().requires_grad_())  # as it is in a model, where backward goes on below
    return {tuple(tensor.shape) for tensor in kept if tensor.data_ptr() not in base}


def coded_layer() -> SimpleNamespace:
    """A layer of 64 inputs and 16 outputs as chapter 06 makes it.

    It has the codes `packed`, `scales`, `shape`, and `weight()`, which unpacks them each time.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    matrix = random_tensor(16, 64)
    packed, state = quantize_4bit(matrix, quant_type="nf4")
    return SimpleNamespace(
        packed=packed.flatten(),
        scales=state.absmax,
        shape=matrix.shape,
        weight=lambda: dequantize_4bit(packed, state),
    )


def kept_by_product(product: type[torch.autograd.Function]) -> int:
    """How many tensors `product` keeps for the backward of x times a layer's weight.

    The layer's own codes and scales are there anyway.
    """
    layer = coded_layer()
    own = {layer.packed.data_ptr(), layer.scales.data_ptr()}
    unpack = layer.weight
    # No leaf, as in a model: nothing but the product can keep it.
    x = random_tensor(3, 64).requires_grad_() * 1
    made: list[weakref.ref] = [weakref.ref(x)]
    saved: list[torch.Tensor] = []

    def weight() -> torch.Tensor:
        unpacked = unpack()
        # By weak reference: it says whether the product still holds what it unpacked.
        made.append(weakref.ref(unpacked))
        return unpacked

    layer.weight = weight
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor,
        lambda tensor: tensor,
    ):
        output = product.apply(x, layer)
    del x
    alive = sum(reference() is not None for reference in made)
    del output
    return alive + sum(tensor.data_ptr() not in own for tensor in saved)


def trouble_with_product(product: type[torch.autograd.Function], autocast: bool = False) -> str:
    """What PyTorch says of x times a layer's weight, forward and backward; "" where it runs.

    With `autocast` forward runs in bf16, and backward outside of it, as in training.
    """
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = product.apply(random_tensor(3, 64).requires_grad_(), coded_layer())
        output.sum().backward()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


class Coded(torch.nn.Module):
    """Stands for a 4-bit layer: it keeps what it is made from."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight


def with_adapters() -> torch.nn.Module:
    """A small Llama with PEFT's adapters next to its linear layers."""
    return adapted(next(small_models()), r=2)


def places_of(model: torch.nn.Module, ending: str) -> list[str]:
    """Names of the model's modules that end so."""
    return [place for place, _ in model.named_modules() if place.endswith(ending)]


def _inner(model: Any) -> list[torch.nn.Linear]:
    return [
        m
        for m in model.modules()
        # Not isinstance: a quantized or adapted layer may be a subclass.
        if type(m) is torch.nn.Linear and m is not model.get_output_embeddings()
    ]


def four_bit_model(answer: Callable) -> Feedback:
    """Whether `answer(model)` puts 4-bit layers in the place of all linear layers but the head."""
    # The small ones show what is wrong, and the base model what it is worth.
    for model in (*small_models(), load_base_model()):
        wrong = _wrong_model(answer, model, model.config.model_type)
        if wrong:
            return Feedback(False, wrong)
    bits = bits_per_byte(answer(model), finetuning_texts("held_out", limit=4000))
    return Feedback(
        True,
        f"Right: with your layers the base model needs {bits:.3f} bits per byte of prose.",
    )


def _wrong_model(answer: Callable, model: Any, name: str) -> str:
    """What is wrong with `answer(model)`, or ""."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    expected = copy.deepcopy(model)
    whole = sum(p.numel() for p in model.parameters())
    inner = _inner(expected)
    shapes = {tuple(layer.weight.shape) for layer in inner}
    # The reference: the same weights rounded to NF4 and back, in ordinary layers.
    for layer in inner:
        layer.weight.data = dequantize_4bit(
            *quantize_4bit(layer.weight.data, quant_type="nf4")
        ).view_as(layer.weight)
    model = called(answer, copy.deepcopy(model))
    ids = torch.arange(64).view(1, 64)
    head = model.get_output_embeddings()
    left = _inner(model)
    trained = [place for place, p in model.named_parameters() if p.requires_grad]
    # By address, so that a tied head counts once.
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    held = sum(sizes.values())
    rounded = sum(layer.weight.numel() for layer in inner)
    # Rounded weights take 4.5 bits with the scales of their blocks, all others 4 bytes.
    most = 4 * whole - (4 - 4.5 / 8) * rounded
    # Inputs with a gradient, as an adapter in a lower layer would ask for.
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t,
        lambda t: t,
    ):
        logits = model(inputs_embeds=embeds, use_cache=False).logits
    alike = torch.allclose(logits, expected(input_ids=ids).logits, atol=1e-3)
    for layer in inner:
        layer.bias = None
    # Of a model without biases this says the same once more.
    unbiased = torch.allclose(logits, expected(input_ids=ids).logits, atol=1e-3)
    wrong = {
        "the output head was to stay as it is": type(head) is not torch.nn.Linear,
        f"{left[:1]} is still an nn.Linear": left,
        f"{trained[:1]} would be trained": trained,
        f"it holds {held:,} bytes: are full weights kept somewhere?": held > 1.1 * most,
        "its logits are those of layers without their biases": unbiased and not alike,
        "its logits are not those of the same weights in NF4": not alike,
        "autograd keeps an unpacked matrix": shapes & {*kept, *(shape[::-1] for shape in kept)},
        "no gradient reaches the inputs": not logits.requires_grad,
    }
    for text, is_so in wrong.items():
        if is_so:
            return f"{name}: {text}."
    return ""
