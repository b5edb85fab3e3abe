"""Triton kernels of gated feed-forward layers and of rotary positions.

T tokens, I the width inside a feed-forward layer, H hidden size, D head size. The gate's kernels read the two halves of
one matrix product, as `FeedForward` takes them apart; the rotation works in place on the queries and keys of another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.config import Activation
from bertsmith.model.fused.rows import ACTIVATION_PROGRAMS, ACTIVATION_WARPS, tile_sides, value_and_slope

ELEMENTS = (2048, 1024)  # of a tile of the result: forward, backward
ROTATED_ROWS, ROTATED_WARPS = 16, 4


@triton.jit
def _halves(x_ptr, bias_ptr, row, column, valid, columns, BIAS: tl.constexpr):
    """A tile of the activation's input and of the gate, and their offsets; the gate comes `columns` later."""
    place = row[:, None].to(tl.int64) * (2 * columns) + column[None, :]
    inner = tl.load(x_ptr + place, valid, 0.0).to(tl.float32)
    gate = tl.load(x_ptr + place + columns, valid, 0.0).to(tl.float32)
    if BIAS:
        inner += tl.load(bias_ptr + column, column < columns, 0.0).to(tl.float32)[None, :]
        gate += tl.load(bias_ptr + columns + column, column < columns, 0.0).to(tl.float32)[None, :]
    return inner, gate, place


@triton.jit(do_not_specialize=["rows"])
def _gate_forward(
    x_ptr, bias_ptr, out_ptr, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (row[:, None] < rows) & (column[None, :] < columns)
    inner, gate, _ = _halves(x_ptr, bias_ptr, row, column, valid, columns, BIAS)
    value, _ = value_and_slope(inner, ACTIVATION)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out_ptr + place, (value * gate).to(out_ptr.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows"])
def _gate_backward(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner_total = tl.zeros((COLUMNS,), tl.float32)
    gate_total = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = begin + tl.arange(0, ROWS)
        valid = (row[:, None] < rows) & (column[None, :] < columns)
        inner, gate, place = _halves(x_ptr, bias_ptr, row, column, valid, columns, BIAS)
        grad = tl.load(grad_ptr + row[:, None].to(tl.int64) * columns + column[None, :], valid, 0.0).to(tl.float32)
        value, slope = value_and_slope(inner, ACTIVATION)
        dinner, dgate = grad * gate * slope, grad * value
        tl.store(dx_ptr + place, dinner.to(dx_ptr.dtype.element_ty), valid)
        tl.store(dx_ptr + place + columns, dgate.to(dx_ptr.dtype.element_ty), valid)
        if BIAS:
            inner_total += tl.sum(tl.where(valid, dinner, 0.0), 0)
            gate_total += tl.sum(tl.where(valid, dgate, 0.0), 0)
    if BIAS:
        part = dbias_ptr + program.to(tl.int64) * (2 * columns) + column
        tl.store(part, inner_total, column < columns)
        tl.store(part + columns, gate_total, column < columns)


def _sides(elements: int, columns: int) -> dict[str, int]:
    """The sides of a tile; as ModernBERT's widths are 9 · 128 and 41 · 64, tiles of a power of two would stick out."""
    across = min(1024, columns & -columns)  # the largest power of two that divides the width
    return tile_sides(elements, columns) if across < 64 else {"ROWS": elements // across, "COLUMNS": across}


def gate_forward(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """The activation of the first half of x + bias (T, 2 I), times its second half: (T, I)."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    tile = _sides(ELEMENTS[0], columns)
    grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(columns, tile["COLUMNS"]))
    _gate_forward[grid](x, bias, out, rows, columns, **tile, BIAS=bias is not None, ACTIVATION=activation)
    return out


def gate_backward(grad: Tensor, x: Tensor, bias: Tensor | None, activation: Activation) -> tuple[Tensor, Tensor | None]:
    """Gradients of x (T, 2 I) and of the bias."""
    rows, columns = x.shape[0], x.shape[1] // 2
    dx = torch.empty_like(x)
    tile = _sides(ELEMENTS[1], columns)
    across = triton.cdiv(columns, tile["COLUMNS"])
    programs = min(triton.cdiv(ACTIVATION_PROGRAMS, across), triton.cdiv(rows, tile["ROWS"]))
    sums = torch.empty(programs if bias is not None else 0, 2 * columns, dtype=torch.float32, device=x.device)
    _gate_backward[(programs, across)](
        grad, x, bias, dx, sums, rows, columns,
        **tile, BIAS=bias is not None, ACTIVATION=activation, num_warps=ACTIVATION_WARPS,
    )  # fmt: skip
    return dx, sums.sum(0) if bias is not None else None


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    qkv_ptr, cos_ptr, sin_ptr, rows, heads, ROWS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """Rotate the queries and keys of all heads of some tokens; with BACK by the opposite angles."""
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    valid = row[:, None] < rows
    angle = row[:, None].to(tl.int64) * HALF + pair[None, :]
    cos, sin = tl.load(cos_ptr + angle, valid, 0.0), tl.load(sin_ptr + angle, valid, 0.0)
    if BACK:
        sin = -sin
    base = qkv_ptr + row[:, None].to(tl.int64) * (heads * 6 * HALF) + pair[None, :]
    for head in range(2 * heads):  # first those of the queries, then those of the keys
        place = base + head * (2 * HALF)
        first = tl.load(place, valid, 0.0).to(tl.float32)
        second = tl.load(place + HALF, valid, 0.0).to(tl.float32)
        tl.store(place, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), valid)
        tl.store(place + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), valid)


def rotate_in_place(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, back: bool = False) -> None:
    """Rotate the queries and keys of (T, 3 H) by the angles of `rotary.rotation` (T, 1, D / 2), or back."""
    _rotate[(triton.cdiv(len(qkv), ROTATED_ROWS),)](
        qkv, cos, sin, len(qkv), heads,
        ROWS=ROTATED_ROWS, HALF=cos.shape[-1], BACK=back, num_warps=ROTATED_WARPS,
    )  # fmt: skip
