"""Pre-training batches: index → segments → masked, packed batch. A step's data is a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from bertsmith import draws
from bertsmith.batch import CHARACTERS, IGNORE, Batch, Label, LabelKind, lay_out, split_for_rank
from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError
from bertsmith.model.config import Direction
from bertsmith.objectives.causal_lm import MASKED, TARGET, next_tokens
from bertsmith.objectives.kinds import objective_class
from bertsmith.objectives.objective import EVERY_TOKEN, ORIGINAL_LABEL, PAIR_LABEL
from bertsmith.objectives.settings import MASKED_LM, ObjectiveConfig
from bertsmith.pretraining.masking import Masked, MaskPolicy, Vocabulary, mask_tokens
from bertsmith.pretraining.segments import PairKind, SegmentSource
from bertsmith.tasks.examples import SPELLING
from bertsmith.text.tokenizer import Tokenizer

ORIGINAL = LabelKind("token", fill=IGNORE)  # every token before masking
PAIR = LabelKind("sequence", loss="nsp")  # whether the second segment is a random one
MASKING, ORDER = 101, 102  # streams of draws


@dataclass(frozen=True)
class DataConfig:
    """How a corpus becomes pre-training data.

    `pairs` is what a sequence holds: a segment and the "next" or a random one (BERT), two segments in "order" or
    swapped (ALBERT), or one segment without a pair label: "full" sentences (RoBERTa), "varied" ones, of which some are
    short, or "contiguous" text that begins and ends anywhere (OpenAI GPT). `short_share` is the share of pairs, and of
    varied sequences, that are shortened to a random length. `copies` is the number of differently masked copies of the
    data, used in turn (the paper: ten); 0 draws new masks in every epoch. `held_out` is the share of documents that are
    held out for evaluation. With `long_length`, the last `long_share` of a run has sequences of that length, as the
    last tenth with 512 tokens in the paper; their positions are trained in it. Without `long_last`, that share of the
    tokens is in single steps that are spread over the run.
    """

    max_length: int = 128
    short_share: float = 0.1
    long_length: int | None = None
    long_share: float = 0.1
    long_last: bool = True
    masking: MaskPolicy = field(default_factory=MaskPolicy)
    copies: int = 10
    held_out: float = 0.01
    pairs: PairKind = "next"
    BOUNDS = {
        "max_length": Bounds(5, 2**24),  # two segments of one token
        "short_share": Bounds(0, 1),
        "long_length": Bounds(5, 2**24),
        "long_share": Bounds(0, 1, "()"),
        "copies": Bounds(0, 10**9),  # 0: new masks in every epoch
        "held_out": Bounds(0, 1, "[)"),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "data.")
        if self.long_length is not None and self.long_length <= self.max_length:
            raise UserError(
                f"data.long_length {self.long_length} is not longer than data.max_length {self.max_length}; "
                "set data.long_length=null for one length"
            )
        if not self.long_last and self.long_length is None:
            raise UserError("data.long_last=false spreads long sequences over a run: set data.long_length too")
        if self.pairs not in get_args(PairKind):
            raise UserError(f"data.pairs must be one of {', '.join(get_args(PairKind))}, not {self.pairs!r}")

    @property
    def long_steps(self) -> float:
        """The share of the steps that have long sequences; every step has the same number of sequences."""
        if self.long_length is None:
            return 0.0
        share, longer = self.long_share, self.long_length / self.max_length
        return share if self.long_last else share / (share + (1 - share) * longer)


@dataclass(frozen=True, eq=False)
class Loader:
    """Draws the batches that an objective needs: masked sequences, or whole ones whose tokens predict the next one."""

    source: SegmentSource
    tokenizer: Tokenizer
    config: DataConfig
    vocabulary: Vocabulary | None  # for masks; None: nothing is masked
    packed: bool = True
    objective: ObjectiveConfig = MASKED_LM
    direction: Direction = "both"
    predicted_words: int | None = None  # entries of the vocabulary that are predicted; rarer ones as the unknown token

    @classmethod
    def of(
        cls,
        source: SegmentSource,
        tokenizer: Tokenizer,
        config: DataConfig,
        packed: bool = True,
        objective: ObjectiveConfig = MASKED_LM,
        direction: Direction = "both",
        predicted_words: int | None = None,
    ) -> Loader:
        masks = objective_class(objective).targets == "masked"
        vocabulary = Vocabulary.of(tokenizer) if masks else None
        return cls(source, tokenizer, config, vocabulary, packed, objective, direction, predicted_words)

    def step(self, number: int, batch_size: int, micro_batch_size: int, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The micro-batches of a step: samples from number · batch_size on, in the order of their epoch.

        Each rank builds only its own share of that list.
        """
        begin, size = number * batch_size, len(self.source)
        epochs = (begin + np.arange(batch_size)) // size
        indices = draws.in_epochs(begin, begin + batch_size, size, self.source.seed, ORDER)
        cuts = [slice(i, i + micro_batch_size) for i in range(0, batch_size, micro_batch_size)]
        own = [(self.batch(epochs[cut], indices[cut]), idle) for cut, idle in split_for_rank(cuts, rank, ranks)]
        return [batch.zero_weight() if idle else batch for batch, idle in own]

    def batch(self, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> Batch:
        """One batch: the sequences of some chunks, each in its epoch."""
        copies = epochs % self.config.copies if self.config.copies else epochs
        samples = self.source.samples(copies, indices)
        parts = [part for sample in samples for part in sample.parts]
        tokens = np.concatenate(parts, dtype=np.int64)
        if (largest := int(tokens.max())) >= self.tokenizer.vocab_size:  # a GPU would not report an invalid id
            raise UserError(
                f"the corpus holds the token id {largest}, and its vocabulary {self.tokenizer.vocab_size:,} entries: a "
                "shard is damaged; build the corpus again"
            )
        segments = [segment for sample in samples for segment in sample.segments]
        numbers = [len(sample.parts) for sample in samples]
        joined = self.tokenizer.joiner.join_many(tokens, [len(part) for part in parts], numbers, segments)
        tokens, lengths = joined.tokens, joined.lengths
        spelling = {CHARACTERS: Label(self.tokenizer.characters(tokens), SPELLING)} if self.tokenizer.spells else {}
        tokens = self.predictable(tokens)
        objective = objective_class(self.objective)
        if self.vocabulary is not None:
            keys = draws.key(self.source.seed, copies, indices, MASKING)
            masked = mask_tokens(tokens, lengths, keys, self.config.masking, self.vocabulary)
        else:
            masked = Masked(tokens, *next_tokens(tokens, lengths, self.direction))
        batch = lay_out(masked.tokens, joined.segments, lengths, packed=self.packed, pad=self.tokenizer.pad_id)
        labels = {"masked": Label(masked.positions, MASKED), "targets": Label(masked.targets, TARGET), **spelling}
        losses = objective.counts(self.objective)
        if ORIGINAL_LABEL in losses.values():
            labels[ORIGINAL_LABEL] = Label(tokens, ORIGINAL)
        if PAIR_LABEL in losses.values():
            labels[PAIR_LABEL] = Label([s.label for s in samples], PAIR)
        sizes = {EVERY_TOKEN: len(tokens), **{name: len(label.values) for name, label in labels.items()}}
        counts = {loss: sizes[label] for loss, label in losses.items()}
        return replace(batch.with_labels(labels), counts=counts, indices=indices)

    def predictable(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """The tokens with the unknown one for those that are not predicted."""
        if self.predicted_words is None:
            return tokens
        return np.where(tokens < self.predicted_words, tokens, self.tokenizer.unknown_id)


def split_documents(count: int, held_out: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The documents for training and those held out: a random choice of about this share, at least two."""
    if held_out == 0:
        return np.arange(count), np.arange(0)
    size = min(max(2, round(held_out * count)), count - 2)
    if size < 2:
        raise UserError(
            f"{count} document{'s' * (count != 1)} cannot be divided into training and held-out text: separate "
            "documents by a blank line and build the corpus again, or set data.held_out=0"
        )
    held = np.sort(draws.permute(np.arange(size), count, 0, ORDER))
    return np.delete(np.arange(count), held), held
