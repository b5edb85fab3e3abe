"""A run folder: `config.json` before the first step, metrics and checkpoints on the way, `model` at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.folders import new_file, new_folder, refuse_existing
from bertsmith.progress import say
from bertsmith.training.checkpoint import latest_checkpoint

CONFIG, FACTS, MODEL = "config.json", "run.json", "model"


def open_run(run: Path, config: dict[str, Any], facts: dict[str, Any], resume: bool) -> tuple[Path, int] | None:
    """Begin a run, or go on with it: gives the checkpoint to go on from, None at the beginning."""
    if resume and (run / CONFIG).exists():
        for name, values in ((CONFIG, config), (FACTS, facts)):
            if (run / name).exists():
                _same(read_json(run / name), values, run / name)
        if is_finished(run):
            say(f"{run} is finished already: its model is at {run / MODEL}")
            return None
        for left in run.rglob(".*.partial"):  # what a killed process was writing
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        found = latest_checkpoint(run)
        say(
            f"resuming {run} after step {found[1]}"
            if found
            else f"{run} has no checkpoint yet; starting from the beginning"
        )
        return found
    refuse_existing(run, hint="add --resume to go on with it, or choose another --out")
    run.mkdir(parents=True, exist_ok=True)
    for name, values in ((CONFIG, config), (FACTS, facts)):
        with new_file(run / name) as work:
            work.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return None


def is_finished(run: Path) -> bool:
    """Whether a run has written its model."""
    return (run / MODEL).is_dir()


def finish_run(run: Path, save: Callable[[Path], None]) -> None:
    """Write the finished model."""
    shutil.rmtree(run / MODEL, ignore_errors=True)
    with new_folder(run / MODEL) as folder:
        save(folder)


def _same(stored: dict[str, Any], given: dict[str, Any], where: Path, prefix: str = "") -> None:
    """Refuse to resume a run with other settings than it was started with."""
    for key in sorted({*stored, *given}):
        old, new = stored.get(key), given.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            _same(old, new, where, f"{prefix}{key}.")
        elif old != new:
            raise UserError(
                f"--resume: {prefix}{key} is {old!r} in {where} and {new!r} now; "
                "give the settings that the run was started with"
            )
