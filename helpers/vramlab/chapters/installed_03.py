"""Experiments of chapter 03 that ask the installed libraries: names, defaults, kernels, dtypes, what a listing does."""

import warnings
from collections.abc import Mapping
from typing import Any

from ..claims import Finding
from ..gpu import find_gpu
from ..recipe import Recipe


def versions() -> str:
    import torch
    import transformers

    return f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"


def changes_argument(given: Mapping[str, Any], watched: str) -> Finding:
    """Whether an argument of `TrainingArguments` changes what another one says."""
    from transformers import TrainingArguments

    quiet = dict(output_dir="out", use_cpu=True, report_to="none")
    with warnings.catch_warnings():  # transformers renames some, and says so when they are given
        warnings.simplefilter("ignore", FutureWarning)
        values = [getattr(TrainingArguments(**quiet, **more), watched) for more in ({}, given)]
    return Finding(values[0] != values[1], "measured", f"{watched}: {values[0]}, then {values[1]}; {versions()}")


def default_optimizer(name: str) -> Finding:
    """Whether this is the optimizer that the Trainer takes when nobody says one."""
    from transformers import TrainingArguments

    found = TrainingArguments.__dataclass_fields__["optim"].default
    return Finding(getattr(found, "value", found) == name, "measured", f"{found}; {versions()}")


def optimizer_offered(name: str) -> Finding:
    """Whether `TrainingArguments.optim` takes this name."""
    from transformers.training_args import OptimizerNames

    return Finding(name in {member.value for member in OptimizerNames}, "measured", versions())


def backends() -> list[str]:
    """The backends that torch.compile has here, hidden ones too."""
    import torch._dynamo

    return torch._dynamo.list_backends(exclude_tags=())


def backend_offered(name: str) -> Finding:
    """Whether torch.compile has a backend of this name."""
    return Finding(name in backends(), "measured", versions())


def attention_kernels() -> Finding:
    """How many kernels of its own `scaled_dot_product_attention` chooses among."""
    from torch.nn.attention import SDPBackend

    names = [name for name in SDPBackend.__members__ if name not in ("ERROR", "OVERRIDEABLE")]
    return Finding(float(len(names)), "measured", f"{', '.join(names)}; {versions()}")


def chooses_kernel(kernel: str, dtype: str, gpu: str, masked: bool = False) -> Finding:
    """Whether SDPA takes this kernel, by the rules of `sdp_utils.cpp`, for heads of 64."""
    import torch

    from ..cuda import attention_kernel

    card = find_gpu(gpu)
    found = attention_kernel(getattr(torch, dtype), 64, 64, masked=masked, compute_capability=card.compute_capability)
    return Finding(found == kernel, "derived", f"{dtype} on {card.name}{', padded' if masked else ''}: {found}")


def sdpa_by_default(model: str) -> Finding:
    """Whether a model takes SDPA when nothing is said."""
    return Finding(Recipe(model).attn_implementation == "sdpa", "derived", f"{model}; {versions()}")


def state_is_8_bit(numbers: int, kind: str) -> Finding:
    """Whether bitsandbytes' 8-bit AdamW keeps the state of a tensor of so many numbers in 8 bits.

    `kind` is "weight", or "embedding", which `Trainer.create_optimizer` has kept in 32 bits.
    """
    from ..training import build, train_step

    training = build(Recipe(small_gpt2(), seq_len=8, optim="adamw_bnb_8bit"))
    train_step(training)
    tables = (training.model.transformer.wte.weight, training.model.transformer.wpe.weight)
    tensor = next(
        parameter
        for parameter in training.model.parameters()
        if parameter.numel() == numbers and any(parameter is table for table in tables) is (kind == "embedding")
    )
    dtype = str(training.optimizer.state[tensor]["state1"].dtype)
    return Finding(dtype == "torch.uint8", "measured", f"{kind} of {numbers:,} numbers: {dtype}")


def updates_from_dequantized() -> Finding:
    """Whether a second step of the 8-bit AdamW is that which fp32 makes of the dequantized states, to a thousandth."""
    import torch
    from bitsandbytes.functional import dequantize_blockwise
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 256, generator=generator))
    optimizer = AdamW8bit([weight], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    optimizer.mng = object.__new__(GlobalOptimManager)  # its own: the Trainer registers 32 bits by position, for all
    optimizer.mng.initialize()
    weight.grad = torch.randn(64, 256, generator=generator)
    optimizer.step()
    kept = optimizer.state[weight]
    mean, square = (
        dequantize_blockwise(kept[f"state{n}"], absmax=kept[f"absmax{n}"], code=kept[f"qmap{n}"], blocksize=256)
        for n in (1, 2)
    )
    before, weight.grad = weight.detach().clone(), torch.randn(64, 256, generator=generator)
    optimizer.step()
    mean, square = 0.9 * mean + 0.1 * weight.grad, 0.999 * square + 0.001 * weight.grad**2
    wanted = 1e-3 * (mean / (1 - 0.9**2)) / ((square / (1 - 0.999**2)).sqrt() + 1e-8)
    error = float((before - weight.detach() - wanted).norm() / wanted.norm())
    return Finding(error < 1e-3, "measured", f"updates differ by {error:.1e} of them")


def small_gpt2() -> dict[str, Any]:
    return dict(
        model_type="gpt2",
        n_embd=64,
        n_head=2,
        n_layer=1,
        vocab_size=100,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )


def argument_offered(name: str) -> Finding:
    """Whether `TrainingArguments` takes an argument of this name."""
    from transformers import TrainingArguments

    return Finding(name in TrainingArguments.__dataclass_fields__, "measured", versions())


def parses(arguments: str) -> Finding:
    """Whether Python reads a call with these arguments."""
    said = " ".join(arguments.split())
    try:
        compile(f"TrainingArguments({arguments})", "listing", "eval")
    except SyntaxError as error:
        return Finding(False, "measured", f"{said}: {error.msg}")
    return Finding(True, "measured", said)


def effective_batch(per_device_train_batch_size: int, gradient_accumulation_steps: int) -> Finding:
    """Samples behind one update of the Trainer in one process."""
    from transformers import TrainingArguments

    given = dict(
        per_device_train_batch_size=per_device_train_batch_size, gradient_accumulation_steps=gradient_accumulation_steps
    )
    found = TrainingArguments(output_dir="out", use_cpu=True, report_to="none", **given)
    value = found.train_batch_size * found.gradient_accumulation_steps
    return Finding(float(value), "measured", f"{', '.join(f'{k}={v}' for k, v in given.items())}; {versions()}")


def inductor_takes_cuda_graphs(mode: str) -> Finding:
    """Whether inductor records CUDA Graphs in this mode of torch.compile."""
    import torch._inductor as inductor

    default = inductor.config.triton.cudagraphs
    found = inductor.list_mode_options(mode).get("triton.cudagraphs", default)
    return Finding(bool(found), "measured", f'mode="{mode}", {versions()}')


def inductor_writes_triton(device: str) -> Finding:
    """Whether inductor's kernels for a "cuda" device or the "cpu" are written in Triton when nothing is said."""
    import torch._inductor as inductor

    found = getattr(inductor.config, f"{device}_backend")
    return Finding(found == "triton", "measured", f"{device}: {found}; {versions()}")


def model_has(method: str) -> Finding:
    """Whether models of transformers have this method."""
    from transformers import PreTrainedModel

    return Finding(hasattr(PreTrainedModel, method), "measured", versions())


def takes_fast_path(training: bool) -> Finding:
    """Whether PyTorch's own encoder layer runs as one fused operator, in a training step or outside of one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).train(training)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.set_grad_enabled(training):
        layer(torch.zeros(2, 4, 32))
    found = any("transformer_encoder_layer" in event.key for event in profiler.key_averages())
    return Finding(found, "measured", f"torch.nn.TransformerEncoderLayer, {versions()}")


def skips_padding(first: bool) -> Finding:
    """Whether PyTorch's encoder leaves padding out of its work at inference, by nested tensors; padding may come first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    padded = torch.arange(8).expand(2, 8) < torch.tensor([[0], [3]])  # the second sequence has three tokens of padding
    with warnings.catch_warnings(), profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        encoder(torch.zeros(2, 8, 32), src_key_padding_mask=padded if first else padded.flip(1))
    found = any(event.key == "aten::_nested_tensor_from_mask" for event in profiler.key_averages())
    return Finding(found, "measured", f"torch.nn.TransformerEncoder, {versions()}")


def torch_is_new_enough(version: str) -> Finding:
    """Whether the installed transformers takes a torch of this version."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    wanted = {str(r.specifier) for line in requires("transformers") if (r := Requirement(line)).name == "torch"}
    found = all(Requirement(f"torch{each}").specifier.contains(version) for each in wanted)
    return Finding(found, "measured", f"torch{', '.join(sorted(wanted))}; {versions()}")


LOOP = """\
model, optimizer, loader = parts()
model.train()
for x, labels in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
"""
ACCELERATED = """\
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer, loader = parts()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for x, labels in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels)
    accelerator.backward(loss)
    optimizer.step()
"""


def lines_for_accelerate() -> Finding:
    """How many lines a training loop gains with Accelerate, another in place of an old one among them; infinite if the
    loop then trains to other weights."""
    import difflib
    import math

    trained = [_weights_after(loop) for loop in (LOOP, ACCELERATED)]
    added = [line for line in difflib.ndiff(LOOP.splitlines(), ACCELERATED.splitlines()) if line.startswith("+ ")]
    same = all(bool((a == b).all()) for a, b in zip(*trained, strict=True))
    return Finding(float(len(added)) if same else math.inf, "measured", "; ".join(line[2:].strip() for line in added))


def _weights_after(loop: str) -> list:
    """The weights of a small network after a loop of source code has trained it."""
    import torch
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader, TensorDataset

    def parts():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        data = TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)

    names = {"parts": parts, "F": torch.nn.functional}
    try:
        exec(loop, names)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # what comes after chooses its own device
    return [parameter.detach() for parameter in names["model"].parameters()]
