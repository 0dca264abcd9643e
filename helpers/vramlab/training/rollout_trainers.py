"""TRL's GRPOTrainer and RLOOTrainer as far as memory sees them.

It is their own code that samples completions, scores them and computes the loss (trl 1.16,
`trl/trainer/grpo_trainer.py` and `rloo_trainer.py`). Text, rewards and tokenizers hold none of the
GPU's memory: they are given here. Each completion has its full length.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ..private import of_trl
from ..private.patched import replaced
from ..recipe.options import TRL, Rollouts
from ..recipe.recipe import Recipe
from ..recipe.rollouts import plan_of
from .engine import AUTOCAST, Model, Training, autocast, autocast_inside
from .fixed_generation import fixed_length
from .trl_trainers import argument_defaults, balances, reference_model, trl_class

# Arguments of the trainer that are generate's.
OF_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "cache_implementation",
)
TOKEN = 1  # every token of a prompt, and the padding
BUFFERS = ("prompt", "completion", "advantages")  # of the log that TRL prints


class Texts:
    """A tokenizer whose texts are all of one length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pad_token_id = TOKEN
        self.bos_token_id = None

    def __call__(self, text: list[str]) -> dict[str, list]:
        """Return the token ids of each text."""
        return {"input_ids": [[TOKEN] * self.length for _ in text]}

    def batch_decode(self, ids: list, **options: Any) -> list[str]:
        """Return a text for each completion."""
        return ["" for _ in ids]


def start(
    training: Training,
    recipe: Recipe,
    model: Model,
    build_model: Callable[[Recipe, torch.device], Model],
) -> None:
    """Let TRL's trainer of `model` sample the batches of `training` and compute its loss.

    Makes the frozen reference model, if there is one.
    """
    rollouts = recipe.rollouts
    assert rollouts is not None  # the trainer has some
    # Without its `__init__`, which would load a tokenizer, a data set and a process group.
    trainer: Any = object.__new__(trl_class(TRL[recipe.trainer]))
    if recipe.has_reference:
        training.reference = reference_model(training, recipe, build_model)
    for each in (training.reference, model):
        casts = training.precision in AUTOCAST and training.engine.autocasts
        if each is not None and casts:
            autocast_inside(each, training.device.type, training.precision)
    vars(trainer).update(_fields(training, recipe, model))
    # FSDP gathers a unit's weights in `forward`, which `generate` does not go through as a whole.
    if recipe.group.engine == "fsdp":
        _gather_for_generation(model)
    plan = plan_of(recipe)
    # So many steps train on what was sampled once.
    training.cycle = plan.steps
    prompts = [{"prompt": ""} for _ in range(plan.completions)]
    gather = trainer.accelerator.gather

    def next_batch(on_phase: Callable[[str], None]) -> Any:
        # vLLM is given the weights once a step
        trainer.state.global_step = of_trl.steps_made(trainer) // recipe.gradient_accumulation_steps
        # A simulation may sample fewer and repeat the last tokens' events.
        tokens = training.most_tokens or rollouts.max_completion_length
        with _own_process(gather), fixed_length(tokens, training.on_token):
            in_phases = partial(_in_phases, on_phase=on_phase)
            batch = of_trl.next_inputs(trainer, prompts, in_phases)
        # What TRL keeps of a generation for later steps, which is alive between them.
        training.sampled = of_trl.sampled(trainer)
        return batch

    def compute_loss(forward: Callable, batch: Any) -> torch.Tensor:
        with _own_process(gather):
            return trainer.compute_loss(training.model, batch)

    training.next_batch = next_batch
    training.leave_out = partial(of_trl.leave_out, trainer)
    training.compute_loss = compute_loss


def _gather_for_generation(model: Model) -> None:
    """Let FSDP gather weights for `generate` too, as `Trainer.__init__` does."""
    # the class's is looked up when it is called: a simulation replaces it
    model.generate = lambda *args, **options: type(model).generate(model, *args, **options)
    torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")


def _in_phases(generate: Callable, on_phase: Callable[[str], None]) -> Callable:
    """Return `generate` as a phase of its own, which the phase "score" follows."""

    def in_phases(prompts: list[str]) -> Any:
        on_phase("generate")
        made = generate(prompts)
        on_phase("score")
        return made

    return in_phases


@contextlib.contextmanager
def _own_process(gather: Callable) -> Iterator[None]:
    """While entered, TRL does not ask accelerate to `gather`, which would make a process group."""
    from trl.trainer import grpo_trainer, rloo_trainer

    with contextlib.ExitStack() as stack:
        for module in (grpo_trainer, rloo_trainer):
            stack.enter_context(replaced(module, "gather", gather))
            stack.enter_context(replaced(module, "gather_object", lambda value: value))
        yield


def _gathered(value: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return what all ranks have of `value`, which is taken for the same.

    So large is what accelerate gathers, on CPUs with a tensor for each rank before
    (`accelerate.utils.operations._gpu_gather`).
    """
    if ranks == 1:
        return value
    # A number cannot be joined with others, so it becomes a row of one.
    if value.ndim == 0:
        value = value.clone()[None]
    parts = [value] * ranks
    if value.device.type == "cpu" and value.device.index is None:
        parts = [each.clone() for each in parts]
    return torch.cat(parts)


def _fields(training: Training, recipe: Recipe, model: Model) -> dict[str, Any]:
    """Return what the trainer's methods read: its arguments, and what its `__init__` makes."""
    from transformers import GenerationConfig
    from trl.distributed import DistributedBackend

    rollouts = recipe.rollouts
    assert rollouts is not None  # the trainer has some
    said = argument_defaults(recipe) | vars(rollouts)
    said["pad_to_multiple_of"] = None  # what "auto" is but on Neuron
    plan = plan_of(recipe)
    arguments = said | {
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        # In micro-batches, as TRL counts them, though the name says steps.
        "steps_per_generation": plan.micro_batches // rollouts.num_iterations,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "device": training.device,
        "report_to": [],
    }
    tokenizer = Texts(rollouts.prompt_length)
    # beyond the vocabulary: nothing ends a completion
    never = recipe.shape.vocab_size
    generation = {
        "max_new_tokens": rollouts.max_completion_length,
        "do_sample": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": [never],
    }
    generation |= {name: said[name] for name in OF_SAMPLING}
    config = model.config.get_text_config()
    ranks = 1
    if recipe.sharding:
        ranks = recipe.sharding.world_size
    accelerator = _accelerator(training, model, ranks)
    backend = DistributedBackend(accelerator)
    if rollouts.use_vllm:
        said["vllm_generation"] = _vllm(model, accelerator, rollouts)
        said |= of_trl.NO_WEIGHTS_SENT
    return said | {
        "model": model,
        "model_wrapped": model,
        "ref_model": training.reference,
        "args": SimpleNamespace(**arguments),
        "state": SimpleNamespace(global_step=0, num_input_tokens_seen=0),
        "accelerator": accelerator,
        "is_deepspeed_enabled": False,
        "processing_class": tokenizer,
        "eos_token_ids": [never],
        "generation_config": GenerationConfig(**generation, disable_compile=True),
        "generation_kwargs": generation,
        "rollout_func": None,
        "tools": [],
        "environments": None,
        "environment_factories": None,
        "reward_funcs": [_rewards],
        "reward_func_names": ["reward"],
        "reward_processing_classes": [None],
        "reward_weights": torch.ones(1),
        "epsilon_low": said["epsilon"],
        "epsilon_high": said["epsilon"],
        # The loss that keeps a mixture's experts equally used.
        "aux_loss_enabled": balances(config),
        "router_aux_loss_coef": getattr(config, "router_aux_loss_coef", 0.0),
        "current_gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        **of_trl.sampling_state(tokenizer, backend, _logs(plan.completions)),
    }


def _vllm(model: Model, accelerator: SimpleNamespace, rollouts: Rollouts) -> Any:
    """Return TRL's own way to vLLM, which gives it the weights, with completions that are given.

    What vLLM itself holds is no tensor of this process's step.
    """
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    def take(metadata: list, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        # Taking each weight makes it, as sending it to a server would.
        for _ in named:
            pass

    def generate(prompts: list, *others: Any, **more: Any) -> tuple[list, list, list, None]:
        length = rollouts.max_completion_length
        ids = [[TOKEN] * length for _ in prompts]
        logprobs = [[[0.0]] * length for _ in prompts]
        return prompts, ids, logprobs, None

    # A vLLM in the same process is given the weights by its own model's method.
    own_model = SimpleNamespace(load_weights=lambda named: None)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=own_model))
    executor = SimpleNamespace(driver_worker=worker)
    vllm: Any = object.__new__(VLLMGeneration)
    vars(vllm).update(
        model=model,
        accelerator=accelerator,
        mode=rollouts.vllm_mode,
        enable_sleep_mode=False,
        generate=generate,
        llm=SimpleNamespace(
            llm_engine=SimpleNamespace(model_executor=executor),
            reset_prefix_cache=lambda: None,
        ),
        vllm_client=SimpleNamespace(update_named_params=take, reset_prefix_cache=lambda: None),
        **of_trl.vllm_state(DistributedBackend(accelerator)),
    )
    return vllm


def _rewards(completions: list[str], **more: Any) -> list[float]:
    """Return rewards that differ, as those of a group have to."""
    # In a group of equal rewards all advantages would be zero.
    return [float(number % 2) for number, _ in enumerate(completions)]


def _logs(completions: int) -> dict[str, Any]:
    logs: dict[str, Any] = {name: deque(maxlen=completions) for name in BUFFERS}
    return logs | {"rewards": defaultdict(deque), "extra": defaultdict(deque)}


def _accelerator(training: Training, model: Model, ranks: int) -> SimpleNamespace:
    """Return what TRL asks of accelerate, for the first of so many processes."""
    device = training.device
    gather = partial(_gathered, ranks=ranks)
    return SimpleNamespace(
        device=device,
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
        process_index=0,
        num_processes=ranks,
        is_main_process=True,
        sync_gradients=True,
        autocast=lambda: autocast(device.type, training.precision),
        gather=gather,
        gather_for_metrics=gather,
        reduce=lambda value, reduction: value,
        unwrap_model=lambda wrapped: model,
    )
