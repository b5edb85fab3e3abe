"""Masked language model with the next-sentence loss (BERT paper, section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLMHead, NextSentenceHead, loss_and_correct
from bertsmith.model.mask_decoder import MaskDecoder
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import MASKED_LM, MaskedLMConfig


class MaskedLM(Objective):
    """Predicts the masked words and, unless it is switched off, whether the second segment follows the first."""

    targets = "masked"
    token_loss = "mlm"
    token_head = "masked_lm"

    def __init__(self, encoder: Encoder, config: MaskedLMConfig = MASKED_LM) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.masked_lm = MaskedLMHead(encoder.config, encoder.embeddings.tokens)
        self.next_sentence = NextSentenceHead(encoder.config) if config.next_sentence else None
        if config.mask_decoder and encoder.config.positions == "learned":
            raise UserError(
                "objective.mask_decoder=true brings positions in at the end, and the encoder has them in its input: "
                "set model.positions=none, or objective.mask_decoder=false"
            )
        self.mask_decoder = MaskDecoder(encoder.config) if config.mask_decoder else None

    @staticmethod
    def counts(config: MaskedLMConfig) -> dict[str, str]:
        return {"mlm": "targets", **({"nsp": "next"} if config.next_sentence else {})}

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Logits (M, V) at the masked positions only, and (B, 2) for the pair."""
        masked, first = self.states(batch)
        scores = {"mlm": self.masked_lm(masked).float()}
        if self.next_sentence is not None:
            scores["nsp"] = self.next_sentence(first).float()
        return scores

    def dense_logits(self, batch: Batch) -> dict[str, Tensor]:
        hidden = self.encoder(batch) if self.mask_decoder is None else self.mask_decoder(self.encoder, batch)
        scores = {"mlm": self.masked_lm(hidden)}  # (B, L, V)
        if self.next_sentence is not None:
            scores["nsp"] = self.next_sentence(hidden[:, 0])  # (B, 2)
        return scores

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Summed losses, `mlm` over the masked positions and `nsp` over the pairs, and the correct predictions."""
        masked, first = self.states(batch)
        found = {"mlm": self.masked_lm.losses(masked, batch.labels["targets"], self.encoder.choice(batch).fused)}
        if self.next_sentence is not None:
            found["nsp"] = loss_and_correct(self.next_sentence(first).float(), batch.labels["next"])
        losses = {name: loss for name, (loss, _) in found.items()}
        return {**losses, **{f"{name}_accuracy": right for name, (_, right) in found.items()}}

    def states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The states that the losses need: of the masked positions (M, H) and of every `[CLS]` (B, H)."""
        masked = batch.labels["masked"]
        if self.mask_decoder is not None:
            return self.mask_decoder(self.encoder, batch, masked), masked[:0]
        if self.next_sentence is None:
            return self.encoder(batch, rows=masked), masked[:0]
        states = self.encoder(batch, rows=torch.cat([masked, batch.layout.firsts]))
        return states[: len(masked)], states[len(masked) :]
