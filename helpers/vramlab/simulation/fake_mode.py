"""The mode that makes fake tensors: a quick one where it fits the installed torch, else torch's own."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .operators import rules_of

aten = torch.ops.aten
# Of this process, by target: torch's entries by operator and arguments, None where it makes none.
CACHED: dict[str, dict[tuple, Any]] = {"cuda": {}, "cpu": {}}
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def fake_mode(target: str) -> FakeTensorMode:
    """Return a new mode for `target`: a `QuickFakeMode` if it fits the installed torch, else torch's own, which is slower."""
    rules = rules_of(target)
    return QuickFakeMode(CACHED[target], rules) if quick_mode_fits() else RuledFakeMode(rules)


class RuledFakeMode(FakeTensorMode):
    """torch's own FakeTensorMode with `rules` for some operators; torch's table of such is every thread's."""

    def __init__(self, rules: dict[Any, Callable]):
        super().__init__(allow_non_fake_inputs=True)
        self._rules = rules

    def dispatch(self, func, types, args=(), kwargs=None):
        rule = self._rules.get(func)
        if rule is None or any(kind is not FakeTensor for kind in types):
            return super().dispatch(func, types, args, kwargs)
        with self:
            return rule(*args, **(kwargs or {}))


class QuickFakeMode(RuledFakeMode):
    """A FakeTensorMode that caches results by a shorter key than torch's, which took 40 % of a simulation.

    It leans on private parts of torch (`_make_cache_entry` and what its entries hold, `FakeTensor`'s attributes), which
    change without notice: make it by `fake_mode`, which tries it before.
    """

    _should_skip_dynamo = staticmethod(lambda: False)  # no guard against torch.compile around each operator

    def __init__(self, entries: dict[tuple, Any], rules: dict[Any, Callable]):
        super().__init__(rules)
        self.cache_enabled = False  # torch's
        self._entries = entries
        empty = torch.empty(0, device="meta")
        self._attributes = functools.cache(lambda device: vars(FakeTensor(self, empty, device)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._unsafe_view.default:
            func = aten.view.default  # which torch caches
        try:
            key = func, torch.get_default_dtype(), _described(args), _described(kwargs.items())
            entry = self._entries.get(key)
        except TypeError:  # for torch to judge
            return self.dispatch(func, types, args, kwargs)
        if entry:
            outputs = tuple(self._output(output, args) for output in entry.output_infos)
            return outputs if entry.is_output_tuple else outputs[0]
        result = self.dispatch(func, types, args, kwargs)
        if key not in self._entries:
            self._entries[key] = self._entry(func, args, kwargs, result)
        return result

    def _entry(self, func, args, kwargs, result):
        """What torch would cache of `result`, or None."""
        if not isinstance(result, torch.Tensor | tuple):
            return None
        with contextlib.suppress(fake_tensor._BypassDispatchCache):
            state = fake_tensor._CacheKeyState()
            entry = self._make_cache_entry(state, None, func, args, kwargs, result)
            tensors = [output.metadata for output in entry.output_infos if output.metadata]
            if not (any(tensor.is_conj or tensor.is_neg for tensor in tensors) or _has_room(entry, result)):
                return entry
        return None

    def _output(self, output, args):
        """One result of a cached operator. As torch's own, of which `FakeTensor()` and guards take most of the time."""
        made = output.metadata
        if made is None:
            return output.constant_value if output.inplace_idx is None else args[output.inplace_idx]
        meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if output.view_idx is not None:
            storage = args[output.view_idx].untyped_storage()
            meta.set_(storage, made.storage_offset, made.shape, made.stride)
        keys = {"dispatch_device": True, "device_for_backend_keys": made.device}
        fake = torch.Tensor._make_subclass(FakeTensor, meta, made.requires_grad, **keys)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes(made.device))
        return fake

    def _validate_cache_key(self, func, args, kwargs):
        if getattr(func, "namespace", "") != "bitsandbytes":  # torch caches its own operators only
            super()._validate_cache_key(func, args, kwargs)


def _has_room(entry: Any, result: torch.Tensor | tuple) -> bool:
    """Whether a new tensor's storage is larger than its elements, which an entry does not say: `hann_window` makes 65."""
    made = result if isinstance(result, tuple) else (result,)
    for output, tensor in zip(entry.output_infos, made, strict=True):
        if output.view_idx is None and output.inplace_idx is None and isinstance(tensor, torch.Tensor):
            fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if fresh.untyped_storage().nbytes() < tensor.untyped_storage().nbytes():
                return True
    return False


@functools.cache
def quick_mode_fits() -> bool:
    """Whether `QuickFakeMode` works with the installed torch: a trial finds what torch's own mode finds, twice."""
    expected = _trial(FakeTensorMode(allow_non_fake_inputs=True))
    try:
        quick = QuickFakeMode({}, {})
        return [_trial(quick), _trial(quick)] == [expected] * 2  # the second time from the cache
    except Exception:  # whatever a changed private part raises
        return False


def _trial(mode: FakeTensorMode) -> list[tuple]:
    """What a few operators give under `mode`: a new tensor, a view, a result in place, a tuple, a gradient."""
    with mode, torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(4, 6, requires_grad=True)
        product = x @ torch.empty(6, 8)
        view = product.view(2, 2, 8)[1]
        in_place = product.detach().add_(1)
        normed, *statistics = aten.native_layer_norm(product, [8], None, None, 1e-5)
        normed.sum().backward()
        made = [x, product, view, in_place, normed, *statistics, x.grad]
        shared = [tensor.untyped_storage()._cdata == product.untyped_storage()._cdata for tensor in made]
    described = [_described([tensor])[0] for tensor in made]
    return [*zip(described, shared, strict=True)]


def _described(values: Any) -> tuple:
    """What of an operator's arguments decides its fake result. Raises TypeError where that is not all to be seen here."""
    found = []
    for value in values:
        if isinstance(value, FakeTensor) and value.constant is None and value.layout is torch.strided:
            sizes = value.shape, value.stride(), value.storage_offset()
            found.append((*sizes, value.dtype, value.fake_device, value.requires_grad, value.is_conj(), value.is_neg()))
        elif isinstance(value, list | tuple):
            found.append((type(value), _described(value)))
        elif isinstance(value, PLAIN):
            found.append((type(value), value))
        else:
            raise TypeError
    return tuple(found)
