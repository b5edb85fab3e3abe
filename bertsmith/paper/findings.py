"""The paper's findings checked against our scores: each one holds, is within noise, or is reversed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, variance
from typing import Any

from bertsmith.finetuning import protocols
from bertsmith.paper.tables import Table

HOLDS, NOISE, REVERSED = "holds", "within noise", "reversed"


def judged(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings with the comparisons that our rows allow; findings without any are left out."""
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


def standard_error(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the mean of scores that several pre-training runs gave, one group for each.

    Scores of one run are alike, so the means of the runs are compared. Two of them may be alike by chance: the error is
    at least that of independent scores. None if there is a single run with scores.
    """
    known = [group for group in groups if group]
    if len(known) < 2:
        return None
    values = [value for group in known for value in group]
    return sqrt(max(variance([mean(group) for group in known]) / len(known), variance(values) / len(values)))


def noise(first: Mapping[str, Any], second: Mapping[str, Any]) -> float | None:
    """Return two standard errors of the difference of two means; None if one of them is from a single score.

    If only one of them has several pre-training runs, the single run of the other is assumed to vary as much.
    """
    errors = [cell.get("error") for cell in (first, second)]
    if (spread := protocols.noise(first, second)) is None or not any(errors):
        return spread
    if None in errors:
        several, single = (first, second) if errors[1] is None else (second, first)
        of_one_run = several["error"] * sqrt(sum(map(bool, several["by_pretraining"])))
        errors = [several["error"], max(of_one_run, single["deviation"] / sqrt(single["seeds"]))]
    return 2 * sqrt(sum(error**2 for error in errors if error is not None))


def _compared(better: dict[str, Any], worse: dict[str, Any], sign: int, or_equal: bool) -> dict[str, Any]:
    """Return the difference of two scores, its noise, and the verdict."""
    difference, spread = sign * (better["mean"] - worse["mean"]), noise(better, worse)
    margin = spread or 0.0
    verdict = HOLDS if difference > margin else REVERSED if difference < -margin else HOLDS if or_equal else NOISE
    return {"difference": difference, "noise": spread, "verdict": verdict}
