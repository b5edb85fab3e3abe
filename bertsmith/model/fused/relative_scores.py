"""The scores of two blocks with the terms of distances, in Triton, and where a pass keeps their weights for later ones.

The distances i - j of two blocks with B positions are a band of 2 B values. The vectors of one band are a slice of the
expanded table, in which distance d has the row `centre` + d, so that their products with the queries (or keys) are
matrix products, and each row of these products is then shifted by its position. The next block of the others needs the
lower half of this band again, as its upper half, so a program multiplies its own block by each slice once.

B positions of a block (BLOCK), D head size (SIZE). A query's own distances are i - j; a key's are j - i, and it reads
the tables in reverse (SIGN -1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from bertsmith.model.fused.distances import columns, products_place


@triton.jit
def shifted(x, SIGN: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr):
    """The element (i, j) is x[i, SIGN (i - j)], modulo the size of the block; columns may be `PAIRED` (`columns`).

    Values of 16 bits move in pairs: those of columns that are half a block apart are moved by the same distance.
    """
    row = tl.arange(0, BLOCK)[:, None]
    if x.dtype.primitive_bitwidth == 16:
        HALF: tl.constexpr = BLOCK // 2
        source = SIGN * (row - tl.arange(0, HALF)[None, :])
        first, second = tl.split(tl.permute(tl.reshape(x, (BLOCK, 2, HALF)), (0, 2, 1)))
        pair = first.to(tl.uint16, bitcast=True).to(tl.uint32)
        pair |= second.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        pair = tl.gather(pair, source & (HALF - 1), 1)
        pair = tl.where((source & HALF) != 0, (pair >> 16) | (pair << 16), pair)
        first = (pair & 0xFFFF).to(tl.uint16).to(x.dtype, bitcast=True)
        second = (pair >> 16).to(tl.uint16).to(x.dtype, bitcast=True)
        moved = tl.join(first, second)
        if not PAIRED:
            moved = tl.permute(moved, (0, 2, 1))
        moved = tl.reshape(moved, (BLOCK, BLOCK))
    else:
        moved = tl.gather(x, (SIGN * (row - columns(BLOCK, PAIRED)[None, :])) & (BLOCK - 1), 1)
    return moved


@triton.jit
def vectors(
    table_ptr, first, head, centre, width: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """The vectors of the distances from `first` on (B, D), in the order of `columns`."""
    row = centre + SIGN * (first + columns(BLOCK, PAIRED))
    return tl.load(table_ptr + row[:, None] * width + head * SIZE + tl.arange(0, SIZE)[None, :])


@triton.jit
def own_products(
    own, table_ptr, first, head, centre, width: tl.constexpr,
    TERM: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The products of a program's own block with the distances from `first` on; 0 if there is no such term."""
    if TERM:
        of_slice = vectors(table_ptr, first, head, centre, width, SIGN, BLOCK, SIZE, False)
        products = tl.dot(own, tl.trans(of_slice)).to(own.dtype)
    else:
        products = 0.0
    return products


@triton.jit
def scores_of(
    own, other, upper, own_ptr, other_ptr, distance, head, centre, width: tl.constexpr,
    OWN_TERM: tl.constexpr, OTHER_TERM: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The scores of two blocks (B, B), not scaled, and the products that the next block needs as `upper`.

    `distance` is that of the first positions of the two blocks.
    """
    place = tl.arange(0, BLOCK)
    scores = tl.zeros((BLOCK, BLOCK), tl.float32)
    if OTHER_TERM:
        near = own_products(other, other_ptr, distance, head, centre, width, True, SIGN, BLOCK, SIZE)
        far = own_products(other, other_ptr, distance - BLOCK, head, centre, width, True, SIGN, BLOCK, SIZE)
        products = tl.where(place[:, None] + place[None, :] + distance < BLOCK + distance, near, far)
        scores += tl.trans(shifted(products, -1, BLOCK, False))
    lower = own_products(own, own_ptr, distance - BLOCK, head, centre, width, OWN_TERM, SIGN, BLOCK, SIZE)
    if OWN_TERM:
        products = tl.where(is_upper(distance, BLOCK, False), upper, lower)
        scores += shifted(products, 1, BLOCK, False)
    scores = tl.dot(own, tl.trans(other), scores)
    return scores, lower


@triton.jit
def is_upper(distance, BLOCK: tl.constexpr, PAIRED: tl.constexpr):
    """Where products with the upper half of a band are, and not with its lower half.

    The distance is no part of the result: it keeps the compiler from computing this once for all blocks, which would
    take more registers than there are.
    """
    return columns(BLOCK, PAIRED)[None, :] + distance <= tl.arange(0, BLOCK)[:, None] + distance


@triton.jit
def kept_tile(start, length, query, key, head, blocks, heads: tl.constexpr, BLOCK: tl.constexpr):
    """Where the weights (B, B) of a block of queries and a block of keys are kept, given their first positions."""
    at, step = products_place(start, length, query, head, blocks - 1, heads, BLOCK)
    return at + key // BLOCK * step
