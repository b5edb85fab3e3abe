"""Attention of packed sequences in Triton, for sequences that fit into one tile (up to 128 tokens), with dropout.

A program has one head of one sequence and all of its scores. Its backward pass recomputes the weights, so that the
forward pass saves nothing, and writes the gradients of queries, keys and values concatenated, as the matrix product of
the backward pass reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.config import Reach
from bertsmith.model.fused.rows import column_numbers, dropout_line, is_kept, threshold_of

LONGEST = 128
LOG2E = 1.4426950408889634


@triton.jit
def _load(qkv_ptr, starts_ptr, heads, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """A program's tokens, which of them are valid, the offsets of their queries, and their queries, keys and values."""
    start = tl.load(starts_ptr + tl.program_id(0))
    row, feature = tl.arange(0, LENGTH), tl.arange(0, SIZE)
    valid = row < tl.load(starts_ptr + tl.program_id(0) + 1) - start
    token, width = start + row, heads * SIZE
    place = token.to(tl.int64)[:, None] * (3 * width) + tl.program_id(1) * SIZE + feature[None, :]
    q = tl.load(qkv_ptr + place, valid[:, None], 0.0)
    k = tl.load(qkv_ptr + place + width, valid[:, None], 0.0)
    v = tl.load(qkv_ptr + place + 2 * width, valid[:, None], 0.0)
    return token, valid, place, q, k, v


@triton.jit
def sees(query, key, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Whether a key is within a query's reach; a negative limit is none, and one side at least has a limit."""
    distance = key - query
    if AFTER < 0:
        seen = distance >= -BEFORE
    elif BEFORE < 0:
        seen = distance <= AFTER
    else:
        seen = (distance >= -BEFORE) & (distance <= AFTER)
    return seen


@triton.jit
def _weights(q, k, valid, scale, LENGTH: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """The attention of each query to the keys within its reach."""
    scores = tl.dot(q, tl.trans(k)) * scale + tl.where(valid, 0.0, -1e30)[None, :]
    if BEFORE >= 0 or AFTER >= 0:
        place = tl.arange(0, LENGTH)
        scores += tl.where(sees(place[:, None], place[None, :], BEFORE, AFTER), 0.0, -1e30)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _kept(token, heads, seed_ptr, numbers_ptr, threshold, LENGTH: tl.constexpr):
    """Which weights dropout keeps, as booleans, which take few registers."""
    slope, level = dropout_line(token * heads + tl.program_id(1), tl.load(seed_ptr))
    number = tl.load(numbers_ptr + tl.arange(0, LENGTH))
    return is_kept(slope[:, None], level[:, None], number[None, :], threshold)


@triton.jit
def _tile_attention_forward(
    qkv_ptr, starts_ptr, seed_ptr, numbers_ptr, out_ptr, scale, threshold, factor, heads,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    token, valid, _, q, k, v = _load(qkv_ptr, starts_ptr, heads, LENGTH, SIZE)
    weights = _weights(q, k, valid, scale, LENGTH, BEFORE, AFTER)
    if DROP:
        weights = tl.where(_kept(token, heads, seed_ptr, numbers_ptr, threshold, LENGTH), weights, 0.0)
    out = tl.dot(weights.to(v.dtype), v)
    if DROP:
        out *= factor
    mixed = token.to(tl.int64)[:, None] * (heads * SIZE) + tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + mixed, out.to(v.dtype), valid[:, None])


@triton.jit
def _tile_attention_backward(
    grad_ptr, qkv_ptr, starts_ptr, seed_ptr, numbers_ptr, dqkv_ptr, sums_ptr,
    scale, gradient_scale, threshold, factor, heads,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, DROP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    token, valid, place, q, k, v = _load(qkv_ptr, starts_ptr, heads, LENGTH, SIZE)
    width, inside = heads * SIZE, tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    part = sums_ptr + tl.program_id(0) * 2 * width + inside
    grad = tl.load(grad_ptr + token.to(tl.int64)[:, None] * width + inside[None, :], valid[:, None], 0.0)
    weights = _weights(q, k, valid, scale, LENGTH, BEFORE, AFTER)
    dweights = tl.dot(grad, tl.trans(v))
    if DROP:
        kept = _kept(token, heads, seed_ptr, numbers_ptr, threshold, LENGTH)
        dweights = tl.where(kept, dweights, 0.0)
        dropped = tl.where(kept, weights, 0.0).to(v.dtype)
        gradient_scale = gradient_scale * factor
    else:
        dropped = weights.to(v.dtype)
    dv = tl.dot(tl.trans(dropped), grad)
    if DROP:
        dv *= factor
    tl.store(dqkv_ptr + place + 2 * width, dv.to(v.dtype), valid[:, None])
    tl.store(part + width, tl.sum(dv, 0))
    dscores = (weights * (dweights - tl.sum(weights * dweights, 1)[:, None])).to(v.dtype)
    dq = tl.dot(dscores, k) * gradient_scale
    tl.store(dqkv_ptr + place, dq.to(v.dtype), valid[:, None])
    tl.store(part, tl.sum(dq, 0))
    dk = tl.dot(tl.trans(dscores), q) * gradient_scale
    tl.store(dqkv_ptr + place + width, dk.to(v.dtype), valid[:, None])


def limits(reach: Reach) -> dict[str, int]:
    """A reach as the constants that the attention kernels are compiled for; -1: no limit."""
    return {"BEFORE": -1 if reach.before is None else reach.before, "AFTER": -1 if reach.after is None else reach.after}


def tile_length(longest: int) -> int:
    """The side of the tile for sequences of at most this length."""
    return int(max(16, triton.next_power_of_2(longest)))


def _warps(length: int) -> int:
    return 8 if length == LONGEST else 4


def attention_forward(
    qkv: Tensor, starts: Tensor, seed: Tensor | None, longest: int, heads: int, reach: Reach, dropout: float
) -> Tensor:
    """The output (T, H) of attention, given queries, keys and values concatenated (T, 3 H)."""
    size = qkv.shape[1] // (3 * heads)
    out = torch.empty(len(qkv), heads * size, dtype=qkv.dtype, device=qkv.device)
    length = tile_length(longest)
    _tile_attention_forward[(len(starts) - 1, heads)](
        qkv, starts, seed, column_numbers(length, seed), out, size**-0.5 * LOG2E, threshold_of(dropout),
        1 / (1 - dropout), heads,
        LENGTH=length, SIZE=size, DROP=seed is not None, **limits(reach), num_warps=_warps(length),
    )  # fmt: skip
    return out


def attention_backward(
    grad: Tensor,
    qkv: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    longest: int,
    heads: int,
    reach: Reach,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of queries, keys and values (T, 3 H), and its sum over all tokens (3 H).

    The sum of the keys' part is zero: a vector added to all keys changes no weight.
    """
    size = qkv.shape[1] // (3 * heads)
    dqkv, width = torch.empty_like(qkv), heads * size
    sums = torch.empty(len(starts) - 1, 2 * width, dtype=torch.float32, device=qkv.device)
    length = tile_length(longest)
    _tile_attention_backward[(len(starts) - 1, heads)](
        grad, qkv, starts, seed, column_numbers(length, seed), dqkv, sums, size**-0.5 * LOG2E, size**-0.5,
        threshold_of(dropout), 1 / (1 - dropout), heads,
        LENGTH=length, SIZE=size, DROP=seed is not None, **limits(reach), num_warps=_warps(length),
    )  # fmt: skip
    totals = sums.sum(0)
    return dqkv, torch.cat([totals[:width], torch.zeros(width, device=qkv.device), totals[width:]])
