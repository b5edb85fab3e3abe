"""The weights of a model folder: one safetensors file, several shards, or older pickled files.

The files that we write have a checksum of their tensors in the metadata, which is compared when a file is opened. A
file that another library has written has no checksum and is read without one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, regular_file

WEIGHTS, OLD_WEIGHTS, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
CHECKSUM, BLANK = "bertsmith_checksum", "0" * 64  # filled in after all tensors are written
CODES = {  # the name of a type in safetensors, and its bytes
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "bool": ("BOOL", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
}
Buffer = memoryview


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a model folder."""
    for name in (WEIGHTS, OLD_WEIGHTS):
        if (folder / name).exists():
            return [folder / name]
        if (folder / f"{name}{INDEX}").exists():
            return _parts(folder / f"{name}{INDEX}", Path(name).suffix)
    raise UserError(f"{folder} holds no model: {WEIGHTS} is missing")


def weights_facts(folder: Path) -> dict[str, str]:
    """A model folder with a hash of its weights, both of which must be the same when a run is resumed."""
    files = "".join(map(file_hash, weight_files(folder)))
    return {"folder": str(folder), "sha256": hashlib.sha256(files.encode()).hexdigest()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a model folder under its saved name, in the precision of the file."""
    parts = weight_files(folder)
    read = _read_safetensors if parts[0].suffix == Path(WEIGHTS).suffix else _read_old
    return {current_name(tensor): value for part in parts for tensor, value in read(regular_file(part)).items()}


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a safetensors file."""
    forms = {name: (_name(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(path, forms, lambda name: _bytes(tensors[name]))


def write_safetensors(path: Path, forms: Mapping[str, tuple[str, list[int]]], data: Callable[[str], Buffer]) -> None:
    """Write a safetensors file with its checksum, one tensor at a time, given their types and shapes.

    The library's own writer needs all tensors in memory, makes files that only their owner can read, and writes the
    metadata in random order.
    """
    names = sorted(
        forms, key=lambda name: (-CODES[forms[name][0]][1], name)
    )  # large types first, so that all tensors are aligned
    metadata = {"format": "pt", CHECKSUM: BLANK}
    header: dict[str, Any] = {"__metadata__": metadata}
    end, lines = 0, []
    for name in names:
        (code, size), shape = CODES[forms[name][0]], forms[name][1]
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                content = data(name)
                lines.append(_line(name, *forms[name], content))
                file.write(content)
            file.seek(8)
            file.write(text.replace(BLANK.encode(), _checksum(lines).encode()))
    except OSError as error:  # the error of a full disk does not name the file
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from None


def _checksum(lines: Iterable[str]) -> str:
    """Return one digest of the lines that describe the tensors of a file, whatever their order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _line(name: str, dtype: str, shape: Iterable[int], data: Buffer) -> str:
    """Describe a tensor for the checksum of its file: its name, type, shape and the CRC-32 of its bytes.

    CRC-32 takes a quarter of a second for BERT-Base; SHA-256 takes two seconds on a CPU without instructions for it.
    """
    return f"{name} {dtype} {list(shape)} {zlib.crc32(data):08x}"


def _lines(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the lines of all tensors; CRC-32 releases the interpreter lock, so threads share the work."""

    def line(name: str) -> str:
        return _line(name, _name(tensors[name].dtype), tensors[name].shape, _bytes(tensors[name]))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(line, tensors))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> Buffer:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            expected = (file.metadata() or {}).get(CHECKSUM)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if expected is not None and _checksum(_lines(tensors)) != expected:
        raise UserError(
            f"{path} is damaged: the weights do not match {CHECKSUM} in its metadata; restore the file, or save "
            "changed weights without that entry"
        )
    return tensors


def _parts(index: Path, suffix: str) -> list[Path]:
    """Return the files that an index names; all of them must be in its own folder."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index} names no files: weight_map is missing")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(suffix):
            raise UserError(f"{index}: {name!r} is not the name of a {suffix[1:]} file beside it")
        if not (index.parent / name).exists():
            raise UserError(f"{index.parent}: {name} is missing, which {index.name} names")
    return [index.parent / name for name in names]


def _read_old(path: Path) -> dict[str, Tensor]:
    """Read a pickled file with a loader that accepts tensors and refuses to call anything else."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # the errors have no common class, and their messages advise loading unsafely
        raise UserError(f"{path} is damaged or holds more than tensors; convert it to {WEIGHTS}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__}, not tensors by name; convert it to {WEIGHTS}")
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def current_name(name: str) -> str:
    """Return the name of a tensor in today's releases; old ones named the parameters of a norm gamma and beta."""
    return re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", name))
