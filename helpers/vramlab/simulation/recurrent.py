"""Recurrent layers: in PyTorch's own CUDA kernels (`RNN.cpp`, `cuda/RNN.cu`), and in oneDNN's on a CPU (`mkldnn/RNN.cpp`).

A step of an LSTM or GRU on CUDA is one fused kernel, which keeps the gates for the backward pass; every step multiplies
its own input, where CPU multiplies all inputs at once. cuDNN, torch's default, keeps a block instead whose size only
cuDNN knows (`cudnnGetRNNTempSpaceSizes`): that is what NOTE says. An LSTM on a CPU keeps a workspace of oneDNN's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import meta_table
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

NOTE = (
    "recurrent layers: simulated with torch's own CUDA kernels, as under torch.backends.cudnn.enabled=False; "
    "how much cuDNN keeps for the backward pass is not published"
)
aten = torch.ops.aten


def rnn_kernels(note: Callable[[str], None]) -> dict[str, Callable]:
    """Operator to its kernel; `note` is told NOTE when a layer runs that cuDNN would run."""

    def stacked(cell: Callable) -> Callable:
        def layers(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
            note(NOTE)
            several = not isinstance(hx, torch.Tensor)  # an LSTM's hidden and cell states
            hiddens = list(zip(*(h.unbind(0) for h in hx), strict=True)) if several else list(hx.unbind(0))
            directions = 1 + bidirectional
            count = len(params) // (num_layers * directions)
            input, final = input.transpose(0, 1) if batch_first else input, []
            for layer in range(num_layers):
                outputs = []
                for i in range(layer * directions, (layer + 1) * directions):
                    weights = _weights(params[count * i : count * (i + 1)], has_biases)
                    backward = i % directions == 1
                    output, last = _unrolled(cell, input, hiddens[i], weights, backward)
                    outputs.append(output)
                    final.append(last)
                input = torch.cat(outputs, -1) if bidirectional else outputs[0]
                if dropout and train and layer < num_layers - 1:
                    input = torch.dropout(input, dropout, True)
            output = input.transpose(0, 1) if batch_first else input
            ends = zip(*final, strict=True) if several else [final]
            return (output, *(torch.stack(each, 0) for each in ends))

        return layers

    def lstm_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
        return _lstm(input, hx, (w_ih, w_hh, b_ih, b_hh, None))

    def gru_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
        return _gru(input, hx, (w_ih, w_hh, b_ih, b_hh, None))

    return {
        "lstm.input": stacked(_lstm),
        "gru.input": stacked(_gru),
        "rnn_tanh.input": stacked(_simple(torch.tanh)),
        "rnn_relu.input": stacked(_simple(torch.relu)),
        "lstm_cell": lstm_cell,
        "gru_cell": gru_cell,
    }


def _weights(params: Sequence[torch.Tensor], has_biases: bool) -> tuple:
    """Of input and hidden state, their biases, and of the projection."""
    w_ih, w_hh, *rest = params
    biases = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
    return w_ih, w_hh, *biases, rest[0] if rest else None


def _unrolled(cell: Callable, input: torch.Tensor, hidden: Any, weights: tuple, backward: bool) -> tuple:
    """The outputs of all steps as one tensor, and the last hidden state."""
    steps, made = input.unbind(0), []
    for step in reversed(steps) if backward else steps:
        hidden = cell(step, hidden, weights)
        made.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    return torch.stack(made[::-1] if backward else made, 0), hidden


def _lstm(input: torch.Tensor, hidden: Sequence[torch.Tensor], weights: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hidden[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(*gates, hidden[1], b_ih, b_hh)
    return (hy if w_hr is None else torch.matmul(hy, w_hr.t())), cy


def _gru(input: torch.Tensor, hidden: torch.Tensor, weights: tuple) -> torch.Tensor:
    w_ih, w_hh, b_ih, b_hh, _ = weights
    return aten._thnn_fused_gru_cell(torch.matmul(input, w_ih.t()), torch.matmul(hidden, w_hh.t()), hidden, b_ih, b_hh)[
        0
    ]


def _simple(activation: Callable) -> Callable:
    def cell(input: torch.Tensor, hidden: torch.Tensor, weights: tuple) -> torch.Tensor:
        w_ih, w_hh, b_ih, b_hh, _ = weights
        return activation(F.linear(hidden, w_hh, b_hh).add_(F.linear(input, w_ih, b_ih)))

    return cell


# --- what the fused GRU kernels return: torch has no fake rules for them ----------------------------------------------


def _fake_gru(mode, func, input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """The new state, and a workspace of five numbers a unit (GRU_WORKSPACE_MULTIPLIER)."""
    with mode:
        return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _fake_gru_backward(mode, func, gradient, workspace, has_bias):
    rows, units = workspace.shape[0], workspace.shape[1] // 5
    with mode:
        gates = [workspace.new_empty(rows, 3 * units) for _ in range(2)]
        biases = [workspace.new_empty(3 * units) if has_bias else None for _ in range(2)]
        return *gates, torch.empty_like(gradient, memory_format=torch.contiguous_format), *biases


FAKE_CUDA = {
    aten._thnn_fused_gru_cell.default: _fake_gru,
    aten._thnn_fused_gru_cell_backward.default: _fake_gru_backward,
}

# --- oneDNN on a CPU --------------------------------------------------------------------------------------------------


def _fake_onednn(mode, func, input, *args):
    """torch's own rule leaves out the workspace."""
    weights, hx, (hidden, layers, has_biases, bidirectional, _, train) = args[:4], args[4], args[-6:]
    with mode:
        output, hy, cy, workspace = meta_table[func](input, *args)
        if train and torch.is_grad_enabled():
            shapes = tuple(tuple(t.shape) for t in (*weights, hx))
            options = (args[8], hidden, layers, has_biases, bidirectional)
            size = onednn_workspace(*input.shape, shapes, input.dtype, options)
            workspace = input.new_empty(size, dtype=torch.uint8)
    return output, hy, cy, workspace


def _fake_onednn_backward(mode, func, *args):
    """Both biases have a gradient of their own."""
    with mode:
        made = list(meta_table[func](*args))
        made[4] = torch.empty_like(made[4])
    return tuple(made)


@functools.lru_cache(maxsize=256)
def onednn_workspace(steps: int, rows: int, width: int, shapes: tuple, dtype: torch.dtype, options: tuple) -> int:
    """Bytes that oneDNN keeps of a layer; it depends on this processor, so a real layer of zeros is asked.

    The workspace is a few stretches, each so many cache lines a step and rounded up to pages of 4,096 bytes. So what 64
    steps more take is always the same, and long sequences need not be run.
    """
    if steps >= 192:
        short = steps % 64 + 64
        sizes = [onednn_workspace(n, rows, width, shapes, dtype, options) for n in (short, short + 64)]
        return sizes[0] + (steps - short) // 64 * (sizes[1] - sizes[0])
    mode, hidden, layers, has_biases, bidirectional = options
    with _disable_current_modes(), torch.enable_grad():  # without, nothing is kept
        *weights, state = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        input = torch.zeros(steps, rows, width, dtype=dtype)
        sizes = hidden, layers, has_biases, bidirectional
        made = aten.mkldnn_rnn_layer(input, *weights, state, state, False, [], mode, *sizes, False, True)
    return made[3].untyped_storage().nbytes()


FAKE_CPU = {
    aten.mkldnn_rnn_layer.default: _fake_onednn,
    aten.mkldnn_rnn_layer_backward.default: _fake_onednn_backward,
}
