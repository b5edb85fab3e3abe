"""Attention within a window in plain PyTorch, block by block: time and memory grow with the length, not its square.

B sequences, L padded length, A heads, D head size, N blocks of S queries, each with its W keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.model.config import Reach

BLOCK = 128  # queries, or as many as the larger side of the window


def is_worthwhile(length: int, reach: Reach) -> bool:
    """Whether blocks have less work than a mask over all pairs of tokens; an exported graph has no blocks."""
    if reach.before is None or reach.after is None or torch.compiler.is_compiling():
        return False
    return length >= 2 * (_block(reach) + reach.before + reach.after)


def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, reach: Reach) -> Tensor:
    """Attention of rectangles (B, L, A, D) within a reach of both sides; `mask` (B, L) is false at padding."""
    length, size = q.shape[1], _block(reach)
    q = F.pad(q, (0, 0, 0, 0, 0, -length % size)).unflatten(1, (-1, size))  # (B, N, S, A, D)
    k, v = (_windows(x, size, reach).permute(0, 1, 4, 2, 3) for x in (k, v))  # (B, N, W, A, D)
    seen = _visible(mask, length, size, reach, q.device).expand(*q.shape[:2], -1, -1)
    q, k, v = (x.transpose(2, 3).flatten(0, 1) for x in (q, k, v))  # (B N, A, S or W, D)
    found = F.scaled_dot_product_attention(q, k, v, seen.flatten(0, 1)[:, None], dropout)
    return found.unflatten(0, (-1, seen.shape[1])).transpose(2, 3).flatten(1, 2)[:, :length]


def _block(reach: Reach) -> int:
    return max(BLOCK, reach.before or 0, reach.after or 0)


def _windows(x: Tensor, size: int, reach: Reach) -> Tensor:
    """The keys or values within reach of each block of queries, as a view of the padded ones: (B, N, …, W)."""
    before, after = reach.before or 0, reach.after or 0
    sides = (before, after + -x.shape[1] % size)
    return F.pad(x, (0, 0) * (x.dim() - 2) + sides).unfold(1, size + before + after, size)


def _visible(mask: Tensor | None, length: int, size: int, reach: Reach, device: torch.device) -> Tensor:
    """Which of its keys each query sees (B or 1, N, S, W); a query sees itself also where there is only padding."""
    before, after = reach.before or 0, reach.after or 0
    real = torch.ones(1, length, dtype=torch.bool, device=device) if mask is None else mask
    keys = _windows(real, size, reach)[:, :, None, :]  # (B, N, 1, W)
    offset = torch.arange(size + before + after, device=device) - torch.arange(size, device=device)[:, None]
    return ((offset >= 0) & (offset <= before + after) & keys) | (offset == before)
