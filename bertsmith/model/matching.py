"""A BiLSTM model with attention on the features of a frozen encoder, for single texts, pairs, choices and spans.

It stands for the models that the papers put ELMo into: BiLSTM with attention (GLUE), ESIM (Chen et al. 2017; SWAG) and
BiDAF (Seo et al. 2017; SQuAD). B sequences, L padded length, D the states of both directions, K classes. `…` stands for
(B, L) or (T,), as the batch is laid out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import Batch, Layout
from bertsmith.model.characters import init_by_inputs
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_parameter
from bertsmith.model.recurrent import FeatureConfig, bilstm, combined, frozen_states, mixing, standardisation


class MatchingHead(nn.Module):
    """Two BiLSTMs with attention between them, and logits of every token or of every sequence.

    After the first BiLSTM, every token of a text attends to the tokens of the other text, or of its own where there is
    only one. Its state, what it attends to, their difference and their product go into the second BiLSTM, whose states
    are added to the first one's: that learns faster from few rows. A sequence has the mean and the maximum of each
    text's states.
    """

    def __init__(
        self, config: EncoderConfig, features: FeatureConfig, outputs: int, dropout: float, of_tokens: bool
    ) -> None:
        super().__init__()
        self.layers = features.numbers(config.num_layers)
        size, self.mix, self.scale = mixing(config, features)
        self.standard = standardisation(config, features)
        width, between = features.hidden_size, dropout if features.num_layers > 1 else 0.0
        self.lstm = nn.LSTM(size, width, features.num_layers, bidirectional=True, dropout=between)
        self.compare = nn.Linear(8 * width, width)
        self.compose = nn.LSTM(width, width, bidirectional=True)
        self.dense = None if of_tokens else nn.Linear(8 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * width if of_tokens else width, outputs)
        for name, parameter in self.named_parameters():
            init_matching(name, parameter)

    def scores(self, encoder: Encoder, batch: Batch) -> Tensor:
        """Logits of a batch: (…, K) of tokens, or (B, K) of sequences."""
        states = combined(self.standard(frozen_states(encoder, batch, self.layers)), self.mix, self.scale)
        return self(states, batch.layout, batch.segments)  # type: ignore[no-any-return]

    def forward(self, states: Tensor, layout: Layout, segments: Tensor) -> Tensor:
        """Logits from the features of every token; texts are told apart by their segments."""
        with torch.autocast(states.device.type, enabled=False):  # not every device has an LSTM in bfloat16
            states = bilstm(self.lstm, self.dropout(states.to(self.output.weight.dtype)), layout)
            texts = layout.pad(segments, -1)  # (B, L)
            seen = layout.unpad(attended(layout.pad(states), texts))
            compared = F.relu(self.compare(torch.cat([states, seen, states - seen, states * seen], -1)))
            states = states + bilstm(self.compose, self.dropout(compared), layout)
            if self.dense is None:
                return self.output(self.dropout(states))  # type: ignore[no-any-return]
            pooled = layout.valid(pooled_texts(layout.pad(states), texts))
            return self.output(self.dropout(self.dense(self.dropout(pooled)).tanh()))  # type: ignore[no-any-return]


def init_matching(name: str, parameter: Tensor) -> None:
    """Initialise matrices by their number of inputs: without norms, smaller ones would learn slowly at first."""
    if parameter.dim() > 1:
        init_by_inputs(parameter)
    else:  # biases, and the weights of the encoder's layers
        init_parameter(name, parameter, std=0.0)


def attended(states: Tensor, texts: Tensor) -> Tensor:
    """What each token sees of the other text, or of its own where it is the only one (B, L, D).

    `texts` (B, L) are the numbers of the texts, -1 at the padding.
    """
    is_token = (texts >= 0)[:, None, :]
    others = (texts[:, :, None] != texts[:, None, :]) & is_token
    allowed = torch.where(others.any(-1, keepdim=True), others, is_token)  # (B, L, L)
    scores = states @ states.transpose(1, 2) / states.shape[-1] ** 0.5
    lowest = torch.finfo(scores.dtype).min  # an infinite one would give NaN for padding sequences, which are empty
    return scores.masked_fill(~allowed, lowest).softmax(-1) @ states


def pooled_texts(states: Tensor, texts: Tensor) -> Tensor:
    """The mean and the maximum of the first text's states and of the second's, zeros where there is none (B, 4 D)."""
    parts = []
    for number in (0, 1):
        own = (texts == number)[..., None]
        parts.append((states * own).sum(1) / own.sum(1).clamp_min(1))
        highest = states.masked_fill(~own, torch.finfo(states.dtype).min).amax(1)
        parts.append(highest.masked_fill(~own.any(1), 0.0))
    return torch.cat(parts, -1)
