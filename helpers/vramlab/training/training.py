"""The one training step, which `simulate`, `measure` and every chapter run.

`build(recipe)` makes the model, the optimizer and a batch; `train_step` runs one optimizer step. What a loop does beyond
the textbook (clipping, loss scaling, where gradients are cleared, which outputs stay alive) comes from `recipe.loop` only.
"""

import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe
from ..report.errors import needing
from . import trl_trainers
from .engine import AUTOCAST, Training, autocast, makes_fakes
from .engines import engine_of
from .models import build_model, real_tensors

# transformers.Trainer.get_decay_parameter_names; importing the Trainer only to ask it takes seconds
WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def build(recipe: Recipe, device: str = "cpu", target: str | None = None) -> Training:
    """The model, optimizer and batch of `recipe` on `device`; fake under a FakeTensorMode.

    Args:
        target: take the defaults of "cuda" or "cpu", None: of the device. On CUDA, PyTorch's optimizers and clipping
            use the multi-tensor ("foreach") kernels (`torch.optim.optimizer._default_to_fused_or_foreach`).
    """
    target, engine, loop = target or torch.device(device).type, engine_of(recipe), recipe.loop
    bare = build_model(recipe, device)
    model = engine.wrap(bare)
    training = Training(
        model=model,
        optimizer=None,
        batch=make_batch(recipe, device),
        device=torch.device(device),
        multi_tensor=target == "cuda" if loop.foreach is None else loop.foreach,
        loop=loop,
        precision=recipe.precision,
        accumulation=recipe.gradient_accumulation_steps,
        engine=engine,
    )
    if recipe.trainer != "transformers":
        trl_trainers.start(training, recipe, bare, build_model)
    if loop.name == "trainer":  # Trainer.get_batch_samples fetches the whole step's micro-batches first
        training.further = [make_batch(recipe, device) for _ in range(training.accumulation - 1)]
    if recipe.activation_offloading:
        training.around = trl_trainers.offloading(model, training.device)
    make = partial(make_optimizer, recipe, multi_tensor=training.multi_tensor)
    if loop.optimizer_in_backward:
        step_in_backward(training, lambda p: make([p]), [p for p in model.parameters() if p.requires_grad])
    else:
        training.optimizer = engine.optimizer(_groups(recipe, model), make)
        if "8bit" in recipe.optim and loop.name == "trainer":  # Trainer.create_optimizer: fp32 states of embeddings
            for module in filter(lambda module: isinstance(module, torch.nn.Embedding), model.modules()):
                for optimizer in training.optimizers:
                    optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
    if recipe.precision == "fp16-mixed":
        # the default of 65,536 overflows at once with random weights, and a skipped step makes no optimizer states
        training.scaler = torch.amp.GradScaler(training.device.type, init_scale=1.0)
    if recipe.precision == "tf32" and target == "cuda" and not makes_fakes():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    engine.start(training)
    return training


def make_batch(recipe: Recipe, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One micro-batch of random inputs and labels; what is ragged is real among fake tensors too."""
    if recipe.trainer not in ("transformers", "sft"):
        return trl_trainers.make_pairs(recipe, device)
    if recipe.is_ragged:
        return collated(recipe, device)
    shape, size = recipe.shape, (recipe.batch_size, recipe.seq_len)
    if shape.features:
        name, sizes = shape.features
        batch = {name: torch.rand(recipe.batch_size, *sizes, device=device)}
        if recipe.precision.endswith("-true"):
            batch[name] = batch[name].to(torch.float16 if recipe.precision == "fp16-true" else torch.bfloat16)
    else:
        batch = {"input_ids": torch.randint(0, shape.vocab_size, size, device=device)}
    highest, of = (shape.num_labels, size[:1]) if "classification" in shape.task else (shape.vocab_size, size)
    batch["labels"] = torch.randint(0, highest, of, device=device)
    if recipe.trainer == "sft":  # trl's DataCollatorForLanguageModeling
        batch["attention_mask"] = torch.ones(size, dtype=torch.int64, device=device)
    return batch


def collated(recipe: Recipe, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One micro-batch of random samples with the recipe's lengths: real tensors, on the CPU where others are fake."""
    # what a simulation draws is not of the process's generator, which is for who trains
    generator = torch.Generator() if makes_fakes() else None
    device = "cpu" if makes_fakes() else device
    with real_tensors():
        batch = (_by_trl if recipe.trainer == "sft" else _padded)(recipe, generator)
        return {name: t.to(device) if hasattr(t, "to") else t for name, t in batch.items()}


@needing("trainer='sft'")
def _by_trl(recipe: Recipe, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """What `SFTTrainer.__init__` makes for its arguments (trl 1.16), on packed rows joined to one."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    multiple = recipe.pad_to_multiple_of
    collator = DataCollatorForLanguageModeling(0, padding_free=recipe.joins, pad_to_multiple_of=multiple)
    ids = [torch.randint(recipe.shape.vocab_size, (length,), generator=generator) for length in recipe.samples]
    labels = [sample.clone() for sample in ids]
    for sample, count in zip(labels, recipe.completion_lengths or recipe.samples, strict=True):
        sample[: len(sample) - count] = -100
    if recipe.packing:
        row = {"input_ids": torch.cat(ids).tolist(), "labels": torch.cat(labels).tolist()}
        return collator([row | {"seq_lengths": list(recipe.samples)}])
    return collator([{"input_ids": i.tolist(), "labels": label.tolist()} for i, label in zip(ids, labels, strict=True)])


def _padded(recipe: Recipe, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Ids, mask and labels as `transformers.DataCollatorForLanguageModeling` pads them; or a label for each sample."""
    size, shape = recipe.rows, recipe.shape
    mask = torch.arange(size[1]) < torch.tensor(recipe.samples)[:, None]
    inputs = torch.randint(shape.vocab_size, size, generator=generator) * mask
    labels = inputs.masked_fill(~mask, -100)
    if shape.task == "sequence-classification":
        labels = torch.randint(shape.num_labels, size[:1], generator=generator)
    return {"input_ids": inputs, "attention_mask": mask.long(), "labels": labels}


def _groups(recipe: Recipe, model: torch.nn.Module) -> list:
    """The optimizer's parameters, in the Trainer in groups with and without weight decay, which are updated in turn."""
    if recipe.loop.name != "trainer":
        return [p for p in model.parameters() if p.requires_grad]
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], WITHOUT_DECAY))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [[p for n, p in named if n in decayed], [p for n, p in named if n not in decayed]]
    return [{"params": group} for group in groups]


def make_optimizer(recipe: Recipe, parameters: list, multi_tensor: bool) -> torch.optim.Optimizer:
    """The optimizer that `TrainingArguments.optim` names."""
    name, options = recipe.optim, {"lr": 1e-5, **recipe.optimizer_arguments()}
    library, kind, *_ = MODELLED[name]
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(parameters, fused=True, **options)
    if library == "torch":
        return getattr(torch.optim, kind)(parameters, foreach=multi_tensor, **options)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, scale_parameter=False, relative_step=False, **options)
    if library == "schedulefree":
        return _schedule_free(recipe, kind, parameters, options)
    import bitsandbytes.optim as bnb

    paged = {"is_paged": True} if name.startswith("paged") else {}
    with real_tensors():  # it computes code tables
        optimizer = getattr(bnb, kind)(parameters, optim_bits=8 * MODELLED[name].width, **paged, **options)
    if kind == "AdEMAMix" and optimizer.param_groups[0]["params"][0].device.type == "cpu":
        # the only buffer of a paged optimizer without a fallback where there is no unified memory
        optimizer._get_state_double_buffer = lambda p, dtype: p.new_zeros((2, *p.shape), dtype=dtype)
    # bitsandbytes has one manager a process, which knows parameters by id(): a Trainer's, freed by now, may have had it.
    optimizer.mng = object.__new__(bnb.GlobalOptimManager)
    optimizer.mng.initialize()
    return optimizer


def _schedule_free(recipe: Recipe, kind: str, parameters: list, options: dict) -> torch.optim.Optimizer:
    """A schedule-free optimizer in training mode, RAdam's past the first steps, in which it makes no denominator."""
    with needing(f"optim={recipe.optim!r}"):
        import schedulefree
    optimizer = getattr(schedulefree, kind)(parameters, foreach=recipe.loop.foreach is not False, **options)
    optimizer.train()
    for group in optimizer.param_groups:
        group["k"] = 10  # its average is too short in the first five (Liu et al. 2020, section 4)
    return optimizer


def step_in_backward(training: Training, make: Callable[[torch.Tensor], Any], trained: list) -> None:
    """Update each parameter as soon as its gradient is complete, and free that (PyTorch's tutorial of 2023).

    `make` gives the optimizer of a parameter; None where it shall not be updated.
    """
    owner = weakref.ref(training)  # the garbage collector does not see through hooks: a reference would never be freed

    def update(parameter: torch.Tensor) -> None:
        optimizer = owner().per_parameter[parameter]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for parameter in trained:
        if (optimizer := make(parameter)) is not None:
            training.per_parameter[parameter] = optimizer
            parameter.register_post_accumulate_grad_hook(update)


def train_step(training: Training, on_phase: Callable[[str], None] = lambda name: None) -> torch.Tensor:
    """One optimizer step, with all its micro-batches. Calls `on_phase` as each phase begins.

    Phases: "forward", "backward" (once per micro-batch), "step", "between_steps". Returns the last micro-batch's loss.
    """
    loop, optimizer, engine = training.loop, training.optimizer, training.engine
    if loop.zero_grad == "start" and optimizer:
        engine.zero_grad(training)
    if not engine.run_micro_batches(training, on_phase):
        batches = [training.batch, *training.further]
        for micro in range(1 + (not training.steps) if training.abridged else training.accumulation):
            with engine.micro_batch(training, last=micro == training.accumulation - 1), training.around:
                _micro_batch(training, batches[micro % len(batches)], on_phase, first=micro == 0)
    on_phase("step")
    if optimizer:
        _clip(training)
        engine.update(training)
    if loop.zero_grad == "end" and optimizer:
        engine.zero_grad(training)
    if loop.keep_outputs == "step":
        training.outputs = None
    training.steps += 1
    on_phase("between_steps")
    return training.loss


def _micro_batch(training: Training, batch: Any, on_phase: Callable[[str], None], first: bool) -> None:
    """Forward and backward of one micro-batch; `training` holds what the loop keeps of it."""
    loop = training.loop
    on_phase("forward")
    if training.compute_loss:
        outputs = {"loss": training.compute_loss(lambda **inputs: forward(training, inputs), batch)}
    else:
        outputs = forward(training, batch)
    training.outputs = outputs if loop.keep_outputs else None  # frees the last step's before the loss is computed
    loss = training.loss_of(outputs, batch)
    if training.accumulation > 1:
        loss = loss / training.accumulation
    if loop.empty_cache_steps and training.steps % loop.empty_cache_steps == 0 and training.device.type == "cuda":
        torch.cuda.empty_cache()  # where Trainer.training_step does it
    if loop.keep_outputs is True:
        training.loss = None  # the last step's too
    del outputs
    if loop.zero_grad == "before_backward" and training.optimizer and first:
        training.engine.zero_grad(training)
    on_phase("backward")
    training.engine.backward(training, training.scaler.scale(loss) if training.scaler else loss)
    training.loss = loss.detach()
    del loss
    if loop.keep_outputs == "backward":
        training.outputs = None


def forward(training: Training, batch: Any) -> Any:
    if training.precision not in AUTOCAST or not training.engine.autocasts:
        return call(training.model, batch)
    with autocast(training.device.type, training.precision):
        outputs = call(training.model, batch)
    if training.loop.outputs_to_fp32:
        from accelerate.utils import convert_to_fp32

        return convert_to_fp32(outputs)
    return outputs


def call(model: torch.nn.Module, batch: Any) -> Any:
    """`model` on a batch: a mapping gives keyword arguments, a tuple or list positional ones, anything else is one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _clip(training: Training) -> None:
    """Clip the gradients if the loop does, unscaled under fp16 autocast."""
    scaler, norm = training.scaler, training.loop.max_grad_norm
    if norm is None and training.loop.name == "trainer":
        norm = math.inf  # Trainer._get_grad_norm computes the norm for its log
    if norm is not None:
        if scaler:
            scaler.unscale_(training.optimizer)
        training.engine.clip(training, norm)
