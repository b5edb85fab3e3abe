"""Attention of packed sequences of any length in Triton, block by block, with dropout (FlashAttention-2, Dao 2023).

Queries and keys of one head of one sequence are multiplied block by block. The forward pass saves one number per query,
the base-2 logarithm of the sum of its exponentials, from which the backward pass recomputes the weights. A program owns
a block (OWN) of queries or keys and goes through the blocks (OTHER) of the others that are within reach.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.config import Reach
from bertsmith.model.fused.attention import LOG2E, limits, sees
from bertsmith.model.fused.rows import column_numbers, dropout_factor, dropout_line, is_kept, threshold_of

# Size of the own block and of the others, warps, stages: without dropout, with it. As measured on an H200.
FORWARD = (64, 64, 4, 3), (64, 64, 4, 2)
QUERY_SIDE = (128, 64, 8, 3), (64, 32, 4, 3)
KEY_SIDE = (128, 32, 4, 3), (128, 32, 4, 3)
OVERHANG = 128  # tokens by which a last block may go beyond the longest sequence


@triton.jit
def own_block(starts_ptr, OWN: tl.constexpr):
    """A program's head, the start and the length of its sequence, and the first position of the program's block."""
    start = tl.load(starts_ptr + tl.program_id(2))
    return tl.program_id(1), start, tl.load(starts_ptr + tl.program_id(2) + 1) - start, tl.program_id(0) * OWN


@triton.jit
def span(first, length, OWN: tl.constexpr, OTHER: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Where the keys within reach of a block of queries begin and end; for a block of keys, swap the two limits."""
    low, high = 0, length
    if BEFORE == 0:  # a branch of its own: the compiler knows that `first` is aligned and emits fewer instructions
        low = first // OTHER * OTHER
    elif BEFORE > 0:
        low = tl.maximum(first - BEFORE, 0) // OTHER * OTHER
    if AFTER >= 0:
        high = tl.minimum(length, first + OWN + AFTER)
    return low, high


@triton.jit(do_not_specialize=["tokens"])
def _long_attention_forward(
    qkv_ptr, starts_ptr, seed_ptr, numbers_ptr, out_ptr, sums_ptr, scale, threshold, factor, heads, tokens,
    OWN: tl.constexpr, OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    head, start, length, first = own_block(starts_ptr, OWN)
    if first < length:
        feature, width = tl.arange(0, SIZE), heads * SIZE
        query = first + tl.arange(0, OWN)
        base = qkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE
        q = tl.load(base + query[:, None] * (3 * width) + feature[None, :], query[:, None] < length, 0.0)
        top = tl.full((OWN,), -1e30, tl.float32)
        total = tl.zeros((OWN,), tl.float32)
        mixed = tl.zeros((OWN, SIZE), tl.float32)
        if DROP:
            slope, start_of = dropout_line((start + query) * heads + head, tl.load(seed_ptr))
        low, high = span(first, length, OWN, OTHER, BEFORE, AFTER)
        for begin in range(low, high, OTHER):
            key = begin + tl.arange(0, OTHER)
            place = key[:, None] * (3 * width) + feature[None, :]
            k = tl.load(base + width + place, key[:, None] < length, 0.0)
            v = tl.load(base + 2 * width + place, key[:, None] < length, 0.0)
            scores = tl.dot(q, tl.trans(k)) * scale + tl.where(key < length, 0.0, -1e30)[None, :]
            if BEFORE >= 0 or AFTER >= 0:  # a row's sums over blocks that it sees no key of are later multiplied by 0
                scores += tl.where(sees(query[:, None], key[None, :], BEFORE, AFTER), 0.0, -1e30)
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
def _long_attention_queries(
    grad_ptr, out_ptr, qkv_ptr, starts_ptr, seed_ptr, numbers_ptr, lines_ptr, sums_ptr, delta_ptr, dqkv_ptr, part_ptr,
    scale, gradient_scale, threshold, factor, heads, tokens,
    OWN: tl.constexpr, OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    head, start, length, first = own_block(starts_ptr, OWN)
    feature, width = tl.arange(0, SIZE), heads * SIZE
    dq = tl.zeros((OWN, SIZE), tl.float32)
    if first < length:
        query = first + tl.arange(0, OWN)
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
        low, high = span(first, length, OWN, OTHER, BEFORE, AFTER)
        for begin in range(low, high, OTHER):
            key = begin + tl.arange(0, OTHER)
            at = key[:, None] * (3 * width) + feature[None, :]
            k = tl.load(base + width + at, key[:, None] < length, 0.0)
            v = tl.load(base + 2 * width + at, key[:, None] < length, 0.0)
            # Past the last key the keys are zero and contribute nothing; no weight is above 1.
            weights = tl.exp2(tl.minimum(tl.dot(q, tl.trans(k)) * scale - level[:, None], 0.0))
            if BEFORE >= 0 or AFTER >= 0:
                weights = tl.where(sees(query[:, None], key[None, :], BEFORE, AFTER), weights, 0.0)
            dweights = tl.dot(grad, tl.trans(v))
            if DROP:
                number = tl.load(numbers_ptr + key)[None, :]
                dweights *= dropout_factor(slope[:, None], start_of[:, None], number, threshold, factor)
            dscores = (weights * (dweights - delta[:, None])).to(k.dtype)
            dq += tl.dot(dscores, k)
        dq *= gradient_scale
        tl.store(dqkv_ptr + token[:, None] * (3 * width) + head * SIZE + feature[None, :], dq.to(q.dtype), valid)
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + row * width + head * SIZE + feature, tl.sum(dq, 0))


@triton.jit(do_not_specialize=["tokens"])
def _long_attention_keys(
    grad_ptr, qkv_ptr, starts_ptr, numbers_ptr, lines_ptr, sums_ptr, delta_ptr, dqkv_ptr, part_ptr,
    scale, gradient_scale, threshold, factor, heads, tokens,
    OWN: tl.constexpr, OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    head, start, length, first = own_block(starts_ptr, OWN)
    feature, width = tl.arange(0, SIZE), heads * SIZE
    dk = tl.zeros((OWN, SIZE), tl.float32)
    dv = tl.zeros((OWN, SIZE), tl.float32)
    if first < length:
        key = first + tl.arange(0, OWN)
        valid_key = key[:, None] < length
        base = qkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE
        place = key[:, None] * (3 * width) + feature[None, :]
        k = tl.load(base + width + place, valid_key, 0.0)
        v = tl.load(base + 2 * width + place, valid_key, 0.0)
        if DROP:
            number = tl.load(numbers_ptr + key)
        low, high = span(first, length, OWN, OTHER, AFTER, BEFORE)
        for begin in range(low, high, OTHER):
            query = begin + tl.arange(0, OTHER)
            valid_query = query[:, None] < length
            token = (start + query).to(tl.int64)
            q = tl.load(base + query[:, None] * (3 * width) + feature[None, :], valid_query, 0.0)
            grad = tl.load(grad_ptr + token[:, None] * width + head * SIZE + feature[None, :], valid_query, 0.0)
            level = tl.load(sums_ptr + head * tokens + token, query < length, 1e30)
            delta = tl.load(delta_ptr + head * tokens + token, query < length, 0.0)
            weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - level[None, :])  # keys in rows
            if BEFORE >= 0 or AFTER >= 0:
                weights = tl.where(sees(query[None, :], key[:, None], BEFORE, AFTER), weights, 0.0)
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
        dk *= gradient_scale
        at = dqkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE + place
        tl.store(at + width, dk.to(k.dtype), valid_key)
        tl.store(at + 2 * width, dv.to(k.dtype), valid_key)
        dv = tl.where(valid_key, dv, 0.0)
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + row * width + head * SIZE + feature, tl.sum(dv, 0))


def long_attention_forward(
    qkv: Tensor, starts: Tensor, seed: Tensor | None, longest: int, heads: int, reach: Reach, dropout: float
) -> tuple[Tensor, Tensor]:
    """The output (T, H) of attention to queries, keys and values (T, 3 H), and each query's logarithm of the sum."""
    size, tokens = qkv.shape[1] // (3 * heads), len(qkv)
    out = torch.empty(tokens, heads * size, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    own, other, warps, stages = FORWARD[seed is not None]
    _long_attention_forward[(triton.cdiv(longest, own), heads, len(starts) - 1)](
        qkv, starts, seed, column_numbers(longest + OVERHANG, seed), out, sums,
        size**-0.5 * LOG2E, threshold_of(dropout), 1 / (1 - dropout), heads, tokens,
        OWN=own, OTHER=other, SIZE=size, DROP=seed is not None, **limits(reach), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, sums


def long_attention_backward(
    grad: Tensor, out: Tensor, sums: Tensor, qkv: Tensor, starts: Tensor, seed: Tensor | None, longest: int, heads: int,
    reach: Reach, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of queries, keys and values (T, 3 H), and its sum over all tokens (3 H).

    The sum of the keys' part is zero: a vector added to all keys changes no weight.
    """
    size, tokens = qkv.shape[1] // (3 * heads), len(qkv)
    width, device = heads * size, qkv.device
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(sums)
    numbers = column_numbers(longest + OVERHANG, seed)
    lines = None if seed is None else torch.empty(2, *sums.shape, dtype=torch.int32, device=device)  # for the key side
    values = size**-0.5 * LOG2E, size**-0.5, threshold_of(dropout), 1 / (1 - dropout), heads, tokens
    own, other, warps, stages = QUERY_SIDE[seed is not None]
    blocks = triton.cdiv(longest, own)
    queries = torch.empty((len(starts) - 1) * blocks, width, dtype=torch.float32, device=device)
    _long_attention_queries[(blocks, heads, len(starts) - 1)](
        grad, out, qkv, starts, seed, numbers, lines, sums, delta, dqkv, queries, *values,
        OWN=own, OTHER=other, SIZE=size, DROP=seed is not None, **limits(reach), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    own, other, warps, stages = KEY_SIDE[seed is not None]
    blocks = triton.cdiv(longest, own)
    values_of = torch.empty((len(starts) - 1) * blocks, width, dtype=torch.float32, device=device)
    _long_attention_keys[(blocks, heads, len(starts) - 1)](
        grad, qkv, starts, numbers, lines, sums, delta, dqkv, values_of, *values,
        OWN=own, OTHER=other, SIZE=size, DROP=seed is not None, **limits(reach), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dqkv, torch.cat([queries.sum(0), torch.zeros(width, device=device), values_of.sum(0)])
