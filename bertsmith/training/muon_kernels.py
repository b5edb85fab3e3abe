"""Triton kernels of Muon: momentum and update in one pass each, and batched matrix products.

N matrices of one shape. The products add a matrix without the copy that a library's product makes, and compute only one
half of a symmetric result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements per program of an elementwise kernel
TILE = (128, 128, 64, 4, 3)  # rows, columns, depth, warps, stages


@triton.jit
def _momentum(gradient_ptr, moment_ptr, step_ptr, momentum, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < size
    gradient = tl.load(gradient_ptr + place, valid, 0.0)
    moment = tl.load(moment_ptr + place, valid, 0.0)
    moment += (gradient - moment) * (1.0 - momentum)
    tl.store(moment_ptr + place, moment, valid)
    step = gradient + (moment - gradient) * momentum
    tl.store(step_ptr + place, step.to(step_ptr.dtype.element_ty), valid)


@triton.jit
def _change(parameter_ptr, step_ptr, rate_ptr, decay, factor, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < size
    rate = tl.load(rate_ptr)
    value = tl.load(parameter_ptr + place, valid, 0.0) * (1.0 - rate * decay)
    value -= rate * factor * tl.load(step_ptr + place, valid, 0.0).to(tl.float32)
    tl.store(parameter_ptr + place, value, valid)


@triton.jit
def _product(
    a_ptr, b_ptr, c_ptr, out_ptr, rows, columns, depth, alpha, beta,
    a_matrix, a_row, a_column, b_matrix, b_row, b_column, c_matrix, c_row, c_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ADD: tl.constexpr, SYMMETRIC: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    if SYMMETRIC and j > i:  # ROWS and COLUMNS are equal: this tile mirrors another one
        return
    row, column = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    a_ptr += matrix * a_matrix
    b_ptr += matrix * b_matrix
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, depth, DEPTH):
        k = begin + inner
        left = a_ptr + row[:, None] * a_row + k[None, :] * a_column
        right = b_ptr + k[:, None] * b_row + column[None, :] * b_column
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, (row[:, None] < rows) & (k[None, :] < depth), 0.0)
            b = tl.load(right, (k[:, None] < depth) & (column[None, :] < columns), 0.0)
        total += tl.dot(a, b)
    valid = (row[:, None] < rows) & (column[None, :] < columns)
    total *= alpha
    if ADD:
        place = matrix * c_matrix + row[:, None] * c_row + column[None, :] * c_column
        total += beta * tl.load(c_ptr + place, valid, 0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    out_ptr += matrix * rows * columns
    tl.store(out_ptr + row[:, None] * columns + column[None, :], result, valid)
    if SYMMETRIC:  # noqa: SIM102
        if i != j:
            tl.store(out_ptr + row[:, None] + column[None, :] * columns, result, valid)


def momentum(gradient: Tensor, moment: Tensor, step: Tensor, value: float) -> None:
    """Update the momentum buffer, and write the Nesterov step."""
    size = gradient.numel()
    _momentum[(triton.cdiv(size, BLOCK),)](gradient, moment, step, value, size, BLOCK=BLOCK)


def change(parameter: Tensor, step: Tensor, rate: Tensor, decay: float, factor: float) -> None:
    """Apply the weight decay, and subtract rate · factor · step."""
    size = parameter.numel()
    _change[(triton.cdiv(size, BLOCK),)](parameter, step, rate, decay, factor, size, BLOCK=BLOCK)


def product(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, *, symmetric: bool = False
) -> Tensor:
    """alpha · a b + beta · c for every matrix of the stacks; `symmetric` where the result is known to be."""
    count, rows, depth = a.shape
    columns = b.shape[-1]
    out = torch.empty(count, rows, columns, dtype=a.dtype, device=a.device)
    high, wide, deep, warps, stages = TILE
    added = a if c is None else c
    _product[(triton.cdiv(rows, high) * triton.cdiv(columns, wide), count)](
        a, b, added, out, rows, columns, depth, alpha, beta, *a.stride(), *b.stride(), *added.stride(),
        ROWS=high, COLUMNS=wide, DEPTH=deep, ADD=c is not None, SYMMETRIC=symmetric,
        EVEN=rows % high == columns % wide == depth % deep == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
