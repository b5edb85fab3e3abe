"""`metrics.jsonl`: one JSON object a line, appended while a run goes on; TensorBoard beside it on request."""

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
SCALE = 100  # of scores; a record without this field is of an older version, which wrote them from 0 to 1
SCORES = ("accuracy", "f1", "exact", "exact_match", "precision", "recall", "matthews", "pearson", "spearman")


def is_score(key: str) -> bool:
    """Whether a measured key is a score from 0 to 100, where higher is better."""
    return key.endswith(SCORES)


def open_log(run: Path, step: int, *, tensorboard: bool = False) -> Append:
    """A function that adds a record; what was written after `step`, by a process that died, is forgotten.

    A full disk loses records, with a warning, and does not end a run.
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
        except OSError as error:  # its thread is gone for good
            say(f"warning: {run / 'tensorboard'}: {error.strerror or error}; it gets no more records")
            show = None

    return append


def _line(record: dict[str, Any]) -> str:
    """A record as JSON, with the scale of its scores if it has some."""
    marked = {**record, "scale": SCALE} if any(map(is_score, record)) else record
    return json.dumps(marked, ensure_ascii=False)


def _add_line(path: Path, line: str) -> None:
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        with suppress(OSError):  # half a line would spoil the next one
            os.truncate(path, size)
        raise


def check_tensorboard() -> None:
    """Refuse a wish that cannot be met."""
    if find_spec("tensorboard") is None:
        raise UserError("train.tensorboard needs a package: pip install 'bertsmith[tensorboard]'")


def _tensorboard(run: Path, step: int) -> Append:
    """A function that shows a record's numbers; those of a process that died after `step` are hidden."""
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

    A line that a crash cut off is left out, and a damaged one with a warning.
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
    """A record, or None where a line is none: all of them have a step."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def rescaled(values: dict[str, Any], scale: int | None) -> dict[str, Any]:
    """Saved values with scores from 0 to 100; without a `scale` an older version wrote them, which did so for SQuAD."""
    if scale == SCALE or any(key.endswith("exact_match") for key in values):
        return values
    return {k: SCALE * v if is_score(k) and isinstance(v, float | int) else v for k, v in values.items()}


def last_scores(run: Path, step: int | None = None) -> dict[str, float]:
    """The last evaluation of a run, or the one at a step, as `fit` gave it."""
    found: dict[str, float] = {}
    for record in read(run):
        if step is not None and record["step"] != step:
            continue
        numbers = {n: v for n, v in record.items() if n.startswith("dev_") and isinstance(v, (int, float))}
        found = {n.removeprefix("dev_"): v for n, v in numbers.items()} or found
    return found


def last_loss(run: Path) -> float:
    """The mean training loss over the last fifth of a run; not a number where none was written."""
    losses = [record["loss"] for record in read(run) if "loss" in record]
    last = losses[-max(1, len(losses) // 5) :]
    return sum(last) / len(last) if last else math.nan


def rewind(run: Path, step: int) -> None:
    """Forget what was written after a step, so that a resumed run continues its own curve."""
    if not (run / FILE).exists():
        return
    kept = [r for r in read(run) if r["step"] <= step]
    with new_file(run / FILE) as work:
        work.write_text("".join(_line(r) + "\n" for r in kept), encoding="utf-8")
