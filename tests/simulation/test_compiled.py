"""The compiled step: Inductor's wrappers on fake tensors, held against really compiled steps."""

import re
import weakref

import pytest
import torch
from torch._dynamo import pgo
from torch.profiler import ProfilerActivity, profile, record_function
from vramlab import LoRA, Recipe, Sharding, simulate
from vramlab.base.errors import RecipeError
from vramlab.measurement.records import find_record
from vramlab.simulation.compiled import TIMED
from vramlab.simulation.inductor import wrapper
from vramlab.simulation.simulate import trace
from vramlab.training import training as tr

TINY = Recipe(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 1003,
        "max_position_embeddings": 64,
    },
    2,
    32,
    torch_compile=True,
)
# What Inductor generates for `x.sin() @ w`, shortened; what it imports to check since torch 2.14
GENERATED = """
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.runtime_utils import assert_tensor_metadata
async_compile = AsyncCompile()
triton_poi_fused_sin_0 = async_compile.triton('triton_poi_fused_sin_0', '''...''')
def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    assert_tensor_metadata(arg0_1, (4, 8), (8, 1), torch.float32, 'input')
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        raw_stream0 = get_raw_stream(0)
        triton_poi_fused_sin_0.run(arg0_1, buf0, 32, stream=raw_stream0)
        del arg0_1
        buf1 = empty_strided_cuda((4, 2), (2, 1), torch.float32)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        buf2 = reinterpret_tensor(buf0, (4, 2), (2, 1), 0); del buf0  # reuse
    return (buf1, buf2, )
"""


def test_a_generated_wrapper_runs_without_its_kernels():
    x = torch.randn(4, 8)
    args = [x, torch.ones(8, 2)]
    product, reused = wrapper(GENERATED, {}, on_host=list)(args)
    assert args == [] and product.shape == (4, 2)
    assert reused.untyped_storage().nbytes() == x.nbytes


def test_a_generated_wrapper_calls_convolutions_too():
    convolution = "extern_kernels.convolution"
    shape = "stride=(2,), padding=(0,), dilation=(1,), transposed=False, output_padding=(0,)"
    code = f"""
def call(args):
    image, filters = args
    return ({convolution}(image, filters, {shape}, groups=1, bias=None),)
"""
    (convolved,) = wrapper(code, {}, on_host=list)([torch.ones(2, 3, 8), torch.ones(4, 3, 2)])
    assert convolved.shape == (2, 4, 4)


def test_compiling_moves_the_peak_and_changes_nothing_else():
    sizes = pgo.get_code_state().copy()
    eager = simulate(TINY.replace(torch_compile=False))
    compiled = simulate(TINY, gpu="H100")
    before = eager.phases["forward"].end.activations
    assert 0 < compiled.phases["forward"].end.activations < before
    for name in ("parameters", "gradients", "optimizer_states"):
        for phase in ("backward", "step", "between_steps"):
            held = getattr(compiled.phases[phase].end, name)
            assert held == getattr(eager.phases[phase].end, name)
    assert any("autotuning" in note for note in compiled.notes)
    # nothing of it is left: neither in torch, whose next step of another length would be dynamic,
    # nor in what is simulated next
    assert pgo.get_code_state() == sizes
    assert simulate(TINY.replace(torch_compile=False)).allocated == eager.allocated
    assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(
        type(tr.build(TINY).model).forward.__code__
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": Sharding(0, 2, "ddp")},
        {"use_liger_kernel": True},
        {"activation_offloading": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_compiled_is_refused_in_one_sentence(changes):
    base = Recipe("llama-3.2-1b", 1, 64, trainer="sft", torch_compile=True)
    with pytest.raises(RecipeError, match=r"'torch_compile' is True.*not simulated with"):
        simulate(base.replace(**changes))


def test_what_does_not_compile_is_said_in_one_sentence(monkeypatch):
    from torch._inductor import compile_fx

    def breaks(*args, **options):
        raise ValueError("no such graph")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", breaks)
    with pytest.raises(
        RecipeError, match=r"does not get through.*no such graph.*eager step"
    ) as seen:
        simulate(TINY)
    assert "\n" not in str(seen.value)
    assert not holds_arguments_longer()


def holds_arguments_longer() -> bool:
    """Tell whether dynamo still takes part in each call: a caller then holds what it hands on."""

    def is_last(argument: object) -> bool:
        alive = weakref.ref(argument)
        del argument
        return alive() is None

    return not is_last(Held())


class Held:
    """Something that can be followed."""


def real_phases(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Return of each phase of a really compiled third step on the CPU what was asked for at its
    peak and at its end, above what was held before the step.

    torch's profiler counts no free of what was made before it began, so it sees the second too.
    """
    training = tr.build(recipe, "cpu")
    training.model.compile()
    tr.train_step(training)
    running = []

    def begin(name: str) -> None:
        if running:
            running.pop().__exit__(None, None, None)
        running.append(record_function(f"phase {name}"))
        running[0].__enter__()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        tr.train_step(training)
        tr.train_step(training, begin)
        running.pop().__exit__(None, None, None)
    changes = []
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes(), ""))
        elif event.name().startswith("phase "):
            changes.append((event.start_ns(), 0, event.name().removeprefix("phase ")))
    phases: dict[str, tuple[int, int]] = {}
    held = 0
    name = ""
    for _, size, began in sorted(changes, key=lambda change: change[0]):
        if began and not name:
            held = 0
        name = began or name
        held += size
        if name:
            highest, _ = phases.get(name, (held, held))
            phases[name] = (max(highest, held), held)
    return phases


@pytest.mark.slow  # a C++ compiler works for a minute
@pytest.mark.parametrize(
    "recipe",
    [
        TINY,
        TINY.replace(gradient_checkpointing=True),
        Recipe("gpt2", 2, 64, num_layers=1, torch_compile=True),
        Recipe("gpt2", 2, 64, num_layers=1, torch_compile=True, lora=LoRA(r=8)),
        Recipe("bert-base-uncased", 2, 64, num_layers=1, torch_compile=True),
    ],
    ids=str,
)
def test_forward_and_backward_of_a_compiled_cpu_step_are_equal_to_the_byte(recipe):
    history = trace(recipe, target="cpu")
    real = real_phases(recipe)
    forward, backward, *_ = history.last_step
    before = history.split(forward.start).total
    for name, start, end in (forward, backward):
        highest = history.split(history.highest(start, end)).total
        most, left = real[name]
        assert highest - before == most
        assert history.split(end).total - before == left


def test_the_times_that_are_said_are_recorded():
    for tokens, precision in ((1024, "bf16-mixed"), (512, "fp32")):
        eager = Recipe("gpt2", 8, tokens, precision)
        seconds = [
            find_record(recipe, "H100").speed.median
            for recipe in (eager, eager.replace(torch_compile=True))
        ]
        share = seconds[1] / seconds[0]
        assert re.search(rf"{share:.2f}[a-z ]* \(8 × {tokens} tokens, {precision}\)", TIMED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "gpu", "recorded"),
    [
        (Recipe("gpt2", 8, 512, torch_compile=True), "H100 SXM", 5_758_937_600),
        (Recipe("gpt2", 8, 1024, "bf16-mixed", torch_compile=True), "H100 SXM", 7_242_512_384),
        (Recipe("gpt2", 8, 1024, "fp16-mixed", torch_compile=True), "H200", 7_284_568_064),
        (Recipe("llama-3.2-1b", 4, 1024, "bf16-mixed", torch_compile=True), "H200", 26_479_095_296),
    ],
    ids=str,
)
def test_recorded_compiled_steps_are_within_a_per_cent(recipe, gpu, recorded):
    """They ran torch 2.11, whose Inductor decides as later ones do here."""
    assert simulate(recipe, gpu=gpu).allocated == pytest.approx(recorded, rel=0.01)
