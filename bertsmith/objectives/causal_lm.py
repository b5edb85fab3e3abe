"""The left-to-right language model (BERT paper, section 5.1: "LTR & No NSP"), and its mirror image."""

from __future__ import annotations

from torch import Tensor, nn

from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLMHead


class CausalLM(nn.Module):
    """Predicts at every position the next token; with an encoder that reads right to left, the one before.

    The batch names the positions (`masked`: here nothing is hidden) and what is to be predicted there (`targets`). The
    output layer is the masked language model's, so that the two differ in what they see and in nothing else.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        if encoder.config.direction == "both":
            raise UserError("an encoder that sees both directions would see what it predicts: set model.direction")
        self.encoder = encoder
        self.causal_lm = MaskedLMHead(encoder.config, encoder.embeddings.tokens)

    @property
    def encoders(self) -> list[Encoder]:
        """The encoder, whose layers training treats one by one."""
        return [self.encoder]

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Scores (M, V) at the positions that predict."""
        return {"lm": self.causal_lm(self._states(batch)).float()}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The summed loss `lm`, and how many were right."""
        states, fused = self._states(batch), self.encoder.choice(batch).fused
        loss, right = self.causal_lm.losses(states, batch.labels["targets"], fused)
        return {"lm": loss, "lm_accuracy": right}

    def _states(self, batch: Batch) -> Tensor:
        return self.encoder(batch, rows=batch.labels["masked"])
