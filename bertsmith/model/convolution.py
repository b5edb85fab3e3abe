"""The convolution beside the first layer of DeBERTa v2 (its authors' code: `ConvLayer`).

`…` stands for (B, L) or (T,), as the batch is laid out; H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from bertsmith.batch import Layout
from bertsmith.model.activation import activate
from bertsmith.model.config import LayerConfig


class Convolution(nn.Module):
    """A convolution over the tokens of each sequence, which reads zeros before its first and after its last token."""

    def __init__(self, layer: LayerConfig) -> None:
        super().__init__()
        assert layer.convolution is not None
        hidden, width = layer.hidden_size, layer.convolution
        self.conv = nn.Conv1d(hidden, hidden, width, padding=width // 2, bias=layer.bias)
        self.norm = nn.LayerNorm(hidden, eps=layer.norm_eps, bias=layer.bias)
        self.dropout = nn.Dropout(layer.hidden_dropout)
        self.activation = layer.convolution_activation

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """What is added to the output of the layer that reads the same states (…, H), before `norm`."""
        mixed = self.conv(layout.pad(x).transpose(1, 2)).transpose(1, 2)
        return activate(self.dropout(layout.unpad(mixed)), self.activation)
