"""A mode that hears of each tensor that operators make: what some judges and cells count."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MadeTensors(TorchDispatchMode):
    """While entered, gives `see` each tensor that an operator returns, also in backward."""

    sees_views = True  # which look at memory that is there

    def see(self, tensor: torch.Tensor) -> None:
        """Take a tensor that was made, or a view of one."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view and not self.sees_views:
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result
