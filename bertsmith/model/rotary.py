"""Rotary positions (RoFormer, Su et al. 2021): queries and keys are rotated by angles that grow with the position.

`…` stands for (B, L) or (T,), as the batch is laid out; A heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """The cosines and sines of every token's angles."""

    cos: Tensor  # (…, 1, D / 2) float32
    sin: Tensor


def rotation(positions: Tensor, head_size: int, base: float) -> Rotation:
    """The rotation of tokens at these positions (…): dimension pair i is rotated by base^(-2i / D) per position."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    angles = positions[..., None, None].float() * base**-exponents
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Queries or keys (…, A, D), rotated; dimension i is paired with dimension i + D / 2."""
    first, second = x.float().chunk(2, -1)
    rotated = torch.cat([first * by.cos - second * by.sin, second * by.cos + first * by.sin], -1)
    return rotated.to(x.dtype)
