"""LSTM layers (Hochreiter and Schmidhuber 1997), on cuDNN where there is a GPU.

B sequences, L padded length, H hidden size. `…` stands for (B, L) or (T,), as the batch is laid out.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.batch import Layout, Packed
from bertsmith.model.characters import init_by_inputs
from bertsmith.model.config import LayerConfig

# On a CPU this is the expected case: PyTorch's own loop runs instead, at about the same speed.
warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")


class LSTMBlock(nn.Module):
    """One layer of ELMo (Peters et al. 2018, section 3.4): an LSTM in each direction, which do not see each other.

    The first half of the states is read from left to right, the second half from right to left. The cells are projected
    to the width of a half. All layers but the first add their input. The authors clip cells and projections at ±3;
    cuDNN cannot clip, and here nothing is clipped.
    """

    def __init__(self, layer: LayerConfig) -> None:
        super().__init__()
        half = layer.hidden_size // 2
        sizes = {"input_size": half, "hidden_size": layer.intermediate_size, "proj_size": half, "batch_first": True}
        self.forwards, self.backwards = nn.LSTM(**sizes), nn.LSTM(**sizes)
        self.dropout = nn.Dropout(layer.hidden_dropout)
        self.residual = layer.residual

    def forward(self, x: Tensor, layout: Layout, trace: Any = None, rows: Tensor | None = None, *unused: Any) -> Tensor:
        """The states after this layer (…, H), or those of the given `rows` (R,) of the flat form: (R, H)."""
        states = self.dropout(torch.cat(self._directions(x, layout), -1))
        states = x + states if self.residual else states
        return states if rows is None else layout.flat(states).index_select(0, rows)

    def _directions(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Each direction's states (…, H / 2); padding comes after a sequence, also where it is reversed."""
        with torch.autocast(x.device.type, enabled=False):  # not every device has an LSTM in bfloat16
            first, second = layout.pad(x.float()).chunk(2, -1)
            order = reversal(layout)
            forwards, _ = self.forwards(first.contiguous())
            backwards, _ = self.backwards(reordered(second, order))
            return layout.unpad(forwards), layout.unpad(reordered(backwards, order))


def reversal(layout: Layout) -> Tensor:
    """The place from which each place (B · L,) takes its state when every sequence is reversed in its own places."""
    if isinstance(layout, Packed):
        lengths = layout.starts.diff().long()[:, None]
    else:
        lengths = layout.mask.sum(1, keepdim=True)
    steps = torch.arange(layout.max_length, device=lengths.device)
    order = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return (order + layout.max_length * torch.arange(len(lengths), device=lengths.device)[:, None]).flatten()


def reordered(states: Tensor, order: Tensor) -> Tensor:
    """Padded states (B, L, …) in another order of their places."""
    return states.flatten(0, 1).index_select(0, order).view_as(states)


@torch.no_grad()
def init_lstm(block: LSTMBlock) -> None:
    """Initialise matrices by their number of inputs; gates forget little at the start, as in the authors' code."""
    for name, parameter in block.named_parameters():
        init_by_inputs(parameter)
        if name.endswith("bias_ih_l0"):
            parameter[len(parameter) // 4 : len(parameter) // 2] = 1.0  # input, forget, cell, output gate
