"""`metrics.jsonl`: one JSON object a line, appended while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bertsmith.folders import new_file

FILE = "metrics.jsonl"


def append(run: Path, record: dict[str, Any]) -> None:
    """Add a record and flush it."""
    with (run / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(run: Path) -> list[dict[str, Any]]:
    """All records of a run; a last line that a crash cut off is left out."""
    path = run / FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def last_scores(run: Path) -> dict[str, float]:
    """The last evaluation of a run, as `fit` gave it."""
    evaluations = [r for r in read(run) if any(name.startswith("dev_") for name in r)]
    return {n.removeprefix("dev_"): v for n, v in evaluations[-1].items() if n != "step"} if evaluations else {}


def rewind(run: Path, step: int) -> None:
    """Forget what was written after a step, so that a resumed run continues its own curve."""
    kept = [r for r in read(run) if r["step"] <= step]
    with new_file(run / FILE) as work:
        work.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
