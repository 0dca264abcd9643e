"""The training step of diffusers' and finetrainers' scripts, made ready for `train_step`.

Denoiser, VAE and text encoders are diffusers' and transformers' own classes, and adapters PEFT's.
What a step computes around the denoiser is written out in `diffusion_steps.py` and `wan_step.py`
after the scripts that `data/diffusion_models.json` names.
"""

import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from ..base.errors import RecipeError, needing
from ..private.of_diffusers import kept_in_fp32
from ..recipe.configuration import reason
from ..recipe.diffusion import Diffusion
from ..recipe.options import Loop
from .default_dtype import own_default_dtype
from .diffusion_steps import KleinStep, Sd3Step, SdxlStep
from .engine import Training
from .make_optimizer import make_optimizer
from .models import materialise, real_tensors, take_base_dtype
from .quiet import unlogged
from .wan_step import WanStep

CASTS = "diffusers.models.modeling_utils"  # warns of every `to(dtype)`, which the scripts do too
Step = Any
STEPS: dict[str, Callable[..., Step]] = {
    "UNet2DConditionModel": SdxlStep,
    "SD3Transformer2DModel": Sd3Step,
    "Flux2Transformer2DModel": KleinStep,
    "WanTransformer3DModel": WanStep,
}


@needing("diffusion")
def build_diffusion(asked: Diffusion, device: str = "cpu", target: str = "cpu") -> Training:
    """Return the training of `asked` on `device`; fake under a FakeTensorMode.

    `target` is "cuda" or "cpu": whose defaults optimizer and clipping take.
    """
    place = torch.device(device)
    model = denoiser(asked, place)
    residents = _residents(asked, place)
    step = STEPS[asked.config["_class_name"]](asked, residents, place)
    training = Training(
        model=model,
        optimizer=None,
        batch=step.loaded,
        device=place,
        multi_tensor=target == "cuda",
        loop=Loop(name="diffusers"),
        precision=asked.precision,
        accumulation=asked.gradient_accumulation_steps,
        reference=residents,
        next_batch=step.next_batch,
    )
    # the garbage collector would not see this reference: it would never be freed
    owner = weakref.ref(training)

    def loss_of(outputs: Any, batch: Any) -> torch.Tensor:
        loss = step.loss(outputs, batch)
        alive = owner()
        assert alive is not None  # its step runs
        # the new loss takes the last one's place before the backward pass
        alive.loss = None
        return loss

    training.loss_of = loss_of
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name = "adamw_bnb_8bit" if asked.use_8bit_adam else "adamw_torch"
    options: Any = SimpleNamespace(optim=name, optimizer_arguments=dict)
    training.optimizer = make_optimizer(options, trained, training.multi_tensor)
    if asked.precision == "fp16-mixed":
        # the default scale overflows with random weights, and a skipped step makes no states
        training.scaler = torch.amp.GradScaler(place.type, init_scale=1.0)
    return training


def denoiser(asked: Diffusion, device: torch.device) -> Any:
    """Return the UNet or transformer in training mode, with adapters where those are trained."""
    kind = asked.config["_class_name"]
    model = on_meta("diffusers", kind, asked.config, asked.weights_dtype, not asked.autocasts)
    if asked.method == "lora":
        _adapt(model, asked)
    if asked.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    materialise(model, device)
    return model.train()


def on_meta(
    library: str, kind: str, config: Mapping[str, Any], dtype: str, is_loaded: bool = False
) -> Any:
    """Return a model of a class of diffusers, or of transformers, on the meta device.

    It is in `dtype`; where `is_loaded`, in the formats in which `from_pretrained` would load it.
    """
    found = getattr(import_module(library), kind)
    # The meta device needs no fake tensors, and a fake cast would untie weights.
    with real_tensors(), own_default_dtype(), torch.device("meta"), unlogged(CASTS):
        if library == "diffusers":
            model = found.from_config(dict(config))
        else:
            model = found(found.config_class(**config))
        if not is_loaded:
            return model.to(getattr(torch, dtype))
        kept = kept_in_fp32(model)
        for name, parameter in model.named_parameters():
            if kept.isdisjoint(name.split(".")):
                parameter.data = parameter.data.to(getattr(torch, dtype))
        return model


def _adapt(model: Any, asked: Diffusion) -> None:
    """Freeze `model` and add the script's adapters, in its format.

    They are in fp32 under fp16, and where the script does not autocast.
    """
    from peft import LoraConfig

    model.requires_grad_(False)
    config = LoraConfig(
        r=asked.rank,
        lora_alpha=asked.rank,
        init_lora_weights="gaussian",
        target_modules=asked.script["target_modules"],
    )
    with real_tensors(), torch.device("meta"):
        try:
            model.add_adapter(config)
        except ValueError as error:  # no such layers
            rest = f"PEFT refuses it: {reason(error)}"
            raise RecipeError("method", asked.method, rest) from error
    take_base_dtype(model)
    if asked.mixed_precision == "fp16" or not asked.autocasts:
        from diffusers.training_utils import cast_training_params

        with real_tensors():
            cast_training_params(model, dtype=torch.float32)


def _residents(asked: Diffusion, device: torch.device) -> torch.nn.ModuleDict | None:
    """Return VAE and text encoders that stay on the GPU and are not trained."""
    made = {}
    dtype = asked.record.get("residents_dtype", asked.frozen_dtype)
    if asked.encodes:
        vae = asked.record["vae"]
        config = vae["config"]
        own = "float32" if vae["in_fp32"] else dtype
        made["vae"] = on_meta("diffusers", config["_class_name"], config, own)
    if asked.has_text_encoders:
        for number, encoder in enumerate(asked.record["encoders"], 1):
            name = f"text_encoder_{number}"
            made[name] = on_meta("transformers", encoder["class"], encoder["config"], dtype)
    for model in made.values():
        materialise(model.requires_grad_(False).eval(), device)
    return torch.nn.ModuleDict(made) if made else None
