"""BiLSTMs: on a frozen encoder (section 5.3, Table 7), and on an encoder that is trained with them (Table 5).

W words, T tokens, L layers whose states are used, H the encoder's hidden size, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bertsmith.batch import Batch, Layout, Packed, Padded
from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError, nearest_or_all
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_weights
from bertsmith.model.lstm import reordered, reversal
from bertsmith.model.states import hidden_states, parse_layers

EPS = 1e-8  # added to the variance of a component, which may be the same for all words
How = Literal["concat", "sum", "scaled-sum"]
# The rows of Table 7: which layers are used, and how their states become one vector per word.
VARIANTS: dict[str, tuple[str, How]] = {
    "embeddings": ("0", "concat"),
    "second-to-last": ("-2", "concat"),
    "last": ("-1", "concat"),
    "sum-last-four": ("-4..-1", "sum"),
    "concat-last-four": ("-4..-1", "concat"),
    "sum-all": ("1..-1", "sum"),
}
# And ELMo's own (Peters et al. 2018, equation 1): all layers with the embeddings, and a learned factor.
FEATURES: dict[str, tuple[str, How]] = {**VARIANTS, "mix-all": ("all", "scaled-sum")}


@dataclass(frozen=True)
class FeatureConfig:
    """The BiLSTM between a frozen encoder and the output layer; without a `variant` the whole model is fine-tuned.

    `variant` names a row of Table 7, or `mix-all`, as ELMo is used; `hidden_size` is that of each direction. With
    `standardise` the states are standardised before they are used; unset, fine-tuning does so for an encoder of LSTMs.
    """

    variant: str = ""
    hidden_size: int = 768
    num_layers: int = 2
    standardise: bool | None = None
    BOUNDS = {"hidden_size": Bounds(1, 2**17), "num_layers": Bounds(1, 100)}

    def __post_init__(self) -> None:
        if self.variant and self.variant not in FEATURES:
            raise UserError(f"--features: unknown variant {self.variant!r}{nearest_or_all(self.variant, FEATURES)}")
        check_bounds(self, "features.")

    @property
    def layers(self) -> str:
        """The layers whose states are used, in the notation of `--layers`."""
        return FEATURES[self.variant][0]

    def numbers(self, num_layers: int) -> tuple[int, ...]:
        """The indices of these layers in an encoder of `num_layers` layers."""
        if "four" in self.variant and num_layers < 4:
            raise UserError(f"--features {self.variant} needs four layers, and the model has {num_layers}")
        return parse_layers(self.layers, num_layers)


class Standardised(nn.Module):
    """States (…, L, H) whose components have mean 0 and standard deviation 1 over the training rows.

    The states of ELMo, which has no norms, have a large part that all words share, and an LSTM on them learns slowly.
    The statistics are measured once before training and saved with the model; without them nothing changes.
    """

    weight: Tensor  # (L · H,) the inverse of the standard deviation
    bias: Tensor  # (L · H,) the mean, divided by the standard deviation, with the opposite sign

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(size))
        self.register_buffer("bias", torch.zeros(size))

    @property
    def is_measured(self) -> bool:
        return bool(self.bias.any())

    @torch.no_grad()
    def measure(self, parts: Iterable[Tensor]) -> None:
        """Set the statistics from the states (N, L, H) of some batches."""
        count, sums, squares = 0, torch.zeros(len(self.bias), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for part in parts:
            states = part.flatten(-2).cpu().double()
            count, sums, squares = count + len(states), sums + states.sum(0), squares + states.square().sum(0)
        mean = sums / count
        scale = (squares / count - mean.square() + EPS).rsqrt()
        self.weight.copy_(scale)
        self.bias.copy_(-mean * scale)

    def forward(self, states: Tensor) -> Tensor:
        shape = states.shape[-2:]
        return states * self.weight.view(shape) + self.bias.view(shape)


class RecurrentHead(nn.Module):
    """A BiLSTM on the states of some layers of a frozen encoder, and the logits of every word."""

    def __init__(self, config: EncoderConfig, features: FeatureConfig, outputs: int, dropout: float) -> None:
        super().__init__()
        self.layers = features.numbers(config.num_layers)
        size, self.mix, self.scale = mixing(config, features)
        self.standard = standardisation(config, features)
        between = dropout if features.num_layers > 1 else 0.0
        self.lstm = nn.LSTM(size, features.hidden_size, features.num_layers, bidirectional=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * features.hidden_size, outputs)
        init_weights(self, config.init_std)

    def forward(self, states: Tensor, layout: Layout) -> Tensor:
        """Logits (W, K) from the states (W, L, H) of packed sentences.

        Autocast is off, since not every device has an LSTM in bfloat16.
        """
        with torch.autocast(states.device.type, enabled=False):
            x = combined(self.standard(states.to(self.output.weight.dtype)), self.mix, self.scale)
            return self.output(self.dropout(bilstm(self.lstm, self.dropout(x), layout)))

    def scores(self, encoder: Encoder, batch: Batch) -> Tensor:
        """Logits of a batch: (W, K) if it holds states of words, else (T, K), zero except at words' first tokens."""
        if "states" in batch.labels:
            return self(batch.labels["states"], batch.layout)
        assert isinstance(batch.layout, Packed)
        words = batch.labels["words"]  # the first token of each word
        logits = self.output.weight.new_zeros(len(batch.tokens), self.output.out_features)
        if not len(words):
            return logits
        starts = F.pad(torch.searchsorted(words, batch.labels["sentences"]), (0, 1), value=len(words)).int()
        sentences = Packed(starts, int(starts.diff().max()))
        of_words = self(self.states(encoder, batch)[words], sentences)
        return logits.to(of_words.dtype).index_copy(0, words, of_words)

    def states(self, encoder: Encoder, batch: Batch) -> Tensor:
        """The frozen encoder's states of the layers that are used (T, L, H)."""
        return frozen_states(encoder, batch, self.layers)


def mixing(config: EncoderConfig, features: FeatureConfig) -> tuple[int, nn.Parameter | None, nn.Parameter | None]:
    """The width of a word's features, the weights of the layers before their softmax, and the factor of their sum.

    Layers that are concatenated have no weights; only the variant of ELMo has a factor.
    """
    count, how = len(features.numbers(config.num_layers)), FEATURES[features.variant][1]
    if how == "concat":
        return config.hidden_size * count, None, None
    scale = nn.Parameter(torch.empty(1)) if how == "scaled-sum" else None
    return config.hidden_size, nn.Parameter(torch.empty(count)), scale  # equal at the start, and 1


def standardisation(config: EncoderConfig, features: FeatureConfig) -> nn.Module:
    """What is done to the states before they are combined: nothing, unless they are standardised."""
    size = config.hidden_size * len(features.numbers(config.num_layers))
    return Standardised(size) if features.standardise else nn.Identity()


def combined(states: Tensor, mix: Tensor | None, scale: Tensor | None) -> Tensor:
    """One vector (…, E) from the states of several layers (…, L, H): concatenated, or their weighted sum."""
    if mix is None:
        return states.flatten(-2)
    summed = torch.einsum("l,...lh->...h", mix.softmax(0), states.to(mix.dtype))
    return summed if scale is None else scale * summed


@torch.no_grad()
def frozen_states(encoder: Encoder, batch: Batch, layers: tuple[int, ...]) -> Tensor:
    """The states of some layers of a frozen encoder (…, L, H), without dropout."""
    encoder.eval()
    by_layer = hidden_states(encoder, batch, layers)
    return torch.stack([by_layer[layer] for layer in layers], -2)


def bilstm(lstm: nn.LSTM, x: Tensor, layout: Layout) -> Tensor:
    """The states of a bidirectional LSTM, which runs over each sequence separately."""
    if x.is_cuda and isinstance(layout, Packed):
        return capturable_bilstm(lstm, x, layout)
    layout = _without_empty(layout) if isinstance(layout, Packed) else layout
    lengths = (layout.mask.sum(1) if isinstance(layout, Padded) else layout.starts.diff()).cpu()
    packed = pack_padded_sequence(layout.pad(x), lengths, batch_first=True, enforce_sorted=False)
    hidden, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=layout.max_length)
    return layout.unpad(hidden)


def capturable_bilstm(lstm: nn.LSTM, x: Tensor, layout: Packed) -> Tensor:
    """The same without synchronising host and device, so a CUDA graph can capture it.

    Each layer and direction is a call on the padded sequences (B, L, …). For the backward direction every sequence is
    reversed in its own places, and its padding comes after it. The padding is wasted work, but it costs a GPU less time
    than launching a kernel for each token.
    """
    starts, order = layout.starts.long(), reversal(layout)
    hidden = layout.pad(x)
    for layer in range(lstm.num_layers):
        hidden = F.dropout(hidden, lstm.dropout, lstm.training and layer > 0)
        forward = _one_direction(lstm, f"l{layer}", hidden)
        backward = reordered(_one_direction(lstm, f"l{layer}_reverse", reordered(hidden, order)), order)
        hidden = torch.cat([forward, backward], -1)
    tokens = torch.arange(len(x), device=x.device)
    sequences = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    places = layout.max_length * sequences + tokens - starts.index_select(0, sequences)
    return hidden.flatten(0, 1).index_select(0, places)


def _one_direction(lstm: nn.LSTM, name: str, x: Tensor) -> Tensor:
    """One direction of one layer on (B, L, …)."""
    weights = [getattr(lstm, f"{kind}_{name}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    flat = torch.cat([weight.flatten() for weight in weights])  # contiguous, as cuDNN needs them
    parts = [part.view_as(w) for part, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]
    start = x.new_zeros(1, len(x), lstm.hidden_size)
    return torch.lstm(x, (start, start), parts, True, 1, 0.0, lstm.training, False, True)[0]


def _without_empty(layout: Packed) -> Packed:
    """The layout without its empty sequences, which `pack_padded_sequence` refuses."""
    starts = torch.unique_consecutive(layout.starts)
    return Packed(starts, int(starts.diff().max()))


class RecurrentTop(nn.Module):
    """A BiLSTM between an encoder and an output layer, trained with both; its states are as wide as the encoder's.

    With `pooled` the output layer takes one state per sequence: the forward direction's at the last token and the
    backward direction's at the first, each of which has seen the whole sequence.
    """

    def __init__(self, config: EncoderConfig, num_layers: int, top: nn.Module, pooled: bool) -> None:
        super().__init__()
        size, between = config.hidden_size, config.hidden_dropout if num_layers > 1 else 0.0
        if size % 2:
            raise UserError(f"bilstm_layers: a width of {size} cannot be divided between two directions")
        self.lstm = nn.LSTM(size, size // 2, num_layers, bidirectional=True, dropout=between)
        init_weights(self.lstm, config.init_std)
        self.top, self.pooled = top, pooled

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # not every device has an LSTM in bfloat16
            states = bilstm(self.lstm, hidden.to(next(self.lstm.parameters()).dtype), layout)
        if not self.pooled:
            return self.top(states)
        forward, backward = layout.flat(states).chunk(2, -1)
        ends = forward.index_select(0, layout.lasts), backward.index_select(0, layout.firsts)
        return self.top(torch.cat(ends, -1))
