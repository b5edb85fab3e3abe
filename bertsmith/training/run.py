"""A run folder: `config.json` before the first step, metrics and checkpoints on the way, `model` at the end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from bertsmith.config import load, read_json, to_dict, write_json
from bertsmith.errors import UserError
from bertsmith.folders import new_file, new_folder, refuse_existing
from bertsmith.progress import say
from bertsmith.training import checkpoint, distributed, runlog
from bertsmith.training.checkpoint import Save, TrainerState, latest_checkpoint
from bertsmith.training.settings import MAY_CHANGE, TrainConfig

CONFIG, FACTS, MODEL, SUM = "config.json", "run.json", "model", "sha256"
TAKEN = "add --resume to go on with it, or choose another --out"
Found = tuple[Path, TrainerState]


def open_run(
    run: Path, config: Any, facts: dict[str, Any], resume: bool, notes: Mapping[str, Any] | None = None
) -> tuple[Found | None, bool]:
    """Start or resume a run; return the checkpoint to resume from, if any, and whether the run is finished already.

    The configuration and the `facts` have to be those that the run was started with; `notes` are written beside them.
    Rank 0 reads and writes the files, and broadcasts the result.
    """
    if config.train.tensorboard:
        runlog.check_tensorboard()

    def find() -> list[Any]:
        found = _open(run, config, facts, resume, notes or {})
        return [str(found[0]), asdict(found[1])] if found else [is_finished(run)]

    result = distributed.on_rank_zero(find)
    return ((Path(result[0]), TrainerState(**result[1])), False) if len(result) == 2 else (None, result[0])


def refuse_taken(run: Path, resume: bool) -> None:
    """Refuse the folder of another run, as `open_run` does: before the data is read, which may take long."""
    if not resume:
        distributed.on_rank_zero(lambda: refuse_existing(run, hint=TAKEN))


def _open(run: Path, config: Any, facts: dict[str, Any], resume: bool, notes: Mapping[str, Any]) -> Found | None:
    if resume and (run / CONFIG).exists():
        return _resume(run, config, facts, notes)
    refuse_existing(run, hint=TAKEN)
    with new_file(run / CONFIG) as work:
        write_json(work, to_dict(config))
    write_checked(run / FACTS, {**facts, **notes})
    return None


def write_checked(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file with a checksum of its values, for `read_checked`."""
    with new_file(path) as work:
        write_json(work, {**values, SUM: checkpoint.checksum(values)})


def read_checked(path: Path) -> dict[str, Any]:
    """Read a file of `write_checked`; a wrong checksum is an error, and files of older versions have none."""
    values = read_json(path)
    stored = values.pop(SUM, None)
    if stored is not None and stored != checkpoint.checksum(values):
        raise UserError(f"{path} is damaged: it does not match its checksum; put a copy back, or take another --out")
    return values


def facts_of(run: Path) -> dict[str, Any]:
    """The contents of a run's `run.json`; empty if there is none yet."""
    return read_checked(run / FACTS) if (run / FACTS).exists() else {}


def add_facts(run: Path, **facts: Any) -> None:
    """Add facts that were found during a run to its `run.json`."""
    distributed.on_rank_zero(lambda: write_checked(run / FACTS, {**facts_of(run), **facts}))


def _resume(run: Path, config: Any, facts: dict[str, Any], notes: Mapping[str, Any]) -> Found | None:
    stored = to_dict(load(type(config), run / CONFIG))  # an older version wrote fewer settings
    same_settings(stored, to_dict(config), run / CONFIG)
    if not (run / FACTS).exists():  # killed between the two writes
        write_checked(run / FACTS, {**facts, **notes})
    stored = read_checked(run / FACTS)
    known = [key for key in facts if key in stored]  # an older version wrote fewer of them
    same_settings({key: stored[key] for key in known}, {key: facts[key] for key in known}, run / FACTS)
    if is_finished(run):
        say(f"{run} is finished already: its model is at {run / MODEL}")
        return None
    for left in run.rglob(".*.partial"):  # files that a killed process was writing
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    found = latest_checkpoint(run)
    if found is None:
        say(f"{run} has no checkpoint to go on from; starting from the beginning")
    else:
        say(f"resuming {run} after step {found[1].step}")
    return found


def is_finished(run: Path) -> bool:
    """Whether a run has written its model."""
    return (run / MODEL).is_dir()


def final_scores(run: Path) -> dict[str, float]:
    """The dev scores of a run's model: of the last evaluation, or of the best one with `keep_best`."""
    return runlog.last_scores(run, facts_of(run).get("best_step"))


def finish_run(run: Path, model: nn.Module, save: Save) -> None:
    """Write the finished model."""
    tensors = checkpoint.model_tensors(model)

    def write() -> None:
        try:
            with new_folder(run / MODEL) as folder:
                save(folder, tensors)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{run / MODEL} could not be written: {error}. The checkpoints are untouched: make room, and the same "
                "command with --resume goes on from the last one"
            ) from error

    distributed.on_rank_zero(write)


def same_settings(
    stored: dict[str, Any], given: dict[str, Any], where: Path, option: str = "--resume: ", prefix: str = ""
) -> None:
    """Refuse to resume a run with other settings than it was started with; `option` is the option that requested it.

    If a run of an older version has several lengths (steps, epochs, hours), only the deciding one is compared.
    """
    if prefix == "train.":
        stored, given = _with_one_length(stored), _with_one_length(given)
    for key in sorted({*stored, *given}):
        old, new = stored.get(key), given.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            same_settings(old, new, where, option, f"{prefix}{key}.")
        elif old != new and prefix + key not in MAY_CHANGE:
            raise UserError(
                f"{option}{prefix}{key} is {old!r} in {where} and {new!r} now; "
                "give the settings that the run was started with, or another --out"
            )


def _with_one_length(train: Mapping[str, Any]) -> dict[str, Any]:
    deciding = next((name for name in TrainConfig.ONE_OF if train.get(name) is not None), None)
    return {**train, **{name: None for name in TrainConfig.ONE_OF if name != deciding}}
