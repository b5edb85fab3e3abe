"""The input layer, a layer and the masked-word head in fused operations, equal to those of encoder.py and heads.py.

T tokens, E embedding size, H hidden size, M masked positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import Packed
from bertsmith.model.fused.operations import (
    activated,
    add_norm,
    attend,
    embed,
    linear,
    linear_and_residual,
    masked_words,
    norm_and_residual,
    taught_words,
    word_scores,
)
from bertsmith.model.fused.weights import LayerWeights, LinearWeights, NormWeights, Sampling, Tables, WordHead

DTYPE = torch.bfloat16  # of the states between two operations


def embeddings_forward(
    tokens: Tensor, segments: Tensor, positions: Tensor, tables: Tables, norm: NormWeights | None, dropout: float,
    projection: LinearWeights | None,
) -> Tensor:  # fmt: skip
    """The input layer on packed tokens; the tables are those of tokens, segments and positions."""
    x = embed(tokens, segments, positions, tables, norm, dropout, DTYPE)  # (T, E)
    return x if projection is None else linear(x, *projection)  # (T, H)


def layer_forward(layer: LayerWeights, x: Tensor, layout: Packed, rows: Tensor | None = None) -> Tensor:
    """One layer on packed tokens (T, H); with `rows`, only the states of these rows."""
    if layer.norm_first:
        y, x = norm_and_residual(x, layer.attention_norm)
        qkv, _ = linear_and_residual(y, *layer.qkv)
        mixed, x = _select(_mixed(layer, qkv, layout), x, rows)
        x = _add(x, mixed, layer.output, layer.dropout)
        y, x = norm_and_residual(x, layer.feed_forward_norm)
        inner = activated(linear(y, layer.inner.weight), layer.inner.bias, layer.activation)
        return _add(x, inner, layer.outer, layer.dropout)
    qkv, x = linear_and_residual(x, *layer.qkv)
    mixed, x = _select(_mixed(layer, qkv, layout), x, rows)
    x = add_norm(x, linear(mixed, layer.output.weight), layer.output.bias, layer.attention_norm, layer.dropout)
    y, x = linear_and_residual(x, layer.inner.weight)
    outer = linear(activated(y, layer.inner.bias, layer.activation), layer.outer.weight)
    return add_norm(x, outer, layer.outer.bias, layer.feed_forward_norm, layer.dropout)


def _mixed(layer: LayerWeights, qkv: Tensor, layout: Packed) -> Tensor:
    return attend(qkv, layer.qkv.bias, layout, layer.num_heads, layer.reach, layer.attention_dropout)


def _select(mixed: Tensor, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    return (mixed, x) if rows is None else (mixed.index_select(0, rows), x.index_select(0, rows))


def _add(x: Tensor, inner: Tensor, output: LinearWeights, dropout: float) -> Tensor:
    """x + dropout(output(inner)); with neither dropout nor a bias the matrix product itself adds x."""
    weight = output.weight.to(x.dtype)
    if dropout or output.bias is not None:
        bias = None if output.bias is None else output.bias.to(x.dtype)
        return x + F.dropout(F.linear(inner, weight, bias), dropout)
    return x.addmm(inner, weight.t())


def norm_forward(x: Tensor, norm: NormWeights) -> Tensor:
    """The norm of the last layer's states."""
    return norm_and_residual(x, norm)[0]


def masked_word_losses(
    hidden: Tensor, targets: Tensor, head: WordHead, sampling: Sampling | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The summed loss of the masked words' states (M, H) against all words, how many were right, and samples."""
    return masked_words(_transformed(hidden, head), head.words, head.bias, targets, sampling)


def masked_word_scores(hidden: Tensor, head: WordHead) -> Tensor:
    """The scores of all words from the masked words' states (M, H), in aligned rows (at least V); without gradients."""
    return word_scores(_transformed(hidden, head), head.words, head.bias)[0]


def taught_word_losses(
    hidden: Tensor, taught: Tensor, targets: Tensor, head: WordHead, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed soft loss with a teacher's scores (M, at least V), the masked words' loss, and how many were right."""
    return taught_words(_transformed(hidden, head), head.words, head.bias, taught, targets, temperature)


def _transformed(hidden: Tensor, head: WordHead) -> Tensor:
    if head.transform is None or head.norm is None:
        return hidden.to(DTYPE)
    x = activated(linear(hidden.to(DTYPE), head.transform.weight), head.transform.bias, head.activation)
    return norm_and_residual(x, head.norm)[0]
