"""Triton kernels of the input layer: rows of the tables are added, perhaps normalised, and dropped out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.fused.rows import (
    NORM_PROGRAMS,
    column_numbers,
    dropout_factor,
    dropout_line,
    norm_gradient,
    norm_warps,
    normalised,
    threshold_of,
)
from bertsmith.model.fused.weights import Tables


@triton.jit
def _lookup_forward(
    tokens_ptr, segments_ptr, positions_ptr, words_ptr, parts_ptr, places_ptr, scale_ptr, shift_ptr, seed_ptr,
    numbers_ptr, out_ptr, mean_ptr, rstd_ptr, eps, threshold, factor, columns,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < columns
    z = tl.load(words_ptr + tl.load(tokens_ptr + row) * columns + column, valid, 0.0)
    if PARTS:
        z += tl.load(parts_ptr + tl.load(segments_ptr + row) * columns + column, valid, 0.0)
    if PLACES:
        z += tl.load(places_ptr + tl.load(positions_ptr + row) * columns + column, valid, 0.0)
    out = z
    if NORM:
        normal, mean, rstd = normalised(z, valid, eps, columns)
        out = normal * tl.load(scale_ptr + column, valid, 0.0)
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    if SHIFT:
        out += tl.load(shift_ptr + column, valid, 0.0)
    place = row * columns + column
    if DROP:
        seed = tl.load(seed_ptr)
        slope, level = dropout_line(row, seed)
        out *= dropout_factor(slope, level, tl.load(numbers_ptr + column), threshold, factor)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows"])
def _lookup_backward(
    grad_ptr, tokens_ptr, segments_ptr, positions_ptr, words_ptr, parts_ptr, places_ptr, scale_ptr, seed_ptr,
    numbers_ptr, mean_ptr, rstd_ptr, dwords_ptr, dparts_ptr, dplaces_ptr, dscale_ptr, dshift_ptr,
    threshold, factor, rows, columns,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr, NORM: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    wide = tl.cast(columns, tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < columns
    if NORM:
        scale = tl.load(scale_ptr + column, valid, 0.0)
        dscale = tl.zeros((BLOCK,), tl.float32)
        dshift = tl.zeros((BLOCK,), tl.float32)
    first = tl.zeros(
        (BLOCK,), tl.float32
    )  # of segment 0, which most tokens may have: one atomic addition per program, not per token
    if DROP:
        seed = tl.load(seed_ptr)
        number = tl.load(numbers_ptr + column)
    for row in range(program, rows, programs):
        place = row * wide + column
        grad = tl.load(grad_ptr + place, valid, 0.0).to(tl.float32)
        if DROP:
            slope, start = dropout_line(tl.cast(row, tl.int32), seed)
            grad *= dropout_factor(slope, start, number, threshold, factor)
        token = tl.load(tokens_ptr + row) * columns
        if PARTS:
            segment = tl.load(segments_ptr + row)
        if PLACES:
            position = tl.load(positions_ptr + row) * columns
        dz = grad
        if NORM:
            z = tl.load(words_ptr + token + column, valid, 0.0)
            if PARTS:
                z += tl.load(parts_ptr + segment * columns + column, valid, 0.0)
            if PLACES:
                z += tl.load(places_ptr + position + column, valid, 0.0)
            mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
            dz, normal = norm_gradient(grad, scale, z, mean, rstd, valid, columns)
            dscale += grad * normal
            dshift += grad
        tl.atomic_add(dwords_ptr + token + column, dz, valid, sem="relaxed")
        if PLACES:
            tl.atomic_add(dplaces_ptr + position + column, dz, valid, sem="relaxed")
        if PARTS:
            if segment == 0:
                first += dz
            else:
                tl.atomic_add(dparts_ptr + segment * columns + column, dz, valid, sem="relaxed")
    if NORM:
        part = program.to(tl.int64) * columns + column
        tl.store(dscale_ptr + part, dscale, valid)
        tl.store(dshift_ptr + part, dshift, valid)
    if PARTS:
        tl.atomic_add(dparts_ptr + column, first, valid, sem="relaxed")


def lookup_forward(
    tokens: Tensor, segments: Tensor, positions: Tensor, tables: Tables, scale: Tensor | None,
    shift: Tensor | None, seed: Tensor | None, dropout: float, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Dropout of the norm of the tables' rows, with each row's mean and inverse deviation; without `scale`, no norm."""
    rows, columns = len(tokens), tables[0].shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=tokens.device)
    kept = 0 if scale is None else 2
    mean, rstd = (*(torch.empty(rows, dtype=torch.float32, device=tokens.device) for _ in range(kept)), None, None)[:2]
    block = triton.next_power_of_2(columns)
    _lookup_forward[(rows,)](
        tokens, segments, positions, *tables, scale, shift, seed, column_numbers(columns, seed), out, mean, rstd,
        eps, threshold_of(dropout), 1 / (1 - dropout), columns,
        BLOCK=block, PARTS=tables[1] is not None, PLACES=tables[2] is not None, NORM=scale is not None,
        SHIFT=shift is not None, DROP=seed is not None, num_warps=norm_warps(block, seed),
    )  # fmt: skip
    return out, mean, rstd


def lookup_backward(
    grad: Tensor, tokens: Tensor, segments: Tensor, positions: Tensor, tables: Tables,
    scale: Tensor | None, seed: Tensor | None, mean: Tensor | None, rstd: Tensor | None, dropout: float,
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the tables, and of the norm's scale and shift where there is one."""
    rows, columns = grad.shape
    found = [None if table is None else torch.zeros_like(table) for table in tables]
    programs = min(NORM_PROGRAMS[seed is not None], rows)
    norm = scale is not None
    sums = torch.empty(2, programs, columns, dtype=torch.float32, device=grad.device) if norm else [None, None]
    block = triton.next_power_of_2(columns)
    _lookup_backward[(programs,)](
        grad, tokens, segments, positions, *tables, scale, seed, column_numbers(columns, seed), mean, rstd,
        *found, sums[0], sums[1], threshold_of(dropout), 1 / (1 - dropout), rows, columns,
        BLOCK=block, PARTS=tables[1] is not None, PLACES=tables[2] is not None, NORM=norm, DROP=seed is not None,
        num_warps=norm_warps(block, seed),
    )  # fmt: skip
    if not isinstance(sums, Tensor):
        return found, None, None
    totals = sums.sum(1)
    return found, totals[0], totals[1]
