"""Tables beside the fine-tuning scores: models chosen from several runs, and attempts that collapsed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.finetuning.protocols import SUMMARY
from bertsmith.pages import page
from bertsmith.pages.report.runs import Run, name_of
from bertsmith.tasks.task import TASKS

DEPTH = 2  # folders from a run up to its summary: seeds, and the settings of a grid


def chosen(runs: Sequence[Run]) -> str:
    """Return a table of the models that `--seeds` and `--grid` chose."""
    found = summaries(runs)
    if not found:
        return ""
    header = ["task", "model", "settings", "runs", "score", "mean of the chosen setting", "median"]
    header += ["chosen run", "its score"]
    rows = [_row(folder, summary) for folder, summary in found.items()]
    note = (
        "The setting with the best mean and the best of its runs were chosen on dev, so the score of the chosen run is "
        "optimistic on these rows; `bertsmith evaluate` on other rows gives an unbiased one."
    )
    return page.section("Chosen models") + page.table(header, rows) + page.paragraph(note, "note")


def summaries(runs: Sequence[Run]) -> dict[Path, dict[str, Any]]:
    """Return the summaries that name one of these runs, by folder; a summary that cannot be read is skipped."""
    found: dict[Path, dict[str, Any]] = {}
    for run in runs:
        for folder in list(run.folder.parents)[:DEPTH]:
            with suppress(UserError, KeyError, TypeError):
                if folder not in found and (folder / SUMMARY).is_file():
                    summary = read_json(folder / SUMMARY)
                    named = [entry["folder"] for setting in summary["settings"] for entry in setting["runs"]]
                    if str(run.folder.relative_to(folder)) in named:
                        found[folder] = summary
    return found


def _row(folder: Path, summary: dict[str, Any]) -> list[str]:
    best, metric = summary["best"], summary["metric"]
    setting = next(s for s in summary["settings"] if s["name"] == best["setting"])
    scale = _factor(summary)
    spread = f" ± {scale * setting['deviation']:.1f}" if setting["deviation"] is not None else ""
    failed = f", {len(summary['failed'])} failed" if summary.get("failed") else ""
    run = f"seed {best['seed']}" + (f", {best['setting']}" if best["setting"] else "")
    return [
        summary["task"],
        folder.name,
        str(len(summary["settings"])),
        f"{best['of_runs']}{failed}",
        name_of(metric),
        f"{scale * setting['mean']:.1f}{spread} ({setting['seeds']} seeds)",
        f"{scale * setting['median']:.1f}",
        run,
        f"{scale * best[metric]:.1f}, on {summary.get('chosen_on', 'dev')}",
    ]


def _factor(summary: dict[str, Any]) -> float:
    """Return the factor that scales scores to 0 to 100; older versions wrote them from 0 to 1, except SQuAD's."""
    is_span = summary["task"] in TASKS and TASKS[summary["task"]].head == "span"
    return 1.0 if "scale" in summary or is_span else 100.0


def collapsed(runs: Sequence[Run]) -> str:
    """Return a table of the attempts that collapsed."""
    rows = []
    for run in runs:
        attempts = [entry for entry in run.fact("collapsed") or () if isinstance(entry, dict)]
        restarts = run.setting("restarts")
        for number, entry in enumerate(attempts, 1):
            again = not isinstance(restarts, int) or number <= restarts
            fate = "restarted with another seed" if again else "kept, since no restart was left"
            rows.append([run.label, str(entry.get("seed", "")), str(entry.get("why", "")), fate])
    if not rows:
        return ""
    words = f"{len(rows)} attempts collapsed: they are no better than guessing."
    if len(rows) == 1:
        words = "One attempt collapsed: it is no better than guessing."
    return page.section("Collapsed attempts") + page.paragraph(words) + page.table(["run", "seed", "why", "then"], rows)
