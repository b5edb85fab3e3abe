"""The encoder's layer and its ends in fused operations: what `encoder.py` and `heads.py` spell out, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bertsmith.batch import Layout, Packed
from bertsmith.model.fused.operations import (
    add_norm,
    attend,
    branch,
    embed,
    gelu,
    linear,
    masked_words,
    norm_beside,
)

if TYPE_CHECKING:
    from bertsmith.model.encoder import Block, Embeddings, FeedForward
    from bertsmith.model.heads import MaskedLMHead

DTYPE = torch.bfloat16  # of the states between two operations


def embeddings_forward(module: Embeddings, tokens: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
    """The input layer on packed tokens."""
    tables = module.tokens.weight, module.segments.weight, module.positions.weight
    dropout = module.dropout.p if module.training else 0.0
    return embed(tokens, segments, positions, tables, module.norm, dropout, DTYPE)


def block_forward(block: Block, x: Tensor, layout: Layout, rows: Tensor | None = None) -> Tensor:
    """One layer on packed tokens (T, H); gives the states of `rows` alone where they are given."""
    assert isinstance(layout, Packed)
    attention, feed_forward = block.attention, block.feed_forward
    dropout = block.dropout.p if block.training else 0.0
    first, second = block.attention_norm, block.feed_forward_norm
    if block.config.norm_first:
        y, x = norm_beside(x, first)
        qkv, _ = branch(y, attention.qkv.weight, attention.qkv.bias)
        mixed = _mixed(block, qkv, layout)
        mixed, x = _chosen(mixed, x, rows)
        x = _add(x, mixed, attention.output, dropout)
        y, x = norm_beside(x, second)
        return _add(x, _inner(feed_forward, linear(y, feed_forward.inner.weight)), feed_forward.outer, dropout)
    qkv, x = branch(x, attention.qkv.weight, attention.qkv.bias)
    mixed = _mixed(block, qkv, layout)
    mixed, x = _chosen(mixed, x, rows)
    x = add_norm(x, linear(mixed, attention.output.weight), attention.output.bias, first, dropout)
    inner, x = branch(x, feed_forward.inner.weight)
    outer = linear(_inner(feed_forward, inner), feed_forward.outer.weight)
    return add_norm(x, outer, feed_forward.outer.bias, second, dropout)


def _mixed(block: Block, qkv: Tensor, layout: Packed) -> Tensor:
    module = block.attention
    dropout = module.attention_dropout if block.training else 0.0
    return attend(qkv, module.qkv.bias, layout, module.num_heads, module.direction, dropout)


def _chosen(mixed: Tensor, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    return (mixed, x) if rows is None else (mixed.index_select(0, rows), x.index_select(0, rows))


def _inner(feed_forward: FeedForward, x: Tensor) -> Tensor:
    """The activation of x + bias."""
    bias = feed_forward.inner.bias
    if feed_forward.activation == "gelu":
        return gelu(x, bias)
    return feed_forward.activate(x if bias is None else x + bias.to(x.dtype))


def _add(x: Tensor, inner: Tensor, output: nn.Linear, dropout: float) -> Tensor:
    """x + dropout(output(inner)); without dropout the product itself adds."""
    if dropout or output.bias is not None:
        bias = None if output.bias is None else output.bias.to(x.dtype)
        return x + nn.functional.dropout(nn.functional.linear(inner, output.weight.to(x.dtype), bias), dropout)
    return x.addmm(inner, output.weight.to(x.dtype).t())


def masked_word_losses(head: MaskedLMHead, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of the masked words' states (M, H), and how many were right."""
    x = linear(hidden.to(DTYPE), head.transform.weight)
    if head.activation == "gelu":
        x = gelu(x, head.transform.bias)
    else:
        x = head.activate(x + head.transform.bias.to(x.dtype))
    x, _ = norm_beside(x, head.norm)
    return masked_words(x, head.decoder.weight, head.decoder.bias, targets)
