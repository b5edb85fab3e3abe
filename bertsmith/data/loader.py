"""Pre-training batches: index → segment pair → masked, packed batch. A step's data is a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith import draws
from bertsmith.batch import Batch, Packed, lay_out
from bertsmith.data.masking import MaskPolicy, Vocabulary, mask_tokens
from bertsmith.data.segments import PairSource
from bertsmith.errors import UserError
from bertsmith.text.tokenizer import Tokenizer

MASKING, ORDER = 101, 102  # streams of draws


@dataclass(frozen=True)
class DataConfig:
    """How a corpus becomes pre-training data.

    `copies` is how many differently masked copies of the data there are, gone through in turn (the paper: ten);
    0 masks anew in every epoch. `held_out` is the share of documents that are kept for evaluation.
    """

    max_length: int = 128
    short_share: float = 0.1
    masking: MaskPolicy = field(default_factory=MaskPolicy)
    copies: int = 10
    held_out: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise UserError(f"data.held_out must be at least 0 and under 1, not {self.held_out}")


@dataclass(frozen=True, eq=False)
class Loader:
    """Draws batches of masked segment pairs."""

    pairs: PairSource
    tokenizer: Tokenizer
    config: DataConfig
    vocabulary: Vocabulary
    packed: bool = True

    @classmethod
    def of(cls, pairs: PairSource, tokenizer: Tokenizer, config: DataConfig, packed: bool = True) -> Loader:
        vocabulary = Vocabulary.of(tokenizer.vocab_size, tokenizer.id("[MASK]"), tokenizer.special_ids)
        return cls(pairs, tokenizer, config, vocabulary, packed)

    def step(self, number: int, batch_size: int, micro_batch_size: int) -> list[Batch]:
        """The micro-batches of a step: samples from number · batch_size on, in the order of their epoch."""
        samples = number * batch_size + np.arange(batch_size)
        epochs, places = np.divmod(samples, len(self.pairs))
        indices = places.copy()
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = draws.permute(places[here], len(self.pairs), self.pairs.seed, epoch, ORDER)
        cuts = range(0, batch_size, micro_batch_size)
        return [self.batch(epochs[i : i + micro_batch_size], indices[i : i + micro_batch_size]) for i in cuts]

    def batch(self, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> Batch:
        """One batch of the given chunks, each in its epoch."""
        copies = epochs % self.config.copies if self.config.copies else epochs
        pairs = self.pairs.pairs(copies, indices)
        cls_id, sep_id = [self.tokenizer.id("[CLS]")], [self.tokenizer.id("[SEP]")]
        tokens = np.concatenate([x for p in pairs for x in (cls_id, p.first, sep_id, p.second, sep_id)]).astype(
            np.int64
        )
        sizes = np.array([(len(p.first) + 2, len(p.second) + 1) for p in pairs])
        segments = np.repeat(np.tile([0, 1], len(pairs)), sizes.ravel())
        lengths = sizes.sum(1)
        keys = draws.key(self.pairs.seed, copies, indices, MASKING)
        masked = mask_tokens(tokens, lengths, keys, self.config.masking, self.vocabulary)
        batch = lay_out(masked.tokens, segments, lengths, packed=self.packed, pad=self.tokenizer.id("[PAD]"))
        positions = masked.positions
        if not isinstance(batch.layout, Packed):  # places in the rectangle instead of in the row of tokens
            positions = np.flatnonzero(batch.layout.mask.numpy().ravel())[positions]
        labels = {
            "masked": torch.from_numpy(positions),
            "targets": torch.from_numpy(masked.targets),
            "next": torch.tensor([0 if p.is_next else 1 for p in pairs]),
        }
        return replace(batch, labels=labels, counts={"mlm": len(positions), "nsp": len(pairs)})


def split_documents(count: int, held_out: float, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The documents for training and those held out: about the given share, chosen by number, at least two."""
    if held_out == 0:
        return np.arange(count), np.arange(0)
    size = min(max(2, round(held_out * count)), count - 2)
    if size < 2:
        raise UserError(f"{count} documents cannot be divided into training and held-out text; set data.held_out=0")
    held = np.sort(draws.permute(np.arange(size), count, seed, ORDER))
    return np.delete(np.arange(count), held), held
