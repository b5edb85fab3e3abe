"""Checkpoints: a model folder with the trainer's state beside it, written atomically. No pickle.

Sharded tensors are gathered, so that a checkpoint does not depend on the number of ranks. Rank 0 reads and writes; the
other ranks take part in the gathering.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from bertsmith.config import from_dict, read_json
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, new_folder
from bertsmith.progress import say
from bertsmith.training import distributed
from bertsmith.training.muon import Muon
from bertsmith.training.parts import is_untrained, untrained_parameters

OPTIMIZER, STATE = "optimizer.safetensors", "trainer.json"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}  # other errors of a reservation say nothing about the room
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_NAME = re.compile(r"step-(\d+)")
Save = Callable[[Path, Mapping[str, Tensor]], None]
Load = Callable[[Path], Mapping[str, Tensor]]


@dataclass(frozen=True)
class TrainerState:
    """The state of a run that is restored when it is resumed, apart from tensors."""

    step: int
    seconds: float = 0.0
    tokens: int = 0
    first_loss: float | None = None
    skipped: int = 0
    in_a_row: int = 0
    score: float | None = None  # of the evaluation at this step; higher is better
    best: float | None = None  # score of the run so far
    since_best: int = 0  # evaluations


@contextmanager
def hold_room(run: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Hold room on the disk for the first checkpoint until it is written; too little is an error before any step."""
    size = checkpoint_size(model, optimizers)
    distributed.on_rank_zero(lambda: _reserve(run, size))
    try:
        yield
    finally:
        _held_room(run).unlink(missing_ok=True)


def checkpoint_size(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """About how many bytes a checkpoint takes: the weights that are saved, and the optimisers' moments."""
    frozen = untrained_parameters(distributed.unwrap(model))
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p not in frozen)
    for optimizer in optimizers:
        moments = 1 if isinstance(optimizer, Muon) else 2  # Adam and LAMB have two
        size += moments * sum(p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"])
    return size


def _held_room(run: Path) -> Path:
    """The file that holds the room; if its process is killed, the next command on this run removes it."""
    return run / f".checkpoint.{os.getpid()}.partial"


def _reserve(run: Path, size: int) -> None:
    path = _held_room(run)
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS and Windows
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)  # a part of it may be reserved
        if error.errno not in NO_ROOM:
            return
        raise UserError(
            f"{run}: {error.strerror}: a checkpoint of this run takes {size / 1e6:,.0f} MB, and "
            f"the disk has {shutil.disk_usage(run).free / 1e6:,.0f} MB free. Make room and add --resume, or choose "
            "an --out on another disk"
        ) from None


def save_checkpoint(
    run: Path,
    state: TrainerState,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    save: Save,
    keep: int,
) -> Path | None:
    """Write the model through `save` and the optimisers' state; keep the last `keep` checkpoints and the best one.

    If it cannot be written (a full disk), earlier checkpoints are untouched; warn and return None.
    """
    tensors = model_tensors(model)
    moments = optimizer_tensors(model, optimizers)
    if not distributed.is_rank_zero():
        return None
    path = run / "checkpoints" / f"step-{state.step:08}"
    try:
        _held_room(run).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)  # a damaged one of the same step
        with new_folder(path) as folder:
            save(folder, tensors)
            save_file(moments, folder / OPTIMIZER)
            values = asdict(state)
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            sums = {file.relative_to(folder).as_posix(): file_hash(file) for file in files}
            (folder / STATE).write_text(json.dumps({**values, "sha256": {**sums, STATE: checksum(values)}}) + "\n")
    except (OSError, SafetensorError, UserError) as error:
        say(f"warning: no checkpoint after step {state.step}: {error}; earlier ones are untouched")
        return None
    _prune(path, keep)
    return path


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    folder = run / "checkpoints"
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found)


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def best_checkpoint(found: Sequence[Path]) -> Path | None:
    """The checkpoint with the best evaluation, the earliest of equally good ones; None if none was evaluated.

    The earliest is the one that `keep_best` wrote; whether a later one exists depends on the clock.
    """
    scored = [(score, path) for path in sorted(found) if (score := _score(path)) is not None]
    return max(scored, key=itemgetter(0))[1] if scored else None


def latest_checkpoint(run: Path) -> tuple[Path, TrainerState] | None:
    """The newest undamaged checkpoint and its state; damaged ones are skipped with a warning."""
    for path in reversed(checkpoints(run)):
        try:
            return path, _read_state(path)
        except (UserError, OSError) as error:
            say(f"warning: checkpoint {path} cannot be read ({error}); trying the one before")
    return None


def _read_state(path: Path) -> TrainerState:
    """The state of a checkpoint, after checking the checksums of its files."""
    values = read_json(path / STATE)
    sums = values.pop("sha256", None)
    if not isinstance(sums, dict) or sums.pop(STATE, None) != checksum(values):
        raise UserError(f"{STATE} does not match its checksum")
    for name, expected in sums.items():
        if file_hash(path / name) != expected:
            raise UserError(f"{name} does not match its checksum")
    return from_dict(TrainerState, values, str(path / STATE))


def _prune(newest: Path, keep: int) -> None:
    """Remove old checkpoints; those after the newest are damaged, since the run was resumed from one before them."""
    found = [path for path in checkpoints(newest.parent.parent) if path <= newest]
    best = best_checkpoint(found)
    for old in found[:-keep]:
        if old != best:
            shutil.rmtree(old, ignore_errors=True)


def _score(path: Path) -> float | None:
    try:
        return read_json(path / STATE).get("score")
    except UserError:
        return None


def checksum(values: Mapping[str, Any]) -> str:
    """The SHA-256 of values that JSON can represent."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The full tensors of a model on the CPU of rank 0; the other ranks take part and get none."""
    return get_model_state_dict(model, options=FULL)  # type: ignore[return-value]


def optimizer_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The full state of the optimisers by key and parameter name, `exp_avg:encoder.layers.0.…`, on rank 0."""
    begun = [optimizer for optimizer in optimizers if optimizer.state]  # torch would step the others to have a state
    if not begun:
        return {}
    state: dict[str, Any] = get_optimizer_state_dict(model, begun, options=FULL).get("state", {})  # type: ignore[assignment]
    return {f"{key}:{name}": value for name, values in state.items() for key, value in values.items()}


@torch.no_grad()
def load_model(model: nn.Module, tensors: Mapping[str, Tensor] | None) -> None:
    """Load full tensors, which only rank 0 has, into a model; each rank keeps its shard."""
    found = distributed.broadcast_tensors(tensors)
    own = distributed.unwrap(model)
    for name, value in own.state_dict().items():
        if name in found or not is_untrained(own, name):  # a teacher need not be saved
            value.copy_(distributed.shard_like(found[name], value))


def load_optimizers(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Restore the state of the optimisers from a checkpoint; each rank keeps its shard."""
    tensors = distributed.broadcast_tensors(load_file(path / OPTIMIZER) if distributed.is_rank_zero() else None)
    by_name = dict(distributed.unwrap(model).named_parameters())
    owners = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for entry, value in tensors.items():
        key, _, name = entry.partition(":")
        if name not in by_name:
            raise UserError(f"{path / OPTIMIZER} holds {name!r}, which the model does not have")
        parameter = by_name[name]
        optimizer = owners[parameter]
        # AdamW keeps its step counter on the CPU unless it is fused, and its moments on the parameter's device.
        on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        counter = key == "step" and not on_device
        optimizer.state[parameter][key] = value if counter else distributed.shard_like(value, parameter)
