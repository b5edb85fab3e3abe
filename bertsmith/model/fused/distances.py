"""The tables of distances as the attention kernels read them, and their gradients, in Triton (DeBERTa, section 3.1).

Several distances may have the same row of a table. The kernels read an expanded table with one row for each distance,
so that neighbouring distances are neighbouring rows. Its gradient comes from the gradients of the products of queries
(or keys) with these rows: partial sums over groups of sequences, which are then added for the distances of each row, in
a fixed order. N rows of a table, H hidden size, B positions of a block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 64  # positions of a block, as measured on an H200
TABLE_PROGRAMS, TABLE_WARPS, TABLE_STAGES = 1584, 4, 3
ROWS_COLUMNS, ROWS_AT_ONCE = 256, 16


class Distances(NamedTuple):
    """The expanded tables (2 `centre` + 1, H) of a layer, where distance d has the row `centre` + d.

    A table that is None has no term. `rows` are the rows of the tables that are expanded, in ascending order, and
    `bounds` says where each row begins in them.
    """

    keys: Tensor | None
    queries: Tensor | None
    rows: Tensor  # (2 centre + 1,)
    bounds: Tensor  # (N + 1,)
    block: int

    @property
    def centre(self) -> int:
        """The row of distance 0."""
        return len(self.rows) // 2

    def empty_products(self, table: Tensor | None, tokens: int, heads: int, blocks: int) -> Tensor | None:
        """Memory for the gradients of the products of every token with the slices that its block needs."""
        return None if table is None else table.new_empty(tokens, heads, (blocks + 1) * self.block)


class Products(NamedTuple):
    """The gradients of products with distances, what was multiplied with them (T, H), and its sequences."""

    gradients: Tensor
    own: Tensor
    starts: Tensor
    longest: int
    heads: int


def block_size(longest: int) -> int:
    """The number of positions in a block for sequences of at most this length."""
    return int(min(LARGEST, max(16, triton.next_power_of_2(longest))))


def rows_of(rows: Tensor, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """The row of each distance that blocks reach, and where the distances of each of `count` rows begin in this list.

    `rows` has those of the distances from -(L - 1) to L - 1. All layers have the same ones.
    """
    block = block_size(longest)
    rows = rows[_places(triton.cdiv(longest, block) * block, len(rows) // 2, rows.device)]
    return rows, torch.searchsorted(rows, torch.arange(count + 1, device=rows.device))


def expand(keys: Tensor | None, queries: Tensor | None, rows: Tensor, bounds: Tensor, longest: int) -> Distances:
    """Tables (N, H) with one row for each distance, as `rows_of` has them."""
    first, second = (None if table is None else table.index_select(0, rows) for table in (keys, queries))
    return Distances(first, second, rows, bounds, block_size(longest))


@lru_cache
def _places(centre: int, furthest: int, device: torch.device) -> Tensor:
    """Where the distances from -`centre` to `centre` are in a list from -`furthest` on; those beyond it are unused."""
    return (torch.arange(2 * centre + 1, device=device) - centre).clamp(-furthest, furthest) + furthest


@triton.jit
def columns(BLOCK: tl.constexpr, PAIRED: tl.constexpr):
    """The columns of a tile in the order in which it holds them.

    `PAIRED`: those that are half a block apart are neighbours. They are shifted together, and sums over distances may
    be in any order.
    """
    place = tl.arange(0, BLOCK)
    return place // 2 + place % 2 * (BLOCK // 2) if PAIRED else place


@triton.jit
def products_place(start, length, first, head, blocks, heads: tl.constexpr, BLOCK: tl.constexpr):
    """Where a block's gradients of products with its first slice (B, B) begin, and how far those of the next slice are.

    The tokens of a block have one piece of memory, in which each slice of each head is contiguous.
    """
    valid = tl.minimum(length - first, BLOCK)
    step = valid.to(tl.int64) * BLOCK
    piece = (start + first).to(tl.int64) * (heads * (blocks + 1) * BLOCK) + head * (blocks + 1) * step
    return piece, step


@triton.jit(do_not_specialize=["sequences", "blocks"])
def _table_gradient(
    products_ptr, own_ptr, starts_ptr, part_ptr, scale, stride, sequences, blocks,
    heads: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """One slice of distances: those of blocks that are `apart` blocks from each other."""
    apart, head, group = tl.program_id(0) - blocks, tl.program_id(1), tl.program_id(2)
    place, feature = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    tile = place[:, None] * BLOCK + place[None, :]
    total = tl.zeros((BLOCK, SIZE), tl.float32)
    for sequence in range(group, sequences, tl.num_programs(2)):
        start = tl.load(starts_ptr + sequence)
        length = tl.load(starts_ptr + sequence + 1) - start
        count = tl.cdiv(length, BLOCK)
        for block in range(tl.maximum(apart, 0), tl.minimum(count, count + apart + 1)):
            position = block * BLOCK + place
            token, valid = (start + position).to(tl.int64), position[:, None] < length
            at, step = products_place(start, length, block * BLOCK, head, blocks, heads, BLOCK)
            products = tl.load(products_ptr + at + (block - apart) * step + tile, valid, 0.0)
            own = tl.load(own_ptr + token[:, None] * stride + head * SIZE + feature[None, :], valid, 0.0)
            total += tl.dot(tl.trans(products), own)
    centre = blocks * BLOCK
    row = group * (2 * centre + 1) + centre + SIGN * (apart * BLOCK + columns(BLOCK, True))
    at = row.to(tl.int64)[:, None] * (heads * SIZE) + head * SIZE + feature[None, :]
    tl.store(part_ptr + at, total * scale)


@triton.jit(do_not_specialize=["groups"])
def _sum_of_rows(part_ptr, bounds_ptr, out_ptr, groups, distances, width, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of all groups over the distances of one row; the first and the last distance are unused."""
    row, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.maximum(tl.load(bounds_ptr + row), 1)
    end = tl.minimum(tl.load(bounds_ptr + row + 1), distances - 1)
    total = tl.zeros((AT_ONCE, COLUMNS), tl.float32)
    count = tl.maximum(end - begin, 0)
    for first in range(0, groups * count, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        at = place // count * distances + begin + place % count
        valid = (place < groups * count)[:, None] & (column < width)[None, :]
        total += tl.load(part_ptr + at.to(tl.int64)[:, None] * width + column[None, :], valid, 0.0)
    tl.store(out_ptr + row * width + column, tl.sum(total, 0), column < width)


def table_gradient(products: Products, distances: Distances, scale: float, sign: int) -> Tensor:
    """The gradient (N, H), in float32, of a table whose products with the distances have these gradients."""
    gradients, own, starts, longest, heads = products
    width, sequences = own.shape[1], len(starts) - 1
    blocks, count = triton.cdiv(longest, distances.block), len(distances.rows)
    groups = min(sequences, triton.cdiv(TABLE_PROGRAMS, 2 * blocks * heads))
    parts = torch.empty(groups, count, width, dtype=torch.float32, device=own.device)
    _table_gradient[(2 * blocks, heads, groups)](
        gradients, own, starts, parts, scale, own.stride(0), sequences, blocks,
        heads=heads, BLOCK=distances.block, SIZE=width // heads, SIGN=sign,
        num_warps=TABLE_WARPS, num_stages=TABLE_STAGES,
    )  # fmt: skip
    rows = len(distances.bounds) - 1
    total = torch.empty(rows, width, dtype=torch.float32, device=own.device)
    _sum_of_rows[(rows, triton.cdiv(width, ROWS_COLUMNS))](
        parts, distances.bounds, total, groups, count, width, COLUMNS=ROWS_COLUMNS, AT_ONCE=ROWS_AT_ONCE
    )
    return total
