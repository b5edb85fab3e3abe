"""The inputs of the fused operations: tensors and a few values, by name. Imports without Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from bertsmith.model.config import Activation, Reach

Tables = tuple[Tensor, Tensor | None, Tensor | None]  # of tokens, of segments, of positions (None: there is none)


class LinearWeights(NamedTuple):
    """The matrix (out, in) and the bias of a linear layer."""

    weight: Tensor
    bias: Tensor | None


class NormWeights(NamedTuple):
    """The scale and the shift of a layer norm, and the epsilon that is added to the variance."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class WordHead(NamedTuple):
    """The masked-word head: the words' embeddings (V, E); a transform before them and a bias may be missing."""

    transform: LinearWeights | None
    activation: Activation
    norm: NormWeights | None
    words: Tensor
    bias: Tensor | None


class Sampling(NamedTuple):
    """How words are drawn from the softmax of their scores; with `disallow_correct` never the target."""

    temperature: float = 1.0
    disallow_correct: bool = False


class RelativeTables(NamedTuple):
    """The vectors of distances of one layer (N, H) as keys and as queries, either may be missing.

    `rows` has the row of the tables for each distance that the blocks of a batch reach, in ascending order, and
    `bounds` (N + 1,) where the distances of each row begin in it; both come from `distances.rows_of`.
    """

    keys: Tensor | None
    queries: Tensor | None
    rows: Tensor
    bounds: Tensor
    scale: float  # that scores are multiplied by


class RelativeWeights(NamedTuple):
    """The vectors of distances (N, H) before a layer projects them, and the layer's projections of them.

    `terms` says whether the vectors as keys and as queries are in the scores. Where a layer has no projections of its
    own, `content`, that of its queries, keys and values, serves for both.
    """

    table: Tensor
    rows: Tensor  # as in RelativeTables, like `bounds`
    bounds: Tensor
    terms: tuple[bool, bool]
    keys: LinearWeights | None
    queries: LinearWeights | None
    content: LinearWeights | None
    dropout: float


class LayerWeights(NamedTuple):
    """One layer of an encoder; the dropout probabilities are 0 outside training."""

    attention_norm: NormWeights | None  # None: a pre-norm layer without one
    qkv: LinearWeights
    output: LinearWeights
    feed_forward_norm: NormWeights
    inner: LinearWeights
    outer: LinearWeights
    num_heads: int
    reach: Reach
    activation: Activation
    gated: bool
    norm_first: bool
    dropout: float
    attention_dropout: float
    relative: RelativeWeights | None = None
