"""Attention: one function, `attend`, picks the kernel that fits the layout, the device and the dropout.

B sequences, L padded length, T packed tokens, A heads, D head size. Queries, keys and values are (B, L, A, D) in the
padded layout and (T, A, D) in the packed one, and so is the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import Layout, Packed, Padded
from bertsmith.model.config import Reach
from bertsmith.model.local_attention import is_worthwhile, local
from bertsmith.model.relative import RelativeTerms

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of torch without it: packed batches take the dense kernel
    varlen_attn = None  # type: ignore[assignment]

BOTH_WAYS, LEFT_TO_RIGHT = Reach(None, None), Reach(None, 0)
RUN = 24  # tokens in a call on a CPU without a backward pass; with fewer, copying sequences into fewer calls is faster


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, dropout: float = 0.0, reach: Reach = BOTH_WAYS,
    relative: RelativeTerms | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of every token to the tokens of its own sequence that are within its reach.

    `relative` are the terms that distances add to the scores; see `RelativeTerms` for what a kernel computes of them.
    """
    if isinstance(layout, Padded):
        return dense(q, k, v, layout.mask, dropout, reach, relative)
    if relative is None and has_varlen(q) and dropout == 0.0:
        return varlen(q, k, v, layout, reach)
    if q.device.type == "cpu":
        return grouped(q, k, v, layout, dropout, reach, relative)
    _, mask = layout.rectangle
    return layout.unpad(dense(layout.pad(q), layout.pad(k), layout.pad(v), mask, dropout, reach, relative))


def has_varlen(q: Tensor) -> bool:
    """Whether the variable-length flash kernel can take these queries: CUDA, half precision, Ampere or later."""
    return (
        varlen_attn is not None
        and q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, reach: Reach = BOTH_WAYS,
    relative: RelativeTerms | None = None,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention on rectangles (B, L, A, D); `mask` (B, L) is true at tokens, false at padding."""
    if relative is not None:
        return _dense_relative(q, k, v, mask, dropout, reach, relative)
    if is_worthwhile(q.shape[1], reach):
        return local(q, k, v, mask, dropout, reach)
    causal = reach == LEFT_TO_RIGHT  # padding comes after all tokens, so they do not see it anyway
    seen = None if causal else visible(mask, q.shape[1], q.device, reach)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, A, L, D)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=causal).transpose(1, 2)


def _dense_relative(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, reach: Reach, relative: RelativeTerms
) -> Tensor:
    """What `dense` computes, with the terms of distances as a bias of the scores."""
    seen = visible(mask, q.shape[1], q.device, reach)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, A, L, D)
    scale = relative.scale(q.shape[-1])
    bias = relative.scores(q, k) * scale
    if seen is not None:
        bias = bias.masked_fill(~seen, float("-inf"))
    if torch.compiler.is_exporting():  # what an exported graph makes of SDPA has another order in memory
        return ((q @ k.transpose(2, 3) * scale + bias).softmax(-1) @ v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale).transpose(1, 2)


def visible(mask: Tensor | None, length: int, device: torch.device, reach: Reach) -> Tensor | None:
    """Which keys each query sees, as (B, 1, 1, L) or (B, 1, L, L); None: all.

    With a limited reach, padding sees itself: a softmax over no key at all would give NaN.
    """
    real = None if mask is None else mask[:, None, None, :]
    if reach == BOTH_WAYS:
        return real
    place = torch.arange(length, device=device)
    distance = place[None, :] - place[:, None]  # (L, L): from each query to each key
    seen = torch.ones_like(distance, dtype=torch.bool)
    if reach.before is not None:
        seen = seen & (distance >= -reach.before)
    if reach.after is not None:
        seen = seen & (distance <= reach.after)
    seen = seen[None, None]
    return seen if real is None else (seen & real) | (distance == 0)


def varlen(q: Tensor, k: Tensor, v: Tensor, layout: Packed, reach: Reach = BOTH_WAYS) -> Tensor:
    """Variable-length flash attention (CUDA, half precision). It has no dropout."""
    starts, longest = layout.starts, layout.max_length
    sides = tuple(-1 if side is None else side for side in reach)  # -1: no limit
    window: dict[str, Any] = {} if reach == BOTH_WAYS else {"window_size": sides}
    output = varlen_attn(q, k, v, starts, starts, longest, longest, **window)
    assert isinstance(output, Tensor)
    return output


def grouped(
    q: Tensor, k: Tensor, v: Tensor, layout: Packed, dropout: float = 0.0, reach: Reach = BOTH_WAYS,
    relative: RelativeTerms | None = None,
) -> Tensor:  # fmt: skip
    """The packed kernel of a CPU: a dense call for each group of similar lengths, never a T × T mask."""
    needs_copies = torch.is_grad_enabled() or relative is not None or len(q) < RUN * len(layout.runs.shapes)
    groups = layout.groups if needs_copies else layout.runs
    if groups is None:  # all of one length: the rectangle is a view
        q, k, v = (x.unflatten(0, (-1, layout.max_length)) for x in (q, k, v))
        return dense(q, k, v, None, dropout, reach, relative).flatten(0, 1)
    sizes = [rows * length for rows, length in groups.shapes]
    if groups.source is not None:
        q, k, v = (_Spread.apply(x, groups.source, groups.places) for x in (q, k, v))
    spread = (x.split(sizes) for x in (q, k, v))
    outputs = []
    for *rectangle, shape, mask in zip(*spread, groups.shapes, groups.masks, strict=True):
        q, k, v = (x.unflatten(0, shape) for x in rectangle)
        outputs.append(dense(q, k, v, mask, dropout, reach, relative).flatten(0, 1))
    output = torch.cat(outputs)
    if groups.source is None:
        return output
    return _Collect.apply(output, groups.source, groups.places)  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    """Copy tokens into rectangles. A token has one place, so the backward pass copies rows as well."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient.index_select(0, ctx.places), None, None


class _Collect(torch.autograd.Function):
    """Copy rectangles back into tokens; values at padding are dropped and get no gradient."""

    @staticmethod
    def forward(ctx: Any, rectangles: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.places, ctx.size = places, len(source)
        return rectangles.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        spread = gradient.new_zeros(ctx.size, *gradient.shape[1:])
        return spread.index_copy_(0, ctx.places, gradient), None, None


def attend_explicit(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, dropout: float = 0.0, reach: Reach = BOTH_WAYS,
    relative: RelativeTerms | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention in explicit steps; also returns the weights (B, A, L, L), which are zero at padding."""
    mask = layout.mask if isinstance(layout, Padded) else layout.rectangle[1]
    q, k, v = (layout.pad(x).transpose(1, 2) for x in (q, k, v))  # (B, A, L, D)
    if relative is None:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    else:
        scores = (q @ k.transpose(-1, -2) + relative.scores(q, k)) * relative.scale(q.shape[-1])
    seen = visible(mask, mask.shape[1], q.device, reach)
    assert seen is not None
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    output = (F.dropout(weights, dropout) @ v).transpose(1, 2)
    return layout.unpad(output), weights * mask[:, None, :, None]
