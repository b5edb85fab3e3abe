"""The discriminator of replaced-token detection, the model that is kept: its heads, and what it saves.

B sequences, L tokens of the longest one, T packed tokens, M masked positions, V vocabulary. `…` stands for (B, L) or
(T,), as the batch is laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from bertsmith.batch import Batch, Padded
from bertsmith.model.activation import activate
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_weights
from bertsmith.model.heads import MaskedLMHead, NextSentenceHead
from bertsmith.model.pooling import pool
from bertsmith.objectives.objective import ORIGINAL_LABEL, PAIR_LABEL, Objective
from bertsmith.objectives.settings import REPLACED_TOKEN, ReplacedTokenConfig
from bertsmith.progress import say

TOKENS, DELTA = "encoder.embeddings.tokens.weight", "encoder.embeddings.delta"


class ReplacedTokenHead(nn.Module):
    """One logit for each token: whether the generator replaced it (ELECTRA, section 2).

    With `context` it reads the normalised sum of the token's state and that of `[CLS]` (DeBERTa v3's code).
    """

    def __init__(self, config: EncoderConfig, context: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps) if context else None
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)
        self.activation = config.activation
        init_weights(self, config.init_std)

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        if self.norm is not None:
            if isinstance(batch.layout, Padded):
                first = hidden[:, :1]
            else:  # positions count from `[CLS]`
                rows = torch.arange(len(hidden), device=hidden.device) - batch.positions
                first = hidden.index_select(0, rows)
            hidden = self.norm(hidden + first)
        return self.output(activate(self.dense(hidden), self.activation)).squeeze(-1)  # (…)


class Discriminator(Objective):
    """Detects replaced tokens; with `fill_every` it also fills masks, and with `next_sentence` it labels pairs.

    `ReplacedToken` trains it together with the generator that replaces the tokens.
    """

    targets = "masked"
    token_loss = "detection"
    token_head = "detector"

    def __init__(self, encoder: Encoder, config: ReplacedTokenConfig = REPLACED_TOKEN) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.detector = ReplacedTokenHead(encoder.config, config.context)
        self.masked_lm = MaskedLMHead(encoder.config, encoder.embeddings.tokens) if config.fill_every else None
        self.next_sentence = NextSentenceHead(encoder.config) if config.next_sentence else None
        if config.disentangled:
            encoder.embeddings.delta = nn.Parameter(torch.zeros_like(encoder.embeddings.tokens.weight))

    @staticmethod
    def counts(config: ReplacedTokenConfig) -> dict[str, str]:
        words = {"mlm": "targets"} if config.fill_every else {}
        return {"detection": ORIGINAL_LABEL, **words, **({"nsp": PAIR_LABEL} if config.next_sentence else {})}

    @classmethod
    def output(cls, config: ReplacedTokenConfig) -> str:
        return f"{cls.token_head}+masked_lm" if config.fill_every else cls.token_head

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """The logit of every token (…): a positive one says that the token was replaced.

        With them those of masked words (M, V) and of the pairs (B, 2), where there are heads for them.
        """
        hidden = self.encoder(batch)
        scores = {"detection": self.detector(hidden, batch).float()}
        if self.masked_lm is not None:
            scores["mlm"] = self._words(hidden.flatten(0, -2).index_select(0, batch.labels["masked"])).float()
        if self.next_sentence is not None:
            scores["nsp"] = self.pair_scores(hidden, batch)
        return scores

    def token_logits(self, batch: Batch) -> Tensor:
        return self._words(self.encoder(batch, rows=batch.labels["masked"])).float()  # (M, V)

    def dense_logits(self, batch: Batch) -> dict[str, Tensor]:
        hidden = self.encoder(batch)
        scores = {"detection": self.detector(hidden, batch)}  # (B, L)
        if self.masked_lm is not None:
            scores["mlm"] = self._words(hidden)  # (B, L, V)
        if self.next_sentence is not None:
            scores["nsp"] = self.next_sentence(hidden[:, 0])  # (B, 2)
        return scores

    def _words(self, hidden: Tensor) -> Tensor:
        assert self.masked_lm is not None
        return self.masked_lm(hidden, self.encoder.embeddings.table())

    def pair_scores(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The logits of the pairs (B, 2), from the state of every `[CLS]`."""
        assert self.next_sentence is not None
        return self.next_sentence(pool(hidden, batch.layout, "cls")).float()  # type: ignore[no-any-return]

    @property
    def fills_masks(self) -> bool:
        return self.masked_lm is not None

    def lacks_token_head(self, missing: tuple[str, ...]) -> bool:
        return any(name.startswith(("detector.", "masked_lm.")) for name in missing)

    def tie_weights(self) -> None:
        """Where it fills masks, its output layer shares the embeddings' matrix."""
        if self.masked_lm is not None:
            self.masked_lm.tie(self.encoder.embeddings.tokens)


def with_heads(discriminator: Discriminator, config: ReplacedTokenConfig) -> Discriminator:
    """A saved discriminator with the heads that the settings switch on, and without those that they do not."""
    encoder = discriminator.encoder
    discriminator.config = replace(
        discriminator.config,
        fill_every=config.fill_every,
        next_sentence=config.next_sentence,
        pair_weight=config.pair_weight,
    )
    words = (lambda: MaskedLMHead(encoder.config, encoder.embeddings.tokens)) if config.fill_every else None
    pairs = (lambda: NextSentenceHead(encoder.config)) if config.next_sentence else None
    _set_head(discriminator, "masked_lm", words, "masked-word head is dropped; objective.fill_every=5")
    _set_head(discriminator, "next_sentence", pairs, "pair head is dropped; objective.next_sentence=true")
    return discriminator


def _set_head(discriminator: Discriminator, name: str, make: Callable[[], nn.Module] | None, dropped: str) -> None:
    """Make a head that a saved discriminator lacks, or drop one that is switched off (`make` is None)."""
    had = getattr(discriminator, name) is not None
    if make is not None and not had:
        setattr(discriminator, name, make())
        say(f"note: the discriminator has no weights for {name}; they start at random")
    if make is None and had:
        setattr(discriminator, name, None)
        say(f"note: the discriminator's {dropped} keeps and trains it")
