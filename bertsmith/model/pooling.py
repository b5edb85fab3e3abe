"""Pooling: from the states of a sequence's tokens to one state of the sequence.

B sequences, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertsmith.batch import Batch, Layout
from bertsmith.model.activation import activate
from bertsmith.model.config import Direction, EncoderConfig, PooledWindows, PoolingKind
from bertsmith.model.encoder import Encoder, make_norm


def pool(hidden: Tensor, layout: Layout, kind: PoolingKind, skipped: int = 0) -> Tensor:
    """Return a vector for each sequence (B, H): that of `[CLS]`, or the mean or maximum after `skipped` tokens."""
    if kind == "cls":
        return layout.flat(hidden).index_select(0, layout.firsts)
    if kind == "max":
        return layout.pad(hidden, float("-inf"))[:, skipped:].amax(1)
    lengths = layout.pad(torch.ones_like(hidden[..., :1]))[:, skipped:].sum(1)
    return layout.pad(hidden)[:, skipped:].sum(1) / lengths.clamp_min(1)


def pooled_rows(layout: Layout, direction: Direction) -> Tensor:
    """The row of each sequence's token that sees all of it: the first, or the last in a left-to-right encoder (B,)."""
    return layout.lasts if direction == "left-to-right" else layout.firsts


def pooled_states(encoder: Encoder, batch: Batch) -> Tensor:
    """One state of each sequence (B, H), as `pooling` says: of the token that sees all of it, or the mean."""
    if encoder.config.pooling == "mean":
        return batch.layout.valid(pool(encoder(batch).float(), batch.layout, "mean"))
    return encoder(batch, rows=pooled_rows(batch.layout, encoder.config.direction))  # type: ignore[no-any-return]


def pool_windows(logits: Tensor, rows: Tensor, count: int, how: PooledWindows) -> Tensor:
    """The logits of each row (count, K) from those of its windows (B, K), whose rows are `rows` (B,)."""
    inside = rows[None, :] == torch.arange(count, device=rows.device)[:, None]  # (count, B)
    if how == "max":
        return logits[None].masked_fill(~inside[..., None], float("-inf")).amax(1)
    return inside.to(logits.dtype) @ logits / inside.sum(1, keepdim=True)


class Pooler(nn.Module):
    """A dense layer with an activation (BERT: tanh), and in a `prediction_head` a norm, on states (…, H)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        of_all = config.prediction_head
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias or not of_all)
        self.norm = make_norm(config.hidden_size, config) if of_all else nn.Identity()
        self.activation = config.pooler_activation

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(activate(self.dense(states), self.activation))  # type: ignore[no-any-return]
