"""`Predictor`: the one way from a saved model folder to predictions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import Example
from bertsmith.config import from_dict
from bertsmith.errors import UserError
from bertsmith.formats.graphs import FLOAT32, is_onnx
from bertsmith.formats.hf import NOTES, Loaded, load_folder
from bertsmith.formats.hub import find_model, usual_model
from bertsmith.formats.onnx import Exported, open_onnx, require, write_quality
from bertsmith.inference.engines import (
    Engine,
    EngineName,
    OnnxEngine,
    Precision,
    Together,
    TorchEngine,
    check_settings,
    refuse_not_finite,
)
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.objective import GENERATOR, Objective
from bertsmith.progress import Advance
from bertsmith.rows.columns import Columns, Row
from bertsmith.tasks.description import Encoded, Limits, Task
from bertsmith.tasks.inputs import rows_of_inputs
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.spans import merge
from bertsmith.tasks.task import find_task, plain_task
from bertsmith.text.frame import SHOWN_MASK
from bertsmith.text.unknown import Unknowns
from bertsmith.training.settings import pick_device

Combine = Literal["logits", "nbest"]
Names = str | Path | Sequence[str | Path]
WINDOW = 4096  # rows that are sorted by length and batched together


class Predictor:
    """A model with its tokenizer, ready to predict.

    >>> import bertsmith
    >>> predictor = bertsmith.Predictor.load("reviews")
    >>> predictor("The battery of phone 3 died.")
    {'label': 'bad', 'score': 0..., 'scores': {'bad': 0..., 'good': 0...}}
    """

    def __init__(
        self,
        loaded: Loaded | Exported,
        device: str | torch.device | None = None,
        *,
        threads: int | None = None,
        precision: Precision | None = None,
    ) -> None:
        check_settings(None, threads, precision)
        self.tokenizer, self.notes, self.folder = loaded.tokenizer, loaded.notes, loaded.folder
        self.folders: tuple[Path, ...] = (loaded.folder,)  # several for an ensemble
        self.members: tuple[
            Predictor, ...
        ] = ()  # of an ensemble whose answers are merged, because their logits cannot be averaged
        self.engine: Engine
        self.missing: tuple[str, ...] = ()
        if isinstance(loaded, Exported):
            if str(device or "cpu") != "cpu":
                raise UserError(f"onnxruntime is used on the CPU, not on {device}; leave out --device")
            self.engine = OnnxEngine(loaded, threads, precision or "float32")
            self.config = loaded.config
            self._head, self._fills = loaded.head, "mlm_logits" in loaded.outputs
        else:
            where = device if isinstance(device, torch.device) else pick_device(device)
            self.engine = TorchEngine(loaded.model, where, threads, precision or "float32")
            self.missing, self.config = loaded.missing, loaded.model.encoder.config
            self._head = loaded.model.head_config if isinstance(loaded.model, TaskModel) else None
            objective = loaded.model if isinstance(loaded.model, Objective) else None
            self._fills = bool(objective and objective.fills_masks and not objective.lacks_token_head(self.missing))
        self.positions = self.config.max_positions
        self.max_length = min(loaded.notes.max_length or self.positions, self.positions)
        self.shortened = 0
        self.unknowns = Unknowns(self.tokenizer)  # counted over all encoded texts
        self.encode: Callable[..., Encoded] | None = None  # replaces the encoding of the head's kind

    @classmethod
    def load(
        cls,
        name: Names | None = None,
        device: str | None = None,
        *,
        engine: EngineName | None = None,
        threads: int | None = None,
        precision: Precision | None = None,
        combine: Combine | None = None,
    ) -> Predictor:
        """Open a model folder, a run or a hub name, or several of them as an ensemble.

        If the name is None, it is the model in BERTSMITH_MODEL or the default model of the package. ONNX Runtime runs
        an ONNX folder, PyTorch any other. `combine` is for ensembles, see `together`.
        """
        check_settings(engine, threads, precision)
        name = usual_model() if name is None else name
        names = [name] if isinstance(name, (str, Path)) else list(name)
        if not names:
            raise UserError("no model is given; name a model folder, a run or a hub name")
        members = [cls._open(each, device, engine, threads, precision) for each in names]
        if combine is not None:
            _check_combine(combine, members[0])
        return members[0] if len(members) == 1 else together(members, combine)

    @classmethod
    def _open(
        cls,
        name: str | Path,
        device: str | None,
        engine: EngineName | None,
        threads: int | None,
        precision: Precision | None,
    ) -> Predictor:
        folder = find_model(name)
        if engine is None:
            engine = "onnxruntime" if is_onnx(folder) and not any(folder.glob("*.safetensors")) else "torch"
        if engine == "torch":
            return cls(load_folder(folder), device, threads=threads, precision=precision)
        require("onnxruntime")
        if not is_onnx(folder):
            raise UserError(f"{folder} holds no {FLOAT32}, which onnxruntime needs; export it to ONNX first")
        return cls(open_onnx(folder), device, threads=threads, precision=precision)

    @property
    def head(self) -> HeadConfig:
        """The configuration of the task head, or an error if the model has none."""
        if self._head is None:
            raise UserError(f"{self.folder} has no output layer for a task; `bertsmith finetune` adds one")
        self._refuse_random("head.")
        return self._head

    @property
    def torch_engine(self) -> TorchEngine:
        """The engine that holds the weights, or an error if the folder has only an ONNX graph."""
        if not isinstance(self.engine, TorchEngine):
            raise UserError(f"{self.folder} is an ONNX folder without weights; give the model it was made from")
        return self.engine

    @property
    def task(self) -> Task:
        """The task that the model was fine-tuned for, or the generic task of its head."""
        plain = plain_task(self.head.kind)  # first, because it raises the error of a model without a head
        return find_task(self.notes.task) if self.notes.task else plain

    @property
    def limits(self) -> Limits:
        """The maximum lengths of inputs and answers, as in training."""
        values: dict[str, Any] = {**self.notes.limits, "max_length": self.max_length}
        if self.task.no_answer:
            values.setdefault("threshold", 0.0)
        return from_dict(Limits, values, f"{self._notes_file}: limits")

    @property
    def columns(self) -> Columns:
        """The names of the columns that the model was trained on."""
        return from_dict(Columns, self.notes.columns, f"{self._notes_file}: columns")

    @property
    def _notes_file(self) -> Path:
        return self.folder / NOTES

    def _refuse_random(self, part: str) -> None:
        """Refuse to predict with weights that the folder lacks: they would be random."""
        if lacking := [name for name in self.missing if name.startswith(part)]:
            raise UserError(f"{self.folder} has no weights for {', '.join(lacking)}")

    @overload
    def predict(self, texts: str) -> dict[str, Any]: ...

    @overload
    def predict(self, texts: Iterable[Any]) -> Iterator[dict[str, Any]]: ...

    def predict(self, texts: str | Iterable[Any]) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Return the prediction for a text, or an iterator over the predictions for several texts, in order.

        An item is a text or a pair `(first, second)`; for a tagger a text or a list of its words; for questions
        `(question, context)`; for endings `(context, [ending, ending])`. A prediction is a dict: label, score and
        scores of a classifier, value of a regression, words, tags and entities of a tagger, text, start and end of a
        span.

        >>> predictor = Predictor.load("reviews")
        >>> predictor.predict("The battery of phone 3 died.")["label"]
        'bad'
        >>> [found["label"] for found in predictor.predict(["I love phone 7.", "The battery of phone 5 died."])]
        ['good', 'bad']
        >>> tagger = Predictor.load("doses")
        >>> next(iter(tagger.predict([["Patient", "took", "5", "ml"]])))["tags"]
        ['O', 'O', 'B-DOSE', 'I-DOSE']
        """
        if isinstance(texts, str):
            return next(self.predict_rows(rows_of_inputs([texts], self.head.kind)))
        return self.predict_rows(rows_of_inputs(texts, self.head.kind))

    def __call__(self, texts: str | Iterable[Any]) -> Any:
        """Return the prediction for a text, or a list of predictions; see `predict`."""
        return self.predict(texts) if isinstance(texts, str) else list(self.predict(texts))

    def __repr__(self) -> str:
        what = "no task" if self._head is None else self.task.name
        labels = ", ".join(self._head.labels[:5]) if self._head is not None else ""
        more = ", …" if self._head is not None and len(self._head.labels) > 5 else ""
        size = f"{self.config.num_layers} layers, hidden size {self.config.hidden_size}"
        folders = ", ".join(map(str, self.folders))
        return f"<Predictor for {what}{f' ({labels}{more})' if labels else ''}: {folders}; {size}; {self.engine!r}>"

    def predict_rows(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield predictions for rows, window by window."""
        rows, limits = iter(rows), self.limits
        while window := list(islice(rows, WINDOW)):
            if self.members:
                found = [list(member.predict_rows(window)) for member in self.members]
                self.shortened, self.unknowns = self.members[0].shortened, self.members[0].unknowns
                yield from (merge(answers, limits) for answers in zip(*found, strict=True))
                continue
            encoded = self.encode_rows(window)
            self.shortened += encoded.shortened
            self.unknowns.add(encoded.examples.tokens)
            yield from self.decode_rows(window, encoded, self.logits(encoded.examples))

    def encode_rows(self, rows: Sequence[Row]) -> Encoded:
        """Return the examples that rows are encoded as: the first step of a prediction, before `logits`."""
        return (self.encode or KINDS[self.head.kind].encode)(
            rows, self.tokenizer, self.limits, self.head, labelled=False
        )

    def decode_rows(
        self, rows: Sequence[Row], encoded: Encoded, logits: Sequence[NDArray[np.float32]]
    ) -> list[dict[str, Any]]:
        """Return the predictions for encoded rows from the logits of their examples: the last step."""
        return KINDS[self.head.kind].decode(rows, encoded, logits, self.head, self.limits)

    def evaluate(self, rows: Sequence[Row], advance: Advance = lambda done, words: None) -> dict[str, float]:
        """Return the task's metrics on labelled rows, from 0 to 100; `advance` is called after each row."""
        return self.score(rows, self.predict_all(rows, advance, labelled=True))

    def score(self, rows: Sequence[Row], predictions: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return the task's metrics of predictions for labelled rows."""
        return KINDS[self.head.kind].score(self.task, rows, predictions, self.head, self.limits)

    def predict_all(self, rows: Sequence[Row], advance: Advance, *, labelled: bool = False) -> list[dict[str, Any]]:
        """Return predictions for rows, whose labels the model has to know; `advance` is called after each."""
        for row in rows if labelled else ():
            KINDS[self.head.kind].target(row, self.head)
        predictions = []
        for prediction in self.predict_rows(rows):
            predictions.append(prediction)
            advance(len(predictions), "")
        return predictions

    def logits(self, examples: Sequence[Example]) -> list[NDArray[np.float32]]:
        """Return the logits of each example, in order: (K,), or (n, K) for its tokens."""
        scores = self.engine.run(examples)
        refuse_not_finite(scores, "scores", self.folder, self.engine)
        return scores

    def fill(self, text: str, top: int = 5) -> list[list[dict[str, Any]]]:
        """Return the likeliest words for each mask (`[MASK]` for BERT) of a text, with their probabilities."""
        if top < 1:
            raise UserError(f"--top {top} must be at least 1")
        example, masked = self.encode_masks(text)
        return self.decode_masks(self.mask_logits([example], [masked])[0], top)

    def encode_masks(self, text: str) -> tuple[Example, NDArray[np.int64]]:
        """Return a text with masks as an example, and the places of its masks."""
        self.check_fills()
        mask = self.tokenizer.frame.mask or SHOWN_MASK
        if mask not in text:  # `[MASK]` is understood whatever the tokenizer's own mask is
            text = text.replace(SHOWN_MASK, mask)
        joined = self.tokenizer.joiner.join(self.tokenizer.encode([text])[0])
        if (count := len(joined.tokens)) > self.positions:
            limit = self.positions
            raise UserError(f"the text has {count} tokens, more than the model's {limit} positions; shorten it")
        masked = np.flatnonzero(joined.tokens == self.tokenizer.mask_id)
        if not masked.size:
            raise UserError(f"no {mask} in {text!r}; write {mask} where a word is to be filled in")
        return Example(joined.tokens, joined.segments), masked

    def check_fills(self) -> None:
        """Refuse a model that cannot fill masks, and name the reason."""
        if self._fills:
            return
        why = ""
        if self._head is not None:
            why = f" (it was fine-tuned for {self.task.name})"
        elif self.config.direction != "both":
            why = " (it reads in one direction)"
        generator = self.folder / GENERATOR
        fix = str(generator) if generator.is_dir() else "a model that was pre-trained on masked words"
        raise UserError(f"{self.folder} has no masked-word head{why}, so it cannot fill masks; give {fix}")

    def mask_logits(
        self, examples: Sequence[Example], masked: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.float32]]:
        """Return the logits of the vocabulary at the masks of each example, in order."""
        scores = self.engine.masked_words(examples, masked)
        refuse_not_finite(scores, "scores", self.folder, self.engine)
        return scores

    def decode_masks(self, scores: NDArray[np.float32], top: int) -> list[list[dict[str, Any]]]:
        """Return the likeliest words for each mask from the logits of the vocabulary."""
        probabilities = torch.from_numpy(scores).softmax(-1)
        best = probabilities.topk(min(top, probabilities.shape[-1]))
        return [
            [{"token": self.tokenizer.shown(i), "probability": p} for p, i in zip(ps, ids, strict=True)]
            for ps, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]


def together(members: Sequence[Predictor], combine: Combine | None = None) -> Predictor:
    """Return several models of one task as an ensemble.

    `logits` averages their logits before the softmax, for models that encode a text in the same way; `nbest` adds up
    the probabilities of their answers to a question, for models with any tokenizers. The default is `logits` where that
    is possible. The threshold for "no answer" is the mean of the members' thresholds.
    """
    first = members[0]
    for other in members[1:]:
        _refuse_unlike(first, other)
    different = next((m for m in members if _encoding(m) != _encoding(first)), None)
    is_span = first.head.kind == "span"
    if different is not None and (combine == "logits" or not is_span):
        hint = "; combine them by nbest" if is_span else ""
        raise UserError(
            f"{different.folder} and {first.folder} encode texts differently (tokenizer, max_length or windows), "
            f"so that their scores have no mean{hint}"
        )
    result = copy.copy(first)
    result.folders = tuple(folder for member in members for folder in member.folders)
    if is_span and first.task.no_answer:
        thresholds = [limit for limit in (member.limits.threshold for member in members) if limit is not None]
        mean = sum(thresholds) / len(thresholds) if thresholds else None
        result.notes = replace(first.notes, limits={**first.notes.limits, "threshold": mean})
    if different is not None or combine == "nbest":
        result.members = tuple(members)
    else:
        result.engine = Together([member.engine for member in members])
    return result


def _check_combine(combine: str, first: Predictor) -> None:
    """Refuse an unknown way to combine models, or one that does not suit this kind of model."""
    if combine not in get_args(Combine):
        raise UserError(f"unknown way to combine models {combine!r}; one of: {', '.join(get_args(Combine))}")
    if combine == "nbest" and first.head.kind != "span":
        raise UserError(f"nbest is for answers in a text, and {first.folder} gives none; combine by logits")


def _refuse_unlike(first: Predictor, other: Predictor) -> None:
    """Refuse an ensemble of models with different tasks or labels."""
    if first.task.name != other.task.name:
        raise UserError(f"{other.folder} was trained for {other.task.name}, {first.folder} for {first.task.name}")
    one, two = first.head, other.head
    if not one.same_classes(two) or one.num_choices != two.num_choices:
        labels = (", ".join(head.labels) or f"{head.num_choices} endings" for head in (two, one))
        raise UserError(f"{other.folder} and {first.folder} give different labels: {' against '.join(labels)}")


def _encoding(member: Predictor) -> tuple[Any, ...]:
    """Return everything that the encoding of a text depends on."""
    return member.tokenizer.hash, replace(member.limits, threshold=None), member.head.unit


def measure_int8(folder: str | Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Score an ONNX folder in float32 and int8 on labelled rows and write the scores to `onnx.json`."""
    scores: dict[str, dict[str, float]] = {}
    precisions: tuple[Precision, ...] = ("float32", "int8")
    for precision in precisions:
        predictor = Predictor.load(folder, engine="onnxruntime", precision=precision)
        scores[precision] = predictor.evaluate(rows)
    return write_quality(predictor.folder, predictor.task.name, len(rows), scores)
