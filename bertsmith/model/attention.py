"""The attention sublayer of a Transformer layer, and what a traced forward pass keeps.

`…` stands for (B, L) or (T,), as the batch is laid out; H hidden size, A heads, D head size, N rows of the table of
distances.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertsmith.batch import Layout
from bertsmith.model.config import LayerConfig, Reach
from bertsmith.model.fused.weights import LinearWeights, RelativeWeights
from bertsmith.model.kernels import attend, attend_explicit
from bertsmith.model.relative import Relative, RelativeTerms
from bertsmith.model.rotary import Rotation, rotate


@dataclass
class Trace:
    """The hidden states (embeddings first) and attention weights of a forward pass, layer by layer.

    With `only`, it is the hidden states of these layers alone, where 0 is the embeddings.
    """

    only: Collection[int] | None = None
    hidden: list[Tensor] = field(default_factory=list)  # each (…, H)
    attention: list[Tensor] = field(default_factory=list)  # each (B, A, L, L)
    seen: int = 0

    def add(self, states: Tensor) -> None:
        """Keep the states after the next layer."""
        if self.only is None or self.seen in self.only:
            self.hidden.append(states)
        self.seen += 1


class Asking(NamedTuple):
    """States that ask in place of a layer's own input, from which keys and values come."""

    states: Tensor  # (R, H), or (…, H) without rows
    rows: Tensor | None  # (R,) their rows in the flat form; None: all tokens ask


class SelfAttention(nn.Module):
    """Multi-head self-attention; the layer applies the projection `output` itself, to the states that it needs."""

    def __init__(self, layer: LayerConfig) -> None:
        super().__init__()
        self.num_heads = layer.num_heads
        self.attention_dropout = layer.attention_dropout
        size, key_bias = layer.hidden_size, layer.bias and layer.key_bias
        self.qkv = nn.Linear(size, 3 * size, bias=key_bias)
        self.output = nn.Linear(size, size, bias=layer.bias)
        lacks_key_bias = layer.bias and not layer.key_bias  # then queries and values have biases of their own
        self.query_bias = nn.Parameter(torch.zeros(size)) if lacks_key_bias else None
        self.value_bias = nn.Parameter(torch.zeros(size)) if lacks_key_bias else None
        keys, queries = layer.content_to_position, layer.position_to_content
        if not layer.relative_projections:  # those of the content serve
            keys = queries = False
        self.relative_keys = nn.Linear(size, size, bias=key_bias) if keys else None
        self.relative_queries = nn.Linear(size, size, bias=layer.bias) if queries else None
        self.relative_dropout = nn.Dropout(layer.hidden_dropout)
        self.layer = layer

    def forward(
        self, x: Tensor, layout: Layout, reach: Reach, angles: Rotation | None = None, trace: Trace | None = None,
        relative: Relative | None = None, asking: Asking | None = None,
    ) -> Tensor:  # fmt: skip
        """The mixed values (…, H); only those of the rows that ask are right where others than `x` are `asking`."""
        q, k, v = self._project(x)
        if asking is not None:
            q = self._project(asking.states)[0]  # (R, A, D)
            if asking.rows is not None:
                q = torch.zeros_like(layout.flat(k)).index_copy(0, asking.rows, q).view_as(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        dropout = self.attention_dropout if self.training else 0.0
        terms = None if relative is None else self._terms(relative)
        if trace is None:
            mixed = attend(q, k, v, layout, dropout, reach, terms)
        else:
            mixed, weights = attend_explicit(q, k, v, layout, dropout, reach, terms)
            trace.attention.append(weights)
        return mixed.flatten(-2)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (…, A, D)."""
        projected = self.qkv(x)
        if (bias := self._separate_bias()) is not None:
            projected = projected + bias
        q, k, v = projected.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        return q, k, v

    def _separate_bias(self) -> Tensor | None:
        """The biases of queries and values, with zeros for the keys (3 H,), where they are not part of `qkv`."""
        if self.query_bias is None or self.value_bias is None:
            return None
        return torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])

    def weights(self) -> LinearWeights:
        """The projection of queries, keys and values, as the fused operations take it."""
        bias = self._separate_bias()
        return LinearWeights(self.qkv.weight, self.qkv.bias if bias is None else bias)

    def relative_weights(self, relative: Relative) -> RelativeWeights:
        """The vectors of distances and this layer's projections of them, as the fused operations take them."""
        assert relative.of_blocks is not None
        keys, queries = (
            None if own is None else LinearWeights(own.weight, own.bias)
            for own in (self.relative_keys, self.relative_queries)
        )
        rows, bounds = relative.of_blocks
        terms = self.layer.content_to_position, self.layer.position_to_content
        return RelativeWeights(
            relative.table, rows, bounds, terms, keys, queries,
            content=None if self.layer.relative_projections else self.weights(),
            dropout=self.relative_dropout.p if self.training else 0.0,
        )  # fmt: skip

    def _terms(self, relative: Relative) -> RelativeTerms:
        """The vectors of distances as keys and queries of this layer, each (A, N, D)."""
        table = self.relative_dropout(relative.table)
        if self.layer.relative_projections:
            pair = (None if part is None else part(table) for part in (self.relative_queries, self.relative_keys))
            queries, keys = (None if x is None else x.unflatten(-1, (self.num_heads, -1)) for x in pair)
        else:
            queries, keys, _ = self._project(table)
        return RelativeTerms(
            keys.transpose(0, 1) if keys is not None and self.layer.content_to_position else None,
            queries.transpose(0, 1) if queries is not None and self.layer.position_to_content else None,
            relative.rows,
        )
