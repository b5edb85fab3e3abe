"""Masked language model with the next-sentence loss (BERT paper, section 3.1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import Batch
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLMHead, NextSentenceHead


class MaskedLM(nn.Module):
    """Predicts the masked words and, unless it is switched off, whether the second segment follows the first."""

    def __init__(self, encoder: Encoder, next_sentence: bool = True) -> None:
        super().__init__()
        self.encoder = encoder
        self.masked_lm = MaskedLMHead(encoder.config, encoder.embeddings.tokens)
        self.next_sentence = NextSentenceHead(encoder.config) if next_sentence else None

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Scores (M, V) at the masked positions only, and (B, 2) for the pair."""
        hidden = self.encoder(batch)
        masked = batch.layout.flat(hidden).index_select(0, batch.labels["masked"])  # (M, H)
        scores = {"mlm": self.masked_lm(masked).float()}
        if self.next_sentence is not None:
            scores["nsp"] = self.next_sentence(hidden, batch.layout).float()
        return scores

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Summed losses, `mlm` over the masked positions and `nsp` over the pairs, and how many were right."""
        scores = self.logits(batch)
        targets = {"mlm": batch.labels["targets"]}
        if "nsp" in scores:
            targets["nsp"] = batch.labels["next"]
        losses = {name: F.cross_entropy(scores[name], t, reduction="sum") for name, t in targets.items()}
        right = {f"{n}_accuracy": (scores[n].detach().argmax(-1) == t).sum() for n, t in targets.items()}
        return {**losses, **right}
