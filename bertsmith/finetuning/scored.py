"""A fine-tuning run of which only the scores are kept: tables of many runs need no weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertsmith.config import to_dict, write_json
from bertsmith.errors import Diverged
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.folders import new_file
from bertsmith.progress import say
from bertsmith.training import runlog
from bertsmith.training.run import MODEL, final_scores

SCORES = "scores.json"
Values = dict[str, Any]


def _scores_of(run: Path) -> Values:
    return {"scores": final_scores(run)}


def scored(
    config: FinetuneConfig,
    model: str | Path,
    data: Any,
    run: Path,
    *,
    device: str | None = None,
    facts: Values | None = None,
    judge: Callable[[Path], Values] = _scores_of,
) -> Values:
    """Fine-tune, resuming a run that was stopped; write `scores.json` into its folder and remove the weights.

    `judge` returns what is to be kept of a finished run. A run that has diverged has no scores but a reason. `facts`
    are written beside the scores.
    """
    try:
        finetune(config, model, data, run, device=device, resume=True)
    except Diverged as error:
        say(f"warning: {run} failed: {error}")
        found: Values = {"scores": {}, "remarks": [], "failed": str(error)}
    else:
        found = judge(run)
    found = {"config": to_dict(config), **found}
    with new_file(run / SCORES) as work:
        write_json(work, {**found, "scale": runlog.SCALE, **(facts or {})})
    for heavy in (MODEL, "checkpoints"):
        shutil.rmtree(run / heavy, ignore_errors=True)
    return found
