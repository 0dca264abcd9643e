"""The one training step, which `simulate`, `measure` and every chapter run.

`build(recipe)` makes the model, the optimizer and a batch; `train_step` runs one optimizer step.
What a loop does beyond the textbook (clipping, loss scaling, where gradients are cleared, which
outputs stay alive) comes from `recipe.loop` only.
"""

import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..base.errors import needing
from ..recipe.configuration import READERS
from ..recipe.optimizers import MODELLED
from ..recipe.recipe import Recipe
from . import regularizers, rollout_trainers, trl_trainers
from .engine import AUTOCAST, Engine, Model, Training, autocast, makes_fakes
from .engines import engine_of
from .image_batch import image_batch
from .make_optimizer import make_optimizer
from .models import build_model, real_tensors
from .moved_adapters import train_what_moves

# transformers.Trainer.get_decay_parameter_names; importing the Trainer only to ask it takes seconds
WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
NO_LABEL = -100  # what a loss leaves out (`torch.nn.functional.cross_entropy`'s ignore_index)


def build(recipe: Recipe, device: str = "cpu", target: str | None = None) -> Training:
    """Return the model, optimizer and batch of `recipe` on `device`; fake under a FakeTensorMode.

    Args:
        target: take the defaults of "cuda" or "cpu", None: of the device. On CUDA, PyTorch's
            optimizers and clipping use the multi-tensor ("foreach") kernels
            (`torch.optim.optimizer._default_to_fused_or_foreach`).
    """
    target = target or torch.device(device).type
    engine = engine_of(recipe)
    loop = recipe.loop
    # Engines wrap it; what changes or asks the model itself needs it without the wrapper.
    bare = build_model(recipe, device)
    if recipe.peft and target == "cuda" and makes_fakes():
        train_what_moves(bare)
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
    if recipe.rollouts:
        rollout_trainers.start(training, recipe, bare, build_model)
    elif recipe.trainer != "transformers":
        trl_trainers.start(training, recipe, bare, build_model)
    # Trainer.get_batch_samples fetches the whole step's micro-batches first
    if loop.name == "trainer" and not recipe.rollouts:
        further = range(training.accumulation - 1)
        training.further = [make_batch(recipe, device) for _ in further]
    regularizers.start(training, recipe, bare)
    if recipe.activation_offloading:
        training.around = trl_trainers.offloading(model, training.device)
    # After the wrapping: an engine may have put its own parameters in the model's place.
    _give_optimizer(training, recipe, engine)
    _set_precision(training, recipe, target)
    engine.start(training)
    return training


def _give_optimizer(training: Training, recipe: Recipe, engine: Engine) -> None:
    """Make the recipe's optimizer: one, or one for each parameter."""
    make = partial(make_optimizer, recipe, multi_tensor=training.multi_tensor)
    model = training.model
    if recipe.loop.optimizer_in_backward:
        step_in_backward(training, lambda parameter: make([parameter]), _trained(model))
    else:
        training.optimizer = engine.optimizer(_groups(recipe, model), make)
    # Trainer.create_optimizer: fp32 states of embeddings, in bitsandbytes' optimizers only
    modelled = MODELLED[recipe.optim]
    in_8_bits = modelled.library == "bitsandbytes" and modelled.width == 1
    if in_8_bits and recipe.loop.name == "trainer":
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                for optimizer in training.optimizers:
                    manager = optimizer.mng
                    manager.register_module_override(module, "weight", {"optim_bits": 32})


def _set_precision(training: Training, recipe: Recipe, target: str) -> None:
    """Make the loss scaler, and switch to TF32, where the precision asks for it."""
    if recipe.precision == "fp16-mixed":
        # the default of 65,536 overflows at once with random weights, and a skipped step makes no
        # optimizer states
        training.scaler = torch.amp.GradScaler(training.device.type, init_scale=1.0)
    if recipe.precision == "tf32" and target == "cuda" and not makes_fakes():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


def _trained(model: Model) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_batch(recipe: Recipe, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return one micro-batch of random inputs and labels.

    What is ragged is real among fake tensors too.
    """
    if recipe.rollouts:
        return {}  # texts
    if recipe.trainer not in ("transformers", "sft"):
        return trl_trainers.make_pairs(recipe, device)
    if recipe.reads_values:
        return collated(recipe, device)
    shape = recipe.shape
    size = (recipe.batch_size, recipe.seq_len)
    if shape.features:
        name, sizes = shape.features
        features = torch.rand(recipe.batch_size, *sizes, device=device)
        # A processor's features are fp32; a model in half precision takes them in its own format.
        if recipe.precision == "fp16-true":
            features = features.to(torch.float16)
        elif recipe.precision == "bf16-true":
            features = features.to(torch.bfloat16)
        batch = {name: features}
    else:
        batch = {"input_ids": torch.randint(0, shape.vocab_size, size, device=device)}
    if "classification" in shape.task:
        # One for each sample.
        labels = torch.randint(0, shape.num_labels, size[:1], device=device)
    else:
        labels = torch.randint(0, shape.vocab_size, size, device=device)
    batch["labels"] = labels
    if recipe.trainer == "sft":  # trl's DataCollatorForLanguageModeling
        batch["attention_mask"] = torch.ones(size, dtype=torch.int64, device=device)
    return batch


def collated(recipe: Recipe, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return one micro-batch of random samples with the recipe's lengths.

    They are real tensors, on the CPU where others are fake.
    """
    # what a simulation draws is not of the process's generator, which is for who trains
    generator = torch.Generator() if makes_fakes() else None
    device = "cpu" if makes_fakes() else device
    collate = _by_trl if recipe.trainer == "sft" else _padded
    if recipe.shape.family in READERS:
        collate = image_batch
    with real_tensors():
        batch = collate(recipe, generator)
        if recipe.group.sp_size > 1:
            from .engines.ulysses import part_of_rows

            batch = part_of_rows(batch, recipe)
        for name, value in batch.items():
            # a packed batch also has lengths that are plain numbers
            if hasattr(value, "to"):
                batch[name] = value.to(device)
        return batch


@needing("trainer='sft'")
def _by_trl(recipe: Recipe, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return what `SFTTrainer.__init__` makes for its arguments (trl 1.16).

    Packed rows are joined to one.
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(
        0,
        padding_free=recipe.joins,
        pad_to_multiple_of=recipe.pad_to_multiple_of,
    )
    vocabulary = recipe.shape.vocab_size
    labelled = recipe.completion_lengths or recipe.samples
    ids = []
    for length in recipe.samples:
        # Only lengths matter to memory, so the ids are random.
        ids.append(torch.randint(vocabulary, (length,), generator=generator))
    labels = [sample.clone() for sample in ids]
    for sample, count in zip(labels, labelled, strict=True):
        # Labels of a prompt are left out where only the completion is learned.
        sample[: len(sample) - count] = NO_LABEL
    if recipe.packing:
        row = {
            "input_ids": torch.cat(ids).tolist(),
            "labels": torch.cat(labels).tolist(),
            "seq_lengths": list(recipe.samples),
        }
        return collator([row])
    rows = []
    for sample, sample_labels in zip(ids, labels, strict=True):
        rows.append({"input_ids": sample.tolist(), "labels": sample_labels.tolist()})
    return collator(rows)


def _padded(recipe: Recipe, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return ids, mask and labels as `transformers.DataCollatorForLanguageModeling` pads them.

    A classifier gets a label for each sample.
    """
    shape = recipe.shape
    size = recipe.rows
    rows, width = size
    lengths = torch.tensor(recipe.samples)
    # True where a row has a token, False in its padding.
    mask = torch.arange(width) < lengths[:, None]
    inputs = torch.randint(shape.vocab_size, size, generator=generator) * mask
    labels = inputs.masked_fill(~mask, NO_LABEL)
    if shape.task == "sequence-classification":
        labels = torch.randint(shape.num_labels, (rows,), generator=generator)
    return {"input_ids": inputs, "attention_mask": mask.long(), "labels": labels}


def _groups(recipe: Recipe, model: Model) -> list:
    """Return the optimizer's parameters.

    In the Trainer they are in groups with and without weight decay, which are updated in turn.
    """
    hidden = _hidden_matrices(recipe, model)
    if recipe.loop.name != "trainer":
        rest = [parameter for parameter in _trained(model) if id(parameter) not in hidden]
        return [{"params": rest}, *_to_orthogonalize(hidden)] if recipe.optim == "muon" else rest
    from transformers.trainer_pt_utils import get_parameter_names

    # The Trainer's own two groups: no decay of biases and norms.
    decayed_names = set(get_parameter_names(model, [torch.nn.LayerNorm], WITHOUT_DECAY))
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in hidden:
            group = decayed if name in decayed_names else others
            group.append(parameter)
    return [{"params": decayed}, {"params": others}, *_to_orthogonalize(hidden)]


def _hidden_matrices(recipe: Recipe, model: Model) -> dict[int, torch.nn.Parameter]:
    """Return by id what Muon updates: matrices, but no embeddings and no output head.

    Source: torch.optim.Muon's own words on "hidden layers". Nothing where another one does.
    """
    if recipe.optim != "muon":
        return {}
    outside = []
    for name, module in model.named_modules():
        # By the last part of the name, since a wrapper may stand before it.
        is_head = name.split(".")[-1] == recipe.shape.head.split(".")[-1]
        if isinstance(module, torch.nn.Embedding) or is_head:
            outside += [id(parameter) for parameter in module.parameters()]
    hidden = {}
    for parameter in _trained(model):
        if parameter.dim() == 2 and id(parameter) not in outside:
            hidden[id(parameter)] = parameter
    return hidden


def _to_orthogonalize(hidden: dict[int, torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": list(hidden.values()), "orthogonalize": True}] if hidden else []


def step_in_backward(
    training: Training,
    make: Callable[[torch.Tensor], Any],
    trained: list,
) -> None:
    """Update each parameter as soon as its gradient is complete, and free that.

    PyTorch's tutorial of 2023 does so. `make` gives the optimizer of a parameter; None where it
    shall not be updated.
    """
    # the garbage collector does not see through hooks: a reference would never be freed
    owner = weakref.ref(training)

    def update(parameter: torch.Tensor) -> None:
        alive = owner()
        assert alive is not None  # its step runs
        optimizer = alive.per_parameter[parameter]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for parameter in trained:
        optimizer = make(parameter)
        if optimizer is not None:
            training.per_parameter[parameter] = optimizer
            parameter.register_post_accumulate_grad_hook(update)


def _ignore_phase(name: str) -> None:
    """Stand for who does not ask when a phase begins."""


def train_step(training: Training, on_phase: Callable[[str], None] = _ignore_phase) -> torch.Tensor:
    """Run one optimizer step, with all its micro-batches. Calls `on_phase` as each phase begins.

    Phases: "forward", "backward" (once per micro-batch), "step", "between_steps"; "generate" and
    "score" before the "forward" for which a trainer samples. Returns the last micro-batch's loss.
    """
    loop = training.loop
    engine = training.engine
    # Without an optimizer each parameter clears its own gradient in backward.
    if loop.zero_grad == "start" and training.optimizer:
        engine.zero_grad(training)
    if not engine.run_micro_batches(training, on_phase):
        _run_micro_batches(training, on_phase)
    on_phase("step")
    if training.optimizer:
        _clip(training)
        engine.update(training)
    if loop.zero_grad == "end" and training.optimizer:
        engine.zero_grad(training)
    if loop.keep_outputs == "step":
        training.outputs = None
    training.steps += 1
    on_phase("between_steps")
    return training.loss


def _run_micro_batches(training: Training, on_phase: Callable[[str], None]) -> None:
    batches = [training.batch, *training.further]
    count = training.accumulation
    if training.abridged:
        # The first step adds to gradients that are there, as the second of two does; later ones
        # need no second.
        count = 1 if training.steps else 2
    for micro in range(count):
        if micro in training.left_out:
            training.leave_out()
            continue
        # A loop that fetches one at a time uses the same batch again.
        batch = batches[micro % len(batches)]
        is_last = micro == training.accumulation - 1
        with (
            training.engine.micro_batch(training, last=is_last),
            training.around,
            training.engine.part_of(training, batch) as part,
        ):
            _micro_batch(training, part, on_phase, first=micro == 0)


def _micro_batch(
    training: Training,
    batch: Any,
    on_phase: Callable[[str], None],
    first: bool,
) -> None:
    """Run forward and backward of one micro-batch.

    `training` holds what the loop keeps of it.
    """
    loop = training.loop
    if training.next_batch:
        batch = training.next_batch(on_phase)
    on_phase("forward")
    if training.compute_loss:
        run = partial(_forward_by_name, training)
        outputs = {"loss": training.compute_loss(run, batch)}
    else:
        outputs = forward(training, batch)
    # frees the last step's before the loss is computed
    training.outputs = outputs if loop.keep_outputs else None
    loss = training.loss_of(outputs, batch)
    if training.accumulation > 1:
        # So that the sum of all micro-batches' gradients is their mean.
        loss = loss / training.accumulation
    _empty_cache(training)
    if loop.keep_outputs is True:
        training.loss = None  # the last step's too
    # This frame would keep the logits alive through backward, whatever the loop says.
    del outputs
    if loop.zero_grad == "before_backward" and training.optimizer and first:
        training.engine.zero_grad(training)
    on_phase("backward")
    scaled = training.scaler.scale(loss) if training.scaler else loss
    training.engine.backward(training, scaled)
    # A reference here would keep the graph's last node while the loss is detached.
    del scaled
    training.loss = loss.detach()
    del loss
    if loop.keep_outputs == "backward":
        training.outputs = None


def _forward_by_name(training: Training, **inputs: Any) -> Any:
    return forward(training, inputs)


def _empty_cache(training: Training) -> None:
    """Empty CUDA's cache where `Trainer.training_step` does it."""
    every = training.loop.empty_cache_steps
    if every and training.steps % every == 0 and training.device.type == "cuda":
        torch.cuda.empty_cache()


def forward(training: Training, batch: Any) -> Any:
    """Return the model's outputs, under autocast where the precision asks for it."""
    if training.precision not in AUTOCAST or not training.engine.autocasts:
        return call(training.model, batch)
    with autocast(training.device.type, training.precision):
        outputs = call(training.model, batch)
    if training.loop.outputs_to_fp32:
        from accelerate.utils import convert_to_fp32

        return convert_to_fp32(outputs)
    return outputs


def call(model: Model, batch: Any) -> Any:
    """Call `model` on a batch.

    A mapping gives keyword arguments, a tuple or list positional ones, anything else is one.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _clip(training: Training) -> None:
    """Clip the gradients if the loop does, unscaled under fp16 autocast."""
    norm = training.loop.max_grad_norm
    if norm is None and training.loop.name == "trainer":
        norm = math.inf  # Trainer._get_grad_norm computes the norm for its log
    if norm is None:
        return
    if training.scaler:
        # A norm of scaled gradients would be clipped to the wrong length.
        training.scaler.unscale_(training.optimizer)
    training.engine.clip(training, norm)
