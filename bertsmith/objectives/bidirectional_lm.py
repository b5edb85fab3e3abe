"""The language model of both directions (ELMo: Peters et al. 2018, section 3.1).

M positions that predict, H hidden size, V words that are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from bertsmith.batch import IGNORE, Batch
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import loss_and_correct
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import BIDIRECTIONAL_LM, BidirectionalLMConfig

Half = tuple[Tensor, Tensor]  # the states of one direction (M, H / 2), and the words that they predict (M,)


class BidirectionalLM(Objective):
    """Predicts the next word from the states of one direction, the previous word from those of the other.

    The loss is the mean of the two. Both directions have one output layer over the words, as in the paper; it is a full
    softmax, where the authors sampled words.
    """

    targets = "next"
    token_loss = "forward"
    token_head = "bidirectional_lm"

    def __init__(self, encoder: Encoder, config: BidirectionalLMConfig = BIDIRECTIONAL_LM) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.bidirectional_lm = nn.Linear(encoder.config.hidden_size // 2, encoder.config.num_predicted)
        nn.init.normal_(self.bidirectional_lm.weight, std=self.bidirectional_lm.in_features**-0.5)
        nn.init.zeros_(self.bidirectional_lm.bias)

    @staticmethod
    def counts(config: BidirectionalLMConfig) -> dict[str, str]:
        return {"forward": "targets", "backward": "targets"}

    @property
    def loss_weights(self) -> Mapping[str, float]:
        return {"forward": 0.5, "backward": 0.5}

    @property
    def goal(self) -> str:
        """The mean of the two losses."""
        return "-loss"

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Logits (M, V) of each direction, at the positions that predict."""
        return {name: self.bidirectional_lm(states).float() for name, (states, _) in self._halves(batch).items()}

    def dense_logits(self, batch: Batch) -> dict[str, Tensor]:
        first, second = self.encoder(batch).chunk(2, -1)
        return {"forward": self.bidirectional_lm(first), "backward": self.bidirectional_lm(second)}  # (B, L, V)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The summed loss of each direction, and the numbers of correct predictions."""
        found = self._losses(batch)
        losses = {name: loss for name, (loss, _) in found.items()}
        return {**losses, **{f"{name}_accuracy": right for name, (_, right) in found.items()}}

    def measures(self, batch: Batch) -> dict[str, tuple[Tensor, int | Tensor]]:
        count, found = len(batch.labels["targets"]), self._losses(batch)
        losses: dict[str, tuple[Tensor, int | Tensor]] = {f"{name}_loss": (v, count) for name, (v, _) in found.items()}
        return {**losses, **{f"{name}_accuracy": (right, count) for name, (_, right) in found.items()}}

    def _losses(self, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        halves = self._halves(batch)
        return {name: loss_and_correct(self.bidirectional_lm(s).float(), t) for name, (s, t) in halves.items()}

    def _halves(self, batch: Batch) -> dict[str, Half]:
        """What each direction predicts. A position that predicts its successor is what the successor predicts."""
        first, second = batch.layout.flat(self.encoder(batch)).chunk(2, -1)
        places, next_words = batch.labels["masked"], batch.labels.get("targets", batch.labels["masked"])
        previous = batch.tokens.flatten().index_select(0, places).masked_fill(next_words == IGNORE, IGNORE)
        return {
            "forward": (first.index_select(0, places), next_words),
            "backward": (second.index_select(0, places + 1), previous),
        }

    def tie_weights(self) -> None:
        """Nothing is tied: words are read as characters."""
