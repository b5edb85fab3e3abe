"""Attention of packed sequences of any length in Triton, block by block, with dropout (FlashAttention-2, Dao 2023).

Queries and keys of one head of one sequence are multiplied block by block. The forward pass saves one number per query,
the base-2 logarithm of the sum of its exponentials, from which the backward pass recomputes the weights. A program owns
a block (OWN) of queries or keys and goes through the blocks (OTHER) of the others that are within reach: first those
that every one of its own sees all of, where no score is masked, then the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.config import Reach
from bertsmith.model.fused import query_sums
from bertsmith.model.fused.attention import LOG2E, limits, rotated_back, sees
from bertsmith.model.fused.rows import column_numbers, dropout_factor, dropout_line, is_kept, threshold_of
from bertsmith.model.rotary import Rotation

# Size of the own block and of the others, warps, stages: without dropout, with it. As measured on an H200.
Launch = tuple[int, int, int, int]
FORWARD: tuple[Launch, Launch] = (64, 64, 4, 3), (64, 64, 4, 2)
QUERY_SIDE: tuple[Launch, Launch] = (128, 64, 8, 3), (64, 32, 4, 3)
KEY_SIDE: tuple[Launch, Launch] = (128, 32, 4, 3), (128, 32, 4, 3)
# Of a window: an own block that is no larger than a side of it has the fewest scores outside the window.
LOCAL_FORWARD: tuple[Launch, Launch] = (64, 64, 4, 3), (64, 64, 4, 2)
LOCAL_QUERY_SIDE: tuple[Launch, Launch] = (64, 64, 4, 2), (64, 32, 4, 3)
LOCAL_KEY_SIDE: tuple[Launch, Launch] = (64, 64, 4, 2), (128, 32, 4, 3)
# Sequences without dropout from this length on take one kernel in the backward pass: it multiplies five times in place
# of seven, but adds the gradients of queries in memory, in no fixed order.
ONE_PASS_LENGTH = 1 << 30
ONE_PASS: Launch = (128, 64, 8, 2)
OVERHANG = 128  # tokens by which a last block may go beyond the longest sequence


@triton.jit
def own_block(starts_ptr, OWN: tl.constexpr):
    """A program's head, the start and the length of its sequence, and the first position of the program's block."""
    start = tl.load(starts_ptr + tl.program_id(2))
    return tl.program_id(1), start, tl.load(starts_ptr + tl.program_id(2) + 1) - start, tl.program_id(0) * OWN


@triton.jit
def span(first, length, OWN: tl.constexpr, OTHER: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Where the keys within reach of a block of queries begin and end; for a block of keys, swap the two limits.

    Between the two is the end of the blocks that every query sees all of; with a limit before, these are not counted.
    """
    low, high = 0, length
    if BEFORE == 0:  # a branch of its own: the compiler knows that `first` is aligned and emits fewer instructions
        low = first // OTHER * OTHER
    elif BEFORE > 0:
        low = tl.maximum(first - BEFORE, 0) // OTHER * OTHER
    if AFTER >= 0:
        high = tl.minimum(length, first + OWN + AFTER)
    full = low
    if BEFORE < 0:
        full = length // OTHER * OTHER
        if AFTER >= 0:
            full = tl.minimum(length, first + AFTER + 1) // OTHER * OTHER
    return low, full, high


@triton.jit
def _rows(pointers, inside, MASKED: tl.constexpr):
    """The rows of a block; those past the end of a sequence are zero."""
    if MASKED:
        rows = tl.load(pointers, inside[:, None], 0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def _mix(
    begin, end, q, base, top, total, mixed, query, length, slope, start_of, numbers_ptr, scale, threshold, width,
    OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the largest score, the sum of exponentials and the mix of values of each query by some blocks."""
    feature = tl.arange(0, SIZE)
    for at in range(begin, end, OTHER):
        key = at + tl.arange(0, OTHER)
        place = key[:, None] * (3 * width) + feature[None, :]
        k = _rows(base + width + place, key < length, MASKED)
        v = _rows(base + 2 * width + place, key < length, MASKED)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            scores = scores * scale + tl.where(key < length, 0.0, -1e30)[None, :]
            if BEFORE >= 0 or AFTER >= 0:  # a row's sums over blocks that it sees no key of are later multiplied by 0
                scores = tl.where(sees(query[:, None], key[None, :], BEFORE, AFTER), scores, -1e30)
            new = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new[:, None])
        else:  # the scale is multiplied and the maximum subtracted in one instruction
            new = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(weights, 1)
        if DROP:
            number = tl.load(numbers_ptr + key)[None, :]
            weights = tl.where(is_kept(slope[:, None], start_of[:, None], number, threshold), weights, 0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new
    return top, total, mixed


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
        slope, start_of = query, query  # without dropout nothing reads them
        if DROP:
            slope, start_of = dropout_line((start + query) * heads + head, tl.load(seed_ptr))
        low, full, high = span(first, length, OWN, OTHER, BEFORE, AFTER)
        if BEFORE < 0:
            top, total, mixed = _mix(
                low, full, q, base, top, total, mixed, query, length, slope, start_of, numbers_ptr, scale, threshold,
                width, OTHER, SIZE, DROP, BEFORE, AFTER, False,
            )  # fmt: skip
        top, total, mixed = _mix(
            full, high, q, base, top, total, mixed, query, length, slope, start_of, numbers_ptr, scale, threshold,
            width, OTHER, SIZE, DROP, BEFORE, AFTER, True,
        )  # fmt: skip
        level = top + tl.log2(total)
        if DROP:
            total /= factor
        mixed = mixed / total[:, None]
        token = (start + query).to(tl.int64)
        place = token[:, None] * width + head * SIZE + feature[None, :]
        tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), query[:, None] < length)
        tl.store(sums_ptr + head * tokens + token, level, query < length)


@triton.jit
def _query_gradients(
    begin, end, dq, q, grad, base, query, length, level, delta, slope, start_of, numbers_ptr, scale, threshold, factor,
    width,
    OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what some blocks of keys contribute to the gradients of a block of queries."""
    feature = tl.arange(0, SIZE)
    for at in range(begin, end, OTHER):
        key = at + tl.arange(0, OTHER)
        place = key[:, None] * (3 * width) + feature[None, :]
        k = _rows(base + width + place, key < length, MASKED)
        v = _rows(base + 2 * width + place, key < length, MASKED)
        scores = tl.dot(q, tl.trans(k)) * scale - level[:, None]
        if MASKED:  # past the last key the keys are zero and contribute nothing; no weight is above 1
            scores = tl.minimum(scores, 0.0)
        weights = tl.exp2(scores)
        if MASKED and (BEFORE >= 0 or AFTER >= 0):
            weights = tl.where(sees(query[:, None], key[None, :], BEFORE, AFTER), weights, 0.0)
        dweights = tl.dot(grad, tl.trans(v))
        if DROP:
            number = tl.load(numbers_ptr + key)[None, :]
            dweights *= dropout_factor(slope[:, None], start_of[:, None], number, threshold, factor)
        dscores = (weights * (dweights - delta[:, None])).to(k.dtype)
        dq += tl.dot(dscores, k)
    return dq


@triton.jit(do_not_specialize=["tokens"])
def _long_attention_queries(
    grad_ptr, out_ptr, qkv_ptr, starts_ptr, seed_ptr, numbers_ptr, lines_ptr, sums_ptr, delta_ptr, cos_ptr, sin_ptr,
    dqkv_ptr, part_ptr, scale, gradient_scale, threshold, factor, heads, tokens,
    OWN: tl.constexpr, OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, ROTARY: tl.constexpr, SUMS: tl.constexpr,
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
        # A row past the end has no gradient, and weights of zero.
        level = tl.load(sums_ptr + head * tokens + token, query < length, 1e30)
        slope, start_of = query, query  # without dropout nothing reads them
        if DROP:
            slope, start_of = dropout_line((start + query) * heads + head, tl.load(seed_ptr))
            line = lines_ptr + head * tokens + token
            tl.store(line, slope.to(tl.int32, bitcast=True), query < length)
            tl.store(line + heads * tokens, start_of.to(tl.int32, bitcast=True), query < length)
        low, full, high = span(first, length, OWN, OTHER, BEFORE, AFTER)
        if BEFORE < 0:
            dq = _query_gradients(
                low, full, dq, q, grad, base, query, length, level, delta, slope, start_of, numbers_ptr, scale,
                threshold, factor, width, OTHER, SIZE, DROP, BEFORE, AFTER, False,
            )  # fmt: skip
        dq = _query_gradients(
            full, high, dq, q, grad, base, query, length, level, delta, slope, start_of, numbers_ptr, scale,
            threshold, factor, width, OTHER, SIZE, DROP, BEFORE, AFTER, True,
        )  # fmt: skip
        dq *= gradient_scale
        if ROTARY:
            dq = rotated_back(dq, cos_ptr, sin_ptr, token, query < length, OWN, SIZE)
        tl.store(dqkv_ptr + token[:, None] * (3 * width) + head * SIZE + feature[None, :], dq.to(q.dtype), valid)
    if SUMS:
        row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.store(part_ptr + row * width + head * SIZE + feature, tl.sum(dq, 0))


@triton.jit
def _key_gradients(
    begin, end, dk, dv, k, v, base, grad_ptr, lines_ptr, sums_ptr, delta_ptr, dq_ptr, key, number, start, length, head,
    scale, threshold, factor, heads, tokens,
    OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    ONE_PASS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what some blocks of queries contribute to the gradients of a block of keys and values.

    With ONE_PASS the block of keys also adds what it contributes to the gradients of these queries in memory.
    """
    feature, width = tl.arange(0, SIZE), heads * SIZE
    for at in range(begin, end, OTHER):
        query = at + tl.arange(0, OTHER)
        token = (start + query).to(tl.int64)
        q = _rows(base + query[:, None] * (3 * width) + feature[None, :], query < length, MASKED)
        grad = _rows(grad_ptr + token[:, None] * width + head * SIZE + feature[None, :], query < length, MASKED)
        if MASKED:
            level = tl.load(sums_ptr + head * tokens + token, query < length, 1e30)
            delta = tl.load(delta_ptr + head * tokens + token, query < length, 0.0)
        else:
            level = tl.load(sums_ptr + head * tokens + token)
            delta = tl.load(delta_ptr + head * tokens + token)
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - level[None, :])  # keys in rows
        if MASKED and (BEFORE >= 0 or AFTER >= 0):
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
        if ONE_PASS:
            place = token[:, None] * width + head * SIZE + feature[None, :]
            tl.atomic_add(dq_ptr + place, tl.dot(tl.trans(dscores), k), (query < length)[:, None], sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["tokens"])
def _long_attention_keys(
    grad_ptr, qkv_ptr, starts_ptr, numbers_ptr, lines_ptr, sums_ptr, delta_ptr, cos_ptr, sin_ptr, dqkv_ptr, part_ptr,
    dq_ptr, scale, gradient_scale, threshold, factor, heads, tokens,
    OWN: tl.constexpr, OTHER: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, ROTARY: tl.constexpr, SUMS: tl.constexpr, ONE_PASS: tl.constexpr,
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
        number = key
        if DROP:
            number = tl.load(numbers_ptr + key)
        low, full, high = span(first, length, OWN, OTHER, AFTER, BEFORE)
        if AFTER < 0:
            dk, dv = _key_gradients(
                low, full, dk, dv, k, v, base, grad_ptr, lines_ptr, sums_ptr, delta_ptr, dq_ptr, key, number, start,
                length, head, scale, threshold, factor, heads, tokens,
                OTHER, SIZE, DROP, BEFORE, AFTER, ONE_PASS, False,
            )  # fmt: skip
        dk, dv = _key_gradients(
            full, high, dk, dv, k, v, base, grad_ptr, lines_ptr, sums_ptr, delta_ptr, dq_ptr, key, number, start,
            length, head, scale, threshold, factor, heads, tokens, OTHER, SIZE, DROP, BEFORE, AFTER, ONE_PASS, True,
        )  # fmt: skip
        dk *= gradient_scale
        if ROTARY:
            dk = rotated_back(dk, cos_ptr, sin_ptr, (start + key).to(tl.int64), key < length, OWN, SIZE)
        at = dqkv_ptr + start.to(tl.int64) * (3 * width) + head * SIZE + place
        tl.store(at + width, dk.to(k.dtype), valid_key)
        tl.store(at + 2 * width, dv.to(k.dtype), valid_key)
        dv = tl.where(valid_key, dv, 0.0)
    if SUMS:
        row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.store(part_ptr + row * width + head * SIZE + feature, tl.sum(dv, 0))


def _is_local(reach: Reach) -> bool:
    return reach.before is not None and reach.after is not None


def long_attention_forward(
    qkv: Tensor, starts: Tensor, seed: Tensor | None, longest: int, heads: int, reach: Reach, dropout: float
) -> tuple[Tensor, Tensor]:
    """The output (T, H) of attention to queries, keys and values (T, 3 H), and each query's logarithm of the sum."""
    size, tokens = qkv.shape[1] // (3 * heads), len(qkv)
    out = torch.empty(tokens, heads * size, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
    own, other, warps, stages = (LOCAL_FORWARD if _is_local(reach) else FORWARD)[seed is not None]
    _long_attention_forward[(triton.cdiv(longest, own), heads, len(starts) - 1)](
        qkv, starts, seed, column_numbers(longest + OVERHANG, seed), out, sums,
        size**-0.5 * LOG2E, threshold_of(dropout), 1 / (1 - dropout), heads, tokens,
        OWN=own, OTHER=other, SIZE=size, DROP=seed is not None, **limits(reach), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, sums


def long_attention_backward(
    grad: Tensor, out: Tensor, sums: Tensor, qkv: Tensor, starts: Tensor, seed: Tensor | None, angles: Rotation | None,
    has_bias: bool, longest: int, heads: int, reach: Reach, dropout: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradient of queries, keys and values (T, 3 H) and, with a bias, its sum over all tokens (3 H).

    `angles`, by which queries and keys have been rotated, rotate their gradients back. Without a rotation the sum of
    the keys' part is zero: a vector added to all keys changes no weight.
    """
    size, tokens = qkv.shape[1] // (3 * heads), len(qkv)
    width, device = heads * size, qkv.device
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(sums)
    numbers = column_numbers(longest + OVERHANG, seed)
    lines = None if seed is None else torch.empty(2, *sums.shape, dtype=torch.int32, device=device)  # for the key side
    values = size**-0.5 * LOG2E, size**-0.5, threshold_of(dropout), 1 / (1 - dropout), heads, tokens
    one_pass = seed is None and not _is_local(reach) and longest >= ONE_PASS_LENGTH
    summed = has_bias and angles is None and not one_pass
    turned = angles or (None, None)
    constants = {"SIZE": size, "DROP": seed is not None, **limits(reach), "ROTARY": angles is not None, "SUMS": summed}
    queries = dq = None
    if one_pass:
        dq = query_sums.before(grad, out, delta)
    else:
        own, other, warps, stages = (LOCAL_QUERY_SIDE if _is_local(reach) else QUERY_SIDE)[seed is not None]
        blocks = triton.cdiv(longest, own)
        queries = _parts(summed, (len(starts) - 1) * blocks, width, device)
        _long_attention_queries[(blocks, heads, len(starts) - 1)](
            grad, out, qkv, starts, seed, numbers, lines, sums, delta, *turned, dqkv, queries, *values,
            OWN=own, OTHER=other, **constants, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    own, other, warps, stages = (
        ONE_PASS if one_pass else (LOCAL_KEY_SIDE if _is_local(reach) else KEY_SIDE)[seed is not None]
    )
    blocks = triton.cdiv(longest, own)
    values_of = _parts(summed, (len(starts) - 1) * blocks, width, device)
    _long_attention_keys[(blocks, heads, len(starts) - 1)](
        grad, qkv, starts, numbers, lines, sums, delta, *turned, dqkv, values_of, dq, *values,
        OWN=own, OTHER=other, **constants, ONE_PASS=one_pass, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if dq is not None:
        query_sums.after(dq, angles, dqkv, heads, size**-0.5)
    if queries is None or values_of is None:
        return dqkv, dqkv.sum(0, dtype=torch.float32) if has_bias else None
    return dqkv, torch.cat([queries.sum(0), torch.zeros(width, device=device), values_of.sum(0)])


def _parts(summed: bool, programs: int, width: int, device: torch.device) -> Tensor | None:
    """Memory for the sums over each program's rows; None where nobody asks for them."""
    return torch.empty(programs, width, dtype=torch.float32, device=device) if summed else None
