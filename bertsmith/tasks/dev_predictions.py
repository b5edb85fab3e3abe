"""`dev_predictions.parquet` of a run: the dev rows with their predictions, for reports (see `comparison`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.folders import new_file
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.comparison import Comparison
from bertsmith.tasks.description import Prediction, Task
from bertsmith.tasks.kinds import KINDS

FILE = "dev_predictions.parquet"
LONGEST = 1000  # characters of a text that are kept


def write_dev_predictions(
    run: Path,
    task: Task,
    head: HeadConfig,
    rows: Mapping[str, Sequence[Row]],
    predictions: Mapping[str, Sequence[Prediction]],
) -> None:
    """Write the dev rows of a run with their predictions; both are by the prefix of the dev file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [
        {"file": name, **compare(task, head, row, prediction)}
        for name in rows
        for row, prediction in zip(rows[name], predictions[name], strict=True)
    ]
    text, number, texts, numbers = pa.string(), pa.float64(), pa.list_(pa.string()), pa.list_(pa.float64())
    types = {"file": text, "key": text, "text": text, "pair": text, "parts": texts, "gold": texts, "predicted": texts}
    types |= {"probability": number, "gold_probability": number, "loss": number, "scores": numbers}
    facts = {"task": task.name, "kind": head.kind, "labels": json.dumps(head.labels)}
    schema = pa.schema(list(types.items()), metadata=facts)
    with new_file(run / FILE) as work:
        pq.write_table(pa.Table.from_pylist(lines, schema), work, compression="zstd")


def compare(task: Task, head: HeadConfig, row: Row, prediction: Prediction) -> Comparison:
    """The texts of a row, its gold label and its prediction."""
    texts = {"key": row.key, "text": row.text[:LONGEST], "pair": row.pair and row.pair[:LONGEST], "parts": row.parts}
    return {**texts, **KINDS[head.kind].compare(task, head, row, prediction)}


def read_dev_predictions(run: Path) -> tuple[dict[str, Any], list[Comparison]] | None:
    """The facts (task, kind, labels) and the comparisons that a run has written; None if it has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not (run / FILE).is_file():
        return None
    try:
        table = pq.read_table(run / FILE)
        facts: dict[str, Any] = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
        return {**facts, "labels": json.loads(facts["labels"])}, table.to_pylist()
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run / FILE} cannot be read: {error}; remove it, and the report goes without it") from None
