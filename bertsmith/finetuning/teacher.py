"""A fine-tuned teacher: its logits for the training rows, which a smaller model learns beside the labels.

The teacher reads texts with its own tokenizer, so that any family can teach any other. Labels of tokens need the same
tokens in both models, and with them the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import Label
from bertsmith.errors import UserError
from bertsmith.finetuning.data import RunData
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.hf import load_folder
from bertsmith.formats.hub import find_model
from bertsmith.formats.weights import weights_facts
from bertsmith.inference.predictor import WINDOW, Predictor
from bertsmith.model.heads import HeadConfig
from bertsmith.model.soft_targets import SoftTargets
from bertsmith.progress import progress_bar
from bertsmith.tasks.description import Encoded, Limits
from bertsmith.tasks.examples import SOFT, SOFT_TOKEN
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.sequences import of_rows
from bertsmith.text.tokenizer import Tokenizer

Logits = NDArray[np.float32]
OF_TOKENS = ("tags", "span")  # the kinds with logits for every token


@dataclass(frozen=True, eq=False)
class TaskTeacher:
    """A fine-tuned model with the labels of a run, whose order may differ."""

    predictor: Predictor
    order: list[int]  # the place of each label of the run among the teacher's
    soft_targets: SoftTargets

    @property
    def facts(self) -> dict[str, str]:
        """What must be the same when a run is resumed."""
        return weights_facts(self.predictor.folder)

    def teach(self, data: RunData, encoded: Encoded) -> Encoded:
        """Add the teacher's logits to the encoded training rows."""
        kind = data.head.kind
        made = self._of_tokens(encoded) if kind in OF_TOKENS else self._of_texts(data)
        parts, total = [], len(encoded.examples) if kind in OF_TOKENS else len(data.rows)
        with progress_bar("predictions of the teacher", total) as advance:
            for number, part in enumerate(made, 1):
                parts.append(part)
                advance(min(total, number * WINDOW), "")
        logits = np.concatenate(parts)
        logits = logits[:, self.order] if self.order else logits
        soft = Label(logits, SOFT_TOKEN if kind in OF_TOKENS else SOFT)
        return replace(encoded, examples=replace(encoded.examples, soft=soft))

    def _of_texts(self, data: RunData) -> Iterator[Logits]:
        """The logits of each row (n, K), or of its endings, as the teacher's own tokenizer reads it."""
        predictor = self.predictor
        head = replace(predictor.head, num_choices=data.head.num_choices)
        for begin in range(0, len(data.rows), WINDOW):
            rows = data.rows[begin : begin + WINDOW]
            read = KINDS[head.kind].encode(rows, predictor.tokenizer, predictor.limits, head, labelled=False)
            logits = of_rows(predictor.logits(read.examples), read, head, predictor.limits)
            yield np.stack(logits).reshape(len(rows), -1)

    def _of_tokens(self, encoded: Encoded) -> Iterator[Logits]:
        """The logits of all tokens (T, K), which are the same for both models."""
        for begin in range(0, len(encoded.examples), WINDOW):
            yield np.concatenate(self.predictor.logits(encoded.examples[begin : begin + WINDOW]))


def find_teacher(
    config: FinetuneConfig, data: RunData, tokenizer: Tokenizer, limits: Limits, device: torch.device
) -> TaskTeacher | None:
    """Open the teacher of a run; None if it has none. One that was trained for something else is refused."""
    settings = config.distillation
    if not settings.teacher:
        return None
    predictor = Predictor(load_folder(find_model(settings.teacher)), device)
    folder, head = predictor.folder, predictor.head
    if head.kind != data.head.kind:
        raise UserError(
            f"--teacher {folder} was fine-tuned for another kind of task: {head.kind}, not {data.head.kind}"
        )
    if head.kind in OF_TOKENS:
        _check_tokens(predictor, tokenizer, limits)
    soft_targets = SoftTargets(settings.temperature, settings.soft_weight, settings.label_weight)
    return TaskTeacher(predictor, _order(data.head, head, folder), soft_targets)


def _check_tokens(predictor: Predictor, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuse a teacher whose tokens are not those of the student."""
    folder, kind = predictor.folder, predictor.head.kind
    if predictor.tokenizer.hash != tokenizer.hash:
        raise UserError(
            f"--teacher {folder} has another vocabulary than the model: for a task of kind {kind} both need the same "
            "tokens; take a model with the teacher's vocabulary"
        )
    if predictor.head.features is not None:
        raise UserError(f"--teacher {folder} is a BiLSTM on a frozen encoder; take a model that was fine-tuned whole")
    if limits.max_length > predictor.positions:
        raise UserError(
            f"data.max_length {limits.max_length} is longer than the {predictor.positions} positions of the teacher "
            f"{folder}; set it to {predictor.positions} or less"
        )


def _order(labels: HeadConfig, teacher: HeadConfig, folder: Path) -> list[int]:
    """The place of each label among the teacher's, which have to be the same ones."""
    ours, theirs = labels.labels, teacher.labels
    if different := sorted(set(ours) ^ set(theirs)):
        own = different[0] in ours
        where = "the training rows have" if own else "the teacher has"
        lacks = "the teacher lacks it" if own else "the training rows lack it"
        raise UserError(
            f"--teacher {folder}: {where} the label {different[0]!r}, and {lacks}; take a teacher that was fine-tuned "
            "with the same labels"
        )
    return [theirs.index(name) for name in ours]
