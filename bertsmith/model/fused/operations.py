"""The fused operations and their gradients: matrix products, and between them one kernel where plain code has many.

T tokens, H hidden size, M masked positions, V vocabulary. States are bfloat16, sums inside the kernels float32. A
matrix product leaves its bias to the kernel that reads its result, which adds it in the forward pass and sums its
gradient in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.batch import Packed
from bertsmith.model.config import Activation, Reach
from bertsmith.model.fused import (
    attention,
    distances,
    gate,
    long_attention,
    lookup,
    loss,
    relative_attention,
    rows,
    taught,
)
from bertsmith.model.fused.weights import NormWeights, RelativeTables, Sampling, Tables
from bertsmith.model.rotary import Rotation


def draw_seed(device: torch.device, dropout: float) -> Tensor | None:
    """The seed of a kernel's dropout, from the device's generator; None without dropout."""
    return torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device) if dropout else None


def embed(
    tokens: Tensor, segments: Tensor, positions: Tensor, tables: Tables, norm: NormWeights | None, dropout: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Dropout of the sum of the tables' rows (tokens, perhaps segments, positions), normalised if there is a norm."""
    seed = draw_seed(tokens.device, dropout)
    indices = tokens, segments, positions
    scale, shift, eps = norm or (None, None, 0.0)
    return _Embed.apply(*indices, *tables, scale, shift, seed, dropout, eps, dtype)  # type: ignore[no-any-return, no-untyped-call]


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens, segments, positions, words, parts, places, scale, shift, seed, dropout, eps, dtype):  # type: ignore[override]
        indices, tables = (tokens, segments, positions), (words, parts, places)
        out, mean, rstd = lookup.lookup_forward(*indices, tables, scale, shift, seed, dropout, eps, dtype)
        ctx.save_for_backward(*indices, *tables, scale, shift, seed, mean, rstd)
        ctx.dropout = dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        *first, scale, shift, seed, mean, rstd = ctx.saved_tensors
        tokens, segments, positions, *tables = first
        dtables, dscale, dshift = lookup.lookup_backward(
            grad.contiguous(), tokens, segments, positions, tuple(tables), scale, seed, mean, rstd, ctx.dropout
        )
        return None, None, None, *dtables, dscale, None if shift is None else dshift, None, None, None, None


def add_norm(x: Tensor, y: Tensor, bias: Tensor | None, norm: NormWeights, dropout: float) -> Tensor:
    """The norm of x + dropout(y + bias)."""
    seed = draw_seed(x.device, dropout)
    out, _ = _AddNorm.apply(x, y, bias, norm.weight, norm.bias, seed, dropout, norm.eps)  # type: ignore[no-untyped-call]
    return out  # type: ignore[no-any-return]


def norm_and_residual(x: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
    """The norm of x, and x itself for the residual; one kernel adds the gradients of both."""
    return _AddNorm.apply(x, None, None, norm.weight, norm.bias, None, 0.0, norm.eps)  # type: ignore[no-any-return, no-untyped-call]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, y, bias, scale, shift, seed, dropout, eps):  # type: ignore[override]
        out, mean, rstd = rows.add_norm_forward(x, y, bias, scale, shift, seed, dropout, eps)
        ctx.save_for_backward(x, y, bias, scale, shift, seed, mean, rstd)
        ctx.dropout = dropout
        ctx.set_materialize_grads(False)
        return out, x.view_as(x) if y is None else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, residual):  # type: ignore[override]
        x, y, bias, scale, shift, seed, mean, rstd = ctx.saved_tensors
        dx, dy, dscale, dshift, dbias = rows.add_norm_backward(
            grad.contiguous(), x, y, bias, scale, seed, mean, rstd, ctx.dropout, residual
        )
        return dx, None if y is None else dy, dbias, dscale, None if shift is None else dshift, None, None, None


def activated(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """The activation of x + bias."""
    kernels = rows.activation_forward, rows.activation_backward
    return _Activated.apply(x, bias, activation, *kernels)  # type: ignore[no-any-return, no-untyped-call]


def gated(x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """The activation of the first half of x + bias (T, 2 I), times its second half (T, I)."""
    kernels = gate.gate_forward, gate.gate_backward
    return _Activated.apply(x, bias, activation, *kernels)  # type: ignore[no-any-return, no-untyped-call]


class _Activated(torch.autograd.Function):
    """A function of x + bias, by the kernels of its forward and of its backward pass."""

    @staticmethod
    def forward(ctx: Any, x, bias, activation, kernel, backward_kernel):  # type: ignore[override]
        ctx.save_for_backward(x, bias)
        ctx.activation, ctx.kernel = activation, backward_kernel
        return kernel(x, bias, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        x, bias = ctx.saved_tensors
        return *ctx.kernel(grad.contiguous(), x, bias, ctx.activation), None, None, None


_copies: dict[Tensor, Tensor] | None = None  # of weights, inside `one_copy_of_each_weight`


@contextmanager
def one_copy_of_each_weight() -> Iterator[None]:
    """A context in which a weight is converted once to the precision of products, however many layers share it."""
    global _copies
    before, _copies = _copies, {}
    try:
        yield
    finally:
        _copies = before


def _converted(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if _copies is None:
        return weight.to(dtype)
    if weight not in _copies:
        _copies[weight] = weight.to(dtype)
    return _copies[weight]


def linear_and_residual(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A matrix product of x, and x itself for the residual, whose gradient the product of the backward pass adds.

    The bias gets no gradient here: the operation that reads the result computes it.
    """
    return _Product.apply(x, weight, None if bias is None else bias.detach(), True)  # type: ignore[no-any-return, no-untyped-call]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A matrix product of x, plus the bias."""
    product, _ = _Product.apply(x, weight, bias, False)  # type: ignore[no-untyped-call]
    return product  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """A matrix product in the precision of x; the gradients of the weights and of the bias are float32."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, residual):  # type: ignore[override]
        weight = _converted(weight, x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype)), x.view_as(x) if residual else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, residual):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        # In place: `residual` was read by the kernels that led to `grad`, and by nothing after them.
        dx = grad @ weight if residual is None else residual.addmm_(grad, weight)
        dbias = grad.sum(0, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        return dx, matmul_float32(grad.t(), x), dbias, None


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product in float32, whatever the precision of a and b."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()  # type: ignore[call-overload, no-any-return]


def rotated(qkv: Tensor, bias: Tensor | None, heads: int, by: Rotation) -> Tensor:
    """Queries, keys and values (T, 3 H) with the queries and keys rotated, in the same memory.

    Nothing else may read `qkv`: a matrix product does not keep its result. `bias` has been added already, and gets its
    gradient here, where the gradient is that of queries and keys before the rotation.
    """
    return _Rotated.apply(qkv, bias, heads, by.cos, by.sin)  # type: ignore[no-any-return, no-untyped-call]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, bias, heads, cos, sin):  # type: ignore[override]
        gate.rotate_in_place(qkv, cos, sin, heads)
        ctx.mark_dirty(qkv)
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.bias = heads, bias is not None
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        grad = grad.contiguous()  # in place: it is the attention kernel's output, which nothing else reads
        cos, sin = ctx.saved_tensors
        gate.rotate_in_place(grad, cos, sin, ctx.heads, back=True)
        return grad, grad.sum(0, dtype=torch.float32) if ctx.bias else None, None, None, None


def attend(qkv: Tensor, bias: Tensor | None, layout: Packed, heads: int, reach: Reach, dropout: float) -> Tensor:
    """The output (T, H) of attention, given queries, keys and values concatenated (T, 3 H).

    `bias` has been added to them already, and gets its gradient here.
    """
    seed = draw_seed(qkv.device, dropout)
    kernel = _Tile if layout.max_length <= attention.LONGEST else _Long
    settings = layout.max_length, heads, reach, dropout
    return kernel.apply(qkv, bias, layout.starts, seed, settings)  # type: ignore[no-any-return, no-untyped-call]


class _Tile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, bias, starts, seed, settings):  # type: ignore[override]
        ctx.save_for_backward(qkv, starts, seed)
        ctx.settings, ctx.bias = settings, bias is not None
        return attention.attention_forward(qkv, starts, seed, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        qkv, starts, seed = ctx.saved_tensors
        dqkv, dbias = attention.attention_backward(grad.contiguous(), qkv, starts, seed, *ctx.settings)
        return dqkv, dbias if ctx.bias else None, None, None, None


class _Long(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, bias, starts, seed, settings):  # type: ignore[override]
        out, sums = long_attention.long_attention_forward(qkv, starts, seed, *settings)
        ctx.save_for_backward(out, sums, qkv, starts, seed)
        ctx.settings, ctx.bias = settings, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        out, sums, qkv, starts, seed = ctx.saved_tensors
        dqkv, dbias = long_attention.long_attention_backward(
            grad.contiguous(), out, sums, qkv, starts, seed, *ctx.settings
        )
        return dqkv, dbias if ctx.bias else None, None, None, None


def attend_with_distances(
    qkv: Tensor, bias: Tensor | None, layout: Packed, heads: int, relative: RelativeTables, dropout: float
) -> Tensor:
    """What `attend` computes, with the terms that distances add to the scores."""
    seed = draw_seed(qkv.device, dropout)
    settings = layout.max_length, heads, relative.scale, dropout
    return _Relative.apply(qkv, bias, *relative[:4], layout.starts, seed, settings)  # type: ignore[no-any-return, no-untyped-call]


class _Relative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, bias, keys, queries, where, bounds, starts, seed, settings):  # type: ignore[override]
        tables = distances.expand(keys, queries, where, bounds, settings[0])
        out, sums, kept = relative_attention.relative_attention_forward(
            ctx.needs_input_grad[0], qkv, tables, starts, seed, *settings
        )
        ctx.save_for_backward(out, sums, *kept, qkv, *tables[:4], starts, seed)
        ctx.block, ctx.settings, ctx.bias = tables.block, settings, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        out, sums, weights, peaks, qkv, keys, queries, where, bounds, starts, seed = ctx.saved_tensors
        tables = distances.Distances(keys, queries, where, bounds, ctx.block)
        kept = relative_attention.Kept(weights, peaks)
        dqkv, dbias, dkeys, dqueries = relative_attention.relative_attention_backward(
            grad.contiguous(), out, sums, kept, qkv, tables, starts, seed, *ctx.settings
        )
        return dqkv, dbias if ctx.bias else None, dkeys, dqueries, None, None, None, None, None


def word_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores of all words (M, V and up to 63 more) with the padded matrix: rows of a multiple of 64 are aligned."""
    extra = -len(weight) % 64
    weight = F.pad(weight.to(hidden.dtype), (0, 0, 0, extra))
    bias = None if bias is None else F.pad(bias.to(hidden.dtype), (0, extra))
    return F.linear(hidden, weight, bias), weight


def masked_words(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, sampling: Sampling | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The summed cross-entropy of `hidden` (M, H) against all words of `weight` (V, H), and how many were right.

    With `sampling`, a word is drawn from the predictions of each row, too (M,).
    """
    seed = None if sampling is None else draw_seed(hidden.device, 1.0)
    return _MaskedWords.apply(hidden, weight, bias, targets, seed, sampling or Sampling())  # type: ignore[no-any-return, no-untyped-call]


class _MaskedWords(torch.autograd.Function):
    """The scores are never saved: the forward pass overwrites them with their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, seed, sampling):  # type: ignore[override]
        words = len(weight)
        scores, weight = word_scores(hidden, weight, bias)
        needed = any(ctx.needs_input_grad)
        losses, right, sampled = loss.cross_entropy(scores, words, targets, needed, seed, sampling)
        if needed:
            ctx.save_for_backward(hidden, weight, scores)
            ctx.words, ctx.bias = words, bias is not None
        count = right.sum()
        ctx.mark_non_differentiable(count, *([] if sampled is None else [sampled]))
        return losses.sum(), count, sampled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, *_):  # type: ignore[override]
        hidden, weight, scores = ctx.saved_tensors
        dhidden = (scores @ weight) * grad.to(hidden.dtype)
        dweight = matmul_float32(scores.t(), hidden)
        dbias = scores.sum(0, dtype=torch.float32)[: ctx.words] * grad if ctx.bias else None
        return dhidden, dweight[: ctx.words].mul_(grad), dbias, None, None, None


def taught_words(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, taught: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed soft loss and cross-entropy of `hidden` (M, H) against all words, and how many were right.

    `taught` are the teacher's scores (M, at least V).
    """
    return _TaughtWords.apply(hidden, weight, bias, taught, targets, temperature)  # type: ignore[no-any-return, no-untyped-call]


class _TaughtWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, theirs, targets, temperature):  # type: ignore[override]
        words = len(weight)
        ours, weight = word_scores(hidden, weight, bias)
        soft, hard, right, sums = taught.taught_losses(ours, theirs, words, targets, temperature)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weight, ours, theirs, targets, sums)
            ctx.settings = words, temperature, bias is not None
        count = right.sum()
        ctx.mark_non_differentiable(count)
        return soft.sum(), hard.sum(), count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, soft, hard, _):  # type: ignore[override]
        hidden, weight, ours, theirs, targets, sums = ctx.saved_tensors
        words, temperature, has_bias = ctx.settings
        scores = taught.taught_gradients(ours, theirs, words, targets, sums, temperature, soft, hard)
        dweight = matmul_float32(scores.t(), hidden)
        dbias = scores.sum(0, dtype=torch.float32)[:words] if has_bias else None
        return scores @ weight, dweight[:words], dbias, None, None, None
