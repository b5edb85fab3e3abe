"""The left-to-right language model (BERT paper, section 5.1: "LTR & No NSP"), and its mirror image."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.batch import IGNORE, Batch, LabelKind
from bertsmith.errors import UserError
from bertsmith.model.config import Direction
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLMHead
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import CAUSAL_LM, CausalLMConfig

MASKED = LabelKind("position", fill=0, index=True)  # the positions that predict a word
TARGET = LabelKind("position", fill=IGNORE)  # the ids of the words


class NextTokens(NamedTuple):
    """The positions that predict, and the ids of the tokens that they predict."""

    positions: NDArray[np.int64]  # (M,)
    targets: NDArray[Any]  # (M,)


def next_tokens(tokens: NDArray[Any], lengths: NDArray[Any], direction: Direction) -> NextTokens:
    """Targets without masks: a position predicts its successor or, right to left, its predecessor, where it has one."""
    ends = np.cumsum(lengths)
    if direction != "right-to-left":
        positions = np.delete(np.arange(len(tokens)), ends - 1)
        return NextTokens(positions, tokens[positions + 1])
    positions = np.delete(np.arange(len(tokens)), ends - lengths)
    return NextTokens(positions, tokens[positions - 1])


class CausalLM(Objective):
    """Predicts the next token at every position, or the previous one if the encoder reads right to left.

    The batch names the positions (label `masked`, although nothing is masked) and the tokens to predict there (label
    `targets`). The output layer is the masked language model's: the two objectives differ only in what a token sees.
    """

    targets = "next"
    token_loss = "lm"
    token_head = "causal_lm"

    def __init__(self, encoder: Encoder, config: CausalLMConfig = CAUSAL_LM) -> None:
        super().__init__()
        if encoder.config.direction == "both":
            raise UserError("an encoder that sees both directions would see what it predicts: set model.direction")
        self.config = config
        self.encoder = encoder
        self.causal_lm = MaskedLMHead(encoder.config, encoder.embeddings.tokens)

    @staticmethod
    def counts(config: CausalLMConfig) -> dict[str, str]:
        return {"lm": "targets"}

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Logits (M, V) at the positions that predict."""
        return {"lm": self.causal_lm(self._states(batch)).float()}

    def dense_logits(self, batch: Batch) -> dict[str, Tensor]:
        return {"lm": self.causal_lm(self.encoder(batch))}  # (B, L, V)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The summed loss `lm`, and the number of correct predictions."""
        states, fused = self._states(batch), self.encoder.choice(batch).fused
        loss, right = self.causal_lm.losses(states, batch.labels["targets"], fused)
        return {"lm": loss, "lm_accuracy": right}

    def _states(self, batch: Batch) -> Tensor:
        return self.encoder(batch, rows=batch.labels["masked"])
