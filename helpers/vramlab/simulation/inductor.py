"""Inductor compiles for a card that is not there, and what it generates runs without its kernels.

The wrapper that Inductor writes around its kernels allocates every buffer (`empty_strided_cuda`),
frees it (`del`) and hands it on (`# reuse`): it is run as it is, on fake tensors, and each kernel
in it does nothing. The step is traced on fake CPU tensors, which stand for a GPU's here, so its
graphs are given that device before Inductor schedules them.
"""

import ast
import contextlib
import ctypes
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..base.errors import RecipeError
from ..hardware.gpu import Chip
from ..private.of_compiler import dynamo, inductor, triton_of_torch
from ..private.of_fake_tensors import FakeTensor
from ..private.of_torch import tree_map, without_modes
from ..private.patched import replaced
from . import own_kernels
from .cuda import AMPERE

GPU = torch.device("cuda", 0)
HOPPER = (9, 0)
REGISTERS = 65_536  # of a multiprocessor, on all of CUDA's from compute capability 5 on
BLOCK_THREADS = 1024
WARP = 32
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # by type of device: CPU, CUDA, …
GENERATOR = 16  # bytes of a CUDA generator's state


class Kernel:
    """A kernel, which is not launched."""

    def __call__(self, *args: Any, **options: Any) -> None:
        """Do nothing."""

    run = __call__


class Compiled:
    """Stands for `CompiledFxGraph`: a generated wrapper without kernels."""

    partition_maps = None

    def __init__(self, *args: Any, **options: Any) -> None:
        # torch looks for it among the attributes of the instance
        self._boxed_call = True
        self.call: Callable = args[0]

    def post_compile(self, *args: Any, **options: Any) -> None:
        """Do nothing: there are no CUDA graphs, and no input is misaligned."""

    set_triton_bundle = post_compile
    prepare_for_serialization = post_compile

    def __call__(self, args: list) -> Any:
        """Run the wrapper, which empties `args`."""
        with torch.no_grad(), own_kernels.left():
            return self.call(args)


def compiler(chip: Chip | None, on_host: Callable[[list[torch.Tensor]], None]) -> Callable:
    """Return a backend for `torch.compile`: Inductor's, for a GPU of `chip`, or None: for the CPU.

    `on_host` is called with what a wrapper makes on the host of a GPU.
    """
    compile_fx = inductor("compile_fx")
    config = inductor("config")
    graph = inductor("graph")

    def compile_to_module(lowering: Any) -> Any:
        # `GraphLowering.compile_to_module` would write this text to disk and import it, which
        # compiles its kernels.
        code, _ = lowering.codegen()
        call = wrapper(getattr(code, "value", code), lowering.constants, on_host if chip else None)
        return SimpleNamespace(call=call)

    def compile_graph(module: Any, inputs: Sequence, **options: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(own_kernels.left())
            if chip:
                inputs = moved(module, inputs)
                for context in _on_gpu(chip):
                    stack.enter_context(context)
            module_of = replaced(graph.GraphLowering, "compile_to_module", compile_to_module)
            stack.enter_context(module_of)
            stack.enter_context(replaced(compile_fx, "CompiledFxGraph", Compiled))
            # what others compiled would be found there, with its kernels
            stack.enter_context(config.patch(force_disable_caches=True))
            compiled = compile_fx.compile_fx_inner(module, inputs, **options)
        # What its pattern matcher raised holds the frames of all callers in a cycle, and one of
        # those has the gradients (torch 2.15). Compiling for real is long enough for Python to
        # collect it; here nothing is collected by itself.
        gc.collect(1)
        return compiled

    def backend(module: Any, inputs: Sequence, **options: Any) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=compile_graph)

    return backend


def moved(module: Any, inputs: Sequence) -> list:
    """Let a graph of fake CPU tensors be one of a GPU's, and return its inputs as such."""
    for node in module.graph.nodes:
        node.args = tree_map(_moved, node.args)
        node.kwargs = tree_map(_moved, node.kwargs)
        if "val" in node.meta:
            node.meta["val"] = tree_map(_moved, node.meta["val"])
    module.recompile()
    return [_moved(value) for value in inputs]


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return GPU if value.type == "cpu" else value
    if not isinstance(value, FakeTensor) or value.fake_device.type != "cpu":
        return value
    # Under the modes the meta tensor would itself be fake, and logged.
    with without_modes():
        strides = value.stride()
        meta = torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, GPU)


def _on_gpu(chip: Chip) -> Iterator[contextlib.AbstractContextManager]:
    """Return contexts in which Inductor finds a GPU of `chip`, and Triton."""
    device_interface = dynamo("device_interface")
    device_properties = inductor("runtime.hints").DeviceProperties
    device_interface.get_registered_device_interfaces()  # which fills the table
    properties = _properties(chip)
    answers: dict[str, Callable] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: chip.capability,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_rng_state": lambda device="cuda": torch.empty(GENERATOR, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
    }
    for name, answer in answers.items():
        yield replaced(torch.cuda, name, answer)
    yield replaced(device_interface.device_interfaces, "cuda", _interface(chip, properties))
    # it keeps the first card's for ever
    create = vars(device_properties)["create"].__func__.__wrapped__
    yield replaced(device_properties, "create", classmethod(create))
    yield replaced(inductor("scheduler"), "has_triton", lambda *args: True)
    yield replaced(triton_of_torch(), "triton_hash_with_backend", lambda *args: "")

    def cannot_add(dtype: torch.dtype) -> bool:
        # atomic additions (`utils.needs_fallback_due_to_atomic_add_limitations`)
        if dtype == torch.bfloat16:
            return chip.capability < HOPPER
        return dtype in (torch.int64, torch.bool)

    for name in ("utils", "lowering", "decomposition"):
        yield replaced(inductor(name), "needs_fallback_due_to_atomic_add_limitations", cannot_add)
    yield _guarded()


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """While entered, torch's C++ takes fake tensors of a GPU where there is none.

    Before some operators it makes their device the current one, by an object that a CPU build lacks
    and that finds no driver in a CUDA build (c10/core/impl/DeviceGuardImplInterface.h,
    `device_guard_impl_registry`). The CPU's does nothing. Where the table is not found so, as on
    Windows, these operators fail.
    """
    folder = Path(torch.__file__).parent / "lib"
    table: Any = None
    if not torch.cuda.is_available():
        for file in folder.glob("libc10.*"):
            with contextlib.suppress(OSError, ValueError):
                table = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(str(file)), GUARDS)
    if table is None:
        yield
        return
    of_cpu, before = table
    table[1] = of_cpu
    try:
        yield
    finally:
        table[1] = before


def _properties(chip: Chip) -> SimpleNamespace:
    """Return what `torch.cuda.get_device_properties` says of a GPU."""
    major, minor = chip.capability
    return SimpleNamespace(
        name="",
        gcnArchName="",  # of AMD
        major=major,
        minor=minor,
        multi_processor_count=chip.multiprocessors,
        max_threads_per_multi_processor=chip.threads,
        max_threads_per_block=BLOCK_THREADS,
        regs_per_multiprocessor=REGISTERS,
        warp_size=WARP,
    )


def _interface(chip: Chip, properties: SimpleNamespace) -> type:
    """Return dynamo's interface to a GPU with these `properties`."""
    base: Any = dynamo("device_interface").CudaInterface
    major, minor = chip.capability

    class Interface(base):
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        get_device_properties = staticmethod(lambda device=None: properties)
        get_compute_capability = staticmethod(lambda device=None: 10 * major + minor)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        is_bf16_supported = staticmethod(lambda *args, **options: chip.capability >= AMPERE)

        class Worker:
            current_device = staticmethod(lambda: 0)
            set_device = staticmethod(lambda device: None)
            get_device_properties = staticmethod(lambda device=None: properties)

    return Interface


def wrapper(
    code: str,
    constants: dict[str, Any],
    on_host: Callable[[list[torch.Tensor]], None] | None,
) -> Callable:
    """Return `call` of the module that Inductor generated, with kernels that do nothing.

    `on_host` is called with what is made on a GPU's host; None on a CPU.
    """
    tree = ast.parse(code)
    names = _names(constants, on_host)
    defined: list[ast.stmt] = []
    # Only functions and classes are run. The other statements import Triton and compile kernels,
    # each of which becomes a name that does nothing.
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.append(node)
        elif isinstance(node, ast.Assign):
            for name in node.targets:
                if isinstance(name, ast.Name):
                    names.setdefault(name.id, Kernel())
        elif isinstance(node, ast.ImportFrom):
            for imported in node.names:
                if imported.name.startswith("assert_"):  # of a buffer, which has no values
                    names.setdefault(imported.name, Kernel())
    exec(compile(ast.Module(defined, []), "<generated by Inductor>", "exec"), names)
    # With graph partitions the entry is a method of this class.
    runner = names.get("Runner")
    return runner(partitions=[]).call if runner else names["call"]


class Operators:
    """Stands for `torch.ops`: what keeps a generator's state for a recomputation is Python code."""

    def __init__(self, generator_state: Callable[[], torch.Tensor]) -> None:
        def run_and_save(operator: Callable, *args: Any, **options: Any) -> tuple:
            return generator_state(), operator(*args, **options)

        def run_with(state: torch.Tensor, operator: Callable, *args: Any, **options: Any) -> Any:
            return operator(*args, **options)

        self.higher_order = SimpleNamespace(
            run_and_save_rng_state=run_and_save, run_with_rng_state=run_with
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops, name)


def _names(
    constants: dict[str, Any], on_host: Callable[[list[torch.Tensor]], None] | None
) -> dict[str, Any]:
    """Return what the generated module finds under its names."""

    # A fake CPU tensor stands for the GPU's buffer, as everywhere in a simulation.
    def empty(shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    def empty_on_host(shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
        made = empty(shape, strides, dtype)
        if on_host:
            on_host([made])
        return made

    def reinterpret(
        buffer: torch.Tensor, shape: tuple, strides: tuple, offset: int = 0
    ) -> torch.Tensor:
        return torch.as_strided(buffer, shape, strides, buffer.storage_offset() + offset)

    def pool(*args: Any) -> None:
        raise RecipeError("torch_compile", True, "Inductor's memory_planning is not simulated")

    cuda = SimpleNamespace(
        _DeviceGuard=lambda index: contextlib.nullcontext(),
        set_device=lambda index: None,
    )

    def generator_state() -> torch.Tensor:
        size = GENERATOR if on_host else torch.get_rng_state().numel()
        return empty_on_host((size,), (1,), torch.uint8)

    own = {"cuda": cuda, "ops": Operators(generator_state)}
    return {
        **constants,
        "torch": SimpleNamespace(**{**vars(torch), **own}),
        "aten": torch.ops.aten,
        "device": torch.device,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "extern_kernels": inductor("select_algorithm").extern_kernels,
        "get_raw_stream": lambda index: 0,
        "copy_if_misaligned": lambda tensor: tensor,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": empty_on_host,
        "empty_strided_cpu_pinned": empty_on_host,
        "empty_strided_cuda": empty,
        "reinterpret_tensor": reinterpret,
        "alloc_from_pool": pool,
        "inductor_ops": torch.ops.inductor,
        "_quantized": torch.ops._quantized,
    }
