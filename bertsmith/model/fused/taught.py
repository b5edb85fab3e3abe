"""Triton kernels of the word losses of a student with a teacher: soft targets, and the right words (M, V)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.fused.loss import leader

BLOCK, WARPS = 2048, 4
SUMS = 3  # log-sums of exponentials: of the student at temperature 1 and at T, of the teacher at T


@triton.jit
def _losses(
    ours_ptr, theirs_ptr, targets_ptr, soft_ptr, hard_ptr, right_ptr, sums_ptr, coldness, words, our_stride,
    their_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ours_ptr += row * our_stride
    theirs_ptr += row * their_stride
    target = tl.load(targets_ptr + row).to(tl.int32)
    top, total, cold_total = -float("inf"), 0.0, 0.0
    their_top, their_total, apart = -float("inf"), 0.0, 0.0
    best, at_target = 2147483647, 0.0
    for begin in range(0, words, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        valid = column < words
        x = tl.load(ours_ptr + column, valid, -float("inf")).to(tl.float32)
        new, best = leader(x, column, top, best)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        cold_total = cold_total * tl.exp((top - new) * coldness) + tl.sum(tl.exp((x - new) * coldness), 0)
        top = new
        at_target += tl.sum(tl.where(column == target, x, 0.0), 0)
        y = tl.load(theirs_ptr + column, valid, -float("inf")).to(tl.float32)
        new = tl.maximum(their_top, tl.max(y, 0))
        rescale = tl.exp((their_top - new) * coldness)
        share = tl.exp((y - new) * coldness)
        their_total = their_total * rescale + tl.sum(share, 0)
        difference = tl.where(valid, y, 0.0) - tl.where(valid, x, 0.0)
        apart = apart * rescale + tl.sum(share * difference * coldness, 0)
        their_top = new
    log_sum = top + tl.log(total)
    cold = top * coldness + tl.log(cold_total)
    their_cold = their_top * coldness + tl.log(their_total)
    counts = target >= 0  # targets of padding are negative
    soft = (apart / their_total - their_cold + cold) / (coldness * coldness)
    tl.store(soft_ptr + row, tl.where(counts, soft, 0.0))
    tl.store(hard_ptr + row, tl.where(counts, log_sum - at_target, 0.0))
    tl.store(right_ptr + row, (best == target).to(tl.int32))
    tl.store(sums_ptr + 3 * row, log_sum)
    tl.store(sums_ptr + 3 * row + 1, cold)
    tl.store(sums_ptr + 3 * row + 2, their_cold)


@triton.jit
def _gradients(
    ours_ptr, theirs_ptr, targets_ptr, sums_ptr, soft_ptr, hard_ptr, out_ptr, coldness, words, our_stride,
    their_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int32)
    soft = tl.where(target >= 0, tl.load(soft_ptr) / coldness, 0.0)
    hard = tl.where(target >= 0, tl.load(hard_ptr), 0.0)
    log_sum = tl.load(sums_ptr + 3 * row)
    cold = tl.load(sums_ptr + 3 * row + 1)
    their_cold = tl.load(sums_ptr + 3 * row + 2)
    for begin in range(0, our_stride, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        valid = column < words
        x = tl.load(ours_ptr + row * our_stride + column, valid, -float("inf")).to(tl.float32)
        y = tl.load(theirs_ptr + row * their_stride + column, valid, -float("inf")).to(tl.float32)
        apart = tl.exp(x * coldness - cold) - tl.exp(y * coldness - their_cold)
        wrong = tl.exp(x - log_sum)
        wrong = tl.where(column == target, wrong - 1.0, wrong)
        gradient = soft * apart + hard * wrong
        tl.store(out_ptr + row * our_stride + column, gradient.to(out_ptr.dtype.element_ty), column < our_stride)


def taught_losses(
    ours: Tensor, theirs: Tensor, words: int, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row's soft loss and cross-entropy, whether its highest score is the target's, and sums for the gradient.

    Only the first `words` scores of a row count. The losses are 0 where the target is negative.
    """
    rows, stride = ours.shape
    soft, hard = (torch.empty(rows, dtype=torch.float32, device=ours.device) for _ in range(2))
    right = torch.empty(rows, dtype=torch.int32, device=ours.device)
    sums = torch.empty(rows, SUMS, dtype=torch.float32, device=ours.device)
    _losses[(rows,)](
        ours, theirs, targets.contiguous(), soft, hard, right, sums, 1.0 / temperature, words, stride, theirs.stride(0),
        BLOCK=min(BLOCK, triton.next_power_of_2(stride)), num_warps=WARPS,
    )  # fmt: skip
    return soft, hard, right, sums


def taught_gradients(
    ours: Tensor, theirs: Tensor, words: int, targets: Tensor, sums: Tensor, temperature: float, soft: Tensor,
    hard: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the student's scores, given those of the two summed losses (scalars); 0 beyond the words."""
    rows, stride = ours.shape
    gradient = torch.empty_like(ours)
    _gradients[(rows,)](
        ours, theirs, targets.contiguous(), sums, soft, hard, gradient, 1.0 / temperature, words, stride,
        theirs.stride(0), BLOCK=min(BLOCK, triton.next_power_of_2(stride)), num_warps=WARPS,
    )  # fmt: skip
    return gradient
