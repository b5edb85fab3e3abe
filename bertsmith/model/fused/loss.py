"""Triton kernel of the masked-word loss, which can also draw a word from each row of scores (M, V)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.fused.rows import hashed
from bertsmith.model.fused.weights import Sampling

LOSS_BLOCK, LOSS_WARPS = 2048, 4  # as measured on an H200
SAMPLING = Sampling()


@triton.jit
def gumbel(column, key):
    """Gumbel noise for each column of a row; small exponential draws, which win, are kept exact by their series."""
    uniform = hashed(column, key).to(tl.float32) * 2.3283064365386963e-10 + 1e-10
    return -tl.log(tl.where(uniform < 0.001, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform)))


@triton.jit
def leader(values, column, top, best):
    """The highest value so far and its column, given those of the columns before; the first of equal values counts."""
    highest = tl.max(values, 0)
    first = tl.min(tl.where(values == highest, column, 2147483647), 0)
    best = tl.where(highest > top, first, best)
    return tl.maximum(top, highest), best


@triton.jit
def _cross_entropy(
    scores_ptr, targets_ptr, seed_ptr, loss_ptr, right_ptr, sampled_ptr, coldness, words, stride,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr, SAMPLE: tl.constexpr, DISALLOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride
    target = tl.load(targets_ptr + row).to(tl.int32)
    top, total = -float("inf"), 0.0
    best, at_target = 2147483647, 0.0
    if SAMPLE:
        key = hashed(row, tl.load(seed_ptr))
        drawn, luckiest = 0, -float("inf")
    for begin in range(0, words, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        valid = column < words
        x = tl.load(scores_ptr + column, valid, -float("inf")).to(tl.float32)
        new, best = leader(x, column, top, best)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
        at_target += tl.sum(tl.where(column == target, x, 0.0), 0)
        if SAMPLE:  # the highest sum of score and Gumbel noise is a draw from the softmax
            luck = x * coldness + gumbel(column, key)
            if DISALLOW:
                luck = tl.where(column == target, -float("inf"), luck)
            luckiest, drawn = leader(luck, column, luckiest, drawn)
    counts = target >= 0  # targets of padding are negative
    tl.store(loss_ptr + row, tl.where(counts, top + tl.log(total) - at_target, 0.0))
    tl.store(right_ptr + row, (best == target).to(tl.int32))
    if SAMPLE:
        tl.store(sampled_ptr + row, drawn)
    if GRADIENT:
        inverse = tl.where(counts, 1.0 / total, 0.0)
        for begin in range(0, stride, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            valid = column < words
            x = tl.load(scores_ptr + column, valid, -float("inf")).to(tl.float32)
            share = tl.exp(x - top) * inverse
            share = tl.where(column == target, share - 1.0, share)
            tl.store(scores_ptr + column, share.to(scores_ptr.dtype.element_ty), column < stride)


def cross_entropy(
    scores: Tensor, words: int, targets: Tensor, gradient: bool, seed: Tensor | None = None,
    sampling: Sampling = SAMPLING,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Each row's loss, and whether its highest score is the target's; both are 0 where the target is negative.

    With a `seed`, a word is drawn from each row as well. Only the first `words` scores of a row count. With `gradient`,
    the gradient of the summed loss overwrites the scores (M, at least V): they are the largest matrix of a step, and
    are not read again.
    """
    rows, stride = scores.shape
    loss = torch.empty(rows, dtype=torch.float32, device=scores.device)
    right = torch.empty(rows, dtype=torch.int32, device=scores.device)
    sampled = None if seed is None else torch.empty(rows, dtype=torch.int64, device=scores.device)
    _cross_entropy[(rows,)](
        scores, targets.contiguous(), seed, loss, right, sampled, 1.0 / sampling.temperature, words, stride,
        BLOCK=min(LOSS_BLOCK, triton.next_power_of_2(stride)), GRADIENT=gradient,
        SAMPLE=seed is not None, DISALLOW=sampling.disallow_correct, num_warps=LOSS_WARPS,
    )  # fmt: skip
    return loss, right, sampled
