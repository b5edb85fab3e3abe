"""The phases of a run: one length of sequence each, with its loader and its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bertsmith.batch import Batch
from bertsmith.corpus.shards import Corpus
from bertsmith.objectives.objective import Objective
from bertsmith.pretraining.loader import Loader
from bertsmith.pretraining.memory import MicroBatches
from bertsmith.pretraining.segments import segment_source
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import distributed


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of a run with one length of sequence; `end` is the share of the run at which it ends."""

    end: float
    loader: Loader
    micro_batch_size: int

    @property
    def length(self) -> int:
        """The largest number of tokens of a sequence."""
        return self.loader.source.max_length

    def fullness(self) -> float:
        """The share of a sequence's positions that hold a token, estimated from a sample of the sequences."""
        indices = np.linspace(0, len(self.loader.source) - 1, 64).astype(np.int64)
        return self.loader.batch(np.zeros_like(indices), indices).num_tokens / (len(indices) * self.length)


@dataclass(frozen=True, eq=False)
class Phases:
    """The phases of a run in their order.

    With a share `spread`, there are two that do not follow each other: this share of the steps, at equal distances, has
    the second one's sequences, and both have begun from the start.
    """

    parts: tuple[Phase, ...]
    batch_size: int
    spread: float = 0.0

    @property
    def micro_batch_sizes(self) -> dict[str, int]:
        """The size of a micro-batch by the length of the sequences, as `run.json` keeps it."""
        return {str(phase.length): phase.micro_batch_size for phase in self.parts}

    def number(self, step: int, share: float) -> int:
        """The number of the phase that a step belongs to, which comes after this share of a run."""
        if self.spread:
            return int((step + 1) * self.spread) - int(step * self.spread)
        return self.begun(share)

    def begun(self, share: float) -> int:
        """The number of the last phase that has begun after this share of a run."""
        return next((number for number, phase in enumerate(self.parts) if share < phase.end), len(self.parts) - 1)

    def batches(self, step: int, share: float) -> list[Batch]:
        """The micro-batches of this rank for a step, where `share` is the share of the run before that step."""
        phase = self.parts[self.number(step, share)]
        ranks = distributed.rank(), distributed.world_size()
        return phase.loader.step(step, self.batch_size, phase.micro_batch_size, *ranks)


def make_phases(
    config: PretrainConfig,
    objective: Objective,
    corpus: Corpus,
    documents: np.ndarray[Any, Any],
    tokenizer: Tokenizer,
    where: torch.device,
    sizes: Mapping[str, int],
) -> Phases:
    """One phase, or short sequences and then long ones (BERT paper, appendix A.2), or long ones among short ones.

    `sizes` are the micro-batch sizes that a resumed run was started with, by the length of the sequences.
    """
    data = config.data
    lengths = [(1.0, data.max_length)]
    if data.long_length is not None:
        begin = 1.0 - data.long_share if data.long_last else 0.0
        lengths = [(begin, data.max_length), (1.0, data.long_length)]
    parts = []
    for end, length in lengths:
        micro_batches = MicroBatches(objective, config.train, where, length, config.predicted_share)
        size = micro_batches.size(sizes.get(str(length)))
        parts.append(Phase(end, make_loader(config, corpus, documents, tokenizer, length), size))
    return Phases(tuple(parts), config.train.batch_size, 0.0 if data.long_last else data.long_steps)


def make_loader(
    config: PretrainConfig, corpus: Corpus, documents: np.ndarray[Any, Any], tokenizer: Tokenizer, max_length: int
) -> Loader:
    """The loader of some documents, for the objective and the encoder of a run."""
    data = config.data
    source = segment_source(
        data.pairs, corpus, documents, max_length, data.short_share, config.train.seed, tokenizer.frame
    )
    model = config.model
    return Loader.of(
        source, tokenizer, data, objective=config.objective, direction=model.direction,
        predicted_words=model.predicted_words,
    )  # fmt: skip
