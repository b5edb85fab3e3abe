"""The character CNN of ELMo (Kim et al. 2016; Jozefowicz et al. 2016): a vector for each word from its characters.

N distinct words, C characters of a word, E their embedding size, F filters in all, H hidden size. `…` stands for (B, L)
or (T,), as the batch is laid out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.config import EncoderConfig

GATE_BIAS = -2.0  # at the start: a highway layer first passes most of its input on, as in the authors' code


class CharacterEmbeddings(nn.Module):
    """Filters of several widths over the characters, the largest value of each; highway layers; a projection to H / 2.

    Both directions of the LSTM layers begin with this vector, so the states hold it twice.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, total = config.character_size, sum(count for _, count in config.character_filters)
        self.characters = nn.Embedding(config.num_characters, size)
        self.filters = nn.ModuleList(nn.Conv1d(size, count, width) for width, count in config.character_filters)
        self.highways = nn.ModuleList(nn.Linear(total, 2 * total) for _ in range(config.num_highways))
        self.projection = nn.Linear(total, config.hidden_size // 2)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, characters: Tensor) -> Tensor:
        """The vectors (…, H) of words, given as characters (…, C); a word that occurs repeatedly is computed once."""
        words, places = characters.flatten(0, -2).unique(dim=0, return_inverse=True)
        x = F.embedding(places, self.projection(self._filtered(words))).view(*characters.shape[:-1], -1)  # (…, H / 2)
        x = self.dropout(x)
        return torch.cat([x, x], -1)

    def _filtered(self, words: Tensor) -> Tensor:
        """The values of all filters after the highway layers (N, F)."""
        embedded = self.characters(words).transpose(1, 2)  # (N, E, C)
        # The values and indices of `max` are all that the backward pass keeps of a filter's output.
        x = torch.cat([F.relu(conv(embedded).max(-1).values) for conv in self.filters], -1)  # (N, F)
        for highway in self.highways:
            new, gate = highway(x).chunk(2, -1)
            gate = gate.sigmoid()
            x = gate * F.relu(new) + (1 - gate) * x
        return x


@torch.no_grad()
def init_characters(embeddings: CharacterEmbeddings) -> None:
    """Initialise characters evenly in [-1, 1], matrices by their number of inputs, gates nearly closed."""
    for parameter in embeddings.parameters():
        init_by_inputs(parameter)
    nn.init.uniform_(embeddings.characters.weight, -1.0, 1.0)
    for highway in embeddings.highways:
        bias = highway.bias
        assert isinstance(bias, nn.Parameter)
        bias[len(bias) // 2 :] = GATE_BIAS


def init_by_inputs(parameter: Tensor) -> None:
    """Initialise a matrix so that its outputs are about as large as its inputs, and a bias with zeros."""
    if parameter.dim() == 1:
        nn.init.zeros_(parameter)
    else:
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
