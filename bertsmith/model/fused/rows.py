"""Triton kernels that go through a matrix row by row: norms and activations.

T rows, H columns. A kernel reads its inputs once and writes its outputs once. The same kernel sums
over all rows (the gradients of biases and scales), as partial sums of a fixed number of programs, so that the result
does not depend on the order in which the programs finish.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.config import Activation

# As measured on an H200: programs that share the rows of a backward pass, warps of a program, blocks.
NORM_PROGRAMS, NORM_WARPS = (1056, 1584), (1, 2)  # without dropout, with it
ACTIVATION_PROGRAMS, ACTIVATION_WARPS, ACTIVATION_ELEMENTS = 4224, 4, (4096, 2048)  # of a tile: forward, backward


@triton.jit
def hashed(index, seed):
    """A hash of 32 bits for each index."""
    x = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_line(index, seed):
    """The slope and the level of each row, by which dropout decides which elements it keeps."""
    return hashed(index, seed), hashed(index, seed ^ 0x2545F491)


@triton.jit
def is_kept(slope, level, number, threshold):
    """Whether dropout keeps the elements of these rows and columns: slope · number + level against the threshold.

    One multiplication and one comparison modulo 2^32, since it runs for every element in both passes.
    """
    return slope.to(tl.uint32) * number.to(tl.uint32) + level.to(tl.uint32) >= threshold.to(tl.uint32)


@triton.jit
def dropout_factor(slope, level, number, threshold, factor):
    """The factor by which dropout multiplies the elements.

    This is a number, since the compiler may turn a boolean into packed pairs, with five instructions in place of one.
    """
    return tl.where(is_kept(slope, level, number, threshold), factor, 0.0)


def column_numbers(columns: int, seed: Tensor | None) -> Tensor | None:
    """The odd number that dropout uses for each column; None without dropout."""
    return None if seed is None else _column_numbers(triton.next_power_of_2(columns), seed.device)


@lru_cache
def _column_numbers(columns: int, device: torch.device) -> Tensor:
    """A table, since computing a number takes longer than the rest of dropout's work on an element."""
    drawn = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, columns, dtype=np.int32) | 1
    return torch.from_numpy(drawn).to(device)


def threshold_of(dropout: float) -> int:
    """The dropout probability as the kernels take it: times 2^32, plus 2^40, so that it is always a 64-bit integer."""
    return round(dropout * (1 << 32)) + (1 << 40)


@triton.jit
def gelu_parts(x):
    """The normal distribution's cdf and density at x; error under 2e-7 (Abramowitz and Stegun 7.1.26)."""
    t = 1.0 / (1.0 + 0.2316418882 * tl.abs(x))
    density = tl.exp2(x * x * -0.7213475204444817) * 0.3989422804014327
    tail = t * (0.3193815306 + t * (-0.3565637813 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail *= density
    return tl.where(x >= 0, 1.0 - tail, tail), density


@triton.jit
def logistic(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def value_and_slope(x, ACTIVATION: tl.constexpr):
    """The activation at x and its derivative; the compiler drops what a kernel does not use."""
    if ACTIVATION == "gelu":
        cdf, density = gelu_parts(x)
        value, slope = x * cdf, cdf + x * density
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
        share = logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * share
        slope = share + value * (1.0 - share) * (1.5957691216057308 + 0.2140644488177907 * x * x)
    elif ACTIVATION == "silu":
        share = logistic(x)
        value, slope = x * share, share * (1.0 + x * (1.0 - share))
    else:
        tl.static_assert(ACTIVATION == "relu")
        value, slope = tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, 0.0)  # this order keeps NaN
    return value, slope


@triton.jit
def normalised(z, valid, eps, columns):
    """A row brought to mean 0 and deviation 1, its mean and its inverse deviation."""
    mean = tl.sum(z, 0) / columns
    centred = tl.where(valid, z - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    return centred * rstd, mean, rstd


@triton.jit
def norm_gradient(grad, scale, z, mean, rstd, valid, columns):
    """The gradient of a norm's input z, and z normalised."""
    normal = tl.where(valid, (z - mean) * rstd, 0.0)
    scaled = grad * scale
    along = tl.sum(scaled * normal, 0) / columns
    level = tl.sum(scaled, 0) / columns
    return (scaled - normal * along - level) * rstd, normal


@triton.jit
def _add_norm_forward(
    x_ptr, y_ptr, bias_ptr, scale_ptr, shift_ptr, seed_ptr, numbers_ptr, out_ptr, mean_ptr, rstd_ptr,
    eps, threshold, factor, columns,
    BLOCK: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < columns
    place = row * columns + column
    z = tl.load(x_ptr + place, valid, 0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + place, valid, 0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + column, valid, 0.0).to(tl.float32)
        if DROP:
            seed = tl.load(seed_ptr)
            slope, level = dropout_line(row, seed)
            number = tl.load(numbers_ptr + column)
            y *= dropout_factor(slope, level, number, threshold, factor)
        z += y
    normal, mean, rstd = normalised(z, valid, eps, columns)
    out = normal * tl.load(scale_ptr + column, valid, 0.0).to(tl.float32)
    if SHIFT:
        out += tl.load(shift_ptr + column, valid, 0.0).to(tl.float32)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), valid)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_backward(
    grad_ptr, x_ptr, y_ptr, bias_ptr, scale_ptr, seed_ptr, numbers_ptr, mean_ptr, rstd_ptr, residual_ptr,
    dx_ptr, dy_ptr, dscale_ptr, dshift_ptr, dbias_ptr,
    threshold, factor, rows, columns,
    BLOCK: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    wide = tl.cast(columns, tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < columns
    scale = tl.load(scale_ptr + column, valid, 0.0).to(tl.float32)
    dscale = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + column, valid, 0.0).to(tl.float32)
    if DROP:
        seed = tl.load(seed_ptr)
        number = tl.load(numbers_ptr + column)
    for row in range(program, rows, programs):
        place = row * wide + column
        grad = tl.load(grad_ptr + place, valid, 0.0).to(tl.float32)
        z = tl.load(x_ptr + place, valid, 0.0).to(tl.float32)
        if DROP:
            slope, start = dropout_line(tl.cast(row, tl.int32), seed)
            kept = dropout_factor(slope, start, number, threshold, factor)
        if ADD:
            y = tl.load(y_ptr + place, valid, 0.0).to(tl.float32)
            if BIAS:
                y += bias
            if DROP:
                y *= kept
            z += y
        dz, normal = norm_gradient(grad, scale, z, tl.load(mean_ptr + row), tl.load(rstd_ptr + row), valid, columns)
        dscale += grad * normal
        dshift += grad
        if RESIDUAL:
            dz += tl.load(residual_ptr + place, valid, 0.0).to(tl.float32)
        tl.store(dx_ptr + place, dz.to(dx_ptr.dtype.element_ty), valid)
        if ADD:
            if DROP:
                dz *= kept
                tl.store(dy_ptr + place, dz.to(dy_ptr.dtype.element_ty), valid)
            if BIAS:
                dbias += tl.where(valid, dz, 0.0)
    part = program.to(tl.int64) * columns + column
    tl.store(dscale_ptr + part, dscale, valid)
    tl.store(dshift_ptr + part, dshift, valid)
    if BIAS:
        tl.store(dbias_ptr + part, dbias, valid)


def norm_warps(block: int, seed: Tensor | None) -> int:
    """The warps of a program that normalises a row in a block of this size: rows wider than 1,024 take more."""
    return NORM_WARPS[seed is not None] * max(1, block // 1024)


def add_norm_forward(
    x: Tensor, y: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor | None, seed: Tensor | None,
    dropout: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The norm of x + dropout(y + bias), with each row's mean and inverse deviation."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    block = triton.next_power_of_2(columns)
    _add_norm_forward[(rows,)](
        x, y, bias, scale, shift, seed, column_numbers(columns, seed), out, mean, rstd,
        eps, threshold_of(dropout), 1 / (1 - dropout), columns,
        BLOCK=block, ADD=y is not None, BIAS=bias is not None, SHIFT=shift is not None, DROP=seed is not None,
        num_warps=norm_warps(block, seed),
    )  # fmt: skip
    return out, mean, rstd


def add_norm_backward(
    grad: Tensor, x: Tensor, y: Tensor | None, bias: Tensor | None, scale: Tensor, seed: Tensor | None, mean: Tensor,
    rstd: Tensor, dropout: float, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x, y, the norm's scale and shift, and the bias; `residual` is added to that of the norm's input."""
    rows, columns = x.shape
    dx = torch.empty_like(x)
    dy = torch.empty_like(x) if seed is not None else dx
    programs = min(NORM_PROGRAMS[seed is not None], rows)
    sums = torch.empty(3 if bias is not None else 2, programs, columns, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    _add_norm_backward[(programs,)](
        grad, x, y, bias, scale, seed, column_numbers(columns, seed), mean, rstd, residual,
        dx, dy, sums[0], sums[1], sums[-1],
        threshold_of(dropout), 1 / (1 - dropout), rows, columns,
        BLOCK=block, ADD=y is not None, BIAS=bias is not None, DROP=seed is not None, RESIDUAL=residual is not None,
        num_warps=norm_warps(block, seed),
    )  # fmt: skip
    totals = sums.sum(1)
    return dx, dy, totals[0], totals[1], totals[2] if bias is not None else None


@triton.jit(do_not_specialize=["rows"])
def _activation_forward(
    x_ptr, bias_ptr, out_ptr, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    x = tl.load(x_ptr + place, valid, 0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + column, column < columns, 0.0).to(tl.float32)[None, :]
    value, _ = value_and_slope(x, ACTIVATION)
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows"])
def _activation_backward(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + column, column < columns, 0.0).to(tl.float32)[None, :]
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = begin + tl.arange(0, ROWS)
        valid = (row[:, None] < rows) & (column[None, :] < columns)
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        x = tl.load(x_ptr + place, valid, 0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, valid, 0.0).to(tl.float32)
        if BIAS:
            x += bias
        _, slope = value_and_slope(x, ACTIVATION)
        dx = grad * slope
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), valid)
        if BIAS:
            total += tl.sum(dx, 0)
    if BIAS:
        tl.store(dbias_ptr + program.to(tl.int64) * columns + column, total, column < columns)


def tile_sides(elements: int, columns: int) -> dict[str, int]:
    """The sides of a tile with this many elements; of a narrow matrix it has more rows."""
    across = min(1024, triton.next_power_of_2(columns))
    return {"ROWS": elements // across, "COLUMNS": across}


def activation_forward(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """The activation of x + bias."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    tile = tile_sides(ACTIVATION_ELEMENTS[0], columns)
    grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(columns, tile["COLUMNS"]))
    _activation_forward[grid](x, bias, out, rows, columns, **tile, BIAS=bias is not None, ACTIVATION=activation)
    return out


def activation_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the bias."""
    rows, columns = x.shape
    dx = torch.empty_like(x)
    tile = tile_sides(ACTIVATION_ELEMENTS[1], columns)
    across = triton.cdiv(columns, tile["COLUMNS"])
    programs = min(triton.cdiv(ACTIVATION_PROGRAMS, across), triton.cdiv(rows, tile["ROWS"]))
    sums = torch.empty(programs if bias is not None else 0, columns, dtype=torch.float32, device=x.device)
    _activation_backward[(programs, across)](
        grad, x, bias, dx, sums, rows, columns,
        **tile, BIAS=bias is not None, ACTIVATION=activation, num_warps=ACTIVATION_WARPS,
    )  # fmt: skip
    return dx, sums.sum(0) if bias is not None else None
