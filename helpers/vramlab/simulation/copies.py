"""Fake copies of a user's objects that share nothing with them: no hook or closure of a copy reaches the original."""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..report.errors import RecipeError

FUNCTIONS = (types.FunctionType, types.MethodType)
NAMESPACE = (
    torch.nn.Module,
    torch.Tensor,
    torch.optim.Optimizer,
    dict,
    list,
    set,
    tuple,
)  # copied of a function's globals
SHARED = (types.ModuleType, type, types.BuiltinFunctionType, str, bytes, int, float, complex, type(None))
COPIED = (*SHARED, *FUNCTIONS, torch.nn.Module, torch.Tensor, torch.Generator)  # without any question


class Copier:
    """Copies objects, each once. Tensors become fake ones of `mode`.

    `copy.deepcopy` shares functions. Here a function is made again where it holds something that is copied: in its
    closure, its defaults or, by name, its globals.
    """

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self.memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # ids in the memo stay true as long as what they are of lives

    def module(self, model: torch.nn.Module, adapt: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
        """The fake copy of `model`, after `adapt` was called on it, with its hooks and functions made again."""
        self._keep_locks(model)
        with FakeCopyMode(self.mode):
            fake = copy.deepcopy(model, self.memo)
        adapt(fake)
        pairs = list(zip(model.modules(), fake.modules(), strict=True))
        for old, new in pairs:
            for name in ("_parameters", "_buffers"):
                self.memo.update({id(tensor): getattr(new, name)[key] for key, tensor in getattr(old, name).items()})
        for old, new in pairs:
            for name, value in vars(old).items():
                if isinstance(value, FUNCTIONS):
                    vars(new)[name] = self(value)
                elif name.endswith("_hooks") and isinstance(value, dict):
                    getattr(new, name).update({key: self(hook) for key, hook in value.items()})
        for old, new in zip(model.parameters(), fake.parameters(), strict=True):
            for hook in (old._backward_hooks or {}).values():
                new.register_hook(self(hook))
            for hook in (old._post_accumulate_grad_hooks or {}).values():
                new.register_post_accumulate_grad_hook(self(hook))
        return fake

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The copy of `optimizer`, without its states; a learning-rate scheduler is not part of it."""
        new = self.memo[id(optimizer)] = object.__new__(type(optimizer))
        self._kept.append(optimizer)
        memo = dict(self.memo)  # another copy has groups of its own
        with FakeCopyMode(self.mode):
            for name, value in vars(optimizer).items():
                if name not in ("state", "step"):
                    vars(new)[name] = copy.deepcopy(value, memo)
        new.state = type(optimizer.state)(dict)
        return new

    def __call__(self, value: Any) -> Any:
        """The copy of `value`; itself where that makes no difference, or where it cannot be copied."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        self._kept.append(value)
        if isinstance(value, SHARED):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, torch.optim.Optimizer):
            return self.optimizer(value)
        if isinstance(value, torch.nn.Module):
            return self.module(value, lambda fake: None)
        try:
            with FakeCopyMode(self.mode):
                return copy.deepcopy(value, self.memo)
        except Exception:  # a handle, a lock, a stream: nothing that a step's tensors would be left in
            return value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        space = dict(function.__globals__)
        new = types.FunctionType(function.__code__, space, function.__name__, None, cells or None)
        new.__dict__.update(function.__dict__)
        new.__kwdefaults__, new.__module__ = function.__kwdefaults__, function.__module__
        self.memo[id(function)] = new
        for name in _names(function.__code__):
            held = space.get(name)
            own = isinstance(held, types.FunctionType) and held.__globals__ is function.__globals__
            if own or (isinstance(held, NAMESPACE) and not name.startswith("__")):
                space[name] = self(held)
        new.__defaults__ = self(function.__defaults__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self(old.cell_contents)
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
                with _disable_current_modes():
                    self.memo[id(value)] = copy.deepcopy(value)
            if isinstance(value, COPIED) or not depth:
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
