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
    attend_with_distances,
    embed,
    gated,
    linear,
    linear_and_residual,
    masked_words,
    norm_and_residual,
    rotated,
    taught_words,
    word_scores,
)
from bertsmith.model.fused.weights import (
    LayerWeights,
    LinearWeights,
    NormWeights,
    RelativeTables,
    RelativeWeights,
    Sampling,
    Tables,
    WordHead,
)
from bertsmith.model.rotary import Rotation

DTYPE = torch.bfloat16  # of the states between two operations


def embeddings_forward(
    tokens: Tensor, segments: Tensor, positions: Tensor, tables: Tables, norm: NormWeights | None, dropout: float,
    projection: LinearWeights | None,
) -> Tensor:  # fmt: skip
    """The input layer on packed tokens; the tables are those of tokens, segments and positions."""
    x = embed(tokens, segments, positions, tables, norm, dropout, DTYPE)  # (T, E)
    return x if projection is None else linear(x, *projection)  # (T, H)


def layer_forward(
    layer: LayerWeights, x: Tensor, layout: Packed, rows: Tensor | None = None, asking: Tensor | None = None,
    angles: Rotation | None = None,
) -> Tensor:  # fmt: skip
    """One layer on packed tokens (T, H); with `rows`, only the states of these rows (R, H).

    With `asking`, states of the same shape as the result ask in place of `x`, which they read. `angles` rotate queries
    and keys.
    """
    if layer.norm_first:
        y, x = _normed(x, layer.attention_norm)
        qkv, x = linear_and_residual(x, *layer.qkv) if y is None else (linear_and_residual(y, *layer.qkv)[0], x)
        if asking is not None:
            y, asking = _normed(asking, layer.attention_norm)
            qkv = _with_queries(layer, qkv, asking if y is None else y, rows)
        mixed, x = _select(_mixed(layer, qkv, layout, angles), x, rows, asking)
        x = _add(x, mixed, layer.output, layer.dropout)
        y, x = norm_and_residual(x, layer.feed_forward_norm)
        return _add(x, _inner(layer, linear(y, layer.inner.weight)), layer.outer, layer.dropout)
    assert layer.attention_norm is not None
    qkv, x = linear_and_residual(x, *layer.qkv)
    if asking is not None:
        qkv = _with_queries(layer, qkv, asking, rows)
    mixed, x = _select(_mixed(layer, qkv, layout, angles), x, rows, asking)
    x = add_norm(x, linear(mixed, layer.output.weight), layer.output.bias, layer.attention_norm, layer.dropout)
    y, x = linear_and_residual(x, layer.inner.weight)
    outer = linear(_inner(layer, y), layer.outer.weight)
    return add_norm(x, outer, layer.outer.bias, layer.feed_forward_norm, layer.dropout)


def _normed(x: Tensor, norm: NormWeights | None) -> tuple[Tensor | None, Tensor]:
    """The norm of x, None if the layer has none, and x itself for the residual."""
    return (None, x) if norm is None else norm_and_residual(x, norm)


def _mixed(layer: LayerWeights, qkv: Tensor, layout: Packed, angles: Rotation | None) -> Tensor:
    bias = layer.qkv.bias
    if angles is not None:
        qkv, bias = rotated(qkv, bias, layer.num_heads, angles), None
    if layer.relative is None:
        return attend(qkv, bias, layout, layer.num_heads, layer.reach, layer.attention_dropout)
    tables = _relative_tables(layer.relative, qkv.shape[1] // (3 * layer.num_heads))
    return attend_with_distances(qkv, bias, layout, layer.num_heads, tables, layer.attention_dropout)


def _inner(layer: LayerWeights, x: Tensor) -> Tensor:
    """The states between the two products of a feed-forward layer, given the first product without its bias."""
    between = gated if layer.gated else activated
    return between(x, layer.inner.bias, layer.activation)


def _relative_tables(relative: RelativeWeights, head_size: int) -> RelativeTables:
    """The vectors of distances as keys and queries of one layer, and the scale of the scores with their terms."""
    table = F.dropout(relative.table, relative.dropout).to(DTYPE)
    keys: Tensor | None
    queries: Tensor | None
    if relative.content is not None:  # one product for both
        queries, keys, _ = linear(table, *relative.content).unflatten(1, (3, -1)).unbind(1)
        keys, queries = (part if there else None for part, there in zip((keys, queries), relative.terms, strict=True))
    else:
        own = relative.keys, relative.queries
        keys, queries = (None if weights is None else linear(table, *weights) for weights in own)
    scale = (head_size * (1 + sum(relative.terms))) ** -0.5
    return RelativeTables(keys, queries, relative.rows, relative.bounds, scale)


def _with_queries(layer: LayerWeights, qkv: Tensor, asking: Tensor, rows: Tensor | None) -> Tensor:
    """Queries, keys and values (T, 3 H) whose queries come from other states; rows that do not ask have zeros."""
    width = qkv.shape[1] // 3
    q = linear(asking.to(qkv.dtype), layer.qkv.weight[:width])
    if layer.qkv.bias is not None:  # attention computes its gradient
        q = q + layer.qkv.bias[:width].detach().to(q.dtype)
    if rows is not None:
        q = q.new_zeros(len(qkv), width).index_copy(0, rows, q)
    return torch.cat([q, qkv[:, width:]], 1)


def _select(mixed: Tensor, x: Tensor, rows: Tensor | None, asking: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values that are mixed, and the states that they are added to."""
    mixed = mixed if rows is None else mixed.index_select(0, rows)
    if asking is not None:
        return mixed, asking.to(mixed.dtype)
    return mixed, x if rows is None else x.index_select(0, rows)


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
