"""Which module runs, while a step is followed."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..private.patched import only_here

REFERENCE = "reference"  # before the names of a reference model's modules and parameters


class RunningModules:
    """The modules that are running, innermost last, by name."""

    meets = False  # whether modules outside of the model are met too

    def __init__(self) -> None:
        super().__init__()
        self._modules: list[str] = []
        # modules outside of the model that were called
        self._others: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def meet_module(self, module: torch.nn.Module) -> None:
        """Take note of a module outside of the model that is called."""

    @contextmanager
    def modules(
        self,
        model: torch.nn.Module,
        reference: torch.nn.Module | None = None,
    ) -> Iterator[None]:
        """While entered, give storages the name of the module that made them.

        Names in a `reference` model begin with REFERENCE.
        """
        names = {id(module): name for name, module in model.named_modules()}
        if reference is not None:
            for name, module in reference.named_modules(prefix=REFERENCE):
                names[id(module)] = name

        def enter(module: torch.nn.Module, args: Any) -> None:
            if not is_here():
                return
            if self.meets and id(module) not in names and module not in self._others:
                # With all that is inside, whose own calls are then no news.
                self._others.update(module.modules())
                self.meet_module(module)
            running = self._modules[-1] if self._modules else ""
            # A module without a name, such as one made inside a forward pass, counts as the one
            # around it.
            self._modules.append(names.get(id(module), running))

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if self._modules and is_here():
                self._modules.pop()

        hooks = torch.nn.modules.module
        with (
            only_here() as is_here,  # such hooks run in every thread
            hooks.register_module_forward_pre_hook(enter),
            # always: a checkpoint stops its recomputation early, by an exception that skips
            # ordinary hooks
            hooks.register_module_forward_hook(leave, always_call=True),
        ):
            yield

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """While entered, what is made is the module's of that name."""
        self._modules.append(name)
        try:
            yield
        finally:
            self._modules.pop()

    def name_module(self, name: str) -> None:
        """Give what is made from here on, outside of `modules`, a module's or parameter's name."""
        self._modules = [name]

    def where_now(self) -> str:
        """Return the name of the module that is running; "" outside."""
        return self._modules[-1] if self._modules else ""

    def running_module(self) -> str:
        """Return the module that is running, for a sentence; "" outside."""
        return f"module {self._modules[-1]!r}" if self._modules else ""
