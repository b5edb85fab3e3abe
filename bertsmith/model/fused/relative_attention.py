"""Attention of packed sequences with terms of distances in Triton, block by block, with dropout (DeBERTa, section 3.1).

It is organised as in `long_attention.py`: a program owns a block of queries or keys and goes through the blocks of the
others; `relative_scores.py` computes the scores of two blocks. They cost four matrix products and two shifts where BERT
takes one product, so the forward pass keeps the weights for the two kernels of the backward pass, in the precision of
the states, relative to the highest score of a query so far, which it keeps too. Weights that dropout drops are
negative. Where sequences are longer than KEPT_LENGTH, nothing is kept, and both kernels recompute the weights.

B positions of a block (BLOCK), D head size (SIZE).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.fused.attention import LOG2E
from bertsmith.model.fused.distances import Distances, Products, products_place, table_gradient
from bertsmith.model.fused.long_attention import OVERHANG, own_block
from bertsmith.model.fused.relative_scores import is_upper, kept_tile, own_products, scores_of, shifted, vectors
from bertsmith.model.fused.rows import column_numbers, dropout_line, is_kept, threshold_of

# Warps, stages: as measured on an H200 at 128 and at 512 tokens, where the same ones are best.
FORWARD, QUERY_SIDE, KEY_SIDE = (4, 2), (4, 3), (4, 1)
RECOMPUTING = (4, 1)  # both sides, if no weights were kept
# The kept weights of a token take 2 * heads * longest bytes in each layer. For 32,768 tokens in 12 layers with 12 heads
# these are 1.2 GB at 128 tokens, and 4.8 GB at 512 tokens, the most that released DeBERTas take, where they save three
# tenths of attention's time. With longer sequences the activations of a step would no longer be linear in its tokens.
KEPT_LENGTH = 512


@triton.jit(do_not_specialize=["tokens"])
def _relative_attention_forward(
    qkv_ptr, keys_ptr, queries_ptr, starts_ptr, seed_ptr, numbers_ptr, out_ptr, sums_ptr, kept_ptr, peaks_ptr,
    scale, threshold, factor, tokens, centre, heads: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    head, start, length, first = own_block(starts_ptr, BLOCK)
    if first < length:
        feature = tl.arange(0, SIZE)
        width: tl.constexpr = heads * SIZE
        block = tl.arange(0, BLOCK)
        query = first + block
        token = (start + query).to(tl.int64)
        base = qkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE
        q = tl.load(base + query[:, None] * (3 * width) + feature[None, :], query[:, None] < length, 0.0)
        tile, blocks = block[:, None] * BLOCK + block[None, :], tl.num_programs(0)
        top = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        mixed = tl.zeros((BLOCK, SIZE), tl.float32)
        if DROP:
            slope, start_of = dropout_line((start + query) * heads + head, tl.load(seed_ptr))
        upper = own_products(q, keys_ptr, first, head, centre, width, KEYS, 1, BLOCK, SIZE)
        for begin in range(0, length, BLOCK):
            key = begin + block
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
                weights = tl.where(is_kept(slope[:, None], start_of[:, None], number, threshold), weights, -weights)
            if KEPT:
                at = kept_tile(start, length, first, begin, head, blocks, heads, BLOCK)
                tl.store(kept_ptr + at + tile, weights.to(v.dtype), query[:, None] < length)
                tl.store(peaks_ptr + (head * blocks + begin // BLOCK) * tokens + token, new, query < length)
            if DROP:
                weights = tl.where(weights < 0, 0.0, weights)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            top = new
        level = top + tl.log2(total)
        if DROP:
            total /= factor
        mixed = mixed / total[:, None]
        place = token[:, None] * width + head * SIZE + feature[None, :]
        tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), query[:, None] < length)
        tl.store(sums_ptr + head * tokens + token, level, query < length)


@triton.jit(do_not_specialize=["tokens"])
def _relative_attention_queries(
    grad_ptr, out_ptr, qkv_ptr, keys_ptr, queries_ptr, starts_ptr, seed_ptr, numbers_ptr, lines_ptr, sums_ptr,
    delta_ptr, dqkv_ptr, products_ptr, part_ptr, kept_ptr, peaks_ptr, shares_ptr,
    scale, gradient_scale, threshold, factor, tokens, centre, heads: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    KEPT: tl.constexpr,
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
        if not KEPT:
            if DROP:
                slope, start_of = dropout_line((start + query) * heads + head, tl.load(seed_ptr))
                line = lines_ptr + head * tokens + token
                tl.store(line, slope.to(tl.int32, bitcast=True), query < length)
                tl.store(line + heads * tokens, start_of.to(tl.int32, bitcast=True), query < length)
            upper = own_products(q, keys_ptr, first, head, centre, width, KEYS, 1, BLOCK, SIZE)
        earlier = tl.zeros((BLOCK, BLOCK), q.dtype)
        blocks = tl.num_programs(0)
        at, step = products_place(start, length, first, head, blocks, heads, BLOCK)
        tile = block[:, None] * BLOCK + block[None, :]
        for begin in range(0, length, BLOCK):
            key = begin + block
            here = key[:, None] * (3 * width) + feature[None, :]
            k = tl.load(base + width + here, key[:, None] < length, 0.0)
            v = tl.load(base + 2 * width + here, key[:, None] < length, 0.0)
            if KEPT:
                there = kept_tile(start, length, first, begin, head, blocks, heads, BLOCK) + tile
                weights = tl.load(kept_ptr + there, valid, 0.0).to(tl.float32)
                line = (head * blocks + begin // BLOCK) * tokens + token
                share = tl.exp2(tl.load(peaks_ptr + line, query < length, 0.0) - level)
                tl.store(shares_ptr + line, share, query < length)
                weights *= share[:, None]
            else:
                scores, upper = scores_of(
                    q, k, upper, keys_ptr, queries_ptr, first - begin, head, centre, width,
                    KEYS, QUERIES, 1, BLOCK, SIZE,
                )  # fmt: skip
                weights = tl.exp2(tl.minimum(scores * scale - level[:, None], 0.0))  # no weight is above 1
                weights = tl.where(key[None, :] < length, weights, 0.0)
                if DROP:
                    number = tl.load(numbers_ptr + key)[None, :]
                    weights = tl.where(is_kept(slope[:, None], start_of[:, None], number, threshold), weights, -weights)
            dweights = tl.dot(grad, tl.trans(v))
            if DROP:
                dweights = tl.where(weights < 0, 0.0, dweights * factor)
            dscores = (tl.abs(weights) * (dweights - delta[:, None])).to(k.dtype)
            dq += tl.dot(dscores, k)
            if KEYS:
                later = shifted(dscores, 1, BLOCK, True)
                products = tl.where(is_upper(first - begin, BLOCK, True), later, earlier)
                tl.store(products_ptr + at + begin // BLOCK * step + tile, products, valid)
                dq += tl.dot(products, vectors(keys_ptr, first - begin, head, centre, width, 1, BLOCK, SIZE, True))
                earlier = later
        if KEYS:
            end = tl.cdiv(length, BLOCK) * BLOCK
            products = tl.where(is_upper(first - end, BLOCK, True), 0.0, earlier).to(q.dtype)
            tl.store(products_ptr + at + end // BLOCK * step + tile, products, valid)
            dq += tl.dot(products, vectors(keys_ptr, first - end, head, centre, width, 1, BLOCK, SIZE, True))
        dq *= gradient_scale
        tl.store(dqkv_ptr + token[:, None] * (3 * width) + head * SIZE + feature[None, :], dq.to(q.dtype), valid)
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + row * width + head * SIZE + feature, tl.sum(dq, 0))


@triton.jit(do_not_specialize=["tokens"])
def _relative_attention_keys(
    grad_ptr, qkv_ptr, keys_ptr, queries_ptr, starts_ptr, numbers_ptr, lines_ptr, sums_ptr, delta_ptr, dqkv_ptr,
    products_ptr, part_ptr, kept_ptr, shares_ptr,
    scale, gradient_scale, threshold, factor, tokens, centre, heads: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    KEPT: tl.constexpr,
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
        if not KEPT:
            if DROP:
                number = tl.load(numbers_ptr + key)
            upper = own_products(k, queries_ptr, first, head, centre, width, QUERIES, -1, BLOCK, SIZE)
        earlier = tl.zeros((BLOCK, BLOCK), k.dtype)
        blocks = tl.num_programs(0)
        at, step = products_place(start, length, first, head, blocks, heads, BLOCK)
        tile = block[:, None] * BLOCK + block[None, :]
        for begin in range(0, length, BLOCK):
            query = begin + block
            token = (start + query).to(tl.int64)
            q = tl.load(base + query[:, None] * (3 * width) + feature[None, :], query[:, None] < length, 0.0)
            here = token[:, None] * width + head * SIZE + feature[None, :]
            grad = tl.load(grad_ptr + here, query[:, None] < length, 0.0)
            delta = tl.load(delta_ptr + head * tokens + token, query < length, 0.0)
            if KEPT:  # keys in rows, in both cases
                there = kept_tile(start, length, begin, first, head, blocks, heads, BLOCK) + tl.trans(tile)
                weights = tl.load(kept_ptr + there, query[None, :] < length, 0.0).to(tl.float32)
                line = (head * blocks + first // BLOCK) * tokens + token
                weights *= tl.load(shares_ptr + line, query < length, 0.0)[None, :]
            else:
                scores, upper = scores_of(
                    k, q, upper, queries_ptr, keys_ptr, first - begin, head, centre, width,
                    QUERIES, KEYS, -1, BLOCK, SIZE,
                )  # fmt: skip
                level = tl.load(sums_ptr + head * tokens + token, query < length, 1e30)
                weights = tl.exp2(tl.minimum(scores * scale - level[None, :], 0.0))
                if DROP:
                    line = lines_ptr + head * tokens + token
                    slope = tl.load(line, query < length, 0)
                    start_of = tl.load(line + heads * tokens, query < length, 0)
                    is_there = is_kept(slope[None, :], start_of[None, :], number[:, None], threshold)
                    weights = tl.where(is_there, weights, -weights)
            dweights = tl.dot(v, tl.trans(grad))
            if DROP:
                dweights = tl.where(weights < 0, 0.0, dweights * factor)
                dv += tl.dot(tl.where(weights < 0, 0.0, weights).to(v.dtype), grad)
            else:
                dv += tl.dot(weights.to(v.dtype), grad)
            dscores = (tl.abs(weights) * (dweights - delta[None, :])).to(k.dtype)
            dk += tl.dot(dscores, q)
            if QUERIES:
                later = shifted(dscores, 1, BLOCK, True)
                products = tl.where(is_upper(first - begin, BLOCK, True), later, earlier)
                tl.store(products_ptr + at + begin // BLOCK * step + tile, products, valid)
                dk += tl.dot(products, vectors(queries_ptr, first - begin, head, centre, width, -1, BLOCK, SIZE, True))
                earlier = later
        if QUERIES:
            end = tl.cdiv(length, BLOCK) * BLOCK
            products = tl.where(is_upper(first - end, BLOCK, True), 0.0, earlier).to(k.dtype)
            tl.store(products_ptr + at + end // BLOCK * step + tile, products, valid)
            dk += tl.dot(products, vectors(queries_ptr, first - end, head, centre, width, -1, BLOCK, SIZE, True))
        dk = tl.where(valid, dk * gradient_scale, 0.0)
        dv = tl.where(valid, dv * factor, 0.0)
        at_keys = dqkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE + width + place
        tl.store(at_keys, dk.to(k.dtype), valid)
        tl.store(at_keys + width, dv.to(k.dtype), valid)
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    part = part_ptr + row * 2 * width + head * SIZE + feature
    tl.store(part, tl.sum(dk, 0))
    tl.store(part + width, tl.sum(dv, 0))


class Kept(NamedTuple):
    """What the forward pass keeps, if anything: the weights, those of two blocks contiguous, and the highest scores."""

    weights: Tensor | None = None  # (tokens, heads, blocks of keys * B), in the precision of the states
    peaks: Tensor | None = None  # (heads, blocks of keys, tokens), float32


def relative_attention_forward(
    needs_gradient: bool, qkv: Tensor, distances: Distances, starts: Tensor, seed: Tensor | None, longest: int,
    heads: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Kept]:  # fmt: skip
    """The output (T, H) of attention to queries, keys and values (T, 3 H), and what the backward pass needs.

    This is each query's logarithm of the sum and, with `needs_gradient`, the weights if no sequence is too long.
    """
    size, tokens, block = qkv.shape[1] // (3 * heads), len(qkv), distances.block
    blocks = triton.cdiv(longest, block)
    out = torch.empty(tokens, heads * size, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    kept = Kept()
    if needs_gradient and longest <= KEPT_LENGTH:
        kept = Kept(qkv.new_empty(tokens, heads, blocks * block), sums.new_empty(heads, blocks, tokens))
    warps, stages = FORWARD
    _relative_attention_forward[(blocks, heads, len(starts) - 1)](
        qkv, distances.keys, distances.queries, starts, seed, column_numbers(longest + OVERHANG, seed), out, sums,
        *kept, scale * LOG2E, threshold_of(dropout), 1 / (1 - dropout), tokens, distances.centre, heads,
        **_terms(distances), BLOCK=block, SIZE=size, DROP=seed is not None, KEPT=kept.weights is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, sums, kept


def relative_attention_backward(
    grad: Tensor, out: Tensor, sums: Tensor, kept: Kept, qkv: Tensor, distances: Distances, starts: Tensor,
    seed: Tensor | None, longest: int, heads: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of queries, keys and values (T, 3 H), its sum over all tokens (3 H), and those of the two tables."""
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    block, device, sequences = distances.block, qkv.device, len(starts) - 1
    blocks = triton.cdiv(longest, block)
    grid = blocks, heads, sequences
    recomputes = kept.weights is None
    shares = None if kept.peaks is None else torch.empty_like(kept.peaks)  # factors of the weights, for the key side
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(sums)
    tables = distances.keys, distances.queries
    numbers = column_numbers(longest + OVERHANG, seed)
    lines = None  # of dropout, for the key side too
    if recomputes and seed is not None:
        lines = torch.empty(2, *sums.shape, dtype=torch.int32, device=device)
    parts = [torch.empty(sequences * blocks, n * width, dtype=torch.float32, device=device) for n in (1, 2)]
    values = scale * LOG2E, scale, threshold_of(dropout), 1 / (1 - dropout), tokens, distances.centre, heads
    constants = {
        **_terms(distances), "BLOCK": block, "SIZE": width // heads, "DROP": seed is not None, "KEPT": not recomputes,
    }  # fmt: skip

    def table_sum(products: Tensor | None, table: Tensor | None, column: int, sign: int) -> Tensor | None:
        if products is None or table is None:
            return None
        own = qkv[:, column * width : (column + 1) * width]
        return table_gradient(Products(products, own, starts, longest, heads), distances, scale, sign)

    products = distances.empty_products(distances.keys, tokens, heads, blocks)
    warps, stages = RECOMPUTING if recomputes else QUERY_SIDE
    _relative_attention_queries[grid](
        grad, out, qkv, *tables, starts, seed, numbers, lines, sums, delta, dqkv, products, parts[0], *kept, shares,
        *values, **constants, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dkeys = table_sum(products, distances.keys, 0, 1)
    del products  # its memory serves the other side
    products = distances.empty_products(distances.queries, tokens, heads, blocks)
    warps, stages = RECOMPUTING if recomputes else KEY_SIDE
    _relative_attention_keys[grid](
        grad, qkv, *tables, starts, numbers, lines, sums, delta, dqkv, products, parts[1], kept.weights, shares,
        *values, **constants, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dqueries = table_sum(products, distances.queries, 1, -1)
    return dqkv, torch.cat([part.sum(0) for part in parts]), dkeys, dqueries


def _terms(distances: Distances) -> dict[str, bool]:
    return {"KEYS": distances.keys is not None, "QUERIES": distances.queries is not None}
