"""`metrics.jsonl`: one JSON object a line, appended while a run goes on; TensorBoard beside it on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.folders import new_file
from bertsmith.progress import say

FILE = "metrics.jsonl"
Append = Callable[[dict[str, Any]], None]


def open_log(run: Path, step: int, *, tensorboard: bool = False) -> Append:
    """A function that adds a record; what was written after `step`, by a process that died, is forgotten."""
    rewind(run, step)
    writer = _tensorboard(run, step) if tensorboard else None

    def append(record: dict[str, Any]) -> None:
        try:
            with (run / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk must not end a run
            say(f"warning: {run / FILE}: {error.strerror or error}; the record of step {record['step']} is lost")
        if writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    writer.add_scalar(name, value, record["step"])
            writer.flush()

    return append


def _tensorboard(run: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard needs a package: pip install 'bertsmith[tensorboard]'") from None
    return SummaryWriter(str(run / "tensorboard"), purge_step=step)


def read(run: Path) -> list[dict[str, Any]]:
    """All records of a run; a last line that a crash cut off is left out."""
    path = run / FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def last_scores(run: Path) -> dict[str, float]:
    """The last evaluation of a run, as `fit` gave it."""
    found: dict[str, float] = {}
    for record in read(run):
        numbers = {n: v for n, v in record.items() if n.startswith("dev_") and isinstance(v, (int, float))}
        found = {n.removeprefix("dev_"): v for n, v in numbers.items()} or found
    return found


def rewind(run: Path, step: int) -> None:
    """Forget what was written after a step, so that a resumed run continues its own curve."""
    if not (run / FILE).exists():
        return
    kept = [r for r in read(run) if r["step"] <= step]
    with new_file(run / FILE) as work:
        work.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), encoding="utf-8")
