"""Fake copies of a user's objects that share nothing with them: no hook or closure of a copy reaches the original."""

import copy
import types
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..report.errors import RecipeError

GLOBALS = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, dict, list, set, tuple)  # copied with a function
LIBRARIES = ("torch", "transformers", "peft")  # whose functions hold nothing of the user's
# what needs no look before it is copied
PLAIN = (*GLOBALS[:2], torch.Generator, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
PLAIN += (types.MethodType, type, str, bytes, int, float, complex, type(None))


class Copier:
    """Copies objects, each once: tensors become fake ones of `mode`, parameters and buffers on the CPU, of `dtype` if they
    are floating and there is one. Functions, which `copy.deepcopy` shares, get copies of what they hold in closure,
    defaults and, by name, globals."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None):
        self.mode, self.dtype = mode, dtype
        self.memo: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """The copy of `value`, or itself where that makes no difference; RecipeError for a module that has no copy."""
        with FakeCopyMode(self.mode), patch.dict(copy._deepcopy_dispatch, {types.FunctionType: self._function}):
            return self._copy(value)

    def _copy(self, value: Any) -> Any:
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        try:
            return copy.deepcopy(value, self.memo)
        except Exception:  # a handle, a lock, a stream: nothing that a step's tensors would be left in
            return value

    def _module(self, model: torch.nn.Module) -> torch.nn.Module:
        """With its hooks and its parameters' hooks."""
        self._keep_locks(model)
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in self.memo:
                    self.memo[id(tensor)] = self._on_cpu(copy.deepcopy(tensor))
        fake = copy.deepcopy(model, self.memo)
        for old, new in zip(model.parameters(), fake.parameters(), strict=True):
            for hook in (old._backward_hooks or {}).values():
                new.register_hook(self._copy(hook))
            for hook in (old._post_accumulate_grad_hooks or {}).values():
                new.register_post_accumulate_grad_hook(self._copy(hook))
        return fake

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Without its states; a learning-rate scheduler is not part of it."""
        new = self.memo[id(optimizer)] = object.__new__(type(optimizer))
        memo = dict(self.memo)  # another copy has groups of its own
        for name, value in vars(optimizer).items():
            if name not in ("state", "step"):
                vars(new)[name] = copy.deepcopy(value, memo)
        new.state = type(optimizer.state)(dict)
        return new

    def _on_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype
        if tensor.device.type == "cpu" and tensor.dtype == dtype:
            return tensor
        new = torch.empty_like(tensor, device="cpu", dtype=dtype)
        return torch.nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else new

    def _function(self, function: types.FunctionType, memo: dict) -> types.FunctionType:
        if not function.__closure__ and function.__module__.partition(".")[0] in LIBRARIES:
            return function
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        space = dict(function.__globals__)
        new = types.FunctionType(function.__code__, space, function.__name__, None, cells or None)
        new.__dict__.update(function.__dict__)
        new.__kwdefaults__, new.__module__ = function.__kwdefaults__, function.__module__
        memo[id(function)] = new
        for name in _names(function.__code__):
            held = space.get(name)
            own = isinstance(held, types.FunctionType) and held.__globals__ is function.__globals__
            if own or (isinstance(held, GLOBALS) and not name.startswith("__")):
                space[name] = self._copy(held)
        new.__defaults__ = self._copy(function.__defaults__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self._copy(old.cell_contents)
            except ValueError:  # an empty cell: a name that is bound later
                continue
        return new

    def _keep_locks(self, model: torch.nn.Module) -> None:
        """Share what cannot be copied and holds no tensors; raise RecipeError for what would be used up."""

        def look(value: Any, where: str, depth: int) -> None:
            if isinstance(value, types.GeneratorType):
                allowed = f"its attribute {where!r} is a generator, which cannot be copied: give it a list"
                raise RecipeError("model", type(model).__name__, allowed)
            if isinstance(value, torch.Generator):
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    self.memo[id(value)] = copy.deepcopy(value)
            if isinstance(value, PLAIN) or not depth:
                return
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            items = list(value) if isinstance(value, list | tuple | set) else list(inner.values())
            for item in items:
                look(item, where, depth - 1)
            if not items:
                try:
                    value.__reduce_ex__(4)
                except Exception:  # of locks, files, sockets and the like
                    self.memo[id(value)] = value

        for path, module in model.named_modules():
            for name, value in vars(module).items():
                look(value, f"{path}.{name}".strip("."), 4)


def _names(code: types.CodeType) -> set[str]:
    """The global names that `code` and the functions defined in it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
