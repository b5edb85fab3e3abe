"""The encoder: embeddings and layers. Those of a Transformer (BERT paper, section 3) are here.

B sequences, T tokens, E embedding size, H hidden size, A heads, D head size. `…` stands for (B, L) or (T,), as the
batch is laid out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertsmith.batch import CHARACTERS, Batch, Layout, Packed
from bertsmith.errors import UserError
from bertsmith.model.activation import activate
from bertsmith.model.attention import Asking, SelfAttention, Trace
from bertsmith.model.characters import CharacterEmbeddings, init_characters
from bertsmith.model.config import EncoderConfig, LayerConfig, Sharing
from bertsmith.model.convolution import Convolution
from bertsmith.model.fused.weights import LayerWeights, LinearWeights, NormWeights
from bertsmith.model.fused_choice import Choice, choose_now
from bertsmith.model.lstm import LSTMBlock, init_lstm
from bertsmith.model.relative import Relative, RelativeTable
from bertsmith.model.rotary import Rotation, rotation

Rotations = Mapping[float | None, Rotation]  # by rotary base
NO_ROTATIONS: Rotations = {}
DECODER_LAYERS = 2  # how often a mask decoder applies the last layer (DeBERTa, section 4.1)
# The sublayers, with their norms, whose parameters the layers of an encoder may share.
SHARED: dict[Sharing, tuple[str, ...]] = {
    "none": (),
    "attention": ("attention", "attention_norm"),
    "feed-forward": ("feed_forward", "feed_forward_norm"),
    "all": ("attention", "attention_norm", "feed_forward", "feed_forward_norm"),
}


def make_norm(size: int, config: EncoderConfig | LayerConfig) -> nn.LayerNorm:
    """Make a layer norm of this size."""
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


def linear_weights(linear: nn.Module | None) -> LinearWeights:
    """The tensors of a linear layer, as the fused operations take them."""
    assert isinstance(linear, nn.Linear)
    return LinearWeights(linear.weight, linear.bias)


def norm_weights(norm: nn.Module | None) -> NormWeights:
    """The tensors of a layer norm, as the fused operations take them."""
    assert isinstance(norm, nn.LayerNorm)
    return NormWeights(norm.weight, norm.bias, norm.eps)


class Embeddings(nn.Module):
    """Token, segment and position embeddings: added, normalised and, where `embedding_size` is set, projected."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, learned = config.table_size, config.positions == "learned"
        self.tokens = nn.Embedding(config.vocab_size, size)
        self.segments = nn.Embedding(config.num_segments, size) if config.num_segments else None
        self.positions = nn.Embedding(config.max_positions, size) if learned else None
        # A discriminator may add a table of its own to its generator's, which it does not train: see `share`.
        self.delta: nn.Parameter | None = None
        self.owner: nn.Embedding | None = None
        self.norm = make_norm(size, config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout)
        projected = config.embedding_size is not None
        self.projection = nn.Linear(size, config.hidden_size, bias=config.bias) if projected else nn.Identity()

    def share(self, owner: nn.Embedding) -> None:
        """Take the sum of another network's table, without its gradient, and `delta` as the table of tokens."""
        self.tokens.weight = owner.weight
        object.__setattr__(self, "owner", owner)  # not a submodule: the other network has it

    def table(self) -> Tensor:
        """The vectors of all tokens (V, E)."""
        if self.owner is None or self.delta is None:
            return self.tokens.weight
        return self.owner.weight.detach() + self.delta

    def forward(self, tokens: Tensor, segments: Tensor, positions: Tensor, fused: bool = False) -> Tensor:
        if fused:
            return self._fused(tokens, segments, positions)
        x = self.tokens(tokens) if self.owner is None else F.embedding(tokens, self.table())  # (…, E)
        if self.segments is not None:
            x = x + self.segments(segments)
        if self.positions is not None:
            x = x + self.positions(positions)
        return self.projection(self.dropout(self.norm(x)))  # (…, H)

    def _fused(self, tokens: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        from bertsmith.model.fused.layer import embeddings_forward

        parts, places = (None if table is None else table.weight for table in (self.segments, self.positions))
        tables = self.table(), parts, places
        projection = linear_weights(self.projection) if isinstance(self.projection, nn.Linear) else None
        norm = norm_weights(self.norm) if isinstance(self.norm, nn.LayerNorm) else None
        dropout = self.dropout.p if self.training else 0.0
        return embeddings_forward(tokens, segments, positions, tables, norm, dropout, projection)


class FeedForward(nn.Module):
    """Two linear layers with the activation between them; a gate multiplies the activation by a second projection."""

    def __init__(self, layer: LayerConfig) -> None:
        super().__init__()
        width = layer.intermediate_size * (2 if layer.gated else 1)
        self.inner = nn.Linear(layer.hidden_size, width, bias=layer.bias)
        self.outer = nn.Linear(layer.intermediate_size, layer.hidden_size, bias=layer.bias)
        self.activation, self.gated = layer.activation, layer.gated

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        if not self.gated:
            return self.outer(activate(inner, self.activation))
        inner, gate = inner.chunk(2, -1)
        return self.outer(activate(inner, self.activation) * gate)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each with a residual; norms come after the sums or before sublayers."""

    def __init__(self, layer: LayerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(layer)
        self.attention_norm = make_norm(layer.hidden_size, layer) if layer.attention_norm else nn.Identity()
        self.feed_forward = FeedForward(layer)
        self.feed_forward_norm = make_norm(layer.hidden_size, layer)
        self.dropout = nn.Dropout(layer.hidden_dropout)
        self.convolution = None if layer.convolution is None else Convolution(layer)
        self.layer = layer

    def share(self, owner: Block, parts: Iterable[str]) -> None:
        """Use these sublayers of another layer, which registers them: `state_dict` has their parameters once."""
        for name in parts:
            delattr(self, name)
            object.__setattr__(self, name, getattr(owner, name))

    def forward(
        self, x: Tensor, layout: Layout, trace: Trace | None = None, rows: Tensor | None = None, fused: bool = False,
        angles: Rotations = NO_ROTATIONS, relative: Relative | None = None, asking: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The states after this layer (…, H), or those of the given `rows` (R,) of the flat form: (R, H).

        With `asking`, states of the same shape ask in place of the layer's input, which they read.
        """
        own = angles.get(self.layer.rotary_base)
        if fused:
            from bertsmith.model.fused.layer import layer_forward

            assert isinstance(layout, Packed)
            return layer_forward(self._weights(relative), x, layout, rows, asking, own)
        before = self._before(x, self.attention_norm)
        queries = None if asking is None else Asking(self._before(asking, self.attention_norm), rows)
        mixed = self.attention(before, layout, self.layer.reach, own, trace, relative, queries)
        beside = None if self.convolution is None or asking is not None else self.convolution(x, layout)
        if rows is not None:
            mixed, x = (layout.flat(states).index_select(0, rows) for states in (mixed, x))
            beside = None if beside is None else layout.flat(beside).index_select(0, rows)
        if asking is not None:
            x = asking
        x = self._after(x + self.dropout(self.attention.output(mixed)), self.attention_norm)
        inner = self.feed_forward(self._before(x, self.feed_forward_norm))
        x = self._after(x + self.dropout(inner), self.feed_forward_norm)
        return self.convolution.norm(x + beside) if self.convolution is not None and beside is not None else x

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.layer.norm_first else x

    def _after(self, x: Tensor, norm: nn.Module) -> Tensor:
        return x if self.layer.norm_first else norm(x)

    def _weights(self, relative: Relative | None) -> LayerWeights:
        attention, feed_forward = self.attention, self.feed_forward
        return LayerWeights(
            attention_norm=norm_weights(self.attention_norm) if self.layer.attention_norm else None,
            qkv=attention.weights(),
            output=linear_weights(attention.output),
            feed_forward_norm=norm_weights(self.feed_forward_norm),
            inner=linear_weights(feed_forward.inner),
            outer=linear_weights(feed_forward.outer),
            num_heads=attention.num_heads,
            reach=self.layer.reach,
            activation=feed_forward.activation,
            gated=feed_forward.gated,
            norm_first=self.layer.norm_first,
            dropout=self.dropout.p if self.training else 0.0,
            attention_dropout=attention.attention_dropout if self.training else 0.0,
            relative=None if relative is None else attention.relative_weights(relative),
        )


class Encoder(nn.Module):
    """Maps a batch to hidden states (…, H)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        # What refers to the table of tokens (a tied head, a longer vocabulary) is refused where words are characters.
        self.embeddings: Embeddings = (
            CharacterEmbeddings(config) if config.reads_characters else Embeddings(config)  # type: ignore[assignment]
        )
        blocks: list[Any] = [LSTMBlock(e) if e.layer_type == "lstm" else Block(e) for e in config.layers]
        for block in blocks[1:] if self.shares_layers else ():
            block.share(blocks[0], SHARED[config.shared_layers])
        self.relative = None if config.relative_terms == "none" else RelativeTable(config)
        self.layers = nn.ModuleList(blocks)
        self.final_norm = make_norm(config.hidden_size, config) if config.norm_first else nn.Identity()
        init_weights(self, config.init_std)

    def forward(
        self, batch: Batch, trace: Trace | None = None, rows: Tensor | None = None, asking: Tensor | None = None
    ) -> Tensor:
        """All states, or those of the given `rows` (R,) of the flat form: (R, H), with less work in the last layer.

        With `asking`, (…, H) or (R, H), the states are those of a mask decoder: these vectors are added to the states
        before the last layer, and the sums ask that layer, whose output asks it once more (`MaskDecoder`).
        """
        self.check_ids(*batch.largest)
        self._check_length(batch)
        weights = trace if trace is not None and trace.only is None else None  # of attention, which layers add
        fused = weights is None and self.choice(batch).fused
        inputs: tuple[Any, ...] = batch.tokens, batch.segments, batch.positions, fused
        if self.config.reads_characters:
            inputs = (batch.labels[CHARACTERS],)
        x = self.embeddings(*inputs)
        angles = self._angles(batch.positions)
        relative = self._relative(batch.layout.max_length, x.device, fused)
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled() and weights is None

        def run(block: nn.Module, x: Tensor, rows: Tensor | None, *more: Tensor) -> Tensor:
            inputs = x, batch.layout, weights, rows, fused, angles, relative, *more
            return checkpoint(block, *inputs, use_reentrant=False) if checkpointing else block(*inputs)  # type: ignore[no-any-return]

        with self._conversion(fused):
            for block in self.layers[:-1]:
                if trace is not None:
                    trace.add(x)
                x = run(block, x, None)
            if trace is not None:
                trace.add(x)
            if asking is None:
                x = run(self.layers[-1], x, rows)
            else:
                queries = asking + (x if rows is None else batch.layout.flat(x).index_select(0, rows))
                for _ in range(DECODER_LAYERS):
                    queries = run(self.layers[-1], x, rows, queries)
                x = queries
        x = self._normalise(x, fused)
        if trace is not None:
            trace.add(x)
        return x

    @property
    def shares_layers(self) -> bool:
        """Whether layers have parameters in common."""
        return self.config.shared_layers != "none"

    def _conversion(self, fused: bool) -> AbstractContextManager[None]:
        """A context in which the fused operations convert shared weights once to the precision of products."""
        config = self.config
        projects_twice = config.relative_terms != "none" and not config.relative_projections  # content and distances
        if not fused or not (self.shares_layers or projects_twice):
            return nullcontext()
        from bertsmith.model.fused.operations import one_copy_of_each_weight

        return one_copy_of_each_weight()

    def _relative(self, length: int, device: torch.device, fused: bool) -> Relative | None:
        """The distances of sequences of up to this length, as plain code or the fused kernels take them."""
        if self.relative is None:
            return None
        relative: Relative = self.relative(length, device)
        if not fused:
            return relative
        from bertsmith.model.fused.distances import rows_of

        return relative._replace(of_blocks=rows_of(relative.rows, len(relative.table), length))

    def _angles(self, positions: Tensor) -> Rotations:
        """The rotation of every token for each rotary base; layers with the same base share it."""
        if self.config.positions != "rotary":
            return {}
        bases = {layer.rotary_base for layer in self.config.layers}
        return {base: rotation(positions, self.config.head_size, base) for base in bases if base is not None}

    def choice(self, batch: Batch) -> Choice:
        """Which kernels this batch uses under the current autocast."""
        return choose_now(self.config, batch.tokens.device, batch.layout)

    def _normalise(self, x: Tensor, fused: bool) -> Tensor:
        if fused and isinstance(self.final_norm, nn.LayerNorm):
            from bertsmith.model.fused.layer import norm_forward

            return norm_forward(x, norm_weights(self.final_norm))
        return self.final_norm(x)

    def check_ids(self, token: int, segment: int) -> None:
        """Refuse ids that the tables have no row for, given the largest ones: a GPU would not report the error."""
        config = self.config
        if token >= config.vocab_size:
            raise UserError(
                f"the token id {token} is not one of the model's {config.vocab_size:,}: this is not the tokenizer that "
                "the model was made with"
            )
        if config.num_segments and segment >= config.num_segments:  # without a table, segments are not looked up
            raise UserError(
                f"the input has {segment + 1} segments, as a pair has 2, and the encoder's num_segments is "
                f"{config.num_segments}; take single texts, or a model with more segments"
            )

    def _check_length(self, batch: Batch) -> None:
        length = batch.layout.max_length
        if length > self.config.max_positions:
            raise UserError(
                f"a sequence of {length} tokens is longer than the encoder's {self.config.max_positions} positions; "
                f"set data.max_length to {self.config.max_positions} or less"
            )


def init_weights(module: nn.Module, std: float) -> None:
    """Initialise every parameter of a module; a character CNN and LSTM layers of an encoder have rules of their own."""
    for name, parameter in module.named_parameters():
        init_parameter(name, parameter, std)
    for part in module.modules():
        if isinstance(part, CharacterEmbeddings):
            init_characters(part)
        elif isinstance(part, LSTMBlock):
            init_lstm(part)


def init_parameter(name: str, parameter: Tensor, std: float) -> None:
    """Initialise matrices by a truncated normal, biases with zeros (as in the released code), norms as the identity."""
    if "bias" in name.rsplit(".", 1)[-1]:
        nn.init.zeros_(parameter)
    elif parameter.dim() == 1:  # a norm's scale
        nn.init.ones_(parameter)
    else:
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
