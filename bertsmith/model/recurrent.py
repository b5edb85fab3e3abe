"""BiLSTMs: on an encoder that is not trained (section 5.3, Table 7), and on one that is trained with it (Table 5).

W words, T tokens, L layers that are read, H the encoder's hidden size, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bertsmith.batch import Batch, Layout, Packed, Padded
from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError, suggestion
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_weights
from bertsmith.model.states import hidden_states, parse_layers

# The rows of Table 7: which layers, and how they become one vector a word.
VARIANTS: dict[str, tuple[str, Literal["concat", "sum"]]] = {
    "embeddings": ("0", "concat"),
    "second-to-last": ("-2", "concat"),
    "last": ("-1", "concat"),
    "sum-last-four": ("-4..-1", "sum"),
    "concat-last-four": ("-4..-1", "concat"),
    "sum-all": ("1..-1", "sum"),
}


@dataclass(frozen=True)
class FeatureConfig:
    """What stands between a frozen encoder and the output layer; without a `variant` the whole model is fine-tuned.

    `hidden_size` is the BiLSTM's in each direction.
    """

    variant: str = ""
    hidden_size: int = 768
    num_layers: int = 2
    BOUNDS = {"hidden_size": Bounds(1, 2**17), "num_layers": Bounds(1, 100)}

    def __post_init__(self) -> None:
        if self.variant and self.variant not in VARIANTS:
            near = suggestion(self.variant, VARIANTS) or "; one of: " + ", ".join(VARIANTS)
            raise UserError(f"--features: unknown variant {self.variant!r}{near}")
        check_bounds(self, "features.")

    @property
    def layers(self) -> str:
        """The layers that are read, as `--layers` writes them."""
        return VARIANTS[self.variant][0]

    def numbers(self, num_layers: int) -> tuple[int, ...]:
        """The layers that are read, of an encoder with so many."""
        if "four" in self.variant and num_layers < 4:
            raise UserError(f"--features {self.variant} reads four layers, and the model has {num_layers}")
        return parse_layers(self.layers, num_layers)


class RecurrentHead(nn.Module):
    """One vector of scores a word, from a BiLSTM on the states of some layers."""

    def __init__(self, config: EncoderConfig, features: FeatureConfig, outputs: int, dropout: float) -> None:
        super().__init__()
        self.layers = features.numbers(config.num_layers)
        self.sums = VARIANTS[features.variant][1] == "sum"
        if self.sums:
            self.mix = nn.Parameter(torch.empty(len(self.layers)))  # all alike at first; softmax makes them weights
        size = config.hidden_size * (1 if self.sums else len(self.layers))
        between = dropout if features.num_layers > 1 else 0.0
        self.lstm = nn.LSTM(size, features.hidden_size, features.num_layers, bidirectional=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * features.hidden_size, outputs)
        init_weights(self, config.init_std)

    def forward(self, states: Tensor, layout: Layout) -> Tensor:
        """Scores (W, K) from states (W, L, H) of sentences of words.

        In the parameters' own precision also while training: not every device has an LSTM in bfloat16.
        """
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(self.output.weight.dtype)
            x = torch.einsum("l,wlh->wh", self.mix.softmax(0), states) if self.sums else states.flatten(1)
            return self.output(self.dropout(both_ways(self.lstm, self.dropout(x), layout)))

    def scores(self, encoder: Encoder, batch: Batch) -> Tensor:
        """Scores (T, K) of a batch: of words whose states it brings, or at the tokens that its words begin with."""
        if "states" in batch.labels:
            return self(batch.labels["states"], batch.layout)
        read, layout = batch.labels["read"], batch.layout
        assert isinstance(layout, Packed)
        scores = self.output.weight.new_zeros(len(batch.tokens), self.output.out_features)
        if not len(read):
            return scores
        sentences = F.pad(torch.searchsorted(read, batch.labels["begins"]), (0, 1), value=len(read)).int()
        longest = int(sentences.diff().max())
        found = self(self.states(encoder, batch)[read], Packed(sentences, longest))
        return scores.to(found.dtype).index_copy(0, read, found)

    @torch.no_grad()
    def states(self, encoder: Encoder, batch: Batch) -> Tensor:
        """What is read of a frozen encoder (T, L, H), without dropout."""
        encoder.eval()
        found = hidden_states(encoder, batch, self.layers)
        return torch.stack([found[layer] for layer in self.layers], -2)


def both_ways(lstm: nn.LSTM, x: Tensor, layout: Layout) -> Tensor:
    """What a BiLSTM gives for each token of sequences that it reads one by one."""
    if x.is_cuda and isinstance(layout, Packed):
        return each_way(lstm, x, layout)
    layout = _without_empty(layout) if isinstance(layout, Packed) else layout
    lengths = (layout.mask.sum(1) if isinstance(layout, Padded) else layout.starts.diff()).cpu()
    packed = pack_padded_sequence(layout.pad(x), lengths, batch_first=True, enforce_sorted=False)
    hidden, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=layout.max_length)
    return layout.unpad(hidden)


def each_way(lstm: nn.LSTM, x: Tensor, layout: Packed) -> Tensor:
    """The same layer by layer and way by way: no length leaves the device, so that a GPU's work can be recorded.

    Sequences stand in a rectangle, for the way back each of them turned round in its own places; what lies behind them
    is read after them. More work than needed, and on a GPU still less time than its launches.
    """
    starts, steps = layout.starts.long(), torch.arange(layout.max_length, device=x.device)
    lengths = starts.diff()[:, None]
    turned = torch.where(steps < lengths, lengths - 1 - steps, steps)
    turned = (turned + layout.max_length * torch.arange(len(lengths), device=x.device)[:, None]).flatten()
    turn = lambda states: states.flatten(0, 1).index_select(0, turned).view_as(states)  # noqa: E731
    hidden = layout.pad(x)
    for layer in range(lstm.num_layers):
        hidden = F.dropout(hidden, lstm.dropout, lstm.training and layer > 0)
        ways = _one_way(lstm, f"l{layer}", hidden), turn(_one_way(lstm, f"l{layer}_reverse", turn(hidden)))
        hidden = torch.cat(ways, -1)
    tokens = torch.arange(len(x), device=x.device)
    sequences = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    places = layout.max_length * sequences + tokens - starts.index_select(0, sequences)
    return hidden.flatten(0, 1).index_select(0, places)


def _one_way(lstm: nn.LSTM, name: str, x: Tensor) -> Tensor:
    """One direction of one layer over (B, L, …)."""
    weights = [getattr(lstm, f"{kind}_{name}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    whole = torch.cat([weight.flatten() for weight in weights])  # in one piece, as cuDNN reads them
    parts = [part.view_as(w) for part, w in zip(whole.split([w.numel() for w in weights]), weights, strict=True)]
    start = x.new_zeros(1, len(x), lstm.hidden_size)
    return torch.lstm(x, (start, start), parts, True, 1, 0.0, lstm.training, False, True)[0]


class RecurrentTop(nn.Module):
    """A BiLSTM between an encoder and an output layer, trained with both; its states are as wide as the encoder's.

    Where `pooled`, the output layer takes one state a sequence: what has read up to its last token, and what from it on
    to the first.
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
            read = both_ways(self.lstm, hidden.to(next(self.lstm.parameters()).dtype), layout)
        if not self.pooled:
            return self.top(read)
        forwards, backwards = layout.flat(read).chunk(2, -1)
        ends = forwards.index_select(0, layout.lasts), backwards.index_select(0, layout.firsts)
        return self.top(torch.cat(ends, -1))


def _without_empty(layout: Packed) -> Packed:
    """The sentences that have words."""
    starts = torch.unique_consecutive(layout.starts)
    return Packed(starts, int(starts.diff().max()))
