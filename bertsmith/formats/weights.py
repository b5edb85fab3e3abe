"""The weights of a model folder: one safetensors file, several, or an older file of tensors alone."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bertsmith.config import read_json
from bertsmith.errors import UserError

WEIGHTS, INDEX, OLD_WEIGHTS = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model folder under its saved name, in the precision of the file."""
    if (folder / WEIGHTS).exists():
        weights = _read_safetensors(folder / WEIGHTS)
    elif (folder / INDEX).exists():
        weights = {name: value for part in _parts(folder / INDEX) for name, value in _read_safetensors(part).items()}
    elif (folder / OLD_WEIGHTS).exists():
        weights = _read_old(folder / OLD_WEIGHTS)
    else:
        raise UserError(f"{folder} holds no model: {WEIGHTS} is missing")
    return {_modern(name): value for name, value in weights.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _parts(index: Path) -> list[Path]:
    """The files that an index names, all of them in its own folder."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index} names no files: weight_map is missing")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index}: {name!r} is not the name of a safetensors file beside it")
        if not (index.parent / name).exists():
            raise UserError(f"{index.parent}: {name} is missing, which {INDEX} names")
    return [index.parent / name for name in names]


def _read_old(path: Path) -> dict[str, Tensor]:
    """A pickled file, read by a loader that knows tensors and refuses to call anything else."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # its errors share no class, and their texts advise to read the file unsafely
        raise UserError(f"{path} is damaged or holds more than tensors; convert it to {WEIGHTS}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__}, not tensors by name; convert it to {WEIGHTS}")
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _modern(name: str) -> str:
    """Old releases called a norm's parameters gamma and beta."""
    return re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", name))
