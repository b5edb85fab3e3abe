"""`predict --url`: the model of a server in the place of a local `Predictor`, for files of any size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from bertsmith.config import from_dict
from bertsmith.rows.columns import Columns, Row
from bertsmith.serve.client import Client
from bertsmith.tasks.description import Task
from bertsmith.tasks.task import find_task

SENTENCES = 64  # of a document that are sent together


class Remote:
    """A model on a server that predicts rows."""

    def __init__(self, client: Client) -> None:
        self.client, self._head = client, client.head

    @property
    def task(self) -> Task:
        """The task of the model."""
        return find_task(self._head["task"])

    @property
    def columns(self) -> Columns:
        """The names of the columns that the model was trained on."""
        return from_dict(Columns, self._head["columns"], f"{self.client.url}/models: columns")

    @property
    def facts(self) -> dict[str, Any]:
        """What the predictions depend on."""
        return {"model": self._head, "engine": [self.client.url]}

    def predict_rows(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield predictions for rows, in order."""
        if self._head["head"] == "tags":
            yield from self._tag(rows)
            return
        head, waiting = self._head["head"], deque[Row]()

        def items() -> Iterator[Any]:
            for row in rows:
                waiting.append(row)
                yield item_of(row, head)

        for prediction in self.client.predict_each(items()):
            row = waiting.popleft()
            yield {**prediction, "text": row.parts[prediction["choice"]]} if head == "choice" else prediction

    def _tag(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield predictions for sentences; those of one document are sent together, with the words around them."""
        for prediction in self.client.predict_each(_passages(rows, self._head["max_length"])):
            yield from prediction if isinstance(prediction, list) else [prediction]


def _passages(rows: Iterable[Row], around: int) -> Iterator[Any]:
    """Yield sentences, and runs of sentences of one document with `around` words of it before and after them."""
    for run in _runs(rows):
        if len(run[0].parts) == len(run[0].document) or not run[0].document:
            yield from (item_of(row, "tags") for row in run)
            continue
        first, last = max(0, run[0].begin - around), run[-1].begin + len(run[-1].parts) + around
        bounds = [(row.begin - first, row.begin - first + len(row.parts)) for row in run]
        yield {"document": list(run[0].document[first:last]), "sentences": bounds}


def _runs(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows in lists of sentences that follow one another in a document."""
    run: list[Row] = []
    for row in rows:
        follows = run and row.document == run[-1].document and row.begin >= run[-1].begin + len(run[-1].parts)
        if run and (not follows or len(run) == SENTENCES):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def item_of(row: Row, head: str) -> Any:
    """Return a row as the value that a client predicts."""
    if head == "tags":
        return list(row.parts) or row.text
    if head == "choice":
        return (row.text, [f"{row.pair} {ending}" if row.pair else ending for ending in row.parts])
    if head == "span":
        return (row.text, row.pair or "")
    return row.text if row.pair is None else (row.text, row.pair)
