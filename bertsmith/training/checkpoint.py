"""Checkpoints: a model folder with the trainer's state beside it, written whole or not at all. No pickle."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.folders import new_folder
from bertsmith.progress import say

OPTIMIZER, STATE = "optimizer.safetensors", "trainer.json"
_NAME = re.compile(r"step-(\d+)")


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def save_checkpoint(
    run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, save: Callable[[Path], None], keep: int
) -> Path:
    """Write the model through `save` and the optimiser's state; then remove all but the last `keep` checkpoints."""
    path = folder_of(run, step)
    shutil.rmtree(path, ignore_errors=True)  # one of the same step that could not be read
    with new_folder(path) as folder:
        save(folder)
        save_file(optimizer_tensors(model, optimizer), folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps({"step": step}) + "\n")
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return path


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    folder = run / "checkpoints"
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found)


def latest_checkpoint(run: Path) -> tuple[Path, int] | None:
    """The newest checkpoint that is whole, with its step; a damaged one is passed over with a warning."""
    for path in reversed(checkpoints(run)):
        try:
            step = int(read_json(path / STATE)["step"])
            for file in path.glob("*.safetensors"):
                load_file(file)
            return path, step
        except (UserError, KeyError, OSError, SafetensorError) as error:
            say(f"warning: checkpoint {path} cannot be read ({error}); trying the one before")
    return None


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by parameter name: `exp_avg:encoder.layers.0.…`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}:{names[parameter]}": torch.as_tensor(value).contiguous()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's optimiser state back."""
    tensors = load_file(path / OPTIMIZER)
    by_name = dict(model.named_parameters())
    for entry, value in tensors.items():
        key, _, name = entry.partition(":")
        if name not in by_name:
            raise UserError(f"{path / OPTIMIZER} holds {name!r}, which the model does not have")
        parameter = by_name[name]
        # Adam counts steps on the CPU unless it is fused; its moments lie where the parameter does.
        place = parameter.device if key != "step" or optimizer.defaults.get("fused") else torch.device("cpu")
        optimizer.state[parameter][key] = value.to(place)
