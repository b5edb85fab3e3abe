"""The Transformer encoder (BERT paper, section 3).

B sequences, T tokens, H hidden size, A heads, D head size. `…` stands for (B, L) or (T,), as the batch is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertsmith.batch import Batch, Layout, Packed
from bertsmith.errors import UserError
from bertsmith.model.activation import activate
from bertsmith.model.config import EncoderConfig
from bertsmith.model.fused.weights import LayerWeights, LinearWeights, NormWeights
from bertsmith.model.fused_choice import Choice, choose_now
from bertsmith.model.kernels import attend, attend_explicit


@dataclass
class Trace:
    """What an encoder did on the way: hidden states (embeddings first) and attention weights, layer by layer."""

    hidden: list[Tensor] = field(default_factory=list)  # each (…, H)
    attention: list[Tensor] = field(default_factory=list)  # each (B, A, L, L)


def make_norm(config: EncoderConfig) -> nn.LayerNorm:
    """A norm of the encoder."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


def linear_weights(linear: nn.Linear) -> LinearWeights:
    """The tensors of a linear layer, as the fused operations take them."""
    return LinearWeights(linear.weight, linear.bias)


def norm_weights(norm: nn.LayerNorm) -> NormWeights:
    """The tensors of a norm, as the fused operations take them."""
    return NormWeights(norm.weight, norm.bias, norm.eps)


class Embeddings(nn.Module):
    """Token + segment + position embeddings, normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.segments = nn.Embedding(config.num_segments, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, tokens: Tensor, segments: Tensor, positions: Tensor, fused: bool = False) -> Tensor:
        if fused:
            from bertsmith.model.fused.layer import embeddings_forward

            tables = self.tokens.weight, self.segments.weight, self.positions.weight
            dropout = self.dropout.p if self.training else 0.0
            return embeddings_forward(tokens, segments, positions, tables, norm_weights(self.norm), dropout)
        x = self.tokens(tokens) + self.segments(segments) + self.positions(positions)  # (…, H)
        return self.dropout(self.norm(x))


class SelfAttention(nn.Module):
    """Multi-head self-attention; `output` is its projection, which the layer applies to the states that it needs."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.direction = config.direction
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.bias)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, layout: Layout, trace: Trace | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # each (…, A, D)
        dropout = self.attention_dropout if self.training else 0.0
        if trace is None:
            mixed = attend(q, k, v, layout, dropout, self.direction)
        else:
            mixed, weights = attend_explicit(q, k, v, layout, dropout, self.direction)
            trace.attention.append(weights)
        return mixed.flatten(-2)


class FeedForward(nn.Module):
    """Two linear layers with the activation between them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.outer = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(activate(self.inner(x), self.activation))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to its input; the norm comes after the sum or before all."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = make_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.config = config

    def forward(
        self, x: Tensor, layout: Layout, trace: Trace | None = None, rows: Tensor | None = None, fused: bool = False
    ) -> Tensor:
        """The states after this layer; of the given `rows` of the flat form alone, where nobody needs the others."""
        if fused:
            from bertsmith.model.fused.layer import layer_forward

            assert isinstance(layout, Packed)
            return layer_forward(self._weights(), x, layout, rows)
        mixed = self.attention(self._before(x, self.attention_norm), layout, trace)
        if rows is not None:
            mixed, x = (layout.flat(states).index_select(0, rows) for states in (mixed, x))
        x = self._after(x + self.dropout(self.attention.output(mixed)), self.attention_norm)
        inner = self.feed_forward(self._before(x, self.feed_forward_norm))
        return self._after(x + self.dropout(inner), self.feed_forward_norm)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.config.norm_first else x

    def _after(self, x: Tensor, norm: nn.Module) -> Tensor:
        return x if self.config.norm_first else norm(x)

    def _weights(self) -> LayerWeights:
        attention, feed_forward = self.attention, self.feed_forward
        return LayerWeights(
            attention_norm=norm_weights(self.attention_norm),
            qkv=linear_weights(attention.qkv),
            output=linear_weights(attention.output),
            feed_forward_norm=norm_weights(self.feed_forward_norm),
            inner=linear_weights(feed_forward.inner),
            outer=linear_weights(feed_forward.outer),
            num_heads=attention.num_heads,
            direction=attention.direction,
            activation=feed_forward.activation,
            norm_first=self.config.norm_first,
            dropout=self.dropout.p if self.training else 0.0,
            attention_dropout=attention.attention_dropout if self.training else 0.0,
        )


class Encoder(nn.Module):
    """Maps a batch to hidden states (…, H)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = make_norm(config) if config.norm_first else nn.Identity()
        init_weights(self, config.init_std)

    def forward(self, batch: Batch, trace: Trace | None = None, rows: Tensor | None = None) -> Tensor:
        """All states, or those of the given `rows` (R,) of the flat form: (R, H), with less work in the last layer."""
        self.check_ids(*batch.largest)
        self._check_length(batch)
        fused = trace is None and self.choice(batch).fused
        x = self.embeddings(batch.tokens, batch.segments, batch.positions, fused)
        for number, layer in enumerate(self.layers, 1):
            wanted = rows if number == len(self.layers) else None
            if trace is not None:
                trace.hidden.append(x)
            if self.gradient_checkpointing and torch.is_grad_enabled() and trace is None:
                given = x, batch.layout, None, wanted, fused
                x = checkpoint(layer, *given, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = layer(x, batch.layout, trace, wanted, fused)
        x = self._normalise(x, fused)
        if trace is not None:
            trace.hidden.append(x)
        return x

    def choice(self, batch: Batch) -> Choice:
        """Which kernels this batch takes, under the autocast of the moment."""
        return choose_now(self.config, batch.tokens.device, batch.layout)

    def _normalise(self, x: Tensor, fused: bool) -> Tensor:
        if fused and isinstance(self.final_norm, nn.LayerNorm):
            from bertsmith.model.fused.layer import norm_forward

            return norm_forward(x, norm_weights(self.final_norm))
        return self.final_norm(x)

    def check_ids(self, token: int, segment: int) -> None:
        """Refuse the largest ids that the tables have no row for: on a GPU nobody would notice the wrong lookup."""
        config = self.config
        if token >= config.vocab_size:
            raise UserError(
                f"the token id {token} is not one of the model's {config.vocab_size:,}: this is not the tokenizer that "
                "the model was made with"
            )
        if segment >= config.num_segments:
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
    """Start every parameter of a module."""
    for name, parameter in module.named_parameters():
        init_parameter(name, parameter, std)


def init_parameter(name: str, parameter: Tensor, std: float) -> None:
    """Truncated normal matrices, zero biases, as the released code; norms start at the identity."""
    if name.rsplit(".", 1)[-1].startswith("bias"):
        nn.init.zeros_(parameter)
    elif parameter.dim() == 1:  # a norm's scale
        nn.init.ones_(parameter)
    else:
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
