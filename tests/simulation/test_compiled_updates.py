"""torchao's optimizers, whose update of a parameter is compiled."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import config
from torch import nn
from transformers import Trainer, TrainingArguments
from vramlab import Recipe
from vramlab.base.errors import MissingExtra, RecipeError
from vramlab.recipe.options import Loop
from vramlab.simulation.compiled_updates import TRIED_UPDATES
from vramlab.simulation.simulate import simulate
from vramlab.training.models import build_model
from vramlab.training.training import make_batch

# What PyTorch's own allocator held at most in the second step on the stand-in for an RTX 4090
# (`data/stand_in/README.md`; torch 2.13, torchao 0.18): requested, allocated.
EMULATED = {
    ("AdamW8bit", "float32"): (693_162_116, 698_930_688),
    ("AdamW4bit", "float32"): (1_178_592_004, 1_183_577_600),
    ("AdamWFp8", "float32"): (431_009_924, 434_681_344),
    ("AdamW8bit", "bfloat16"): (528_494_722, 533_214_720),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), EMULATED)
def test_an_update_takes_what_pytorch_takes(kind, dtype):
    optim = pytest.importorskip("torchao.optim")
    layers = [nn.Embedding(32_000, 1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)]
    report = simulate(
        model=nn.Sequential(*layers, nn.LayerNorm(1024)).to(getattr(torch, dtype)),
        batch=torch.ones(4, 128, dtype=torch.int64),
        optimizer=lambda parameters: getattr(optim, kind)(parameters, lr=1e-3),
        loss=lambda outputs, batch: outputs.square().mean(),
        loop=Loop(keep_outputs=False),
        gpu="RTX 4090",
    )
    requested, allocated = EMULATED[kind, dtype]
    # a block that could not be divided holds 2 MiB more
    assert abs(report.phases["step"].peak.total / allocated - 1) < 0.004
    if report.peak.total == report.phases["step"].peak.total:
        assert abs(report.requested / requested - 1) < 2e-5
    assert TRIED_UPDATES in report.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "precision"),
    [
        ("adamw_torch_8bit", "bf16-true"),
        ("adamw_torch_4bit", "bf16-mixed"),
        ("ao_adamw_fp8", "fp32"),
    ],
)
def test_a_recipe_has_the_optimizer_that_the_trainer_makes(optim, precision):
    kinds = pytest.importorskip("torchao.optim")
    sizes = {"batch_size": 2, "seq_len": 24, "num_layers": 1, "loop": "plain"}
    tiny = config("llama", vocab_size=96)
    recipe = Recipe(tiny, optim=optim, precision=precision, **sizes)
    kind, options = kinds.AdamWFp8, {}  # as axolotl's builder makes it
    if optim != "ao_adamw_fp8":
        arguments = TrainingArguments("unused", optim=optim, use_cpu=True)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    module = simulate(
        model=build_model(recipe, "cpu"),
        batch=make_batch(recipe, "cpu"),
        optimizer=lambda parameters: kind(parameters, **options),
        precision=precision,
        gpu="RTX 4090",
    )
    assert simulate(recipe, gpu="RTX 4090").phases == module.phases


def test_without_torchao_a_sentence_says_how_to_install_it(monkeypatch):
    for name in ("torchao", "torchao.optim"):  # another test may have loaded it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra) as caught:
        simulate(Recipe("qwen2.5-0.5b", optim="adamw_torch_4bit"))
    expected = "optim='adamw_torch_4bit' needs torchao: pip install 'vramlab[torchao]'"
    assert str(caught.value) == expected
    with pytest.raises(RecipeError, match="not simulated with optim='adamw_torch_8bit'"):
        simulate(Recipe("qwen2.5-0.5b", optim="adamw_torch_8bit", torch_compile=True))


def single_param_adam(parameter, grad):
    """An update in two passes: the first gives one number for each row."""
    largest = grad.abs().amax(-1, keepdim=True)
    parameter.copy_(parameter - grad / largest)


class Compiled(torch.optim.SGD):
    """An optimizer that compiles its update as torchao does."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
                update(parameter.detach(), parameter.grad)


@pytest.mark.slow
def test_an_update_runs_as_it_was_compiled(monkeypatch):
    """Fused: one number a row, where three matrices would be there as it is written."""
    table = {"zeros": lambda shape, is_signed: None}
    own = {
        "single_param_adam": single_param_adam,
        "OptimState8bit": SimpleNamespace(**table),
        "OptimState4bit": SimpleNamespace(**table),
    }
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", SimpleNamespace(**own))
    import torch._dynamo.eval_frame

    report = simulate(
        model=nn.Linear(256, 128, bias=False),
        batch=torch.ones(4, 256),
        optimizer=lambda parameters: Compiled(parameters, lr=1e-3),
        loss=lambda outputs, batch: outputs.square().mean(),
        target="cpu",
    )
    assert report.phases["step"].peak.temporaries == 4 * 128
