"""What the paper says about a table, held against our figures: does it hold, is it within noise, is it reversed?"""

from __future__ import annotations

from typing import Any

from bertsmith.finetuning.protocols import noise
from bertsmith.paper.tables import Table

HOLDS, NOISE, REVERSED = "holds", "within noise", "reversed"


def judged(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every finding with the comparisons that our rows allow; one without any is left out."""
    ours = {row["name"]: row["ours"] for row in rows}
    found = []
    for finding in table.findings:
        compared = [
            {
                "column": column.name,
                "better": better,
                "worse": worse,
                **_compared(*cells, -1 if column.lower_is_better else 1, finding.or_equal),
            }
            for column in table.columns
            if not finding.columns or column.name in finding.columns
            for better, worse in finding.pairs
            for cells in ((ours[better].get(column.name), ours[worse].get(column.name)),)
            if all(cells)
        ]
        if compared:
            found.append({"finding": finding.text, "compared": compared})
    return found


def _compared(better: dict[str, Any], worse: dict[str, Any], sign: int, or_equal: bool) -> dict[str, Any]:
    """By how much one is better, the noise of that, and what follows."""
    difference, spread = sign * (better["mean"] - worse["mean"]), noise(better, worse)
    margin = spread or 0.0
    verdict = HOLDS if difference > margin else REVERSED if difference < -margin else HOLDS if or_equal else NOISE
    return {"difference": difference, "noise": spread, "verdict": verdict}
