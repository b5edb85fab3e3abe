"""What the paper says about a table, held against our figures: does it hold, is it within noise, is it reversed?"""

from __future__ import annotations

from math import sqrt
from typing import Any

from bertsmith.paper.tables import LOWER, Finding, Table

HOLDS, NOISE, REVERSED = "holds", "within noise", "reversed"


def judged(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every finding with the comparisons that our rows allow; one without any is left out."""
    ours = {row["name"]: row["ours"] for row in rows}
    found = []
    for finding in table.findings:
        compared = [
            {"column": column, "better": better, "worse": worse, **_compared(finding, column, *cells)}
            for column in finding.columns or tuple(c.name for c in table.columns)
            for better, worse in finding.pairs
            for cells in ((ours[better].get(column), ours[worse].get(column)),)
            if all(cells)
        ]
        if compared:
            found.append({"finding": finding.text, "compared": compared})
    return found


def _compared(finding: Finding, column: str, better: dict[str, Any], worse: dict[str, Any]) -> dict[str, Any]:
    """By how much one is better, the noise of that (two standard errors), and what follows."""
    difference = (better["mean"] - worse["mean"]) * (-1 if column in LOWER else 1)
    noise = None
    if better["deviation"] is not None and worse["deviation"] is not None:
        noise = 2 * sqrt(better["deviation"] ** 2 / better["seeds"] + worse["deviation"] ** 2 / worse["seeds"])
    if difference > (noise or 0.0) or (finding.or_equal and difference >= -(noise or 0.0)):
        verdict = HOLDS
    else:
        verdict = REVERSED if difference < -(noise or 0.0) else NOISE
    return {"difference": difference, "noise": noise, "verdict": verdict}
