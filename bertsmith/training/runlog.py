"""`metrics.jsonl`: one JSON object per line, appended during a run; on request also for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.folders import new_file
from bertsmith.progress import say

FILE = "metrics.jsonl"
Append = Callable[[dict[str, Any]], None]
SCALE = 100  # of scores; records of older versions lack this field and have scores from 0 to 1
SCORES = (
    *("accuracy", "f1", "exact", "exact_match", "precision", "recall", "matthews", "pearson", "spearman"),
    *("f1_at_3", "rouge_w"),  # of KLUE
)


def is_score(key: str) -> bool:
    """Whether a key names a score from 0 to 100, for which higher is better."""
    return key.endswith(SCORES)


def open_log(run: Path, step: int, *, tensorboard: bool = False) -> Append:
    """Return a function that appends a record; records after `step`, of a process that was killed, are removed.

    If the disk is full, records are lost with a warning, and the run continues.
    """
    rewind(run, step)
    show = _tensorboard(run, step) if tensorboard else None

    def append(record: dict[str, Any]) -> None:
        nonlocal show
        finite = {n: v for n, v in record.items() if not isinstance(v, float) or math.isfinite(v)}  # JSON has no NaN
        try:
            _add_line(run / FILE, _line(finite))
        except OSError as error:
            say(f"warning: {run / FILE}: {error.strerror or error}; the record of step {record['step']} is lost")
        try:
            if show is not None:
                show(finite)
        except OSError as error:  # its writer thread has ended
            say(f"warning: {run / 'tensorboard'}: {error.strerror or error}; it gets no more records")
            show = None

    return append


def _line(record: dict[str, Any]) -> str:
    """A record as JSON, with the scale of its scores if it has any."""
    marked = {**record, "scale": SCALE} if any(map(is_score, record)) else record
    return json.dumps(marked, ensure_ascii=False)


def _add_line(path: Path, line: str) -> None:
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        with suppress(OSError):  # a partial line would damage the next one
            os.truncate(path, size)
        raise


def check_tensorboard() -> None:
    """Raise an error if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise UserError("train.tensorboard needs a package: pip install 'bertsmith[tensorboard]'")


def _tensorboard(run: Path, step: int) -> Append:
    """Return a function that writes a record's numbers for TensorBoard; records after `step` are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def show(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                writer.add_scalar(name, value, record["step"])
        writer.flush()

    return show


def read(run: Path) -> list[dict[str, Any]]:
    """All records of a run, with scores from 0 to 100.

    An incomplete last line, left by a crash, is skipped, and a damaged one is skipped with a warning.
    """
    path = run / FILE
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        if (record := _record(line)) is not None:
            records.append(rescaled(record, record.pop("scale", None)))
        else:
            say(f"warning: {path} line {number} is damaged and left out")
    return records


def _record(line: str) -> dict[str, Any] | None:
    """The record of a line, or None if it is damaged: every record has a step."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def rescaled(values: dict[str, Any], scale: int | None) -> dict[str, Any]:
    """Values with scores from 0 to 100; older versions wrote no `scale`, and scores from 0 to 1 except for SQuAD."""
    if scale == SCALE or any(key.endswith("exact_match") for key in values):
        return values
    return {k: SCALE * v if is_score(k) and isinstance(v, float | int) else v for k, v in values.items()}


def last_scores(run: Path, step: int | None = None) -> dict[str, float]:
    """The scores of the last evaluation of a run, or of the one at a step, as `fit` returned them."""
    found: dict[str, float] = {}
    for record in read(run):
        if step is not None and record["step"] != step:
            continue
        numbers = {n: v for n, v in record.items() if n.startswith("dev_") and isinstance(v, (int, float))}
        found = {n.removeprefix("dev_"): v for n, v in numbers.items()} or found
    return found


def last_task_loss(run: Path) -> float:
    """The mean training loss of the task over the last fifth of a run; NaN if no loss was written."""
    losses = [record["task_loss"] for record in read(run) if "task_loss" in record]
    last = losses[-max(1, len(losses) // 5) :]
    return sum(last) / len(last) if last else math.nan


def rewind(run: Path, step: int) -> None:
    """Remove the records after a step, so that a resumed run continues from there."""
    if not (run / FILE).exists():
        return
    kept = [r for r in read(run) if r["step"] <= step]
    with new_file(run / FILE) as work:
        work.write_text("".join(_line(r) + "\n" for r in kept), encoding="utf-8")
