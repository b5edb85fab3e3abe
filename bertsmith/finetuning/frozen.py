"""Training on a frozen encoder (section 5.3): its hidden states of the training rows are computed once and stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.batch import Batch, Example, Label, LabelKind, collate
from bertsmith.folders import new_folder
from bertsmith.formats.feature_store import INDEX, Features, write_index
from bertsmith.inference.features import PARTS, Extractor, write_parts
from bertsmith.inference.output import ReadShare
from bertsmith.inference.predictor import Predictor
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.matching import MatchingHead
from bertsmith.model.recurrent import RecurrentHead, Standardised, frozen_states
from bertsmith.rows.columns import Row
from bertsmith.tasks.examples import TAG, Examples
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.tagging import tag_indices
from bertsmith.training import distributed

STATE = LabelKind("token", fill=0)  # (n, layers, H) the hidden states of a frozen encoder
STATES = "states"  # in the run folder, until the run is finished
MEASURED, MEASURED_AT_ONCE = 512, 16  # training rows whose states are measured, in all and in a batch


@dataclass(frozen=True)
class FrozenExamples:
    """Sentences with the hidden states of their words."""

    examples: list[Example]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def num_rows(self) -> int:
        return len(self)

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """These sentences as a packed batch."""
        return collate([self.examples[row] for row in rows], packed=True, indices=rows)


def stores_states(head: HeadConfig) -> bool:
    """Whether training reads stored states: of words, which are few; other tasks compute the states in every step."""
    return head.features is not None and KINDS[head.kind].tags_words and head.unit != "token"


def frozen_examples(
    predictor: Predictor, rows: Sequence[Row], head: HeadConfig, max_length: int, folder: Path
) -> FrozenExamples:
    """One example per sentence: the memory-mapped hidden states of its words, and their tags."""
    assert head.features is not None
    extractor = Extractor(predictor, head.features.layers, "first", "float16", max_length)
    distributed.on_rank_zero(lambda: _write(extractor, rows, folder))
    examples = []
    for row, entry in zip(rows, Features.open(folder), strict=True):
        none = np.zeros(len(entry.words), dtype=np.int64)
        tags, states = np.array(tag_indices(row, head)), entry.vectors.transpose(1, 0, 2)
        examples.append(Example(none, none, {"tags": Label(tags, TAG), "states": Label(states, STATE)}))
    return FrozenExamples(examples)


@torch.no_grad()
def measure_states(network: TaskModel, examples: Examples | FrozenExamples, device: torch.device) -> None:
    """Measure the statistics of a head that standardises states, on rows from all of the data, if it has none yet."""
    standard = getattr(network.head, "standard", None)
    if not isinstance(standard, Standardised) or standard.is_measured:
        return
    count = examples.num_rows
    rows = np.unique(np.linspace(0, count - 1, min(count, MEASURED)).astype(np.int64))
    parts = (rows[begin : begin + MEASURED_AT_ONCE] for begin in range(0, len(rows), MEASURED_AT_ONCE))
    standard.measure(_states(network, examples.batch(part).to(device)) for part in parts)


def _states(network: TaskModel, batch: Batch) -> Tensor:
    """The states that the head reads (N, L, H): of all tokens, or of the words that it tags."""
    if "states" in batch.labels:
        return batch.labels["states"]
    assert isinstance(network.head, RecurrentHead | MatchingHead)
    states = frozen_states(network.encoder, batch, network.head.layers)
    return states[batch.labels["words"]] if "words" in batch.labels else states


def _write(extractor: Extractor, rows: Sequence[Row], folder: Path) -> None:
    if (folder / INDEX).exists():  # written by this run before it was stopped
        return

    share = ReadShare()

    def counted() -> Iterator[Row]:
        for number, row in enumerate(rows, 1):
            share(number / len(rows))
            yield row

    with new_folder(folder) as work:
        write_index(work, write_parts(extractor, extractor.described, work, counted(), share))
        (work / PARTS).unlink(missing_ok=True)
