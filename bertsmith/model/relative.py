"""Relative positions in attention (DeBERTa: He et al. 2021, section 3.1): distances have vectors of their own.

B sequences, L padded length, A heads, D head size, H hidden size, N rows of the table of distances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertsmith.model.config import EncoderConfig


class Relative(NamedTuple):
    """The distances of a forward pass: their vectors, and which of them each distance has."""

    table: Tensor  # (N, H), after its norm
    rows: Tensor  # (2 L - 1,) the row of the table for the distances from -(L - 1) to L - 1
    of_blocks: tuple[Tensor, Tensor] | None = None  # the rows and bounds of the fused kernels (`RelativeTables`)


class RelativeTerms(NamedTuple):
    """The terms that one layer adds to its attention scores: the table of distances, projected by that layer.

    This is what every attention kernel takes. Queries, keys and values come with split heads, (…, A, D), and the
    distance of query i from key j is d = position(i) - position(j); positions begin at 0 in every sequence, so that a
    packed batch has the distances of a padded one. With r = rows[d + L - 1] the score of the two is

        scale · (q_i · k_j + q_i · keys[r] + k_j · queries[r])     scale = 1 / sqrt(D · (1 + number of terms))

    where a table that is None has no term. Both terms have the row of i - j, as in all released models; the paper
    writes δ(j, i) in the second. Distances beyond the end of the table have its last row. L is at least the length of
    the longest sequence, and every entry of `rows` is a row of the tables.
    """

    keys: Tensor | None  # (A, N, D): content-to-position
    queries: Tensor | None  # (A, N, D): position-to-content
    rows: Tensor  # (2 L - 1,) int64

    @property
    def length(self) -> int:
        """The largest length of a sequence that `rows` has the distances of."""
        return (self.rows.shape[0] + 1) // 2

    def scale(self, head_size: int) -> float:
        """What scores are multiplied by: their variance grows with the number of terms."""
        return float((head_size * (1 + sum(table is not None for table in self[:2]))) ** -0.5)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The sum of the terms for rectangles of queries and keys (B, A, L, D), not scaled: (B, A, L, L).

        A query is multiplied by each row once, and its scores of keys are taken from these products. Memory grows with
        L · (L + N), never with L · L · D.
        """
        length = q.shape[2]
        place = torch.arange(length, device=q.device)
        index = self.rows[place[:, None] - place + (self.rows.shape[0] // 2)]  # (L, L): query i, key j
        shape = (*q.shape[:3], length)
        total: Tensor | None = None
        if self.keys is not None:
            total = (q @ self.keys.transpose(1, 2)).gather(3, index.expand(shape))
        if self.queries is not None:
            of_keys = (k @ self.queries.transpose(1, 2)).gather(3, index.T.expand(shape)).transpose(2, 3)
            total = of_keys if total is None else total + of_keys
        assert total is not None
        return total


class RelativeTable(nn.Module):
    """A vector for every distance between two tokens or, with buckets, for every range of distances."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.span, self.buckets = config.relative_span, config.relative_buckets
        self.furthest = config.relative_reach or config.max_positions
        self.table = nn.Embedding(2 * self.span, config.hidden_size)
        normed = config.relative_norm
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps) if normed else nn.Identity()

    def forward(self, length: int, device: torch.device) -> Relative:
        """The rows that sequences of up to this length need, and which of them each distance has."""
        distances = torch.arange(length * 2 - 1, device=device) - (length - 1)
        rows = (self._buckets(distances) + self.span).clamp(0, 2 * self.span - 1)
        begin, end = self._needed(length)
        return Relative(self.norm(self.table.weight[begin:end]), rows - begin)

    def _needed(self, length: int) -> tuple[int, int]:
        """The part of the table that has all rows of these distances; the whole one if that depends on logarithms."""
        near = self.span if self.buckets is None else self.buckets // 2
        if not isinstance(length, int) or length > near:  # an exported graph takes any length
            return 0, 2 * self.span
        return self.span - length + 1, self.span + length

    def _buckets(self, distances: Tensor) -> Tensor:
        """Distances as ranges: up to half of the buckets each has its own, and then they grow as logarithms.

        The operations are those of the authors' code, in float32: another rounding would move distances at the border
        of two buckets.
        """
        if self.buckets is None:
            return distances
        middle = self.buckets // 2
        size = distances.abs().clamp_min(middle - 1)
        share = torch.log(size / middle) / torch.log(torch.tensor((self.furthest - 1) / middle))
        far = torch.ceil(share * (middle - 1)) + middle
        return torch.where(size <= middle, distances, (far * distances.sign()).long())
