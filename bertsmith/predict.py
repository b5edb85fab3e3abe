"""`Predictor`: the one door from a saved folder to answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import Batch, Example, collate
from bertsmith.errors import UserError
from bertsmith.folders import new_file
from bertsmith.formats.hf import Loaded, load_folder
from bertsmith.formats.hub import find_model
from bertsmith.model.heads import HeadConfig, HeadKind, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.progress import Advance, progress_bar, say
from bertsmith.tasks.description import Limits, Task
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.rows import Columns, Row
from bertsmith.tasks.task import KINDS, find_task, plain_task
from bertsmith.training.settings import pick_device

BATCH_SIZE = 64
WINDOW = 4096  # rows that are sorted by length together


class Predictor:
    """A model with its tokenizer, ready to answer."""

    def __init__(self, loaded: Loaded, device: str | torch.device | None = None) -> None:
        self.device = device if isinstance(device, torch.device) else pick_device(device)
        self.model = loaded.model.to(self.device)
        self.tokenizer = loaded.tokenizer
        self.notes = loaded.notes
        self.folder = loaded.folder
        self.missing = loaded.missing
        positions = loaded.model.encoder.config.max_positions
        self.max_length = min(loaded.notes.max_length or positions, positions)
        self.shortened = 0

    @classmethod
    def load(cls, name: str | Path, device: str | None = None) -> Predictor:
        """Open a model folder, a run or a hub name."""
        return cls(load_folder(find_model(name)), device)

    @property
    def head(self) -> HeadConfig:
        """The output layer, or an error where the model has none."""
        if not isinstance(self.model, TaskModel):
            raise UserError(f"{self.folder} has no output layer for a task; `bertsmith finetune` puts one on it")
        self._refuse_random("head.")
        return self.model.head_config

    @property
    def task(self) -> Task:
        """The task that the model was trained for, or the plain one of its head."""
        plain = plain_task(self.head.kind)  # first, since it says where a model has no head
        return find_task(self.notes.task) if self.notes.task else plain

    @property
    def limits(self) -> Limits:
        """How long inputs and answers may be, as in training."""
        values = {name: int(value) if name != "threshold" else value for name, value in self.notes.limits.items()}
        return Limits(**{**values, "max_length": self.max_length})  # type: ignore[arg-type]

    @property
    def columns(self) -> Columns:
        """The columns that the model was trained on."""
        return Columns(**self.notes.columns) if self.notes.columns else Columns()

    def _refuse_random(self, part: str) -> None:
        """An answer out of weights that were never trained is worse than none."""
        if lacking := [name for name in self.missing if name.startswith(part)]:
            raise UserError(f"{self.folder} has no weights for {', '.join(lacking)}")

    def predict(self, texts: Iterable[str | tuple[str, str]]) -> Iterator[dict[str, Any]]:
        """An answer for each text or pair, in order, as they come: label, score and scores, or a value."""
        rows = (Row(t, None, None, "") if isinstance(t, str) else Row(t[0], t[1], None, "") for t in texts)
        yield from self.predict_rows(rows)

    def predict_rows(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Answers for rows, a window of them at a time."""
        rows, head, limits = iter(rows), self.head, self.limits
        kind = KINDS[head.kind]
        while window := list(islice(rows, WINDOW)):
            encoded = kind.encode(window, self.tokenizer, limits, head, labelled=False)
            self.shortened += encoded.shortened
            yield from kind.decode(window, encoded, self.logits(encoded.examples), head, limits)

    def evaluate(self, rows: Sequence[Row], advance: Advance = lambda done, words: None) -> dict[str, float]:
        """The task's metrics on labelled rows; `advance` is told how many are done."""
        head = self.head
        for row in rows:
            KINDS[head.kind].check(row, head)
        answers = []
        for answer in self.predict_rows(rows):
            answers.append(answer)
            advance(len(answers), "")
        return KINDS[head.kind].score(self.task, rows, answers, head, self.limits)

    def logits(self, examples: Sequence[Example]) -> list[NDArray[np.float32]]:
        """Scores of each example, in their order: (K,), or (n, K) for tokens; batches hold texts of similar length."""
        order = sorted(range(len(examples)), key=lambda i: -len(examples[i].tokens))
        rows: list[Any] = [None] * len(examples)
        choices = max(1, self.head.num_choices)
        size = max(1, BATCH_SIZE // choices) * choices
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            scores = self._run(collate([examples[i] for i in chosen], packed=True))
            for i, row in zip(
                chosen, by_example(scores, [len(examples[i].tokens) for i in chosen], self.head.kind), strict=True
            ):
                rows[i] = row
        return rows

    @torch.inference_mode()
    def _run(self, batch: Batch) -> NDArray[np.float32]:
        assert isinstance(self.model, TaskModel)
        self.model.eval()
        return self.model.logits(batch.to(self.device)).float().cpu().numpy()

    @torch.inference_mode()
    def fill(self, text: str, top: int = 5) -> list[list[dict[str, Any]]]:
        """The likeliest words for each `[MASK]` of a text, with their probabilities."""
        if not isinstance(self.model, MaskedLM):
            raise UserError(f"{self.folder} was fine-tuned and cannot fill masks; take the model it was started from")
        self._refuse_random("masked_lm.")
        ids = self.tokenizer.encode([text], special=True)[0]
        if len(ids) > self.model.encoder.config.max_positions:
            limit = self.model.encoder.config.max_positions
            raise UserError(f"the text has {len(ids)} tokens, more than the model's {limit} positions; shorten it")
        masked = np.flatnonzero(np.array(ids) == self.tokenizer.id("[MASK]"))
        if not masked.size:
            raise UserError(f"no [MASK] in {text!r}; write [MASK] where a word is to be filled in")
        batch = collate([Example(np.array(ids), np.zeros(len(ids), dtype=np.int64))], packed=True)
        batch.labels["masked"] = torch.from_numpy(masked)
        self.model.eval()
        probabilities = self.model.logits(batch.to(self.device))["mlm"].softmax(-1).cpu()
        best = probabilities.topk(min(top, probabilities.shape[-1]))
        return [
            [{"token": self.tokenizer.token(i), "probability": p} for p, i in zip(ps, ids, strict=True)]
            for ps, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]


def by_example(scores: NDArray[np.float32], lengths: Sequence[int], kind: HeadKind) -> list[NDArray[np.float32]]:
    """The scores of a batch as one array an example."""
    if kind == "span":  # padded
        return [row[:length] for row, length in zip(scores, lengths, strict=True)]
    if kind == "tags":  # packed
        return np.split(scores, np.cumsum(lengths)[:-1])
    return list(scores.reshape(len(lengths), -1))  # endings stand in rows of several


def fill(model: str | Path, text: str, *, top: int = 5, device: str | None = None) -> list[list[dict[str, Any]]]:
    """The likeliest words for each `[MASK]` of a text."""
    return Predictor.load(model, device).fill(text, top)


def evaluate(model: str | Path, data: str | Path, *, device: str | None = None) -> dict[str, Any]:
    """Score a fine-tuned model on a labelled file."""
    predictor = Predictor.load(model, device)
    rows = list(read_task(predictor.task, data, predictor.columns, labelled=True))
    with progress_bar("evaluating", len(rows)) as advance:
        scores = predictor.evaluate(rows, advance)
    _say_shortened(predictor)
    return {"task": predictor.task.name, "rows": len(rows), **scores}


def predict(model: str | Path, data: str | Path, out: str | Path, *, device: str | None = None) -> int:
    """Answer every row of a file, in order, as JSON lines; gives the number of rows."""
    predictor = Predictor.load(model, device)
    count, size, title = 0, max(1, Path(data).stat().st_size if Path(data).exists() else 1), "predicting"
    with new_file(out) as work, work.open("w", encoding="utf-8") as file, progress_bar(title, size) as advance:
        read = 0

        def counted() -> Iterator[Row]:
            nonlocal read
            for row in read_task(predictor.task, data, predictor.columns, labelled=False):
                read += len(row.text.encode()) + len((row.pair or "").encode())
                yield row

        for answer in predictor.predict_rows(counted()):
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            count += 1
            advance(min(read, size), f"{count:,} rows")
        advance(size, f"{count:,} rows")
    _say_shortened(predictor)
    return count


def _say_shortened(predictor: Predictor) -> None:
    if predictor.shortened:
        say(f"note: {predictor.shortened} text(s) were cut to {predictor.max_length} tokens")
