"""The mode that makes fake tensors: a quick one where it fits the installed torch, else torch's."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..private import of_fake_tensors
from ..private.of_fake_tensors import FakeTensor, FakeTensorMode
from ..private.of_torch import address_of
from ..tracking.tracked_operators import VIEWS
from .fake_operators import rules_of

aten = torch.ops.aten
# Of this process, by target: torch's entries by operator and arguments, None where it makes none.
CACHED: dict[str, dict[tuple, Any]] = {"cuda": {}, "cpu": {}}
PLAIN = (
    type(None),
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def fake_mode(target: str) -> "RuledFakeMode":
    """Return a new mode for `target`.

    It is a `QuickFakeMode` if that fits the installed torch, else torch's own, which is slower.
    """
    rules = rules_of(target)
    if quick_mode_fits():
        return QuickFakeMode(CACHED[target], rules, target)
    return RuledFakeMode(rules, target)


class RuledFakeMode(FakeTensorMode):
    """torch's own FakeTensorMode with `rules` for some operators.

    torch's table of such is every thread's. `target` is "cuda" where the tensors stand for a GPU's.
    """

    # torch.compile compiles inside (`compiled.py`)
    ignore_compile_internals = staticmethod(lambda: True)

    def __init__(self, rules: dict[Any, Callable], target: str = "cpu") -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.target = target
        self._rules = rules

    def dispatch(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Return the fake result of an operator."""
        rule = self._rules.get(func)
        # Another subclass, such as DTensor, comes first: its inner tensors come back here.
        if rule is None or any(kind is not FakeTensor for kind in types):
            return super().dispatch(func, types, args, kwargs)
        # torch takes the mode off while it dispatches, and the rule's own operators need it.
        with self:
            result = rule(*args, **(kwargs or {}))
        if result is NotImplemented:
            return super().dispatch(func, types, args, kwargs)
        return result


class QuickFakeMode(RuledFakeMode):
    """A FakeTensorMode that caches results by a shorter key than torch's.

    torch's took 40 % of a simulation. It leans on private parts of torch (`_make_cache_entry` and
    what its entries hold, `FakeTensor`'s attributes), which change without notice: make it by
    `fake_mode`, which tries it before.
    """

    # no guard against torch.compile around each operator
    _should_skip_dynamo = staticmethod(lambda: False)

    def __init__(
        self,
        entries: dict[tuple, Any],
        rules: dict[Any, Callable],
        target: str = "cpu",
    ) -> None:
        super().__init__(rules, target)
        self.cache_enabled = False  # torch's
        self._entries = entries
        empty = torch.empty(0, device="meta")

        # What `FakeTensor()` sets depends on mode and device alone, so it is made once and copied
        # from then on.
        @functools.cache
        def attributes(device: torch.device) -> dict[str, Any]:
            return vars(FakeTensor(self, empty, device))

        self._attributes = attributes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._unsafe_view.default:
            func = aten.view.default  # which torch caches
        # Their kernels take no longer than a cached result. torch finds the content of a constant's
        # view.
        if func in VIEWS and getattr(args[0], "constant", 0) is None:
            with of_fake_tensors.meta_kernels(self):
                view = func(*args, **kwargs)
            attributes = self._attributes(args[0].fake_device)
            return of_fake_tensors.new_fake(view, False, attributes)
        try:
            # Of an operator that makes no view the place in a storage decides nothing, and slices
            # of one flat buffer differ in it alone.
            described = _described((args, *kwargs.items()), getattr(func, "is_view", True))
            key = (func, torch.get_default_dtype(), *described)
            entry = self._entries.get(key)
        except TypeError:  # for torch to judge
            return self.dispatch(func, types, args, kwargs)
        # None stands for a call that torch would not cache: it is computed each time, and not
        # asked about again.
        if entry:
            outputs = tuple(self._output(output, args) for output in entry.output_infos)
            return outputs if entry.is_output_tuple else outputs[0]
        result = self.dispatch(func, types, args, kwargs)
        if key not in self._entries:
            self._entries[key] = self._entry(func, args, kwargs, result)
        return result

    def _entry(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> Any:
        """Return what torch would cache of `result`, or None."""
        if not isinstance(result, torch.Tensor | tuple):
            return None
        entry = of_fake_tensors.new_cache_entry(self, func, args, kwargs, result)
        if entry is None:
            return None
        for output in entry.output_infos:
            made = output.metadata
            if made and (made.is_conj or made.is_neg):
                return None
        return None if _has_room(entry, result) else entry

    def _output(self, output: Any, args: Any) -> Any:
        """Return one result of a cached operator.

        It is made as torch makes it, without `FakeTensor()` and guards, which take most of the
        time.
        """
        made = output.metadata
        if made is None:
            if output.inplace_idx is None:
                return output.constant_value
            return args[output.inplace_idx]
        meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if output.view_idx is not None:
            storage = args[output.view_idx].untyped_storage()
            meta.set_(storage, made.storage_offset, made.shape, made.stride)
        attributes = self._attributes(made.device)
        return of_fake_tensors.new_fake(meta, made.requires_grad, attributes)

    def _validate_cache_key(self, func: Any, args: Any, kwargs: Any) -> None:
        # torch caches its own operators only
        if getattr(func, "namespace", "") != "bitsandbytes":
            super()._validate_cache_key(func, args, kwargs)


def _has_room(entry: Any, result: torch.Tensor | tuple) -> bool:
    """Tell whether a new tensor's storage is larger than its elements.

    An entry does not say so: `hann_window` makes 65 for 64.
    """
    results = result if isinstance(result, tuple) else (result,)
    for output, tensor in zip(entry.output_infos, results, strict=True):
        is_new = output.view_idx is None and output.inplace_idx is None
        if is_new and isinstance(tensor, torch.Tensor):
            strides = tensor.stride()
            fresh = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
            if fresh.untyped_storage().nbytes() < tensor.untyped_storage().nbytes():
                return True
    return False


@functools.cache
def quick_mode_fits() -> bool:
    """Tell whether `QuickFakeMode` works with the installed torch.

    A trial has to find what torch's own mode finds, twice: the second time from the cache.
    """
    expected = _trial(FakeTensorMode(allow_non_fake_inputs=True))
    try:
        quick = QuickFakeMode({}, {})
        first = _trial(quick)
        second = _trial(quick)
    except Exception:  # whatever a changed private part raises
        return False
    return first == expected and second == expected


def _trial(mode: FakeTensorMode) -> list[tuple]:
    """Return what a few operators give under `mode`.

    A new tensor, a view, a result in place, a tuple, a gradient.
    """
    # The trial may come while a caller is in `no_grad` or inference mode, and its answer is
    # cached.
    with mode, torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(4, 6, requires_grad=True)
        product = x @ torch.empty(6, 8)
        view = product.view(2, 2, 8)[1]
        in_place = product.detach().add_(1)
        normed, *statistics = aten.native_layer_norm(product, [8], None, None, 1e-5)
        normed.sum().backward()
        made = [x, product, view, in_place, normed, *statistics, x.grad]
        # Addresses differ between runs; which tensors share a storage does not.
        address = address_of(product.untyped_storage())
        results = []
        for tensor in made:
            (described,) = _described([tensor])
            results.append((described, address_of(tensor.untyped_storage()) == address))
    return results


def _described(values: Iterable[Any], has_place: bool = True) -> tuple:
    """Return what of an operator's arguments decides its fake result.

    With `has_place` that is also where in its storage a tensor begins. Raises TypeError where that
    is not all to be seen here.
    """
    described: list[tuple] = []
    for value in values:
        if isinstance(value, FakeTensor) and _is_plain(value):
            described.append(
                (
                    value.shape,
                    value.stride(),
                    value.storage_offset() if has_place else None,
                    value.dtype,
                    value.fake_device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                ),
            )
        elif isinstance(value, list | tuple):
            described.append((type(value), _described(value, has_place)))
        elif isinstance(value, PLAIN):
            described.append((type(value), value))
        else:
            raise TypeError
    return tuple(described)


def _is_plain(tensor: FakeTensor) -> bool:
    """Tell whether sizes and dtype say all of a fake tensor."""
    return tensor.constant is None and tensor.layout is torch.strided
