"""Recurrent layers in PyTorch's own CUDA kernels (`RNN.cpp`, `cuda/RNN.cu`).

A step of an LSTM or GRU is one fused kernel, which keeps the gates for the backward pass; every step multiplies its own
input, where CPU multiplies all inputs at once. cuDNN, torch's default, keeps a block instead whose size only cuDNN knows
(`cudnnGetRNNTempSpaceSizes`): that is what NOTE says.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

NOTE = (
    "recurrent layers: simulated with torch's own CUDA kernels, as under torch.backends.cudnn.enabled=False; "
    "how much cuDNN keeps for the backward pass is not published"
)
aten = torch.ops.aten


def rnn_kernels(note: Callable[[str], None]) -> dict[str, Callable]:
    """Operator to its kernel; `note` is called with NOTE when a layer runs that cuDNN would run."""
    cells = {
        "lstm": _lstm,
        "gru": _gru,
        "rnn_tanh": partial(_simple, torch.tanh),
        "rnn_relu": partial(_simple, torch.relu),
    }
    kernels = {"lstm_cell": _lstm, "gru_cell": _gru}
    for name, cell in cells.items():
        kernels |= {f"{name}.input": partial(_padded, note, cell), f"{name}.data": partial(_packed, note, cell)}
    return kernels


def _padded(note: Callable, cell: Callable, input, hx, params, has_biases, *options) -> tuple[torch.Tensor, ...]:
    """What `aten::lstm.input` and its like compute; `cell` makes one step."""
    note(NOTE)
    *options, batch_first = options
    steps = (input.transpose(0, 1) if batch_first else input).unbind(0)
    output, *final = _layers(cell, steps, torch.stack, hx, params, has_biases, *options)
    return (output.transpose(0, 1) if batch_first else output, *final)


def _packed(note: Callable, cell: Callable, data, batch_sizes, *others) -> tuple[torch.Tensor, ...]:
    """The same of a packed sequence (`aten::lstm.data`), of whose rows fewer and fewer take part."""
    note(NOTE)
    with _disable_current_modes():
        sizes = batch_sizes.tolist()
    return _layers(cell, data.split(sizes), torch.cat, *others)


def _layers(cell: Callable, steps, join, hx, params, has_biases, *options) -> tuple[torch.Tensor, ...]:
    num_layers, dropout, train, bidirectional = options
    several = not isinstance(hx, torch.Tensor)  # an LSTM's hidden and cell states
    hiddens = list(zip(*(h.unbind(0) for h in hx), strict=True)) if several else list(hx.unbind(0))
    directions, count, final = 1 + bidirectional, len(params) // len(hiddens), []
    for layer in range(num_layers):
        outputs = []
        for i in range(layer * directions, (layer + 1) * directions):
            w_ih, w_hh, *more = params[count * i : count * (i + 1)]
            weights = (w_ih, w_hh, *more) if has_biases else (w_ih, w_hh, None, None, *more)
            made, hidden = _unrolled(cell, steps, join, hiddens[i], weights, -1 if i % directions else 1)
            outputs.append(made)
            final.append(hidden)
        output = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            output = torch.dropout(output, dropout, True)
        steps = output.split([len(step) for step in steps]) if join is torch.cat else output.unbind(0)
    return (output, *(torch.stack(each, 0) for each in (zip(*final, strict=True) if several else [final])))


def _unrolled(cell: Callable, steps: Sequence, join: Callable, hidden, weights: tuple, order: int) -> tuple:
    """The outputs of all steps as one tensor, and the last hidden state of each row; `order` is -1 from the end."""
    made, ended, start = [], [], hidden
    for step in steps[::order]:
        rows, had = len(step), len(hidden[0] if isinstance(hidden, tuple) else hidden)
        if rows < had:
            ended.insert(0, _rows(hidden, rows, had))
            hidden = _rows(hidden, 0, rows)
        elif rows > had:
            hidden = _join([hidden, _rows(start, had, rows)])
        hidden = cell(step, hidden, *weights)
        made.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    if join is torch.cat and order > 0:
        hidden = _join([hidden, *ended])
    return join(made[::order]), hidden


def _rows(hidden, first: int, end: int):
    return tuple(h[first:end] for h in hidden) if isinstance(hidden, tuple) else hidden[first:end]


def _join(hiddens: list):
    return tuple(map(torch.cat, zip(*hiddens, strict=True))) if isinstance(hiddens[0], tuple) else torch.cat(hiddens)


def _lstm(input, hx: Sequence, w_ih, w_hh, *more) -> tuple[torch.Tensor, torch.Tensor]:
    b_ih, b_hh, w_hr = (*more, None, None, None)[:3]
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return (hy if w_hr is None else torch.matmul(hy, w_hr.t())), cy


def _gru(input, hx, w_ih, w_hh, b_ih=None, b_hh=None) -> torch.Tensor:
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    return aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]


def _simple(activation: Callable, input, hx, *weights) -> torch.Tensor:
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    return activation(F.linear(hx, w_hh, b_hh).add_(F.linear(input, w_ih, b_ih)))
