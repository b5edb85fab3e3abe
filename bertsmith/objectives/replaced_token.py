"""Replaced-token detection (ELECTRA: Clark et al. 2020, section 2).

A small generator fills in the masked words by sampling from its predictions, and the discriminator, which is the model
that is kept, says of every token whether it is the original one.

B sequences, T tokens, M masked positions, V vocabulary. `…` stands for (B, L) or (T,), as the batch is laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import IGNORE, Batch
from bertsmith.errors import UserError
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import training_flops, training_memory
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused.weights import Sampling
from bertsmith.model.heads import loss_and_correct, sample
from bertsmith.model.mask_decoder import MaskDecoder
from bertsmith.objectives.discriminator import DELTA, TOKENS, Discriminator, with_heads
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import GENERATOR, ORIGINAL_LABEL, PAIR_LABEL, Objective
from bertsmith.objectives.settings import REPLACED_TOKEN, MaskedLMConfig, ReplacedTokenConfig
from bertsmith.progress import say

HEAD_SIZE = 64  # of the generator's attention heads, as in the authors' code


def generator_config(model: EncoderConfig, config: ReplacedTokenConfig) -> EncoderConfig:
    """The generator's encoder: the discriminator's with fewer hidden units, heads and layers (section 3.2)."""
    hidden = max(1, round(model.hidden_size * config.generator_size))
    heads = next(n for n in range(max(1, hidden // HEAD_SIZE), 0, -1) if hidden % n == 0)
    table = model.table_size if config.tied_embeddings else hidden
    return replace(
        model,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=max(1, round(model.intermediate_size * hidden / model.hidden_size)),
        num_layers=max(1, round(model.num_layers * config.generator_layers)),
        embedding_size=None if table == hidden else table,
    )


@dataclass(frozen=True)
class Corrupted:
    """A batch whose masked tokens the generator has filled in."""

    batch: Batch
    replaced: Tensor  # (…) whether a token differs from the original one
    valid: Tensor  # (…) whether a place holds a token to judge: neither padding nor a mask that was left


def corrupt(batch: Batch, sampled: Tensor, fill_every: int = 0) -> Corrupted:
    """Put the sampled tokens (M,) in place of the masks; one that equals the original counts as original.

    With `fill_every` = n every n-th masked position stays as it is.
    """
    original = batch.labels[ORIGINAL_LABEL]
    valid = original != IGNORE
    before = original.where(valid, batch.tokens).flatten()
    # Positions that pad the batch, whose targets are IGNORE, write to a further row, which is dropped.
    rows = batch.labels["masked"].where(batch.labels["targets"] != IGNORE, len(before))
    after = F.pad(before, (0, 1)).scatter(0, rows, sampled)
    if fill_every:
        left = rows[::fill_every]
        after = after.scatter(0, left, F.pad(batch.tokens.flatten(), (0, 1))[left])
        valid = F.pad(valid.flatten(), (0, 1)).scatter(0, left, False)[:-1].view_as(valid)
    after = after[:-1]
    replaced = (after != before).view_as(valid) & valid
    return Corrupted(replace(batch, tokens=after.view_as(batch.tokens)), replaced, valid)


class ReplacedToken(Objective):
    """A generator and a discriminator that are trained together; no gradient flows through the sampled tokens."""

    targets = "masked"
    token_loss = "mlm"
    token_head = "generator.masked_lm"
    folders = {"": "discriminator", GENERATOR: "generator"}
    config: ReplacedTokenConfig

    def __init__(
        self, encoder: Encoder, config: ReplacedTokenConfig = REPLACED_TOKEN, generator: MaskedLM | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.discriminator = Discriminator(encoder, config)
        if generator is None:
            words = MaskedLMConfig(next_sentence=False, mask_decoder=config.mask_decoder)
            generator = MaskedLM(Encoder(generator_config(encoder.config, config)), words)
        self.generator = generator
        self.tie_weights()

    @classmethod
    def of_parts(cls, config: ReplacedTokenConfig, parts: Mapping[str, Objective]) -> ReplacedToken:
        """Join a saved discriminator and its saved generator, whose sizes replace the settings'."""
        discriminator, generator = parts["discriminator"], cast(MaskedLM, parts["generator"])
        ours, theirs = discriminator.encoder, generator.encoder
        if config.tied_embeddings and not config.disentangled and not _same_embeddings(ours, theirs):
            raise UserError(
                "the generator has other embeddings than the discriminator, and objective.tied_embeddings would make "
                "them equal: set objective.tied_embeddings=false"
            )
        size, layers = (
            getattr(theirs.config, name) / getattr(ours.config, name) for name in ("hidden_size", "num_layers")
        )
        config = replace(config, generator_size=size, generator_layers=layers, context=discriminator.config.context)
        if config.mask_decoder and generator.mask_decoder is None:
            generator.mask_decoder = MaskDecoder(theirs.config)
            say("note: the generator has no weights for mask_decoder; they start at random")
        discriminator = with_heads(cast(Discriminator, discriminator), config)
        delta = _delta(ours, theirs) if config.disentangled else None
        joined = cls(ours, config, generator)
        joined.discriminator = discriminator
        joined.tie_weights()
        if delta is not None:
            ours.embeddings.delta = nn.Parameter(delta)
        return joined

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]
        """The discriminator's encoder, which is the one that is kept."""
        return self.discriminator.encoder

    @property
    def encoders(self) -> list[Encoder]:
        return [self.discriminator.encoder, self.generator.encoder]

    @staticmethod
    def counts(config: ReplacedTokenConfig) -> dict[str, str]:
        judged = {"fill" if name == "mlm" else name: label for name, label in Discriminator.counts(config).items()}
        return {"mlm": "targets", **judged}

    @staticmethod
    def saved(model: EncoderConfig, config: ReplacedTokenConfig) -> list[tuple[EncoderConfig, str]]:
        return [*Discriminator.saved(model, config), (generator_config(model, config), MaskedLM.token_head)]

    @property
    def loss_weights(self) -> Mapping[str, float]:
        return {"detection": self.config.detection_weight, "nsp": self.config.pair_weight}

    @property
    def goal(self) -> str:
        """The weighted sum that is minimised; each loss alone misleads: a better generator makes detection harder."""
        return "-loss"

    def tie_weights(self) -> None:
        """Share the embeddings and their norm, as in the authors' code; only the projections differ.

        Disentangled networks share the table of tokens alone.
        """
        self.generator.tie_weights()
        if not self.config.tied_embeddings:
            return
        if self.config.disentangled:
            self.discriminator.encoder.embeddings.share(self.generator.encoder.embeddings.tokens)
            self.discriminator.tie_weights()
            return
        for name, table in _tables(self.discriminator.encoder).items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.generator.encoder.embeddings.get_submodule(owner), leaf, table)
        self.generator.tie_weights()

    def tensors_of(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A discriminator is saved with the table that it uses and, to continue from, with the part of its own."""
        saved = super().tensors_of(part, tensors)
        return {**saved, TOKENS: saved[TOKENS] + saved[DELTA]} if DELTA in saved else saved

    def token_logits(self, batch: Batch) -> Tensor:
        return self.generator.logits(batch)["mlm"]

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """The generator's logits (M, V), and the discriminator's (…) for tokens that are sampled from them.

        `fill` are its logits at the masks that were left.
        """
        words = self.token_logits(batch)
        corrupted = self._corrupt(batch, sample(words, batch.labels["targets"], self.sampling))
        found = self.discriminator.logits(corrupted.batch)
        left = {"fill": found.pop("mlm")[:: self.config.fill_every]} if "mlm" in found else {}
        return {"mlm": words, **found, **left}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Summed losses, `mlm` over the masked positions and `detection` over all tokens, and the right predictions.

        `nsp` is over the pairs. `fill` stands for all masked positions as well: the sum over those that it is computed
        at, times `fill_every`.
        """
        encoder, targets = self.generator.encoder, batch.labels["targets"]
        states, _ = self.generator.states(batch)  # (M, generator's H)
        mlm, right, sampled = self.generator.masked_lm.losses_and_samples(
            states, targets, encoder.choice(batch).fused, self.sampling
        )
        sums = {name: value for name, (value, _) in self._judge(self._corrupt(batch, sampled)).items()}
        sums |= {"mlm_loss": mlm, "mlm_accuracy": right}
        if every := self.config.fill_every:
            sums |= {name: every * sums[name] for name in ("fill_loss", "fill_accuracy")}
        names = self.counts(self.config)
        rights = {f"{name}_accuracy": sums[f"{name}_accuracy"] for name in names}
        return {**{name: sums[f"{name}_loss"] for name in names}, **rights}

    def measures(self, batch: Batch) -> dict[str, tuple[Tensor, int | Tensor]]:
        words, targets = self.token_logits(batch), batch.labels["targets"]
        loss, right = loss_and_correct(words, targets)
        found = self._judge(self._corrupt(batch, sample(words, batch.labels["targets"], self.sampling)))
        return {"mlm_loss": (loss, len(targets)), "mlm_accuracy": (right, len(targets)), **found}

    @property
    def sampling(self) -> Sampling:
        """How the generator's words are drawn."""
        return Sampling(self.config.temperature, self.config.disallow_correct)

    def _corrupt(self, batch: Batch, sampled: Tensor) -> Corrupted:
        return corrupt(batch, sampled, self.config.fill_every)

    def _judge(self, corrupted: Corrupted) -> dict[str, tuple[Tensor, int | Tensor]]:
        """The sums and counts of the discriminator's scores; accuracy alone says little, as most tokens are original.

        Recall is the share of the replaced tokens that are found, precision the share of the found ones that are right.
        """
        network, batch = self.discriminator, corrupted.batch
        hidden = network.encoder(batch)
        scores, replaced, valid = network.detector(hidden, batch).float(), corrupted.replaced, corrupted.valid
        loss = F.binary_cross_entropy_with_logits(scores, replaced.float(), valid.float(), reduction="sum")
        said = (scores.detach() > 0) & valid
        hits, total = (said & replaced).sum(), valid.sum()
        return {
            "detection_loss": (loss, total),
            "detection_accuracy": (((said == replaced) & valid).sum(), total),
            "detection_recall": (hits, replaced.sum()),
            "detection_precision": (hits, said.sum()),
            **({} if network.masked_lm is None else self._fill(network, hidden, batch)),
            **({} if network.next_sentence is None else self._pairs(network, hidden, batch)),
        }

    def _fill(self, network: Discriminator, hidden: Tensor, batch: Batch) -> dict[str, tuple[Tensor, int | Tensor]]:
        """The sums and counts of the discriminator's predictions for the masks that were left."""
        every = self.config.fill_every
        rows, targets = batch.labels["masked"][::every], batch.labels["targets"][::every]
        fused, table = network.encoder.choice(batch).fused, network.encoder.embeddings.table()
        states = hidden.flatten(0, -2).index_select(0, rows)
        loss, right = network.masked_lm.losses(states, targets, fused, table)  # type: ignore[union-attr]
        return {"fill_loss": (loss, len(targets)), "fill_accuracy": (right, len(targets))}

    def _pairs(self, network: Discriminator, hidden: Tensor, batch: Batch) -> dict[str, tuple[Tensor, int | Tensor]]:
        """The sums and counts of the discriminator's predictions for the pairs."""
        targets = batch.labels[PAIR_LABEL]
        loss, right = loss_and_correct(network.pair_scores(hidden, batch), targets)
        return {"nsp_loss": (loss, len(targets)), "nsp_accuracy": (right, len(targets))}

    def _filled(self, predicted: int) -> int:
        """How many of so many masks are left to the discriminator."""
        return -(-predicted // self.config.fill_every) if self.config.fill_every else 0

    def flops(self, lengths: Sequence[int], predicted: int) -> float:
        hidden, tokens = self.encoder.config.hidden_size, sum(lengths)
        detector = 3.0 * tokens * 2 * hidden * (hidden + 1)
        discriminator = training_flops(self.encoder.config, lengths, self._filled(predicted), every_state=True)
        return discriminator + detector + training_flops(self.generator.encoder.config, lengths, predicted)

    def memory(
        self, tokens: int, length: int, predicted: int, *, half: bool, checkpointing: bool, processes: int
    ) -> float:
        """The memory of both networks; tied embeddings are counted twice, which errs on the safe side."""
        networks = (self.encoder.config, self._filled(predicted)), (self.generator.encoder.config, predicted)
        return sum(
            training_memory(config, tokens, length, words, half=half, checkpointing=checkpointing, processes=processes)
            for config, words in networks
        )


def _delta(ours: Encoder, theirs: Encoder) -> Tensor:
    """The table that a saved discriminator adds to its generator's; without one, the difference of their tables."""
    tables = ours.embeddings.tokens.weight, theirs.embeddings.tokens.weight
    if tables[0].shape != tables[1].shape:
        raise UserError(
            f"the discriminator has embeddings of shape {tuple(tables[0].shape)} and the generator of "
            f"{tuple(tables[1].shape)}, which cannot be shared: set objective.tied_embeddings=false and "
            "objective.disentangled=false"
        )
    delta = ours.embeddings.delta
    return (tables[0] - tables[1]).detach() if delta is None else delta.detach()


def _tables(encoder: Encoder) -> dict[str, Any]:
    """The parameters of the input layer without its projection, by name."""
    named = encoder.embeddings.named_parameters()
    return {name: parameter for name, parameter in named if not name.startswith("projection.")}


def _same_embeddings(first: Encoder, second: Encoder) -> bool:
    """Whether the input layers of two encoders have equal tables and norms."""
    ours, theirs = _tables(first), _tables(second)
    same = ours.keys() == theirs.keys() and all(ours[name].shape == theirs[name].shape for name in ours)
    return same and all(bool((ours[name] == theirs[name]).all()) for name in ours)
