"""What `target="cuda"` puts in place, held against PyTorch's own tables and rules."""

import re
import threading
from pathlib import Path

import pytest
import torch
from quick import params
from tiny_models import config
from torch._subclasses import fake_impls
from torch.nn import functional as F
from vramlab.base.errors import RecipeError
from vramlab.hardware.gpu import find_gpu
from vramlab.hardware.overhead import UNIT, torch_release
from vramlab.recipe.recipe import Loop, Recipe
from vramlab.report.report import MiB
from vramlab.simulation.cuda import _install, attention_kernel, cuda_kernels
from vramlab.simulation.cuda_autocast import (
    FP32,
    FP32_BY_DTYPE,
    LOWER,
    PROMOTE,
    WITH_DTYPE,
    cpu_only,
    on_cuda,
)
from vramlab.simulation.cuda_scratch import CONVOLUTIONS, kernel_scratch
from vramlab.simulation.fakes import fake_world
from vramlab.simulation.simulate import simulate, trace
from vramlab.tracking.history import History

HEADERS = Path(torch.__file__).parent / "include" / "ATen"
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
fp16, bf16, fp32, fp64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def macro(name: str) -> set[str]:
    """The operators that `autocast_mode.h` lists in macro `name`, as "name" or "name.overload".

    Without those that take named dimensions, which torch 2.13 no longer has.
    """
    text = (HEADERS / "autocast_mode.h").read_text()
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)*.*)", text).group(1)
    found = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
    plain = [
        (operator, overload) for operator, overload in found if "dimname" not in overload.lower()
    ]
    return {operator + (f".{overload}" if overload else "") for operator, overload in plain}


def births(history: History, operator: str, categories=("activations", None)) -> list:
    """The storages that `operator` made."""
    return [
        s
        for size, s, op in history.log
        if size > 0 and s.op == operator and s.category in categories
    ]


def tiny(family: str, **changes) -> Recipe:
    sizes = {"batch_size": 2, "seq_len": 24, "num_layers": 2}
    return Recipe(config(family), **{**sizes, **changes})


def ran(family: str, gpu: str | None = None, **changes) -> History:
    return trace(tiny(family, **changes), "cuda", find_gpu(gpu) if gpu else None, full=True)


# --- autocast


def test_autocast_lists_are_those_of_the_installed_header():
    assert macro("AT_FORALL_FP32") == set(filter(on_cuda, FP32)) >= FP32 - {"rms_norm"}
    assert macro("AT_FORALL_FP32_SET_OPT_DTYPE") == FP32_BY_DTYPE
    assert macro("AT_FORALL_PROMOTE") == PROMOTE
    text = (HEADERS / "autocast_mode.h").read_text()
    assert set(re.findall(r'"(norm\.\w+)",', text)) - {"norm.names_ScalarOpt_dim"} == set(
        WITH_DTYPE
    )


def test_every_lower_precision_operator_is_one_on_cpu_too_or_is_added():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {name.removesuffix(".deprecated") for name in macro("AT_FORALL_LOWER_PRECISION_FP")}
    lacking = {name for name in names if not has(f"aten::{name}", "AutocastCPU")}
    beneath = {
        "_convolution",
        "convolution",
        FLASH,
    }  # what conv2d and the like call when they have cast already
    assert lacking - {"_convolution.deprecated"} - beneath == LOWER - {"einsum"} | LOWER & lacking


@pytest.mark.parametrize("dtype", [fp16, bf16])
@pytest.mark.parametrize(
    ("name", "function", "wanted"),
    [
        ("a method", lambda x: x.pow(2), fp32),
        ("an operator", lambda x: x**3, fp32),
        ("a number to a tensor", lambda x: 2**x, fp32),
        ("a function", torch.rsqrt, fp32),
        ("exp", torch.exp, fp32),
        ("sum", lambda x: x.sum(-1), fp32),
        ("sum in a dtype", lambda x: x.sum(-1, dtype=x.dtype), "same"),
        ("softmax", lambda x: F.softmax(x, -1), fp32),
        ("softmax in a dtype, by place", lambda x: torch.softmax(x, -1, torch.float16), fp16),
        ("log_softmax", lambda x: x.log_softmax(-1), fp32),
        ("cumsum", lambda x: x.cumsum(0), fp32),
        ("norm", lambda x: x.norm(), fp32),
        ("norm over a dimension", lambda x: x.norm(dim=-1), fp32),
        ("within F.normalize", lambda x: F.normalize(x), fp32),
        ("layer norm", lambda x: F.layer_norm(x, x.shape[-1:]), fp32),
        ("mse", lambda x: F.mse_loss(x, x), fp32),
        ("huge scores", lambda x: torch.logsumexp(x, -1), fp32),
        ("gelu", F.gelu, "same"),
        ("mean", lambda x: x.mean(), "same"),
        ("cat", lambda x: torch.cat([x, x]), "same"),
        ("what CPU casts", lambda x: F.avg_pool3d(x[None, None, None], 1), "same"),
        ("linear of fp32", lambda x: F.linear(x.float(), x.float()), "autocast"),
        ("matrix times vector", lambda x: x.float() @ x.float()[0], "autocast"),
        ("einsum", lambda x: torch.einsum("ij,kj->ik", x.float(), x.float()), "autocast"),
        ("mixed arguments", lambda x: torch.atan2(x, x.float()), fp32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_autocast_gives_the_dtypes_of_cuda(name, function, wanted, dtype):
    """As documented under "CUDA Ops that can autocast"."""
    with fake_world("cuda"), torch.autocast("cpu", dtype):
        result = function(torch.rand(4, 4, dtype=dtype))
    assert result.dtype == {"same": dtype, "autocast": dtype}.get(wanted, wanted)


def test_double_precision_is_left_alone():
    with cuda_kernels(), torch.autocast("cpu", bf16):
        x = torch.rand(4, 4, dtype=fp64)
        assert x.pow(2).dtype == x.sum().dtype == x.norm().dtype == fp64


def test_autocast_computes_in_fp32_and_not_only_answers_so():
    """65,504 is fp16's largest: summed or squared in half precision this would be infinite."""
    with cuda_kernels(), torch.autocast("cpu", fp16):
        x = torch.full((4,), 60000.0, dtype=fp16)
        assert (
            x.sum() == 4 * x[0].float()
            and torch.isfinite(x.pow(2)).all()
            and torch.isfinite(x.norm())
        )


def test_cross_entropy_of_half_precision_logits_keeps_two_sets_of_log_probabilities():
    """`cross_entropy_loss` asks log_softmax for the logits' own dtype, so it stays half; nll_loss
    is then cast up.
    """
    for dtype in (fp16, bf16):
        with cuda_kernels(), torch.autocast("cpu", dtype):
            logits = torch.randn(3, 5, dtype=dtype, requires_grad=True)
            loss = F.cross_entropy(logits, torch.tensor([0, 1, 2]))
        assert loss.dtype == fp32
        assert (
            loss.grad_fn._saved_self.dtype == fp32
            and loss.grad_fn._saved_self.shape == logits.shape
        )
        log_softmax = loss.grad_fn.next_functions[0][0].next_functions[0][0]
        assert log_softmax._saved_result.dtype == dtype


def test_cpu_only_rules_are_found():
    assert {"cat", "cross_entropy_loss", "avg_pool3d"} <= set(cpu_only())
    assert not {"linear", "mm", "layer_norm"} & set(cpu_only())


# --- attention

AMPERE, TURING, ADA, HOPPER, BLACKWELL = (8, 0), (7, 5), (8, 9), (9, 0), (12, 0)


@pytest.mark.parametrize(
    ("dtype", "head", "options", "kernel"),
    [
        (bf16, 128, {}, "flash"),
        (fp16, 80, {}, "flash"),  # padded to a multiple of 8 if need be
        (fp16, 20, {}, "flash"),
        (bf16, 256, {}, "flash"),
        (bf16, 257, {}, "math"),
        (bf16, 264, {}, "efficient"),
        (bf16, 128, {"grouped": True}, "flash"),
        (bf16, 128, {"masked": True}, "efficient"),
        (fp32, 128, {}, "efficient"),
        (fp32, 20, {}, "efficient"),
        (fp32, 18, {}, "math"),
        (fp64, 64, {}, "math"),
        (fp16, 20, {"masked": True}, "math"),
        (fp32, 128, {"grouped": True}, "math"),
        (bf16, 128, {"grouped": True, "masked": True}, "math"),
        (fp16, 128, {"capability": TURING}, "efficient"),
        (bf16, 128, {"capability": TURING}, "math"),
        (fp16, 20, {"capability": TURING}, "math"),
        (
            fp32,
            18,
            {"capability": TURING},
            "efficient",
        ),  # no tensor cores for fp32: nothing to align
        (fp16, 128, {"capability": TURING, "grouped": True}, "math"),
        (bf16, 208, {"capability": ADA}, "efficient"),
        (bf16, 208, {"capability": HOPPER}, "flash"),
        (bf16, 256, {"capability": BLACKWELL}, "flash"),
        (bf16, 256, {"capability": BLACKWELL, "dropout": 0.1}, "efficient"),
    ],
)
def test_attention_kernel_is_the_one_sdp_utils_selects(dtype, head, options, kernel):
    assert attention_kernel(dtype, head, head, **options) == kernel


def test_heads_of_unequal_width_are_not_for_flash():
    assert attention_kernel(bf16, 192, 128) == "efficient"


def test_which_releases_group_queries_in_the_efficient_kernel():
    """What brought it (pull request 191085) also gave a check in a public header a further
    parameter.
    """
    header = (HEADERS / "native" / "transformers" / "sdp_utils_cpp.h").read_text()
    assert ("supports_mqa" in header) == (
        tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    )


@pytest.mark.parametrize(
    ("family", "gpu", "changes", "operator"),
    [
        ("gpt_neox", None, {"precision": "bf16-true"}, FLASH),
        ("gpt_neox", None, {"precision": "bf16-mixed"}, FLASH),
        ("llama", None, {"precision": "fp16-true"}, FLASH),
        ("gpt_neox", None, {"precision": "fp32"}, EFFICIENT),
        ("gpt_neox", "T4", {"precision": "fp16-mixed"}, EFFICIENT),
        ("t5", None, {"precision": "bf16-true"}, EFFICIENT),  # relative positions are a mask
        ("llama", None, {"precision": "fp32"}, None),  # grouped
        ("llama", "T4", {"precision": "fp16-true"}, None),
        ("gemma2", None, {"precision": "bf16-true"}, None),  # eager
    ],
)
def test_models_run_that_kernel(family, gpu, changes, operator):
    history = ran(family, gpu, **changes)
    made = {name for name in (FLASH, EFFICIENT) if births(history, name)}
    assert made == ({operator} if operator else set())
    softmax = births(history, "_softmax") + births(history, "_safe_softmax")
    written_out = [s for s in softmax if s.shape[-2:] == (24, 24)]
    if operator is None and torch_release() < (2, 14):
        assert len(written_out) >= 2


def test_flash_keeps_its_output_and_one_number_a_row():
    kept = births(ran("llama", precision="bf16-true", seq_len=64), FLASH, ("activations",))
    heads, head, rows = 6, 16, 2 * 64
    assert {s.asked for s in kept} >= {2 * rows * heads * head, 4 * rows * heads}
    assert not any(s.asked >= 2 * heads * rows * 64 for s in kept)  # no matrix of scores


def test_a_checkpoint_recomputes_with_the_same_kernels():
    plain = births(ran("gpt_neox", precision="bf16-true"), FLASH)
    again = births(ran("gpt_neox", precision="bf16-true", gradient_checkpointing=True), FLASH)
    assert len(plain) > 0 and len(again) == 2 * len(plain)


def test_modules_of_torch_get_the_kernels_too():
    """nn.MultiheadAttention calls attention and dropout from within a function of torch's own."""
    layer = torch.nn.TransformerEncoderLayer(96, 6, 256, dropout=0.1, batch_first=True)
    report = simulate(
        model=layer,
        batch=torch.rand(2, 64, 96),
        loss=lambda outputs, batch: outputs.sum(),
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
        precision="bf16-mixed",
    )
    made = {tensor.op for tensor in report.largest}
    assert "native_dropout" in made and not made & {"bernoulli_", "div_"}


# --- dropout, softmax, norms


def test_dropout_keeps_one_byte_an_element():
    masks = [s for s in births(ran("gpt2"), "native_dropout") if s.dtype == "bool"]
    assert len(masks) == 2 * (
        1 + 2 * 2
    )  # two steps; after the embeddings, after attention and MLP of two layers
    assert all(s.asked == 2 * 24 * 96 and s.category == "activations" for s in masks)
    on_cpu = [
        s
        for size, s, _ in trace(tiny("gpt2"), "cpu", full=True).log
        if size > 0 and "bernoulli" in s.op
    ]
    assert not births(ran("gpt2"), "bernoulli_") and not any(s.dtype == "bool" for s in on_cpu)


@pytest.mark.parametrize(("precision", "copies"), [("fp16-true", 1), ("bf16-true", 2)])
def test_softmax_of_fp16_into_fp32_makes_no_copy(precision, copies):
    """The fp32 gradient of the cast back to half precision is there in both; bf16's fp32 scores
    come on top.
    """
    history = ran("llama", precision=precision, attn_implementation="eager")
    scores, layers, steps = (2, 6, 24, 24), 2, 2
    made = [s for s in births(history, "_to_copy") if s.shape == scores and s.dtype == "float32"]
    assert len(made) == copies * layers * steps
    assert any(s.shape == scores and s.dtype == "float32" for s in births(history, "_softmax"))


def test_layer_norm_keeps_fp32_statistics():
    def statistics(target):
        history = trace(tiny("gpt2", precision="fp16-true"), target, full=True)
        return {
            (s.dtype, s.asked) for s in births(history, "native_layer_norm") if s.shape[-1:] == (1,)
        }

    assert statistics("cuda") == {("float32", 4 * 2 * 24)}
    assert statistics("cpu") == {("float16", 2 * 2 * 24)}


def test_rms_norm_is_one_kernel():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.RMSNorm(64))
    arguments = {"batch": torch.rand(8, 64), "loss": lambda outputs, batch: outputs.sum()}
    ends = {}
    for target in ("cuda", "cpu"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        report = simulate(model=model, optimizer=optimizer, target=target, **arguments)
        ends[target] = report.phases["forward"].end.activations
    result, loss = 4 * 8 * 64, 512
    assert (
        ends["cuda"] <= 2 * result + 512 + loss
    )  # the linear layer's result, its own, a number a row
    assert ends["cpu"] > 2 * result


# --- sizes


def up(size: int) -> int:
    return -(-size // UNIT) * UNIT


def test_every_block_is_a_multiple_of_512_bytes():
    history = ran("bert", precision="bf16-mixed")
    assert all(abs(size) % 512 == 0 for size, _, _ in history.log)
    assert any(s.asked % 512 for _, s, _ in history.log)


def test_polyglot_is_where_its_published_figures_are():
    """1,331,810,304 parameters of two bytes, as many gradients, twice that for AdamW: 2.481, 2.481
    and 4.961 GiB.
    """
    recipe = Recipe("polyglot-ko-1.3b", batch_size=4, seq_len=256, precision="fp16-true")
    assert recipe.shape.num_parameters == 1_331_810_304
    report, whole = simulate(recipe), sum(up(2 * w.size) for w in recipe.shape.weights())
    step = report.phases["step"].peak
    assert 2 * 1_331_810_304 <= whole < 2 * 1_331_810_304 + 512 * len(recipe.shape.weights())
    assert (step.parameters, step.gradients, step.optimizer_states) == (whole, whole, 2 * whole)
    assert report.peak_phase == "step"


def test_multi_tensor_adamw_holds_one_more_copy_of_a_group():
    """`_multi_tensor_adamw` takes the square roots of a whole group at once; one after the other,
    one of a tensor.
    """
    recipe = tiny("llama", loop=Loop.named("trainer", max_grad_norm=None))
    sizes = [
        up(4 * w.size) for w in recipe.shape.weights() if w.kind != "norm"
    ]  # norms are the other group
    together = simulate(recipe).phases["step"].peak.temporaries
    assert sum(sizes) <= together <= sum(sizes) + up(4 * 96) * 4 + 4096
    one_by_one = simulate(
        recipe.replace(loop=Loop.named("trainer", max_grad_norm=None, foreach=False))
    )
    assert max(sizes) <= one_by_one.phases["step"].peak.temporaries <= 3 * max(sizes)
    fused = simulate(recipe.replace(optim="adamw_torch_fused"))
    assert fused.phases["step"].peak.temporaries <= 512 * (len(recipe.shape.weights()) + 4)


def test_step_counters_stay_on_the_host_unless_fused():
    recipe = tiny("gpt2")
    sizes = [up(4 * w.size) for w in recipe.shape.weights()]
    states = simulate(recipe).phases["between_steps"].end.optimizer_states
    assert states == 2 * sum(sizes)
    fused = (
        simulate(recipe.replace(optim="adamw_torch_fused"))
        .phases["between_steps"]
        .end.optimizer_states
    )
    assert fused == 2 * sum(sizes) + 512 * len(sizes)


def test_paged_states_are_outside_the_allocator():
    """bitsandbytes keeps states of 100,000 elements or more in unified memory."""
    recipe = Recipe(config("gpt2", vocab_size=2000), 2, 24, num_layers=1)
    weights = recipe.shape.weights()
    small = sum(up(4 * w.size) for w in weights if w.size < 1e5)
    large = sum(up(4 * w.size) for w in weights if w.size >= 1e5)
    assert small and large
    states = {o: simulate(recipe.replace(optim=o)).phases["between_steps"].end.optimizer_states
              for o in ("paged_adamw_32bit", "paged_lion_32bit", "lion_32bit")}  # fmt: skip
    assert states == {
        "paged_adamw_32bit": 2 * small,
        "paged_lion_32bit": small,
        "lion_32bit": small + large,
    }


def test_cublas_keeps_a_workspace_for_each_of_the_two_threads():
    recipe = tiny("gpt2", optim="sgd", loop=Loop.named("trainer", max_grad_norm=None))

    def workspaces(gpu):
        log = trace(recipe, "cuda", find_gpu(gpu) if gpu else None, full=True).log
        return [size for size, _, op in log if op == "cublas"]

    assert workspaces(None) == workspaces("A100") == [4096 * 1024 * 2 + 16 * 1024 * 8] * 2
    assert workspaces("H100") == [32 * MiB] * 2
    log = [op for size, _, op in trace(recipe, "cuda", full=True).log if size > 0]
    assert [log[i - 1] for i, op in enumerate(log) if op == "cublas"][-1] == "mm", (
        "backward's with its first product"
    )


def test_scratch_of_the_embeddings_backward():
    """`EmbeddingBackwardKernel.cu`: an fp32 row for each partial sum; short batches take a kernel
    without any.
    """
    gradient = torch.empty(4096, 64, dtype=fp16, device="meta")

    def scratch(count, rows):
        indices = torch.empty(count, dtype=torch.int64, device="meta")
        return kernel_scratch()("embedding_dense_backward", (gradient, indices, rows, -1, False))

    assert scratch(3072, 50000) == 0
    partial = 4096 // 10 + 4096
    assert scratch(4096, 50000) == 8 * (3 * 4096 + 2 * 4096 + partial) + 4 * 64 * partial
    partial = 4096 // 10 + 100
    assert scratch(4096, 100) == 8 * (3 * 4096 + 2 * 100 + partial) + 4 * 64 * partial


def test_scratch_of_attentions_backward():
    """fp32 dQ over padded rows; with grouped queries dK and dV of every query head
    (`flash_api.cpp`, mha_bwd).
    """
    query = torch.empty(2, 8, 100, 80, dtype=bf16, device="meta")
    few = torch.empty(2, 2, 100, 80, dtype=bf16, device="meta")
    alone = kernel_scratch()(FLASH + "_backward", (query, query, query, query))
    assert alone == 4 * 2 * 8 * 128 * (96 + 1)
    assert kernel_scratch()(FLASH + "_backward", (query, query, few, few)) == alone + 2 * (
        2 * 8 * 100 * 80 * 2
    )


def test_scratch_shows_as_workspace_only_while_the_kernel_runs():
    report = simulate(Recipe(config("llama"), 4, 1024, num_layers=1, precision="bf16-true"))
    kept = report.phases["backward"].end.workspace
    assert report.phases["backward"].peak.workspace >= kept >= 2 * cublas()


def cublas() -> int:
    return 4096 * 1024 * 2 + 16 * 1024 * 8


# --- nothing stays behind


FAKE_RULES = dict(fake_impls.op_implementations_dict)


def assert_untouched() -> None:
    from transformers.utils import import_utils

    x = torch.rand(1, 2, 8, 16, requires_grad=True)
    assert "NativeDropout" not in type(F.dropout(x, 0.5).grad_fn).__name__
    assert "Cpu" in type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__
    with torch.autocast("cpu", bf16):
        assert torch.rand(4, dtype=bf16).sum().dtype == bf16
    assert fake_impls.op_implementations_dict == FAKE_RULES
    assert import_utils.is_fake_tensor.__name__ == "is_fake_tensor"


def test_nothing_is_left_in_place():
    simulate(tiny("gpt2"))
    assert_untouched()
    with pytest.raises(KeyError), fake_world("cuda"):
        raise KeyError
    assert_untouched()


def test_nothing_is_left_in_place_when_registering_fails(monkeypatch):
    def fail(*of_thread):
        raise KeyError

    _install.cache_clear()
    monkeypatch.setattr("vramlab.simulation.cuda.cuda_autocast.install", fail)
    with pytest.raises(KeyError), fake_world("cuda"):
        pass
    monkeypatch.undo()
    assert_untouched()
    simulate(tiny("gpt2"))


def test_targets_do_not_see_each_others_cached_results():
    recipe = tiny("gpt2", precision="fp16-true")
    first = simulate(recipe, "cpu").peak
    on_cuda = simulate(recipe, "cuda").peak
    assert simulate(recipe, "cpu").peak == first and simulate(recipe, "cuda").peak == on_cuda


def test_threads_take_turns():
    recipes = [tiny("gpt2"), tiny("llama", precision="bf16-mixed"), tiny("bert")]
    alone = [simulate(recipe).peak for recipe in recipes]
    found: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda i=i, r=r: found.__setitem__(i, simulate(r).peak))
        for i, r in enumerate(recipes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(3)] == alone
    assert_untouched()


# --- convolutions


def test_cudnns_workspace_is_named_and_not_counted():
    plain, depthwise = torch.nn.Conv2d(4, 8, 3), torch.nn.Conv2d(4, 4, 3, groups=4)
    notes = {}
    for name, model in {
        "plain": torch.nn.Sequential(plain, torch.nn.Conv2d(8, 8, 3)),
        "depthwise": depthwise,
    }.items():
        for target in ("cuda", "cpu"):
            step = {"batch": torch.rand(2, 4, 8, 8), "loss": lambda outputs, batch: outputs.sum()}
            notes[name, target] = simulate(
                model=model, optimizer=torch.optim.SGD, target=target, **step
            ).notes
    assert notes.pop(("plain", "cuda")) == [CONVOLUTIONS]
    assert not any(notes.values())


def test_a_recipe_with_convolutions_says_so_too():
    assert simulate(Recipe("vit-base")).notes == [CONVOLUTIONS]


# --- the package flash-attn


FLASH_ATTN = [
    ("gpt2", {}),
    # a batch of one row, where transformers asks the positions whether it is several samples
    ("llama", {"gradient_checkpointing": True, "batch_size": 1}),
    ("bert", {}),
    ("mixtral", {}),
]


@pytest.mark.parametrize(("family", "changes"), params(FLASH_ATTN, FLASH_ATTN[1:3]))
def test_flash_attn_is_simulated_without_the_package(family, changes):
    """`flash_api.cpp`, which torch's own flash kernel has too: output, a number a row and the
    generator's state are kept, and dQ is summed up in fp32 in the backward pass."""
    recipe = tiny(family, precision="bf16-true", seq_len=64, **changes)
    package, own = (
        simulate(recipe.replace(attn_implementation=a)) for a in ("flash_attention_2", "sdpa")
    )
    for phase in package.phases:  # torch's own keeps a block of 512 bytes more a layer
        a, b = (r.phases[phase].peak.total for r in (package, own))
        assert 0 <= b - a <= 2 * 512


def test_what_flash_attn_allocates_by_hand():
    history = ran(
        "llama", precision="bf16-true", attn_implementation="flash_attention_2", seq_len=64
    )
    made = births(history, "_flash_attention_forward", ("activations",))
    heads, head, rows = 6, 16, 2 * 64
    assert {s.asked for s in made} == {2 * rows * heads * head, 4 * rows * heads, 16}
    gradient, few = (torch.empty(2, 100, n, 80, dtype=bf16, device="meta") for n in (8, 2))
    rest = (
        None,
    ) * 4  # output, log-sum-exp, and the ends of joined sequences, of which there are none
    alone = kernel_scratch()("_flash_attention_backward", (gradient, gradient, gradient, *rest))
    assert alone == 4 * 2 * 8 * 128 * (96 + 1)
    assert kernel_scratch()(
        "_flash_attention_backward", (gradient, gradient, few, *rest)
    ) == alone + 2 * (2 * 8 * 100 * 80 * 2)


@pytest.mark.parametrize(
    ("family", "gpu", "changes", "said"),
    [
        ("gpt2", None, {"precision": "fp32"}, "fp16 and bf16"),
        ("llama", None, {"precision": "fp32"}, "fp16 and bf16"),
        ("llama", "T4", {"precision": "fp16-true"}, "Ampere"),
        ("t5", None, {"precision": "bf16-true"}, "does not support Flash Attention 2"),
    ],
)
def test_flash_attn_is_refused_where_the_package_refuses(family, gpu, changes, said):
    with pytest.raises(RecipeError, match=said):
        simulate(tiny(family, attn_implementation="flash_attention_2", **changes), gpu=gpu)
