"""Attention of packed sequences with terms of distances in Triton, block by block, with dropout (DeBERTa, section 3.1).

It is organised as in `long_attention.py`: a program owns a block of queries or keys and goes through the blocks of the
others. The distances i - j of two blocks with B positions are a band of 2 B values. The vectors of one band are a slice
of the expanded table, in which distance d has the row `centre` + d, so that their products with the queries (or keys)
are matrix products, and each row of these products is then shifted by its position. The next block of the others needs
the lower half of this band again, as its upper half, so a program multiplies its own block by each slice once.

B positions of a block (BLOCK), D head size (SIZE). A query's own distances are i - j; a key's are j - i, and it
reads the tables in reverse (SIGN -1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.fused.attention import LOG2E
from bertsmith.model.fused.distances import Distances, Products, products_place, table_gradient
from bertsmith.model.fused.long_attention import OVERHANG, own_block
from bertsmith.model.fused.rows import column_numbers, dropout_factor, dropout_line, is_kept, threshold_of

# Warps, stages: as measured on an H200 at 128 and at 512 tokens, where the same ones are best.
FORWARD, QUERY_SIDE, KEY_SIDE = (4, 2), (4, 1), (4, 1)


@triton.jit
def shifted(x, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """The element (i, j) is x[i, SIGN (i - j)], modulo the size of the block.

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
        moved = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (BLOCK, BLOCK))
    else:
        moved = tl.gather(x, (SIGN * (row - tl.arange(0, BLOCK)[None, :])) & (BLOCK - 1), 1)
    return moved


@triton.jit
def vectors(
    table_ptr, first, head, centre, width: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """The vectors of the distances from `first` on (B, D)."""
    row = centre + SIGN * (first + tl.arange(0, BLOCK))
    return tl.load(table_ptr + row[:, None] * width + head * SIZE + tl.arange(0, SIZE)[None, :])


@triton.jit
def own_products(
    own, table_ptr, first, head, centre, width: tl.constexpr,
    TERM: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The products of a program's own block with the distances from `first` on; 0 if there is no such term."""
    if TERM:
        products = tl.dot(own, tl.trans(vectors(table_ptr, first, head, centre, width, SIGN, BLOCK, SIZE))).to(
            own.dtype
        )
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
        scores += tl.trans(shifted(products, -1, BLOCK))
    lower = own_products(own, own_ptr, distance - BLOCK, head, centre, width, OWN_TERM, SIGN, BLOCK, SIZE)
    if OWN_TERM:
        products = tl.where(is_upper(distance, BLOCK), upper, lower)
        scores += shifted(products, 1, BLOCK)
    scores = tl.dot(own, tl.trans(other), scores)
    return scores, lower


@triton.jit
def is_upper(distance, BLOCK: tl.constexpr):
    """Where products with the upper half of a band are, and not with its lower half.

    The distance is no part of the result: it keeps the compiler from computing this once for all blocks, which would
    take more registers than there are.
    """
    place = tl.arange(0, BLOCK)
    return place[None, :] + distance <= place[:, None] + distance


@triton.jit(do_not_specialize=["tokens"])
def _relative_attention_forward(
    qkv_ptr, keys_ptr, queries_ptr, starts_ptr, seed_ptr, numbers_ptr, out_ptr, sums_ptr,
    scale, threshold, factor, tokens, centre, heads: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    head, start, length, first = own_block(starts_ptr, BLOCK)
    if first < length:
        feature = tl.arange(0, SIZE)
        width: tl.constexpr = heads * SIZE
        query = first + tl.arange(0, BLOCK)
        base = qkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE
        q = tl.load(base + query[:, None] * (3 * width) + feature[None, :], query[:, None] < length, 0.0)
        top = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        mixed = tl.zeros((BLOCK, SIZE), tl.float32)
        if DROP:
            slope, start_of = dropout_line((start + query) * heads + head, tl.load(seed_ptr))
        upper = own_products(q, keys_ptr, first, head, centre, width, KEYS, 1, BLOCK, SIZE)
        for begin in range(0, length, BLOCK):
            key = begin + tl.arange(0, BLOCK)
            place = key[:, None] * (3 * width) + feature[None, :]
            k = tl.load(base + width + place, key[:, None] < length, 0.0)
            v = tl.load(base + 2 * width + place, key[:, None] < length, 0.0)
            scores, upper = scores_of(
                q, k, upper, keys_ptr, queries_ptr, first - begin, head, centre, width, KEYS, QUERIES, 1, BLOCK, SIZE
            )
            scores = scores * scale + tl.where(key < length, 0.0, -1e30)[None, :]
            new = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new[:, None])
            shrink = tl.exp2(top - new)
            total = total * shrink + tl.sum(weights, 1)
            if DROP:
                number = tl.load(numbers_ptr + key)[None, :]
                weights = tl.where(is_kept(slope[:, None], start_of[:, None], number, threshold), weights, 0.0)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            top = new
        level = top + tl.log2(total)
        if DROP:
            total /= factor
        mixed = mixed / total[:, None]
        token = (start + query).to(tl.int64)
        place = token[:, None] * width + head * SIZE + feature[None, :]
        tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), query[:, None] < length)
        tl.store(sums_ptr + head * tokens + token, level, query < length)


@triton.jit(do_not_specialize=["tokens"])
def _relative_attention_queries(
    grad_ptr, out_ptr, qkv_ptr, keys_ptr, queries_ptr, starts_ptr, seed_ptr, numbers_ptr, lines_ptr, sums_ptr,
    delta_ptr, dqkv_ptr, products_ptr, part_ptr,
    scale, gradient_scale, threshold, factor, tokens, centre, heads: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    head, start, length, first = own_block(starts_ptr, BLOCK)
    feature = tl.arange(0, SIZE)
    width: tl.constexpr = heads * SIZE
    dq = tl.zeros((BLOCK, SIZE), tl.float32)
    if first < length:
        block = tl.arange(0, BLOCK)
        query = first + block
        valid = query[:, None] < length
        base = qkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE
        q = tl.load(base + query[:, None] * (3 * width) + feature[None, :], valid, 0.0)
        token = (start + query).to(tl.int64)
        place = token[:, None] * width + head * SIZE + feature[None, :]
        grad = tl.load(grad_ptr + place, valid, 0.0)
        out = tl.load(out_ptr + place, valid, 0.0)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(delta_ptr + head * tokens + token, delta, query < length)
        level = tl.load(sums_ptr + head * tokens + token, query < length, 0.0)
        if DROP:
            slope, start_of = dropout_line((start + query) * heads + head, tl.load(seed_ptr))
            line = lines_ptr + head * tokens + token
            tl.store(line, slope.to(tl.int32, bitcast=True), query < length)
            tl.store(line + heads * tokens, start_of.to(tl.int32, bitcast=True), query < length)
        upper = own_products(q, keys_ptr, first, head, centre, width, KEYS, 1, BLOCK, SIZE)
        earlier = tl.zeros((BLOCK, BLOCK), q.dtype)
        at, step = products_place(start, length, first, head, tl.num_programs(0), heads, BLOCK)
        tile = block[:, None] * BLOCK + block[None, :]
        for begin in range(0, length, BLOCK):
            key = begin + block
            here = key[:, None] * (3 * width) + feature[None, :]
            k = tl.load(base + width + here, key[:, None] < length, 0.0)
            v = tl.load(base + 2 * width + here, key[:, None] < length, 0.0)
            scores, upper = scores_of(
                q, k, upper, keys_ptr, queries_ptr, first - begin, head, centre, width, KEYS, QUERIES, 1, BLOCK, SIZE
            )
            weights = tl.exp2(tl.minimum(scores * scale - level[:, None], 0.0))  # no weight is above 1
            dweights = tl.dot(grad, tl.trans(v))
            if DROP:
                number = tl.load(numbers_ptr + key)[None, :]
                dweights *= dropout_factor(slope[:, None], start_of[:, None], number, threshold, factor)
            dscores = tl.where(key[None, :] < length, weights * (dweights - delta[:, None]), 0.0).to(k.dtype)
            dq += tl.dot(dscores, k)
            if KEYS:
                later = shifted(dscores, 1, BLOCK)
                products = tl.where(is_upper(first - begin, BLOCK), later, earlier)
                tl.store(products_ptr + at + begin // BLOCK * step + tile, products, valid)
                dq += tl.dot(products, vectors(keys_ptr, first - begin, head, centre, width, 1, BLOCK, SIZE))
                earlier = later
        if KEYS:
            end = tl.cdiv(length, BLOCK) * BLOCK
            products = tl.where(is_upper(first - end, BLOCK), 0.0, earlier).to(q.dtype)
            tl.store(products_ptr + at + end // BLOCK * step + tile, products, valid)
            dq += tl.dot(products, vectors(keys_ptr, first - end, head, centre, width, 1, BLOCK, SIZE))
        dq *= gradient_scale
        tl.store(dqkv_ptr + token[:, None] * (3 * width) + head * SIZE + feature[None, :], dq.to(q.dtype), valid)
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + row * width + head * SIZE + feature, tl.sum(dq, 0))


@triton.jit(do_not_specialize=["tokens"])
def _relative_attention_keys(
    grad_ptr, qkv_ptr, keys_ptr, queries_ptr, starts_ptr, numbers_ptr, lines_ptr, sums_ptr, delta_ptr, dqkv_ptr,
    products_ptr, part_ptr,
    scale, gradient_scale, threshold, factor, tokens, centre, heads: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    head, start, length, first = own_block(starts_ptr, BLOCK)
    feature = tl.arange(0, SIZE)
    width: tl.constexpr = heads * SIZE
    dk = tl.zeros((BLOCK, SIZE), tl.float32)
    dv = tl.zeros((BLOCK, SIZE), tl.float32)
    if first < length:
        block = tl.arange(0, BLOCK)
        key = first + block
        valid = key[:, None] < length
        base = qkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE
        place = key[:, None] * (3 * width) + feature[None, :]
        k = tl.load(base + width + place, valid, 0.0)
        v = tl.load(base + 2 * width + place, valid, 0.0)
        if DROP:
            number = tl.load(numbers_ptr + key)
        upper = own_products(k, queries_ptr, first, head, centre, width, QUERIES, -1, BLOCK, SIZE)
        earlier = tl.zeros((BLOCK, BLOCK), k.dtype)
        at, step = products_place(start, length, first, head, tl.num_programs(0), heads, BLOCK)
        tile = block[:, None] * BLOCK + block[None, :]
        for begin in range(0, length, BLOCK):
            query = begin + block
            token = (start + query).to(tl.int64)
            q = tl.load(base + query[:, None] * (3 * width) + feature[None, :], query[:, None] < length, 0.0)
            here = token[:, None] * width + head * SIZE + feature[None, :]
            grad = tl.load(grad_ptr + here, query[:, None] < length, 0.0)
            level = tl.load(sums_ptr + head * tokens + token, query < length, 1e30)
            delta = tl.load(delta_ptr + head * tokens + token, query < length, 0.0)
            scores, upper = scores_of(
                k, q, upper, queries_ptr, keys_ptr, first - begin, head, centre, width, QUERIES, KEYS, -1, BLOCK, SIZE
            )
            weights = tl.exp2(tl.minimum(scores * scale - level[None, :], 0.0))  # keys in rows
            dweights = tl.dot(v, tl.trans(grad))
            if DROP:
                line = lines_ptr + head * tokens + token
                slope = tl.load(line, query < length, 0)
                start_of = tl.load(line + heads * tokens, query < length, 0)
                kept = dropout_factor(slope[None, :], start_of[None, :], number[:, None], threshold, factor)
                dweights *= kept
                dv += tl.dot((weights * kept).to(v.dtype), grad)
            else:
                dv += tl.dot(weights.to(v.dtype), grad)
            dscores = (weights * (dweights - delta[None, :])).to(k.dtype)
            dk += tl.dot(dscores, q)
            if QUERIES:
                later = shifted(dscores, 1, BLOCK)
                products = tl.where(is_upper(first - begin, BLOCK), later, earlier)
                tl.store(products_ptr + at + begin // BLOCK * step + tile, products, valid)
                dk += tl.dot(products, vectors(queries_ptr, first - begin, head, centre, width, -1, BLOCK, SIZE))
                earlier = later
        if QUERIES:
            end = tl.cdiv(length, BLOCK) * BLOCK
            products = tl.where(is_upper(first - end, BLOCK), 0.0, earlier).to(k.dtype)
            tl.store(products_ptr + at + end // BLOCK * step + tile, products, valid)
            dk += tl.dot(products, vectors(queries_ptr, first - end, head, centre, width, -1, BLOCK, SIZE))
        dk = tl.where(valid, dk * gradient_scale, 0.0)
        dv = tl.where(valid, dv, 0.0)
        at_keys = dqkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE + width + place
        tl.store(at_keys, dk.to(k.dtype), valid)
        tl.store(at_keys + width, dv.to(k.dtype), valid)
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    part = part_ptr + row * 2 * width + head * SIZE + feature
    tl.store(part, tl.sum(dk, 0))
    tl.store(part + width, tl.sum(dv, 0))


def relative_attention_forward(
    qkv: Tensor, distances: Distances, starts: Tensor, seed: Tensor | None, longest: int, heads: int, scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (T, H) of attention to queries, keys and values (T, 3 H), and each query's logarithm of the sum."""
    size, tokens, block = qkv.shape[1] // (3 * heads), len(qkv), distances.block
    out = torch.empty(tokens, heads * size, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    warps, stages = FORWARD
    _relative_attention_forward[(triton.cdiv(longest, block), heads, len(starts) - 1)](
        qkv, distances.keys, distances.queries, starts, seed, column_numbers(longest + OVERHANG, seed), out, sums,
        scale * LOG2E, threshold_of(dropout), 1 / (1 - dropout), tokens, distances.centre, heads,
        **_terms(distances), BLOCK=block, SIZE=size, DROP=seed is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, sums


def relative_attention_backward(
    grad: Tensor, out: Tensor, sums: Tensor, qkv: Tensor, distances: Distances, starts: Tensor, seed: Tensor | None,
    longest: int, heads: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of queries, keys and values (T, 3 H), its sum over all tokens (3 H), and those of the two tables."""
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    block, device, sequences = distances.block, qkv.device, len(starts) - 1
    blocks = triton.cdiv(longest, block)
    grid = blocks, heads, sequences
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(sums)
    tables = distances.keys, distances.queries
    numbers = column_numbers(longest + OVERHANG, seed)
    lines = None if seed is None else torch.empty(2, *sums.shape, dtype=torch.int32, device=device)  # for the key side
    parts = [torch.empty(sequences * blocks, n * width, dtype=torch.float32, device=device) for n in (1, 2)]
    values = scale * LOG2E, scale, threshold_of(dropout), 1 / (1 - dropout), tokens, distances.centre, heads
    constants = {**_terms(distances), "BLOCK": block, "SIZE": width // heads, "DROP": seed is not None}

    def table_sum(products: Tensor | None, table: Tensor | None, column: int, sign: int) -> Tensor | None:
        if products is None or table is None:
            return None
        own = qkv[:, column * width : (column + 1) * width]
        return table_gradient(Products(products, own, starts, longest, heads), distances, scale, sign)

    products = distances.empty_products(distances.keys, tokens, heads, blocks)
    _relative_attention_queries[grid](
        grad, out, qkv, *tables, starts, seed, numbers, lines, sums, delta, dqkv, products, parts[0], *values,
        **constants, num_warps=QUERY_SIDE[0], num_stages=QUERY_SIDE[1],
    )  # fmt: skip
    dkeys = table_sum(products, distances.keys, 0, 1)
    del products  # its memory serves the other side
    products = distances.empty_products(distances.queries, tokens, heads, blocks)
    _relative_attention_keys[grid](
        grad, qkv, *tables, starts, numbers, lines, sums, delta, dqkv, products, parts[1], *values,
        **constants, num_warps=KEY_SIDE[0], num_stages=KEY_SIDE[1],
    )  # fmt: skip
    dqueries = table_sum(products, distances.queries, 1, -1)
    return dqkv, torch.cat([part.sum(0) for part in parts]), dkeys, dqueries


def _terms(distances: Distances) -> dict[str, bool]:
    return {"KEYS": distances.keys is not None, "QUERIES": distances.queries is not None}
