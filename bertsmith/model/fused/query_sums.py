"""Triton kernels before and after a backward pass of attention in which blocks of keys add the gradients of queries.

T tokens, A heads, D head size, H = A · D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.fused.attention import rotated_back
from bertsmith.model.rotary import Rotation

ROWS, WARPS = 64, 4


@triton.jit(do_not_specialize=["tokens"])
def _output_sums(grad_ptr, out_ptr, delta_ptr, heads, tokens, ROWS: tl.constexpr, SIZE: tl.constexpr):
    token, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    valid = token < tokens
    place = token.to(tl.int64)[:, None] * (heads * SIZE) + head * SIZE + tl.arange(0, SIZE)[None, :]
    grad = tl.load(grad_ptr + place, valid[:, None], 0.0).to(tl.float32)
    out = tl.load(out_ptr + place, valid[:, None], 0.0).to(tl.float32)
    tl.store(delta_ptr + head * tokens + token, tl.sum(grad * out, 1), valid)


def before(grad: Tensor, out: Tensor, delta: Tensor) -> Tensor:
    """Write the sum of gradient times output (A, T) of every token and head; returns zeros (T, H) to add to."""
    heads, tokens = delta.shape
    _output_sums[(triton.cdiv(tokens, ROWS), heads)](
        grad, out, delta, heads, tokens, ROWS=ROWS, SIZE=grad.shape[1] // heads, num_warps=WARPS
    )
    return torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)


@triton.jit(do_not_specialize=["tokens"])
def _store_queries(
    dq_ptr, cos_ptr, sin_ptr, dqkv_ptr, scale, heads, tokens, ROWS: tl.constexpr, SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    valid, token = token < tokens, token.to(tl.int64)
    inside = head * SIZE + tl.arange(0, SIZE)[None, :]
    dq = tl.load(dq_ptr + token[:, None] * (heads * SIZE) + inside, valid[:, None], 0.0) * scale
    if ROTARY:
        dq = rotated_back(dq, cos_ptr, sin_ptr, token, valid, ROWS, SIZE)
    tl.store(dqkv_ptr + token[:, None] * (3 * heads * SIZE) + inside, dq.to(dqkv_ptr.dtype.element_ty), valid[:, None])


def after(dq: Tensor, angles: Rotation | None, dqkv: Tensor, heads: int, scale: float) -> None:
    """Write the gradients of queries (T, H), times the scale and rotated back, to their columns of (T, 3 H)."""
    tokens, width = dq.shape
    _store_queries[(triton.cdiv(tokens, ROWS), heads)](
        dq, *(angles or (None, None)), dqkv, scale, heads, tokens,
        ROWS=ROWS, SIZE=width // heads, ROTARY=angles is not None, num_warps=WARPS,
    )  # fmt: skip
