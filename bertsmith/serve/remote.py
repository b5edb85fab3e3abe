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
        head, waiting = self._head["head"], deque[Row]()

        def items() -> Iterator[Any]:
            for row in rows:
                waiting.append(row)
                yield item_of(row, head)

        for prediction in self.client.predict_each(items()):
            row = waiting.popleft()
            yield {**prediction, "text": row.parts[prediction["choice"]]} if head == "choice" else prediction


def item_of(row: Row, head: str) -> Any:
    """Return a row as the value that a client predicts."""
    if head == "tags":
        return list(row.parts) or row.text
    if head == "choice":
        return (row.text, [f"{row.pair} {ending}" if row.pair else ending for ending in row.parts])
    if head == "span":
        return (row.text, row.pair or "")
    return row.text if row.pair is None else (row.text, row.pair)
