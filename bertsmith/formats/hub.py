"""Where a model is: a folder, a run, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.progress import say

FILES = ["*.json", "*.safetensors", "vocab.txt"]
OLD_FILES = ["pytorch_model.bin", "pytorch_model-*.bin"]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_model(name: str | Path) -> Path:
    """The model folder behind a folder, a run (its `model`, or the last checkpoint so far) or a hub name."""
    path = Path(name)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        raise UserError(f"{name} is a file; give a model folder, a run or a hub name")
    if isinstance(name, str) and _HUB_NAME.fullmatch(name):
        return _download(name)
    raise UserError(f"no such model folder: {name}")


def _in_folder(path: Path) -> Path:
    if (path / "model" / "config.json").exists():
        return path / "model"
    if saved := sorted((path / "checkpoints").glob("step-*")):
        say(f"note: {path} is not finished; taking its last checkpoint, {saved[-1].name}")
        return saved[-1]
    if (path / "config.json").exists() and _is_model(read_json(path / "config.json")):
        return path
    raise UserError(f"{path} holds no model: no config.json of a model in it, nor in {path / 'model'}")


def _is_model(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is a model's and not a run's; old releases wrote no `model_type`."""
    return "model_type" in values or {"hidden_size", "num_hidden_layers"} <= values.keys()


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=FILES))
        if not any(folder.glob("*.safetensors")):  # an old repository
            snapshot_download(name, allow_patterns=OLD_FILES)
        return folder
    except Exception as error:  # offline, unknown name, no permission: the hub's errors share no class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{name!r} is no folder here, and the hub gave nothing for it: {reason}") from None
